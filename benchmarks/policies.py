"""Policies compared on simulated days: minutes of violation, p99, energy and moves, for each and as a ratio to the oracle.

Recorded traces are read from the directory in TIDEGATE_TRACES; without it the series are made up, and the note says so.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.common import Row, at_most
from controller.simulate_cli import BUILT_IN, load_scenario
from controller.simulate_traces import traces_for
from policies.scenario import world_of
from policies.simulate import Result, simulate
from policies.simulate_choosers import CHOOSERS, chooser_of

QUICK_SECONDS, FULL_SECONDS = 1200.0, 17_280.0
"""Per scenario and seed; five scenarios of 4.8 hours are a simulated day."""
MAX_MOVES_PER_HOUR = 6.0


def run(quick: bool) -> list[Row]:
    """Rows per scenario and policy, then the goals over all of them."""
    directory = os.environ.get("TIDEGATE_TRACES")
    seeds = (1,) if quick else (1, 2)
    rows: list[Row] = []
    sums = {name: [0.0, 0.0, 0.0] for name in CHOOSERS}
    for path in sorted(BUILT_IN.glob("*.toml")):
        scenario = msgspec.structs.replace(load_scenario(str(path)), seconds=QUICK_SECONDS if quick else FULL_SECONDS)
        traces = traces_for(scenario, Path(directory) if directory else None)
        for name in CHOOSERS:
            results = [simulate(world_of(scenario, seed, traces), chooser_of(name), seed) for seed in seeds]
            rows.append(_row(path.stem, name, results, sorted(traces)))
            for r in results:
                sums[name] = [
                    sums[name][0] + r.violation_minutes,
                    sums[name][1] + r.moves,
                    sums[name][2] + len(r.minutes),
                ]
    return [*rows, *_goals(sums)]


def _row(scenario: str, policy: str, results: list[Result], traces: list[str]) -> Row:
    worst = float(np.median([r.p99_ms for r in results]))
    energy, moves = (float(np.mean([getattr(r, name) for r in results])) for name in ("energy_j", "moves_per_hour"))
    note = (
        f"of {sum(len(r.minutes) for r in results)}; p99 {worst:.0f} ms, {energy:.1f} J/request, {moves:.1f} moves/h, "
        f"{sum(r.failed for r in results)} failed; {', '.join(traces) or 'made-up series'}"
    )
    value = float(sum(r.violation_minutes for r in results))
    return Row(name=f"{scenario}, {policy}", value=value, unit="min violated", runs=len(results), note=note)


def _goals(sums: dict[str, list[float]]) -> list[Row]:
    ours = max(1.0, sums["solver"][0])
    rows = []
    for other, goal in (("static", 5.0), ("memory-proportional", 5.0), ("latency-greedy", 2.0)):
        ratio = sums[other][0] / ours
        rows.append(
            Row(name=f"violation minutes, {other} / solver", value=ratio, unit="ratio", goal=f">= {goal:g}", holds=ratio >= goal)
        )  # fmt: skip
    oracle = sums["solver"][0] / max(1.0, sums["oracle"][0])
    rows.append(at_most("violation minutes, solver / oracle", oracle, "ratio", 1.3, runs=1))
    hours = sums["solver"][2] / 60.0
    rows.append(
        at_most(
            "moves, solver",
            sums["solver"][1] / hours,
            "1/h",
            MAX_MOVES_PER_HOUR,
            runs=1,
            note=f"{hours:.1f} simulated hours",
        )
    )
    return rows
