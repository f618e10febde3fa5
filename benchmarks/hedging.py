"""What hedging is worth on real processes: a device throttles, and requests go through an ingress that hedges and through one that does not.

Two fleets of emulated devices run side by side, alike but for the gateway's `--no-hedge`, and get the same requests at the same moments. In
every round, of fresh fleets, the device that works most for a fleet's plan becomes six times slower for half a minute. Both controllers see it and move; what differs
is what happens until then.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.common import Row
from controller.cli import cache_dir
from controller.local.load import Load, Outcome
from controller.local.stack import LocalStack, StackSettings
from controller.replay import log_from
from controller.snapshots import snapshot_from
from policies.ids import AgentId, ServiceId
from policies.predict import Predictor
from policies.snapshot import Snapshot

SERVICE: Final = ServiceId("document-reader")
PROMISE_MS: Final = 1000.0
CONTRACT: Final = {
    "service_id": SERVICE, "latency_p99_ms": PROMISE_MS, "throughput_rps": 1.0, "availability_sla": "99%", "privacy": "any",
    "accuracy_floor": 0.9,
}  # fmt: skip
DEVICES: Final = (("gateway", 12.0), ("d1", 3.0), ("d2", 3.0), ("d3", 4.0))
RATE_RPS: Final = 1.0
ROUND_S, THROTTLED_S = 50.0, (15.0, 45.0)
THROTTLE: Final = 6.0
WARM_UP_S: Final = 30.0


class _Fleet:
    """One fleet and its gateway."""

    def __init__(self, name: str, directory: Path, *gateway_options: str) -> None:
        settings = StackSettings(
            directory=directory / name, cache=Path(cache_dir()), api_port=_free_port(), agent_port=_free_port(), ray="none",
            platforms=(),
        )  # fmt: skip
        self.name, self._options = name, gateway_options
        self.stack = LocalStack(settings, lambda text: None)

    def start(self) -> None:
        """Everything up, the contract in force, the first plan active. Raises TidegateError."""
        stack = self.stack
        stack.start_controller()
        for name, slowdown in DEVICES:
            options = self._options if name == "gateway" else ()
            stack.join_agent(f"{self.name}-{name}", "rk3588", "--slowdown", str(slowdown), "--remember", *options)
        stack.add_service()
        stack.wait_until(lambda: len(stack.live_agents()) == len(DEVICES), 90.0, "Not all agents came to life")
        stack.api.post("/v1/slas", json=CONTRACT, timeout_s=60)
        stack.wait_until(lambda: bool(self._plans()), 120.0, "No first plan became active")

    def send(self, seconds: float, seed: int) -> list[Outcome]:
        """Requests of a Poisson process, the same for the same seed; blocks until they are answered."""
        gateway = self._gateway()
        url = next(str(agent["ingress_url"]) for agent in self.stack.live_agents() if agent["id"] == gateway)
        source = Load(ingresses=[url], rate_rps=RATE_RPS, seed=seed)
        asyncio.run(source.run(seconds))
        return source.outcomes

    def round(self, seed: int) -> list[Outcome]:
        """Requests while the busiest device throttles."""
        throttle = threading.Thread(target=self._throttle, args=(self._busiest(),))
        throttle.start()
        outcomes = self.send(ROUND_S, seed)
        throttle.join()
        return outcomes

    def _throttle(self, victim: AgentId) -> None:
        begin_s, end_s = THROTTLED_S
        time.sleep(begin_s)
        self.stack.throttle(victim, THROTTLE)
        time.sleep(end_s - begin_s)
        self.stack.throttle(victim, 1.0)

    def _busiest(self) -> AgentId:
        snapshot, gateway = self._seen(), self._gateway()
        running = snapshot.services[SERVICE].running
        assert running is not None
        busy_ms = Predictor(snapshot, SERVICE).walked(running).totals.busy_ms
        return max((agent for agent in busy_ms if agent != gateway), key=lambda agent: busy_ms[agent])

    def _gateway(self) -> AgentId:
        return next(AgentId(a["id"]) for a in self.stack.live_agents() if a["id"].startswith(f"{self.name}-gateway-"))

    def _plans(self) -> list[dict[str, Any]]:
        return [p for p in self.stack.api.get("/v1/plans", service_id=SERVICE) if p["running"] and p["active_at_s"]]

    def _seen(self) -> Snapshot:
        """The newest snapshot beside a decision, with the plan that runs now."""
        log = log_from(self.stack.api.get_bytes(f"/v1/decisions/{SERVICE}:log", limit=50))
        entries = [entry for entry in log.entries if entry.seen is not None]
        plan = next(e.record.decision.plan for e in reversed(entries) if e.record.decision.plan is not None)
        snapshot = snapshot_from(next(e.seen for e in reversed(entries) if e.seen is not None))
        view = msgspec.structs.replace(snapshot.services[SERVICE], running=plan)
        return msgspec.structs.replace(snapshot, services={SERVICE: view})


def run(quick: bool) -> list[Row]:
    """Late requests and the p99 while a device throttles, with and without hedging."""
    rounds = 1 if quick else 3
    parts = [_round(number + 1) for number in range(rounds)]
    hedged, planned = ([outcome for part in parts for outcome in part[at]] for at in (0, 1))
    note = f"promise {PROMISE_MS:.0f} ms, {RATE_RPS:g} requests/s, {rounds} times {THROTTLED_S[1] - THROTTLED_S[0]:.0f} s at a sixth of the speed; emulated devices"
    rows = [
        Row(name=f"{what}, {name}", value=value, unit=unit, runs=len(outcomes), note=note)
        for name, outcomes in (("hedged", hedged), ("as planned", planned))
        for what, value, unit in (
            ("late or failed requests", float(_late(outcomes)), "requests"),
            ("p99", float(np.quantile([o.latency_ms if o.ok else 20_000.0 for o in outcomes], 0.99)), "ms"),
            ("answered by a fallback", float(sum(o.fell_back for o in outcomes)), "requests"),
        )
    ]  # fmt: skip
    rows.append(
        Row(
            name="late or failed, as planned / hedged", value=_late(planned) / max(1, _late(hedged)), unit="ratio",
            runs=len(hedged), note=f"{_late(planned)} against {_late(hedged)}; {os.cpu_count()} cores",
        )
    )  # fmt: skip
    wrong = sum(o.ok and not o.correct for o in (*hedged, *planned))
    rows.append(Row(name="wrong answers", value=float(wrong), unit="requests", goal="<= 0", holds=wrong == 0))
    return rows


def _round(seed: int) -> tuple[list[Outcome], list[Outcome]]:
    """Outcomes with and without hedging, of fresh fleets: one that throttled lately has spent its moves, and remembers."""
    with tempfile.TemporaryDirectory(prefix="tidegate-hedging-") as directory, ThreadPoolExecutor(2) as threads:
        fleets = (_Fleet("hedged", Path(directory)), _Fleet("planned", Path(directory), "--no-hedge"))
        try:
            for fleet in fleets:
                fleet.start()
            list(threads.map(lambda fleet: fleet.send(WARM_UP_S, seed), fleets))
            hedged, planned = threads.map(lambda fleet: fleet.round(seed + 100), fleets)
            return hedged, planned
        finally:
            for fleet in fleets:
                fleet.stack.stop()


def _late(outcomes: list[Outcome]) -> int:
    return sum(not o.ok or o.latency_ms > PROMISE_MS for o in outcomes)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
