"""The client and the commands against a real server on a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn

from controller.api import create_api
from controller.auth import Keys, keys_with_admin
from controller.cli import main
from controller.client import ApiClient
from controller.core import Controller
from sla.errors import ConflictError, InvalidInputError, NotFoundError, RefusedError, RetryableError

Serve = Callable[..., Any]


@pytest_asyncio.fixture
async def serve(make_controller: Any) -> AsyncIterator[Serve]:
    """Starts a controller and its HTTP server; its address."""
    stops: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def start(keys: Keys | None = None) -> str:
        controller: Controller = make_controller()
        await controller.start()
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(create_api(controller, keys), log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        stops.append((server, asyncio.create_task(server.serve(sockets=[listener]))))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, task in stops:
        server.should_exit = True
        await task


async def run(*arguments: str) -> int:
    """One command in a thread of its own, as another process would run beside the server."""
    return await asyncio.to_thread(main, arguments)


async def test_the_client_reads_writes_and_gets_our_errors_back(serve: Serve, make_sla: Any) -> None:
    url = await serve()

    def use() -> None:
        api = ApiClient(url)
        api.wait_ready(5)
        assert api.get("/v1/slas") == []
        version = api.post("/v1/slas", body=make_sla())["version"]
        assert [sla["service_id"] for sla in api.get("/v1/slas")] == ["reader"]
        with pytest.raises(ConflictError) as conflict:
            api.post("/v1/slas", body=make_sla(latency_p99_ms=9), headers={"If-Match": "7777"})
        assert conflict.value.current_version == version
        with pytest.raises(InvalidInputError) as wrong:
            api.post("/v1/slas", body=make_sla(latency_p99_ms=-1))
        assert wrong.value.pointer == "/latency_p99_ms"
        with pytest.raises(NotFoundError, match="'none'"):
            api.get("/v1/slas/none")
        api.delete("/v1/slas/reader")
        assert api.get("/v1/slas") == []
        assert api.get("/metrics").startswith("# HELP")
        api.close()

    await asyncio.to_thread(use)


async def test_a_missing_or_wrong_key_is_refused_in_a_sentence(serve: Serve) -> None:
    url = await serve(keys_with_admin("secret"))

    def use() -> None:
        for key in (None, "wrong"):
            api = ApiClient(url, key=key)
            with pytest.raises(RefusedError, match="API key"):
                api.get("/v1/slas")
            api.close()
        api = ApiClient(url, key="secret")
        assert api.get("/v1/slas") == []
        api.close()

    await asyncio.to_thread(use)


def test_nobody_at_the_address_is_an_error_that_may_pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    api = ApiClient(f"http://127.0.0.1:{port}", timeout_s=2)
    with pytest.raises(RetryableError, match=str(port)):
        api.get("/v1/slas")
    api.close()


async def test_the_commands_of_a_contracts_life(
    serve: Serve, make_sla: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await serve()
    file = tmp_path / "sla.json"
    file.write_bytes(make_sla())

    async def said(*arguments: str) -> str:
        assert await run("--url", url, *arguments) == 0
        return capsys.readouterr().out

    assert "valid" in await said("sla", "validate", str(file))
    assert "accepted" in await said("sla", "apply", str(file))
    assert "updated" in await said("sla", "apply", str(file))
    assert "no service 'reader'" in await said("sla", "preview", str(file))
    assert "unbound" in await said("sla", "status")
    assert json.loads(await said("sla", "status", "--json"))[0]["service_id"] == "reader"
    assert json.loads(await said("sla", "status", "reader", "--json"))[0]["state"] == "unbound"
    assert "pinned" in await said("plan", "pin", "reader")
    assert json.loads(await said("plan", "show", "--json")) == []
    assert await said("explain") == ""
    assert "withdrawn" in await said("sla", "delete", "reader")


async def test_the_commands_around_models_tokens_and_agents(
    serve: Serve, tmp_path: Path, tiny_onnx: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await serve()
    file = tmp_path / "tiny.onnx"
    file.write_bytes(tiny_onnx)

    async def said(*arguments: str) -> str:
        assert await run("--url", url, *arguments) == 0
        return capsys.readouterr().out

    assert "Model tiny registered" in await said("model", "add", "tiny", str(file))
    assert "tiny" in await said("model", "list")
    assert "ms per run" in await said("model", "show", "tiny")
    assert "tiny" in await said("service", "list")
    assert "tidegate agent join tidegate://127.0.0.1:" in await said("token", "create", "--uses", "2")
    assert json.loads(await said("token", "create", "--json"))["uses"] == 1
    assert json.loads(await said("agent", "list", "--json")) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("plan", "apply", "no-such-file.json"), "cannot be read"),
        (("sla", "apply", "no-such-file.json"), "cannot be read"),
        (("sla", "status", "none"), "no SLA for 'none'"),
        (("model", "show", "none"), "no model 'none'"),
        (("agent", "remove", "none"), "no agent 'none'"),
        (("plan", "rollback", "none"), "no SLA for 'none'"),
        (("service", "add", "none"), "no built-in service 'none'"),
    ],
)
async def test_what_goes_wrong_is_one_sentence_and_exit_status_2(
    serve: Serve, arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("--url", await serve(), *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("tidegate: ")
    assert sentence in error
    assert error.count("\n") == 1


async def test_a_file_that_is_no_model_and_a_wrong_sla_are_refused(
    serve: Serve, tmp_path: Path, make_sla: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await serve()
    file = tmp_path / "file"
    file.write_bytes(b"hello")
    assert await run("--url", url, "model", "add", "m", str(file)) == 2
    assert "ONNX" in capsys.readouterr().err
    file.write_bytes(make_sla(availability_sla=99.95))
    for command in ("apply", "preview", "validate"):
        assert await run("--url", url, "sla", command, str(file)) == 2
        assert 'did you mean "99.95%"?' in capsys.readouterr().err
    assert await run("--url", url, "sla", "status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("nothing",), ("controller", "--port", "70000"), ("controller", "--port", "x"), ("demo", "--seconds", "3"),
        ("token", "create", "--uses", "0"), ("token", "create", "--ttl", "x"),
        ("agent", "join", "tidegate://x:1", "--ca-fingerprint", "00", "--token", "a", "--token-file", "b"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_exit_status_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: tidegate" in capsys.readouterr().err


def test_a_port_in_use_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status = main(("controller", "--port", port, "--agent-port", "0", "--dir", str(tmp_path), "--ray", "none"))
    assert status == 2
    assert f"Cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
