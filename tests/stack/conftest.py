"""The whole stack as real processes, started once for all tests of this folder."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from controller.local.stack import LocalStack, StackSettings
from controller.local.trouble import wait_for_plan
from controller.local.up import example_sla


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def stack(zoo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Controller, four emulated devices and a cloud agent on a local Ray, serving the document reader under its contract."""
    directory = tmp_path_factory.mktemp("stack")
    settings = StackSettings(directory=directory, cache=zoo_cache, api_port=free_port(), agent_port=free_port())
    with LocalStack(settings, lambda line: print(line)) as running:
        running.start()
        running.api.post("/v1/slas", body=example_sla())
        wait_for_plan(running, after_epoch=0)
        yield running


@pytest.fixture(autouse=True)
def whole(stack: LocalStack) -> None:
    """Every test begins with all devices live, whatever the one before it killed."""
    for agent in stack.api.get("/v1/agents"):
        if agent["state"] == "lost" and not agent["is_cloud"]:
            stack.restart_agent(agent["id"])
    stack.wait_until(
        lambda: sum(not a["is_cloud"] for a in stack.live_agents()) == len(stack.settings.platforms),
        60.0,
        "Not all devices came back",
    )


@pytest.fixture
def cli(stack: LocalStack) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `tidegate` against the stack."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "controller.cli", "--url", stack.api.url, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.fixture
def until_served() -> Callable[[str, dict[str, object]], httpx.Response]:
    """Asks an ingress until it answers: the first plan of a service takes a moment."""

    def ask(url: str, body: dict[str, object]) -> httpx.Response:
        deadline = time.monotonic() + 60
        while True:
            response = httpx.post(url, json=body, timeout=30, trust_env=False)
            if response.status_code == 200:
                return response
            assert time.monotonic() < deadline, response.text
            time.sleep(0.2)

    return ask
