"""`tidegate demo` as a user runs it. How fast it was is for the benchmarks; that it did the job is for this test."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def report(zoo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a short run with trouble in it."""
    directory = tmp_path_factory.mktemp("demo")
    command = [
        sys.executable, "-m", "controller.cli", "demo", "--seconds", "20", "--report", str(directory / "report.json"),
        "--dir", str(directory / "state"), "--cache", str(zoo_cache), "--port", str(free_port()), "--agent-port", str(free_port()),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return found


def test_every_request_is_answered_though_a_link_degrades_and_an_agent_dies(report: dict[str, Any]) -> None:
    requests, recovery = report["requests"], report["recovery"]
    assert requests["sent"] == requests["ok"] > 0
    assert requests["failed"] == recovery["failed_requests"] == 0
    assert requests["correct"] >= 0.9 * requests["ok"]
    assert recovery["killed_agent"]
    assert 0 < recovery["detected_ms"] < recovery["replanned_ms"]


def test_blocks_and_crops_are_spread_over_agents(report: dict[str, Any]) -> None:
    kept = {text: held for text, held in report["promises"].items() if "axis" in text}
    assert len(kept) == 2
    assert all(kept.values()), kept
    assert report["shards_distinct_agents"] >= 3


def test_the_report_has_its_stable_keys(report: dict[str, Any]) -> None:
    assert {"p50", "p95", "p99"} <= report["latency_ms"].keys()
    assert {"service_id", "latency_p99_ms", "met", "availability"} <= report["sla"].keys()
    assert all({"id", "platform", "evidence", "enrolled_in_ms"} <= agent.keys() for agent in report["agents"])
    wanted = {"epoch", "trigger", "proposer", "score", "predicted_p99_ms", "measured_p99_ms", "shards"}
    assert all(wanted <= plan.keys() for plan in report["plans"])
    shard = report["plans"][0]["shards"][0]
    assert {"model", "agent", "patch", "token", "blocks"} <= shard.keys()
    assert {"tidegate", "ray", "onnxruntime", "python"} <= report["versions"].keys()
