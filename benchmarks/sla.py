"""The SLA engine: is the risk calibrated, how long does a day of traffic take, how much memory does a service need?

Risk: an hour's rolling window over replayed requests; every ten minutes each promise gets the probability that it is broken in
ten (and thirty) minutes; later it is seen whether it was. Expected calibration error over ten equal bins; Brier score
against climatology (the base rate in hindsight, which nobody could have known).
"""

from __future__ import annotations

import time
import tracemalloc
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.common import Row, at_most
from benchmarks.replay import Replay, replays, trace_directory
from sla.assess import assess
from sla.contract import Contract, contract_from
from sla.promises import promises_of, tally
from sla.risk import risk_soon
from sla.sketch import MAX_KEY, MIN_KEY, Histogram
from sla.window import BLOCK_S, TIERS, ServiceWindow

HOUR_S = 3600.0
START_S = 1_800_000_000.0 // 86_400 * 86_400
BINS = 10
CONTRACTS = tuple(
    contract_from(
        {"service_id": "replay", "latency_p99_ms": limit_ms, "throughput_rps": 4, "availability_sla": availability}
    )
    for limit_ms, availability in ((70, 0.9995), (75, 0.999), (80, 0.998), (90, 0.995), (100, 0.99), (110, 0.999))
)  # fmt: skip
"""From often broken to hardly ever."""


class Forecasts:
    """Probabilities and what happened."""

    def __init__(self) -> None:
        self.said: list[float] = []
        self.happened: list[bool] = []
        self.persistent: list[bool] = []
        """Whether the promise was broken when the forecast was made."""

    def arrays(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return np.array(self.said), np.array(self.happened, dtype=np.float64)

    def bins(self) -> Iterator[tuple[int, int, float, float]]:
        """(number, forecasts, mean said, share happened) of bins that are not empty."""
        said, happened = self.arrays()
        at = np.minimum((said * BINS).astype(int), BINS - 1)
        for number in range(BINS):
            inside = at == number
            if inside.any():
                yield number, int(inside.sum()), float(said[inside].mean()), float(happened[inside].mean())

    def undecided(self) -> Forecasts:
        """Those that were neither nearly sure nor nearly impossible: where a forecast is worth something."""
        hard = Forecasts()
        for said, happened, before in zip(self.said, self.happened, self.persistent, strict=True):
            if 0.05 <= said <= 0.95:
                _note(hard, said, happened, before)
        return hard

    def calibration_error(self) -> float:
        return sum(count * abs(said - happened) for _, count, said, happened in self.bins()) / len(self.said)

    def brier(self) -> float:
        said, happened = self.arrays()
        return float(((said - happened) ** 2).mean())

    def brier_of_climatology(self) -> float:
        _, happened = self.arrays()
        return float(((happened.mean() - happened) ** 2).mean())

    def brier_of_persistence(self) -> float:
        _, happened = self.arrays()
        return float(((np.array(self.persistent, dtype=np.float64) - happened) ** 2).mean())


def run(quick: bool) -> list[Row]:
    """All rows; about half a minute, quick a few seconds."""
    return [*risk_rows(quick), *engine_rows(quick)]


def risk_rows(quick: bool) -> list[Row]:
    days = list(replays(1 if quick else 4))
    source = "traces" if trace_directory() is not None else "generated, no traces found"
    rows: list[Row] = []
    for steps in (1,) if quick else (1, 3):
        single, whole = forecasts(days, steps)
        _print_table(f"risk over the next {steps * BLOCK_S // 60} minutes ({source})", single)
        name = f"risk {steps * BLOCK_S // 60} min"
        count = len(single.said)
        note = f"{source}; broken {np.mean(single.happened):.0%} of the time"
        rows += [
            at_most(f"{name}: calibration error", single.calibration_error(), "", 0.05, runs=count, note=note),
            at_most(
                f"{name}: Brier / climatology's", single.brier() / single.brier_of_climatology(), "", 1.0, runs=count,
                note=f"{single.brier():.4f} against {single.brier_of_climatology():.4f}; persistence {single.brier_of_persistence():.4f}",
            ),
            at_most(
                f"{name}: whole contract, calibration error", whole.calibration_error(), "", 0.05, runs=len(whole.said),
                note=f"Brier {whole.brier():.4f}, climatology {whole.brier_of_climatology():.4f}, persistence {whole.brier_of_persistence():.4f}",
            ),
        ]  # fmt: skip
        hard = single.undecided()
        if hard.said:
            note = f"said 0.05 to 0.95; Brier {hard.brier():.3f}, climatology {hard.brier_of_climatology():.3f}, persistence {hard.brier_of_persistence():.3f}"
            rows.append(
                Row(
                    name=f"{name}: undecided ones, calibration error", value=hard.calibration_error(), unit="",
                    runs=len(hard.said), note=note,
                )
            )  # fmt: skip
        rows += [
            Row(name=f"{name}: said {said:.3f}, happened", value=happened, unit="", runs=forecast_count)
            for _, forecast_count, said, happened in single.bins()
        ]
    return rows


def forecasts(days: list[Replay], steps: int) -> tuple[Forecasts, Forecasts]:
    """Forecasts of every promise, and of whole contracts."""
    single, whole = Forecasts(), Forecasts()
    for day in days:
        for contract in CONTRACTS:
            _replay(day, contract, steps, single, whole)
    return single, whole


def _replay(day: Replay, contract: Contract, steps: int, single: Forecasts, whole: Forecasts) -> None:
    window = ServiceWindow()
    window.promise(contract.throughput_rps, contract.latency_p99_ms)
    waiting: deque[tuple[dict[str, float], float, dict[str, bool]]] = deque()
    for minute in range(day.seconds() // 60):
        entry = day.minute(minute)
        failed = day.failed[entry]
        latency = Histogram()
        latency.add_values(day.latency_ms[entry][~failed])
        window.fold(
            START_S + 60.0 * minute + 30.0, len(failed) - int(failed.sum()), int(failed.sum()), latency.to_buckets()
        )
        now_s = START_S + 60.0 * (minute + 1)
        if now_s % BLOCK_S or now_s - START_S < HOUR_S:
            continue
        sums = window.sums(now_s, (HOUR_S,))[0]
        broken = {}
        for promise in promises_of(contract):
            counted = tally(promise, sums)
            broken[promise.name] = counted.bad > promise.allowed_share * counted.total + 1e-9
        if len(waiting) == steps:
            risks, risk, before = waiting.popleft()
            for name, happened in broken.items():
                _note(single, risks[name], happened, before[name])
            _note(whole, risk, any(broken.values()), any(before.values()))
        guess = risk_soon(window, contract, now_s, horizon_s=steps * BLOCK_S, window_s=HOUR_S)
        waiting.append((guess.promises, guess.contract, broken))


def _note(book: Forecasts, said: float, happened: bool, before: bool) -> None:
    book.said.append(said)
    book.happened.append(happened)
    book.persistent.append(before)


def engine_rows(quick: bool) -> list[Row]:
    """One day of 1,000 requests/s as the reports of an ingress, twice a second; memory when every bucket of every slot is used."""
    share = 24 if quick else 1
    chance = np.random.default_rng(5)
    reports = []
    for _ in range(50):
        latency = Histogram()
        latency.add_values(chance.lognormal(4.0, 0.5, 500))
        reports.append(latency.to_buckets())
    window = ServiceWindow()
    window.promise(1000.0, 150.0)
    began_s = time.process_time()
    for number in range(2 * 86_400 // share):
        window.fold(START_S + 0.5 * number, 500, 0, reports[number % 50])
    spent_s = (time.process_time() - began_s) * share
    contract = CONTRACTS[0]
    began_s = time.process_time()
    for _ in range(20):
        assess(window, contract, START_S + 86_400.0 / share)
    assess_ms = (time.process_time() - began_s) / 20 * 1000
    worst_mb, saved_mb = _worst_memory_mb()
    return [
        at_most("fold a day of 1,000 requests/s", spent_s, "s of one core", 60.0, runs=1, note="172,800 reports of 500 requests" + (", an hour times 24" if quick else "")),
        Row(name="assess one contract", value=assess_ms, unit="ms", runs=20),
        at_most("memory of a service, every bucket of every slot used", worst_mb, "MB", 32.0, runs=1, note=f"{saved_mb:.1f} MB when saved"),
    ]  # fmt: skip


def _worst_memory_mb() -> tuple[float, float]:
    everything = dict.fromkeys(range(MIN_KEY, MAX_KEY + 1), 1000)
    tracemalloc.start()
    window = ServiceWindow()
    end_s = START_S + 92 * 86_400
    at_s = START_S
    while at_s < end_s:
        window.fold(at_s, 1000, 1, everything)
        left_s = end_s - at_s
        at_s += next(length for length, kept in TIERS if left_s <= kept + length or length == TIERS[-1][0])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / 1e6, len(window.to_bytes()) / 1e6


def _print_table(title: str, book: Forecasts) -> None:
    table = Table("said", "forecasts", "mean said", "happened", title=title, title_justify="left")
    for number, count, said, happened in book.bins():
        table.add_row(f"{number / BINS:.1f} to {(number + 1) / BINS:.1f}", str(count), f"{said:.3f}", f"{happened:.3f}")
    Console().print(table)
