"""The commands about contracts, as an operator types them, against a real controller."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn

from agents.messages import ServiceReport
from controller.api import create_api
from controller.cli import main
from controller.core import Controller
from controller.sla_commands import parse_yaml, preview_lines
from policies.ids import ServiceId
from sla.errors import ContractError
from sla.sketch import LatencySketch

Said = Callable[..., Awaitable[str]]


@pytest_asyncio.fixture
async def controller(make_controller: Any) -> Controller:
    controller: Controller = make_controller()
    await controller.start()
    return controller


@pytest_asyncio.fixture
async def said(controller: Controller, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Said]:
    """Runs a command in a thread, as another process would; what it printed."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_api(controller, None), log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def run(*arguments: str, status: int = 0) -> str:
        assert await asyncio.to_thread(main, ("--url", url, *arguments)) == status
        return capsys.readouterr().out

    yield run
    server.should_exit = True
    await task


async def test_status_in_full_and_a_report_to_send(
    controller: Controller, clock: Any, said: Said, make_sla: Any, tmp_path: Path
) -> None:
    file = tmp_path / "sla.json"
    file.write_bytes(make_sla())
    await said("sla", "apply", str(file))
    assert "No alert fires" in await said("sla", "status", "reader")
    sketch = LatencySketch()
    sketch.add(30.0, 50)
    report = ServiceReport(
        service_id=ServiceId("reader"), epoch=1, ok=50, failed=50, fell_back=0, latency_buckets=sketch.to_buckets()
    )
    for _ in range(10):
        controller.slis.fold((report,), "rk-1")
        clock.advance(60_000)
        controller.contracts.tick()
    full = await said("sla", "status", "reader")
    assert "PAGE 1h/5m: availability burns its budget" in full
    assert "latency-p99" in full
    assert json.loads(await said("sla", "status", "reader", "--json"))[0]["promises"][0]["bad"] == 500
    assert "reader" in await said("sla", "status")
    page = tmp_path / "report.html"
    assert str(page) in await said("sla", "report", "reader", "--output", str(page))
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(await said("sla", "report", "reader", "--format", "json"))["failed"] == 500
    await said("sla", "report", "reader", "--month", "never", status=2)
    await said("sla", "report", "reader", "--output", str(tmp_path / "no" / "where"), status=2)


async def test_a_contract_goes_out_as_openslo_and_comes_back(
    controller: Controller, said: Said, make_sla: Any, tmp_path: Path
) -> None:
    file, out = tmp_path / "sla.json", tmp_path / "openslo.yaml"
    file.write_bytes(make_sla(zones=["plant-1"], window_days=28, objectives=[{"percentile": "p50", "at_most_ms": 90}]))
    await said("sla", "apply", str(file))
    before = controller.desired.contract("reader").contract
    out.write_text(await said("sla", "export", "reader", "--openslo"))
    document = json.loads(await said("sla", "import", str(out)))
    assert document["zones"] == ["plant-1"]
    assert "version" in await said("sla", "import", str(out), "--apply", "--set", "throughput_rps=7")
    after = controller.desired.contract("reader").contract
    assert after == before.model_copy(update={"throughput_rps": 7.0})
    assert json.loads(await said("sla", "export", "reader"))["throughput_rps"] == 7
    out.write_text("a: &x [1]\nb: *x\n")
    await said("sla", "import", str(out), status=2)
    await said("sla", "import", str(out), "--set", "nonsense", status=2)


@pytest.mark.parametrize(
    "data", [b"\xff\xfe\x00", b"a: [", b"{" * 5000, b"!!python/object:os.system {}", b"a: &x 1\nb: *x"]
)
def test_yaml_that_is_none_or_dangerous_is_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        parse_yaml(data)


def test_an_infeasible_preview_reads_like_an_answer() -> None:
    nearest = [
        {"dimension": "latency", "possible": True, "changes": {"latency_p99_ms": 900}, "text": "feasible with latency_p99_ms 900"},
        {"dimension": "privacy", "possible": False, "changes": {}, "text": "no looser privacy alone would do"},
    ]  # fmt: skip
    binding = [{"dimension": "latency", "text": "the quickest plan takes 700 ms"}]
    admission = {
        "verdict": "infeasible",
        "text": "infeasible: x",
        "binding": binding,
        "nearest": nearest,
        "together": None,
    }
    assert preview_lines(admission) == [
        "infeasible on this fleet:",
        "  latency: the quickest plan takes 700 ms",
        "the nearest contracts that could be kept:",
        "  latency: feasible with latency_p99_ms 900",
        "giving way in only one of these would not do: privacy",
    ]
