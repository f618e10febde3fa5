"""Predicted against measured latency on real processes: the demo's document reader on small fleets of emulated devices.

Each plan is made to run by an operator's order (`tidegate plan apply`), so it passes the gate and is rolled out with proof. What is
judged is what the controller's own snapshot said before the plan ran, calibrated by whatever ran before it. Requests come open-loop
(Poisson) through a device's ingress. `python -m benchmarks.prediction_live FILE` judges a recorded run again, by this version.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil
from rich.console import Console

from benchmarks import live_records
from benchmarks.common import Row, at_most, print_rows
from benchmarks.live_fleet import FLEETS, FleetPlan, LiveFleet
from benchmarks.live_records import Load, Measured, Trial, measured
from benchmarks.live_world import simulated
from policies.decision import Prediction
from policies.predict import Predictor
from policies.snapshot import Snapshot

PLANS: Final = 32
SECONDS: Final = 279.0
"""Per plan, for all its loads."""
QUICK_PLANS, QUICK_SECONDS = 4, 45.0
MEDIAN_GOAL, P90_GOAL, SIMULATED_GOAL = 0.10, 0.25, 0.20


def run(quick: bool) -> list[Row]:
    """About 46 minutes; `quick`: five. The record is left in the temporary directory whose name is printed."""
    directory = Path(tempfile.mkdtemp(prefix="tidegate-prediction-"))
    wanted, seconds, fleets = (QUICK_PLANS, QUICK_SECONDS, FLEETS[:2]) if quick else (PLANS, SECONDS, FLEETS)
    console, began = Console(stderr=True), time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:6.0f} s  {text}", highlight=False)

    file = directory / "trials.msgpack"
    say(f"records in {file}")
    trials: list[Trial] = []

    def keep(trial: Trial) -> None:
        trials.append(trial)
        live_records.save(trials, file)  # After each, so that an interrupted run leaves what it measured.

    busy = _measure(fleets, -(-wanted // len(fleets)), seconds, directory, say, keep)
    return [*judge(trials), Row(name="this machine's CPU meanwhile", value=busy, unit="share", runs=len(trials))]


def _measure(
    fleets: tuple[FleetPlan, ...], each: int, seconds: float, directory: Path, say: Callable[[str], None],
    keep: Callable[[Trial], None],
) -> float:  # fmt: skip
    """All fleets side by side, each with its part of the plans; the share of this machine's CPU that was busy."""
    with ExitStack() as stack, ThreadPoolExecutor(len(fleets)) as threads:
        warming = threading.Lock()
        live = [stack.enter_context(LiveFleet(fleet, directory, say, warming)) for fleet in fleets]
        live[0].start()
        for other in live[1:]:
            other.start(models=live[0].models)
        for one in live:
            one.wait_for_profiles()
        psutil.cpu_percent()
        for part in [threads.submit(one.trials, each, seconds, 11 + at, keep) for at, one in enumerate(live)]:
            part.result()
        return psutil.cpu_percent() / 100.0


@dataclass(frozen=True, slots=True)
class Judged:
    """One plan under one load: what was measured, predicted before and after, and simulated."""

    trial: Trial
    load: Load
    real: Measured
    before: Prediction
    after: Prediction
    simulated_p99_ms: float
    simulated_p50_ms: float


def judged(trials: list[Trial]) -> list[Judged]:
    """Every load of every plan, predicted by this version."""
    found = []
    for trial in trials:
        before, after = trial.seen_before(), trial.seen_after()
        for load in trial.loads:
            times = simulated(trial, load)
            found.append(
                Judged(
                    trial,
                    load,
                    measured(load),
                    _predicted(before, trial, load),
                    _predicted(after, trial, load),
                    live_records.smooth_p99(times),
                    float(np.median(times)),
                )
            )
    return found


def _predicted(snapshot: Snapshot, trial: Trial, load: Load) -> Prediction:
    return Predictor(snapshot, trial.service, rate_rps=load.rate_rps).predict(trial.plan)


def judge(trials: list[Trial]) -> list[Row]:
    """The rows of a recorded run."""
    cells = judged(trials)
    plans, runs = len(trials), len(cells)
    requests = sum(len(load.latency_ms) for trial in trials for load in trial.loads)
    note = f"{plans} plans under {runs} loads in all, {requests} requests"
    before = np.array([c.before.p99_ms / c.real.smooth_p99_ms - 1.0 for c in cells])
    raw = np.array([c.before.p99_ms / c.real.p99_ms - 1.0 for c in cells])
    rows = [
        *_errors("real p99, relative error of the prediction before the plan ran", before, runs, note, with_goals=True),
        *_errors("the same against the p99 of the sample as it is", raw, runs, "", with_goals=False),
        _row("standard error of the measured p99 itself, median", np.median([c.real.p99_error for c in cells]), runs),
    ]
    for name in ("p50", "p95"):
        off = np.array([getattr(c.before, f"{name}_ms") / getattr(c.real, f"{name}_ms") - 1.0 for c in cells])
        rows += _errors(
            f"real {name}, relative error of the prediction before the plan ran", off, runs, "", with_goals=False
        )
    after = np.array([c.after.p99_ms / c.real.smooth_p99_ms - 1.0 for c in cells])
    rows += _errors(
        "real p99, relative error of the prediction once the plan was measured", after, runs, "", with_goals=False
    )
    for share in sorted({c.load.share for c in cells}):
        of = np.array([c.load.share == share for c in cells])
        rows.append(
            _row(
                f"real p99, relative error at load {share:g}, median",
                np.median(np.abs(before[of])),
                int(of.sum()),
                f"bias {np.median(before[of]):+.3f}",
            )
        )
    sim = np.array([c.simulated_p99_ms / c.real.smooth_p99_ms - 1.0 for c in cells])
    rows.append(
        at_most("real p99, relative error of the simulator, median", float(np.median(np.abs(sim))), "ratio", SIMULATED_GOAL, runs=runs,
                note=f"within 20 %: {np.mean(np.abs(sim) <= SIMULATED_GOAL):.0%}; bias {np.median(sim):+.3f}")
    )  # fmt: skip
    return rows


def _errors(what: str, off: np.ndarray, runs: int, note: str, *, with_goals: bool) -> list[Row]:
    bias = f"bias {np.median(off):+.3f}; {note}".rstrip("; ")
    middle, high = float(np.median(np.abs(off))), float(np.quantile(np.abs(off), 0.9))
    if not with_goals:
        return [_row(f"{what}, median", middle, runs, bias), _row(f"{what}, p90", high, runs)]
    return [
        at_most(f"{what}, median", middle, "ratio", MEDIAN_GOAL, runs=runs, note=bias),
        at_most(f"{what}, p90", high, "ratio", P90_GOAL, runs=runs),
    ]


def _row(name: str, value: float, runs: int, note: str = "") -> Row:
    return Row(name=name, value=float(value), unit="ratio", runs=runs, note=note)


if __name__ == "__main__":
    print_rows("prediction_live", judge(live_records.load(Path(sys.argv[1]))), Console())
