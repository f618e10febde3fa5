"""The controller as a process of its own, reachable from other machines: HTTPS, keys, a clean end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from controller.client import ApiClient
from sla.errors import RefusedError, RetryableError, TidegateError

KEY = "tga_only-for-this-test"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    """URL, directory and process of a controller that listens on all addresses."""
    directory = tmp_path_factory.mktemp("served")
    port = free_port()
    command = [
        sys.executable, "-m", "controller.cli", "controller", "--host", "0.0.0.0", "--port", str(port), "--agent-port", "0",
        "--dir", str(directory), "--cache", str(directory), "--ray", "none",
    ]  # fmt: skip
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "TIDEGATE_ADMIN_KEY": KEY})
    yield f"https://localhost:{port}", directory, process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def url(served: tuple[str, Path, subprocess.Popen[bytes]]) -> str:
    """Where it is, once it is ready."""
    url, directory, process = served
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, (directory / "log").read_text()
        assert time.monotonic() < deadline
        try:
            with client(served, None) as api:
                api.wait_ready(60)
            return url
        except (TidegateError, FileNotFoundError):
            time.sleep(0.1)


@contextmanager
def client(served: tuple[str, Path, subprocess.Popen[bytes]], key: str | None) -> Iterator[ApiClient]:
    with closing(ApiClient(served[0], key=key, ca_file=str(served[1] / "ca" / "ca.pem"))) as api:
        yield api


def test_probes_need_no_key_and_everything_else_does(
    served: tuple[str, Path, subprocess.Popen[bytes]], url: str
) -> None:
    with client(served, None) as nobody:
        assert nobody.get("/healthz") == {"status": "ok"}
        with pytest.raises(RefusedError, match="API key"):
            nobody.get("/v1/slas")
    with client(served, "tga_wrong") as stranger, pytest.raises(RefusedError):
        stranger.get("/v1/slas")
    with client(served, KEY) as admin:
        assert admin.get("/v1/slas") == []
        assert admin.get("/v1/status")["cloud"] == "off"
        assert admin.post("/v1/tokens", json={"uses": 1})["command"].startswith("tidegate agent join tidegate://")


def test_an_admin_makes_keys_for_others_and_takes_them_back(
    served: tuple[str, Path, subprocess.Popen[bytes]], url: str
) -> None:
    with client(served, KEY) as admin:
        made = admin.post("/v1/keys", json={"role": "viewer", "note": "wall display"})
        assert [(key["id"], key["role"]) for key in admin.get("/v1/keys")] == [(made["id"], "viewer")]
        with client(served, made["key"]) as viewer:
            assert viewer.get("/v1/slas") == []
            with pytest.raises(RefusedError, match="viewer"):
                viewer.post("/v1/tokens", json={"uses": 1})
            with pytest.raises(RefusedError):
                viewer.get("/v1/keys")
        admin.delete(f"/v1/keys/{made['id']}")
        with client(served, made["key"]) as viewer, pytest.raises(RefusedError):
            viewer.get("/v1/slas")


def test_only_its_own_ca_vouches_for_it(served: tuple[str, Path, subprocess.Popen[bytes]], url: str) -> None:
    with closing(ApiClient(url, key=KEY)) as trusting, pytest.raises(RetryableError, match=r"(?i)certificate"):
        trusting.get("/healthz")
    with pytest.raises(httpx.HTTPError):
        httpx.get(url.replace("https", "http") + "/healthz", trust_env=False)


def test_sigterm_ends_it_and_its_store(served: tuple[str, Path, subprocess.Popen[bytes]], url: str) -> None:
    _, directory, process = served
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not (directory / "store" / "valkey.sock").exists()
