"""What hedging is worth on real processes: a device throttles, and requests go through an ingress that hedges and through one that does not.

Two fleets of emulated devices run side by side, alike but for the gateway's `--no-hedge`, and get the same requests at the same moments. In
every round, of fresh fleets, the device that works most for a fleet's plan becomes six times slower for half a minute. Both controllers see it and move; what differs
is what happens until then.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.common import Row
from benchmarks.live_fleet import SERVICE, Device, FleetPlan, LiveFleet
from controller.local.load import Outcome
from policies.ids import AgentId
from policies.predict import Predictor

PROMISE_MS: Final = 1000.0
CONTRACT: Final = {
    "service_id": SERVICE, "latency_p99_ms": PROMISE_MS, "throughput_rps": 1.0, "availability_sla": "99%", "privacy": "any",
    "accuracy_floor": 0.9,
}  # fmt: skip
GATEWAY: Final = 12.0
DEVICES: Final = (("d1", 3.0), ("d2", 3.0), ("d3", 4.0))
"""Slowdowns."""
RATE_RPS: Final = 1.0
ROUND_S, THROTTLED_S = 50.0, (15.0, 45.0)
THROTTLE: Final = 6.0
WARM_UP_S: Final = 30.0


def _fleet(name: str, *gateway_options: str) -> FleetPlan:
    devices = (Device(name=f"{name}-{which}", slowdown=slowdown) for which, slowdown in DEVICES)
    gateway = Device(name=f"{name}-gateway", slowdown=GATEWAY, options=gateway_options)
    return FleetPlan(name=name, devices=(gateway, *devices))


def _throttled(fleet: LiveFleet, seed: int) -> list[Outcome]:
    """Requests while the busiest device throttles."""
    victim = _busiest(fleet)

    def trouble() -> None:
        begin_s, end_s = THROTTLED_S
        time.sleep(begin_s)
        fleet.stack.throttle(victim, THROTTLE)
        time.sleep(end_s - begin_s)
        fleet.stack.throttle(victim, 1.0)

    thread = threading.Thread(target=trouble)
    thread.start()
    outcomes = fleet.send(RATE_RPS, ROUND_S, seed)
    thread.join()
    return outcomes


def _busiest(fleet: LiveFleet) -> AgentId:
    """The device besides the gateway that works most for the running plan."""
    snapshot, gateway = fleet.serving(), fleet.ids[fleet.wanted.devices[0].name]
    running = snapshot.services[SERVICE].running
    assert running is not None
    busy_ms = Predictor(snapshot, SERVICE).walked(running).totals.busy_ms
    return max((agent for agent in busy_ms if agent != gateway), key=lambda agent: busy_ms[agent])


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
    plans, warming = (_fleet("hedged"), _fleet("planned", "--no-hedge")), threading.Lock()
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-hedging-") as directory, ThreadPoolExecutor(2) as threads, ExitStack() as stack,
    ):  # fmt: skip
        fleets = [stack.enter_context(LiveFleet(p, Path(directory), lambda _: None, warming, CONTRACT)) for p in plans]
        for fleet in fleets:
            fleet.start()
        list(threads.map(lambda fleet: fleet.send(RATE_RPS, WARM_UP_S, seed), fleets))
        hedged, planned = threads.map(lambda fleet: _throttled(fleet, seed + 100), fleets)
        return hedged, planned


def _late(outcomes: list[Outcome]) -> int:
    return sum(not o.ok or o.latency_ms > PROMISE_MS for o in outcomes)
