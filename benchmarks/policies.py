"""Policies compared on simulated days: minutes of violation, p99, energy and moves, for each and as a ratio to the oracle.

Recorded traces are read from the directory in TIDEGATE_TRACES; without it the series are made up, and the note says so. Scenarios
and seeds are played side by side in as many processes as there are cores. With `--pictures DIR` the first seed of each scenario is drawn.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.common import Row, at_most
from controller.simulate_cli import BUILT_IN, load_scenario
from controller.simulate_fleet import play_fleet
from controller.simulate_picture import picture
from controller.simulate_traces import traces_for
from policies.scenario import Scenario, Trace, World, world_of
from policies.simulate_choosers import CHOOSERS, simulate_policy
from policies.simulate_results import Result

QUICK_SECONDS, FULL_SECONDS = 1_200.0, 8_640.0
"""Per scenario and seed; five scenarios of 2.4 hours are half a simulated day."""
QUICK_SEEDS, FULL_SEEDS = (1,), (1, 2)
MAX_MOVES_PER_HOUR = 6.0
FLEET, FLEET_GOAL_S = "fleet", 600.0
DRAWN = ("solver", "oracle", "static", "latency-greedy", "memory-proportional")


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy made of one scenario under one seed."""

    scenario: str
    policy: str
    traces: tuple[str, ...]
    violated: int
    minutes: int
    moves: int
    requests: int
    failed: int
    p99_ms: float
    energy_j: float
    """Per request."""
    cpu_s: float
    """Processor time that playing it took."""
    seed: int
    result: Result
    """Without its decisions and plans."""


def run(quick: bool, pictures: Path | None = None) -> list[Row]:
    """Rows per scenario and policy, then per policy, then the goals over all of them; a PNG per scenario in `pictures`."""
    seconds, seeds = (QUICK_SECONDS, QUICK_SEEDS) if quick else (FULL_SECONDS, FULL_SEEDS)
    scenarios = sorted(path.stem for path in BUILT_IN.glob("*.toml") if path.stem != FLEET)
    # The slow ones first, so that no core waits for the last of them alone.
    policies = sorted(CHOOSERS, key=lambda name: name not in ("solver", "oracle"))
    jobs = list(itertools.product(policies, scenarios, seeds, (seconds,)))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as workers:
        played = list(workers.map(play, *zip(*jobs, strict=True)))
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        for scenario in scenarios:
            some = {p.policy: p.result for p in played if p.scenario == scenario and p.seed == seeds[0]}
            drawn = {name: some[name] for name in DRAWN}
            (pictures / f"{scenario}.png").write_bytes(picture(_world(scenario, seeds[0], seconds), drawn))
    rows = [
        _row(f"{scenario}, {policy}", [p for p in played if p.scenario == scenario and p.policy == policy])
        for scenario, policy in itertools.product(scenarios, CHOOSERS)
    ]
    sums = {policy: [p for p in played if p.policy == policy] for policy in CHOOSERS}
    return [*rows, *(_sum_row(policy, sums) for policy in CHOOSERS), *_goals(sums), _fleet_row(quick)]


def play(policy: str, name: str, seed: int, seconds: float) -> Played:
    """One policy on one scenario, for so many simulated seconds."""
    began_s = time.process_time()
    scenario = load_scenario(name)
    result = simulate_policy(policy, _world(name, seed, seconds), seed)
    return Played(
        scenario=name, policy=policy, traces=tuple(sorted(_traces(scenario))), violated=result.violation_minutes,
        minutes=len(result.minutes), moves=result.moves, requests=result.requests, failed=result.failed,
        p99_ms=result.p99_ms, energy_j=result.energy_j, cpu_s=time.process_time() - began_s,
        seed=seed, result=msgspec.structs.replace(result, decisions=(), plans=()),
    )  # fmt: skip


def _world(name: str, seed: int, seconds: float) -> World:
    scenario = msgspec.structs.replace(load_scenario(name), seconds=seconds)
    return world_of(scenario, seed, _traces(scenario))


def _traces(scenario: Scenario) -> dict[str, Trace]:
    directory = os.environ.get("TIDEGATE_TRACES")
    return traces_for(scenario, Path(directory) if directory else None)


def _row(name: str, played: Sequence[Played]) -> Row:
    traces = ", ".join(played[0].traces) or "made-up series"
    return Row(
        name=name, value=float(sum(p.violated for p in played)), unit="min violated", runs=len(played),
        note=f"{_figures(played)}; {traces}",
    )  # fmt: skip


def _sum_row(policy: str, sums: dict[str, list[Played]]) -> Row:
    mine = sums[policy]
    violated, best = (sum(p.violated for p in sums[name]) for name in (policy, "oracle"))
    ratio = f"{violated / best:.2g} times the oracle's" if best else "the oracle has none"
    note = f"{_figures(mine)}; {ratio}; {sum(p.cpu_s for p in mine):.0f} s of processor time"
    return Row(name=f"all, {policy}", value=float(violated), unit="min violated", runs=len(mine), note=note)


def _figures(played: Sequence[Played]) -> str:
    minutes = sum(p.minutes for p in played)
    energy = sum(p.energy_j * p.requests for p in played) / max(1, sum(p.requests for p in played))
    return (
        f"of {minutes}; p99 {np.median([p.p99_ms for p in played]):.0f} ms, {energy:.1f} J/request, "
        f"{60.0 * sum(p.moves for p in played) / minutes:.1f} moves/h, {sum(p.failed for p in played)} failed"
    )


def _goals(sums: dict[str, list[Played]]) -> list[Row]:
    violated = {policy: float(sum(p.violated for p in played)) for policy, played in sums.items()}
    ours = sums["solver"]
    hours = sum(p.minutes for p in ours) / 60.0
    note = f"{hours:.1f} simulated hours"
    rows = []
    for other, goal in (("static", 5.0), ("memory-proportional", 5.0), ("latency-greedy", 2.0)):
        ratio = violated[other] / max(1.0, violated["solver"])
        rows.append(
            Row(
                name=f"violation minutes, {other} / solver", value=ratio, unit="ratio", goal=f">= {goal:g}",
                holds=ratio >= goal, note=note,
            )
        )  # fmt: skip
    oracle = violated["solver"] / max(1.0, violated["oracle"])
    against = f"{violated['solver']:.0f} against {violated['oracle']:.0f}; {note}"
    rows.append(at_most("violation minutes, solver / oracle", oracle, "ratio", 1.3, runs=len(ours), note=against))
    moves = sum(p.moves for p in ours) / hours
    rows.append(at_most("moves, solver", moves, "1/h", MAX_MOVES_PER_HOUR, runs=len(ours), note=note))
    most = max(p.moves / (p.minutes / 60.0) for p in ours)
    rows.append(at_most("moves, solver, worst run", most, "1/h", MAX_MOVES_PER_HOUR, runs=len(ours), note=note))
    return rows


def _fleet_row(quick: bool) -> Row:
    """How long a simulated hour of 10,000 agents takes; quick: a few minutes of some zones, without a goal."""
    scenario = load_scenario(FLEET)
    if quick:
        scenario = msgspec.structs.replace(scenario, zones=4, seconds=300.0)
    result = play_fleet(scenario, "solver", FULL_SEEDS[0], {})
    name = f"{result.agents} agents, {scenario.seconds / 3600:.2g} simulated hours"
    note = (
        f"{result.zones} zones on {os.cpu_count()} cores, {result.cpu_s:.0f} s of processor time; {result.violation_minutes} of "
        f"{result.minutes} zone-minutes violated, {result.moves_per_hour:.2f} moves/h per zone, {result.failed} of {result.requests} failed"
    )
    if quick:
        return Row(name=name, value=result.wall_s, unit="s", note=note)
    return at_most(name, result.wall_s, "s", FLEET_GOAL_S, runs=1, note=note)
