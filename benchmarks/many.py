"""Many services on many agents: from scratch, after the loss of an agent, and how that grows with either."""

from __future__ import annotations

import resource
import time

import numpy as np

from benchmarks.common import Row, at_most
from benchmarks.synthetic import fleet_snapshot
from policies.many import Ledger

SCRATCH_GOAL_S = 5.0
LOSS_GOAL_MS = 50.0
MEMORY_GOAL_MB = 1024.0
GROWTH: tuple[tuple[int, int], ...] = ((125, 10_000), (250, 10_000), (500, 10_000), (500, 1_250), (500, 5_000))
"""Services, agents; the goal's own size is measured besides."""


def rows(quick: bool) -> list[Row]:
    """All on one core: the goals at 1,000 services on 10,000 agents, and the growth towards it."""
    size = (100, 1_000) if quick else (1_000, 10_000)
    growth = [(25, 1_000), (50, 1_000), (50, 500)] if quick else GROWTH
    return [*_goals(*size), *(_growth(*each) for each in growth)]


def _goals(services: int, devices: int) -> list[Row]:
    """All services from scratch, then the loss of one agent after another."""
    ledger, scratch_s = _planned(services, devices)
    risky = sum(b.scored.prediction.risk > ledger.settings.risky for b in ledger.booked.values())
    losses_ms, moved = [], 0
    busy = ledger.busy
    for victim in sorted(busy, key=lambda a: -busy[a])[:20]:
        began_s = time.process_time()
        moved += len(ledger.lose(victim))
        losses_ms.append(1000.0 * (time.process_time() - began_s))
    size = f"{services} services on {devices} agents"
    note = f"CPU time of one core; {len(ledger.infeasible)} without a plan, {risky} at risk"
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    lost = f"the busiest agents first; {moved} services planned anew in 20 losses; slowest {max(losses_ms):.0f} ms"
    return [
        at_most(f"{size}, from scratch", scratch_s, "s", SCRATCH_GOAL_S, runs=1, note=note),
        at_most(f"{size}, one agent lost", float(np.median(losses_ms)), "ms", LOSS_GOAL_MS, runs=20, note=lost),
        at_most(f"{size}, memory of the process", memory_mb, "MB", MEMORY_GOAL_MB, runs=1),
    ]


def _growth(services: int, devices: int) -> Row:
    ledger, scratch_s = _planned(services, devices)
    note = f"{1000.0 * scratch_s / services:.2f} ms per service; {len(ledger.infeasible)} without a plan"
    return Row(name=f"{services} services on {devices} agents, from scratch", value=scratch_s, unit="s", note=note)


def _planned(services: int, devices: int) -> tuple[Ledger, float]:
    """The ledger with all plans, and the processor's seconds that they took, its own making included."""
    snapshot = fleet_snapshot(devices=devices, blocks=12, services=services)
    began_s = time.process_time()
    ledger = Ledger(snapshot)
    ledger.plan()
    return ledger, time.process_time() - began_s
