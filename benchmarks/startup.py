"""How long the embedded stack takes to be ready, and what its processes weigh when idle."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from benchmarks.common import Row
from controller.cli import cache_dir
from controller.local.stack import LocalStack, StackSettings

READY_GOAL_S = 15.0


def run(quick: bool = False) -> list[Row]:
    """Starts of the real processes: controller with embedded store, four agents, the cloud agent on a local Ray."""
    runs = 1 if quick else 3
    measured = [_once() for _ in range(runs)]

    def row(name: str, key: str, unit: str, goal: float | None, note: str) -> Row:
        value = median(m[key] for m in measured)
        text = None if goal is None else f"<= {goal:g}"
        return Row(
            name=name,
            value=value,
            unit=unit,
            goal=text,
            holds=None if goal is None else value <= goal,
            runs=runs,
            note=note,
        )

    return [
        row(
            "controller ready",
            "controller_s",
            "s",
            None,
            "process start until /readyz is true: API, dashboard, store, agents' door",
        ),
        row(
            "embedded stack ready",
            "agents_s",
            "s",
            READY_GOAL_S,
            "the same, and four agent processes enrolled and live",
        ),
        row(
            "cloud agent live",
            "cloud_s",
            "s",
            None,
            "the same, and Ray started with one cloud agent; the controller answers meanwhile",
        ),
        row("controller idle", "controller_mb", "MB", None, "resident (RSS) without its store and Ray"),
        row("store idle", "store_mb", "MB", None, "resident (RSS) of the embedded Valkey"),
        row("agent idle", "agent_mb", "MB", None, "resident (RSS) without a model"),
        row("Ray idle", "ray_mb", "MB", None, "proportional (PSS) of all processes of Ray, cloud agent included"),
    ]


def _once() -> dict[str, float]:
    directory = Path(tempfile.mkdtemp(prefix="tidegate-bench-"))
    settings = StackSettings(directory=directory, cache=Path(cache_dir()), api_port=18080, agent_port=17443)
    began = time.monotonic()
    with LocalStack(settings, lambda _: None) as stack:
        stack.start_controller()
        found = {"controller_s": time.monotonic() - began}
        stack.join_agents()
        _wait_live(stack, len(settings.platforms), edge_only=True)
        found["agents_s"] = time.monotonic() - began
        _wait_live(stack, len(settings.platforms) + 1, edge_only=False)
        found["cloud_s"] = time.monotonic() - began
        time.sleep(5.0)  # Let the processes come to rest.
        found |= _weights(stack)
    return found


def _wait_live(stack: LocalStack, count: int, *, edge_only: bool) -> None:
    deadline = time.monotonic() + 120
    while sum(not (edge_only and agent["is_cloud"]) for agent in stack.live_agents()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} agents were not live within 120 s")
        time.sleep(0.05)


def _weights(stack: LocalStack) -> dict[str, float]:
    controller = psutil.Process(stack.pid("controller"))
    agent = psutil.Process(stack.pid("rk3588-1"))
    children = [controller, *controller.children(recursive=True)]
    store = [p for p in children if "valkey" in p.name()]
    ray = [p for p in children if p != controller and p not in store]
    return {
        "controller_mb": controller.memory_info().rss / 1e6,
        "store_mb": sum(p.memory_info().rss for p in store) / 1e6,
        "agent_mb": agent.memory_info().rss / 1e6,
        "ray_mb": sum(_pss(p.pid) for p in ray) / 1e6,
    }


def _pss(pid: int) -> float:
    """Proportional set size, bytes: shared pages are counted once over all who share them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
