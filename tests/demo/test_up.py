"""`tidegate up` as a process that somebody ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def of_stack(directory: Path) -> list[psutil.Process]:
    """Processes that name the stack's directory on their command line: controller, store, agents."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if str(directory) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def test_a_stack_that_is_ended_while_it_starts_takes_its_processes_along(zoo_cache: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "controller.cli", "up", "--ray", "none", "--dir", str(tmp_path / "state"),
        "--cache", str(zoo_cache), "--port", str(free_port()), "--agent-port", str(free_port()),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        deadline = time.monotonic() + 60
        while len(of_stack(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(of_stack(tmp_path)) >= 2, "the controller was started beside `up` itself"
        up.send_signal(signal.SIGTERM)
        said, _ = up.communicate(timeout=60)
    assert up.returncode == 130, said
    assert of_stack(tmp_path) == []
