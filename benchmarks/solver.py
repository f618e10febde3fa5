"""The solver against its referee (the same problem as a mixed-integer programme in HiGHS), and how its time grows."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from benchmarks import many
from benchmarks.common import Row, at_most
from benchmarks.referee import optimum, random_problem
from benchmarks.synthetic import fleet_snapshot
from policies.decide import DecideSettings
from policies.partition import Objective, bottleneck_of, latency_of, memory_of
from policies.sharing import best_routes
from policies.solve import candidates

GAP_GOAL = 0.01
INSTANCES = 240
SECONDS_PER_QUESTION = 60.0
"""Of HiGHS; a bottleneck takes a few questions, see `optimum`."""
SOLVE_GOAL_MS = 10.0
GOAL_SIZE = (32, 48, 1)
LOOK_CANDIDATES = DecideSettings().candidates
"""How many plans one look of the control loop asks for."""
GROWTH: tuple[tuple[int, int, int], ...] = (
    (8, 48, 1), (32, 12, 1), (32, 24, 1), (32, 48, 1), (32, 96, 1), (128, 48, 1), (1000, 48, 1), (32, 24, 4), (32, 24, 16), (32, 24, 64),
)  # fmt: skip
"""Devices, blocks, services."""


def run(quick: bool) -> list[Row]:
    """Gaps to the optimum, then times."""
    instances, seconds = (40, 4.0) if quick else (INSTANCES, SECONDS_PER_QUESTION)
    return [*_gaps(instances, seconds), *_times(30 if quick else 200), *many.rows(quick)]


def _gaps(instances: int, seconds: float) -> list[Row]:
    gaps: dict[Objective, list[float]] = {"latency": [], "throughput": []}
    times_ms: dict[Objective, list[float]] = {"latency": [], "throughput": []}
    """Of works that share devices."""
    unproven = dict.fromkeys(gaps, 0)
    refused, beyond = 0, 0
    for seed in range(instances):
        works, free = random_problem(np.random.default_rng(seed))
        objective: Objective = "latency" if seed % 2 == 0 else "throughput"
        began_s = time.process_time()
        routes = best_routes(works, free, objective)
        if len(works) > 1:
            times_ms[objective].append(1000.0 * (time.process_time() - began_s))
        verdict = optimum(works, free, objective, seconds=seconds, known=routes)
        if routes is None:
            refused += verdict.value is not None
            beyond += verdict.value is None
            continue
        held = sum((memory_of(w, r) for w, r in zip(works, routes, strict=True)), np.zeros(len(free)))
        assert (held <= free * (1 + 1e-9)).all(), "the solver overdraws a device"
        assert verdict.value is not None, "the referee knows our answer at the least"
        ours = (
            sum(w.rate * latency_of(w, r) for w, r in zip(works, routes, strict=True))
            if objective == "latency" else bottleneck_of(works, routes)
        )  # fmt: skip
        gaps[objective].append(max(0.0, ours / verdict.value - 1.0))
        unproven[objective] += not verdict.is_proven
    rows = []
    for name, found in gaps.items():
        worst = (
            f"median {100 * float(np.median(found)):.3g} %, largest {100 * max(found):.3g} %; {unproven[name]} not proven in {seconds:g} s: "
            "those against the best plan that is known"
        )
        rows.append(
            at_most(f"gap to the optimum, {name}, p95", float(np.quantile(found, 0.95)), "ratio", GAP_GOAL, runs=len(found), note=worst)
        )  # fmt: skip
    rows += [
        _time_row(f"placing 2 or 3 works together, {name}", found, is_goal=False) for name, found in times_ms.items()
    ]
    note = f"{beyond} instances have no answer at all"
    rows.append(at_most("no answer where there is one", float(refused), "instances", 0.0, runs=instances, note=note))
    return rows


def _times(rounds: int) -> list[Row]:
    rows = []
    for devices, blocks, services in GROWTH:
        times_ms = _solve_times_ms(devices, blocks, services, 1, rounds if devices <= 32 else max(20, rounds // 5))
        name = f"solve, {devices} devices, {blocks} blocks, {services} services"
        rows.append(_time_row(name, times_ms, is_goal=(devices, blocks, services) == GOAL_SIZE))
    devices, blocks, services = GOAL_SIZE
    name = f"solve, {devices} devices, {blocks} blocks, the {LOOK_CANDIDATES} best plans"
    return [*rows, _time_row(name, _solve_times_ms(devices, blocks, services, LOOK_CANDIDATES, rounds), is_goal=False)]


def _solve_times_ms(devices: int, blocks: int, services: int, limit: int, rounds: int) -> list[float]:
    """Processor time of each of so many calls, the first one included."""
    snapshot = fleet_snapshot(devices=devices, blocks=blocks, services=services)
    names, times_ms = list(snapshot.services), []
    for at in range(rounds):
        began_s = time.process_time()
        candidates(snapshot, names[at % len(names)], limit)
        times_ms.append(1000.0 * (time.process_time() - began_s))
    return times_ms


def _time_row(name: str, times_ms: Sequence[float], *, is_goal: bool) -> Row:
    p99 = float(np.quantile(times_ms, 0.99))
    note = f"median {float(np.median(times_ms)):.1f} ms; CPU time, nothing remembered from the call before"
    if is_goal:
        return at_most(f"{name}, p99", p99, "ms", SOLVE_GOAL_MS, runs=len(times_ms), note=note)
    return Row(name=f"{name}, p99", value=p99, unit="ms", runs=len(times_ms), note=note)
