"""A scenario of many zones: each is simulated by itself, in as many processes as there are cores, and the results are added up.

Zones share nothing, so this is exact; a fleet whose zones share a cloud needs `policies.many`, which plans them together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec
import numpy as np

from policies.scenario import Scenario, Trace, world_of
from policies.simulate import SimulationSettings
from policies.simulate_choosers import simulate_policy

FLEET_LOOK_EVERY_S = 10.0
"""How often the simulated controller looks at each zone of a fleet."""


class FleetResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy made of all zones."""

    zones: int
    agents: int
    minutes: int
    """Zone-minutes."""
    violation_minutes: int
    requests: int
    failed: int
    moves_per_hour: float
    """Per zone."""
    p99_ms: float
    """Median over the zones."""
    cpu_s: float
    wall_s: float


class _Zone(msgspec.Struct, frozen=True):
    minutes: int
    violated: int
    requests: int
    failed: int
    moves: int
    p99_ms: float
    cpu_s: float


def play_fleet(
    scenario: Scenario, policy: str, seed: int, traces: Mapping[str, Trace], workers: int | None = None
) -> FleetResult:
    """One policy on every zone; zone `n` has the seed `seed + n`. Raises KeyError for an unknown policy."""
    began_s = time.perf_counter()
    count = scenario.zones
    jobs = ([scenario] * count, [policy] * count, range(seed, seed + count), [dict(traces)] * count)
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        zones = list(pool.map(_play, *jobs, chunksize=max(1, min(8, count // 16))))
    return FleetResult(
        zones=count, agents=count * len(scenario.devices), minutes=sum(z.minutes for z in zones),
        violation_minutes=sum(z.violated for z in zones), requests=sum(z.requests for z in zones),
        failed=sum(z.failed for z in zones), moves_per_hour=sum(z.moves for z in zones) / (count * scenario.seconds / 3600.0),
        p99_ms=float(np.median([z.p99_ms for z in zones])), cpu_s=sum(z.cpu_s for z in zones),
        wall_s=time.perf_counter() - began_s,
    )  # fmt: skip


def _play(scenario: Scenario, policy: str, seed: int, traces: Mapping[str, Trace]) -> _Zone:
    began_s = time.process_time()
    settings = SimulationSettings(look_every_s=FLEET_LOOK_EVERY_S)
    result = simulate_policy(policy, world_of(scenario, seed, traces), seed, settings)
    return _Zone(
        len(result.minutes), result.violation_minutes, result.requests, result.failed, result.moves, result.p99_ms,
        time.process_time() - began_s,
    )  # fmt: skip
