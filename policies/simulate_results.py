"""What comes of a simulation: requests that were answered or not, minute by minute, and the sums over all of them."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

import msgspec
import numpy as np

from policies.decision import Decision
from policies.latency import Floats
from policies.plan import Plan
from policies.scenario import World

TIMEOUT_TIMES_P99 = 4.0
"""A request that takes this many times its promise has failed."""


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated minute."""

    requests: int = 0
    late: int = 0
    failed: int = 0
    worst_ms: float = 0.0
    plan: int = 0
    """Which plan ran when it began, counted from 1."""
    rtt_ms: float = 0.0
    is_violated: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy made of a world."""

    minutes: tuple[Minute, ...]
    violation_minutes: int
    requests: int
    failed: int
    p50_ms: float
    p99_ms: float
    energy_j: float
    """Per request."""
    moves: int
    moves_per_hour: float
    decisions: tuple[Decision, ...]
    plans: tuple[Plan, ...]
    predicted_p99_ms: float | None = None
    """Of the last plan, when it was chosen."""


@dataclass(slots=True)
class Tally:
    """What is counted while the simulation runs."""

    done: list[tuple[float, float]] = field(default_factory=list)
    """(when it came, latency), infinite where it failed."""
    moves: int = 0
    copies: int = 0
    """Second copies of lanes."""
    decisions: list[Decision] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    switched_ms: list[float] = field(default_factory=list)
    """When each plan took over."""
    predicted_p99_ms: float | None = None


def result_of(tally: Tally, world: World, energy_j: float) -> Result:
    """The sums; `energy_j` is that of all requests."""
    done = sorted(tally.done)
    latency: Floats = np.array([ms for _, ms in done])
    hours = world.seconds / 3600.0
    minutes = _minutes(tally, world, done)
    finite = np.where(np.isfinite(latency), latency, TIMEOUT_TIMES_P99 * world.contract.latency_p99_ms)
    return Result(
        minutes=minutes, violation_minutes=sum(m.is_violated for m in minutes), requests=len(done),
        failed=int((~np.isfinite(latency)).sum()),
        p50_ms=float(np.quantile(finite, 0.5)) if len(done) else 0.0,
        p99_ms=float(np.quantile(finite, 0.99)) if len(done) else 0.0,
        energy_j=energy_j / max(1, len(done)), moves=tally.moves, moves_per_hour=tally.moves / hours,
        decisions=tuple(tally.decisions), plans=tuple(tally.plans), predicted_p99_ms=tally.predicted_p99_ms,
    )  # fmt: skip


def _minutes(tally: Tally, world: World, done: list[tuple[float, float]]) -> tuple[Minute, ...]:
    """A minute is violated when more than 1 % of its requests, and at least two, were late or failed."""
    limit = world.contract.latency_p99_ms
    by_minute: dict[int, list[float]] = {}
    for at, ms in done:
        by_minute.setdefault(int(at // 60_000), []).append(ms)
    found = []
    for number in range(math.ceil(world.seconds / 60)):
        times = by_minute.get(number, [])
        failed = sum(not math.isfinite(ms) for ms in times)
        late = sum(ms > limit for ms in times) - failed
        span = slice(60 * number, 60 * number + 60)
        found.append(
            Minute(
                requests=len(times), plan=bisect.bisect_right(tally.switched_ms, 60_000.0 * number), late=late, failed=failed, rtt_ms=float(world.rtt_ms[span].mean()),
                worst_ms=max((ms for ms in times if math.isfinite(ms)), default=0.0),
                is_violated=late + failed >= max(2, 0.01 * len(times)),
            )
        )  # fmt: skip
    return tuple(found)
