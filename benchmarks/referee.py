"""The linear planning problem as a mixed-integer programme for HiGHS: the referee of `policies.partition`.

Per work one unit flows through a graph whose arcs are *runs* (a device takes the blocks from one cut to another; binary) and *hops* (from
one device to the next at a cut), so that a run is all or nothing: an arc per block would let the relaxation cut a device's run to pieces. A device
runs at most once per work, memory is a knapsack over all works, and the objective is the sum of run and link times, or that no load of a device or link exceeds a bound.

Runs that do not fit alone are left out, and where a bottleneck is asked for the runs and hops that alone exceed it. For the latency HiGHS starts from
the given answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from policies.latency import Floats
from policies.partition import Objective, Route, Work, bottleneck_of

PRECISION = 1e-3
"""To this share of the value an answer is proven."""
COARSER = (0.01, 0.03)
"""What is tried to prove where that takes too long."""
_SCALE_BYTES = 1e-6


def random_problem(rng: np.random.Generator) -> tuple[list[Work], Floats]:
    """Up to 8 devices, 24 blocks and 3 works that share them; memory is often short."""
    devices, services = int(rng.integers(2, 9)), int(rng.integers(1, 4))
    blocks = [int(rng.integers(3, 25)) for _ in range(services)]
    speed = rng.uniform(1.0, 10.0, devices)
    sizes = [rng.uniform(1e6, 20e6, n) for n in blocks]
    total = float(sum(s.sum() for s in sizes))
    free = rng.dirichlet(np.full(devices, 2.0)) * total * rng.uniform(1.1, 3.0)
    rtt = rng.uniform(0.5, 20.0, (devices, devices))
    rtt = (rtt + rtt.T) / 2
    per_byte = 1e3 / rng.uniform(5e6, 100e6, (devices, devices))
    return [_work(rng, speed, size, rtt, per_byte) for size in sizes], free


def _work(rng: np.random.Generator, speed: Floats, size: Floats, rtt: Floats, per_byte: Floats) -> Work:
    devices, count = len(speed), len(size)
    own = speed * rng.uniform(0.8, 1.25, devices)  # no two models see the same ratio of two devices
    run = np.concatenate(
        [np.zeros((devices, 1)), np.cumsum(own[:, None] * rng.uniform(0.5, 8.0, count), axis=1)], axis=1
    )
    cut = rng.uniform(1e3, 5e5, count + 1)
    transfer = per_byte[:, :, None] * cut
    entry = int(rng.integers(devices))
    at_entry = np.arange(devices) == entry
    enter_busy = np.where(at_entry, 0.0, per_byte[entry] * cut[0])
    return Work(
        run=run, params=np.concatenate([[0.0], np.cumsum(size)]), active=float(rng.uniform(0, 2e6)),
        enter=1.0 + np.where(at_entry, 0.0, rtt[entry]) + enter_busy, hop=1.0 + rtt[:, :, None] + transfer,
        enter_busy=enter_busy, hop_busy=transfer, rate=float(rng.uniform(0.5, 2.0)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """What HiGHS says of an instance."""

    is_proven: bool
    """To `PRECISION`, or that there is no plan."""
    value: float | None
    """Of the best plan that is known, the given one included; None when there is none."""
    bound: float
    """No plan is better than this: infinite where it is proven that there is none, 0 where nothing was proven."""


def optimum(
    works: Sequence[Work], free: Floats, objective: Objective, *, seconds: float = 10.0, known: Sequence[Route] | None = None
) -> Verdict:  # fmt: skip
    """The best value of all plans, as far as it can be found and proven; `known` is an answer to start from.

    A bottleneck is not minimised but asked for, again and again by `PRECISION` less than what is known, until there is none: with the loads
    bounded by a number each device is one more knapsack, of which HiGHS knows how to cut, while a bound that is itself a variable leaves
    the relaxation free to spread every run over all devices. Each such question has `seconds`.
    """
    if objective == "latency":
        return _least_latency(works, free, seconds, known)
    best = known
    if best is None:
        status, best = _Programme(works, free, None).within(seconds)
        if best is None:
            is_none = status == highspy.HighsModelStatus.kInfeasible
            return Verdict(is_none, None, np.inf if is_none else 0.0)
    while True:
        value = bottleneck_of(works, best)
        status, better = _Programme(works, free, value * (1.0 - PRECISION)).within(seconds)
        if better is None:
            break
        best = better
    if status == highspy.HighsModelStatus.kInfeasible:
        return Verdict(True, value, value * (1.0 - PRECISION))
    for coarse in COARSER:
        if _Programme(works, free, value * (1.0 - coarse)).within(seconds)[0] == highspy.HighsModelStatus.kInfeasible:
            return Verdict(False, value, value * (1.0 - coarse))
    return Verdict(False, value, 0.0)


def _least_latency(works: Sequence[Work], free: Floats, seconds: float, known: Sequence[Route] | None) -> Verdict:
    programme = _Programme(works, free, None)
    programme.minimise_latency()
    h = _highs(programme, seconds)
    if known is not None:
        start = highspy.HighsSolution()
        start.col_value = programme.solution(known).tolist()
        h.setSolution(start)
    h.run()
    status, info = h.getModelStatus(), h.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Verdict(True, None, np.inf)
    value = float(info.objective_function_value) if info.primal_solution_status == 2 else None
    return Verdict(status == highspy.HighsModelStatus.kOptimal, value, max(0.0, float(info.mip_dual_bound)))


def _highs(programme: _Programme, seconds: float) -> highspy.Highs:
    h = highspy.Highs()
    h.setOptionValue("output_flag", False)
    h.setOptionValue("threads", 1)
    h.setOptionValue("time_limit", seconds)
    h.setOptionValue("mip_rel_gap", PRECISION)
    h.passModel(programme.model())
    return h


@dataclass(slots=True)
class _Programme:
    """Columns (variables) over rows (constraints), built up work by work."""

    works: Sequence[Work]
    free: Floats
    at_most: float | None
    """The bottleneck of a known plan: whatever alone is above it is left out."""
    costs: list[float] = field(default_factory=list)
    is_binary: list[bool] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    """(row, column, coefficient)"""
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    runs: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    """Work, device, first block, one past the last -> column."""
    hops: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    """Work, from, to, cut -> column."""

    def __post_init__(self) -> None:
        for number, work in enumerate(self.works):
            self._add_flow(number, work)
        for d, room in enumerate(self.free):
            row = self._row(-np.inf, float(room) * _SCALE_BYTES)
            for (number, device, start, stop), column in self.runs.items():
                if device == d:
                    self.entries.append((row, column, _bytes_of(self.works[number], start, stop) * _SCALE_BYTES))

    def minimise_latency(self) -> None:
        for (number, d, start, stop), column in self.runs.items():
            work = self.works[number]
            entered = float(work.enter[d]) if start == 0 else 0.0
            self.costs[column] = work.rate * (float(work.run[d, stop] - work.run[d, start]) + entered)
        for (number, c, d, cut), column in self.hops.items():
            self.costs[column] = self.works[number].rate * float(self.works[number].hop[c, d, cut])

    def within(self, seconds: float) -> tuple[highspy.HighsModelStatus, list[Route] | None]:
        """Any plan whose devices and links carry at most `at_most` each, and what HiGHS says if it finds none.

        The least sum of all loads is what it looks for, which guides it better than nothing to look for.
        """
        devices = [self._row(-np.inf, np.inf if self.at_most is None else self.at_most) for _ in self.free]
        for (number, d, start, stop), column in self.runs.items():
            load = self._load(self.works[number], d, start, stop)
            self.costs[column] = load
            self.entries.append((devices[d], column, load))
        h = _highs(self, seconds)
        h.setOptionValue("mip_max_improving_sols", 1)
        h.run()
        if h.getInfo().primal_solution_status != 2:
            return h.getModelStatus(), None
        values = h.getSolution().col_value
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.works]
        for (number, d, start, stop), column in self.runs.items():
            if values[column] > 0.5:
                found[number].append((d, start, stop))
        return h.getModelStatus(), [tuple(sorted(route, key=lambda hop: hop[1])) for route in found]

    def model(self) -> highspy.HighsLp:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.costs), len(self.low)
        lp.col_cost_ = np.array(self.costs)
        lp.col_lower_ = np.zeros(lp.num_col_)
        lp.col_upper_ = np.where(self.is_binary, 1.0, np.inf)  # The hops follow from the runs.
        lp.row_lower_, lp.row_upper_ = np.array(self.low), np.array(self.high)
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if binary else kinds.kContinuous for binary in self.is_binary]
        entries = sorted(self.entries, key=lambda entry: (entry[1], entry[0]))
        columns = np.array([column for _, column, _ in entries], dtype=np.int64)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.searchsorted(columns, np.arange(lp.num_col_ + 1)).astype(np.int32)
        lp.a_matrix_.index_ = np.array([row for row, _, _ in entries], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([value for _, _, value in entries])
        return lp

    def solution(self, known: Sequence[Route]) -> Floats:
        """[columns] the values that stand for an answer."""
        values = np.zeros(len(self.costs))
        for number, route in enumerate(known):
            for d, start, stop in route:
                values[self.runs[number, d, start, stop]] = 1.0
            for (c, _, cut), (d, _, _) in itertools.pairwise(route):
                values[self.hops[number, c, d, cut]] = 1.0
        return values

    def _add_flow(self, number: int, work: Work) -> None:
        devices, blocks = range(work.devices), work.blocks
        once = [self._row(-np.inf, 1.0) for _ in devices]
        begins = {(d, b): self._row(0.0, 0.0) for d in devices for b in range(1, blocks)}
        ends = {(d, b): self._row(0.0, 0.0) for d in devices for b in range(1, blocks)}
        first = self._row(1.0, 1.0)
        for d in devices:
            for start, stop in itertools.combinations(range(blocks + 1), 2):
                if not self._is_possible(work, d, start, stop):
                    continue
                column = self.runs[number, d, start, stop] = self._column(is_binary=True)
                self.entries.append((once[d], column, 1.0))
                self.entries.append((begins[d, start] if start else first, column, -1.0 if start else 1.0))
                if stop < blocks:
                    self.entries.append((ends[d, stop], column, 1.0))
        for c, d in itertools.permutations(devices, 2):
            for cut in range(1, blocks):
                if self._is_allowed(work.rate * float(work.hop_busy[c, d, cut])):
                    column = self.hops[number, c, d, cut] = self._column(is_binary=False)
                    self.entries += [(ends[c, cut], column, -1.0), (begins[d, cut], column, 1.0)]

    def _is_possible(self, work: Work, d: int, start: int, stop: int) -> bool:
        """Whether the run alone fits, and is not worse than what is known."""
        loads = [self._load(work, d, start, stop)]
        if start == 0:
            loads.append(work.rate * float(work.enter_busy[d]))
        return _bytes_of(work, start, stop) <= self.free[d] * (1.0 + 1e-9) and all(map(self._is_allowed, loads))

    def _is_allowed(self, load: float) -> bool:
        return self.at_most is None or load <= self.at_most * (1.0 + 1e-9)

    def _column(self, *, is_binary: bool) -> int:
        self.costs.append(0.0)
        self.is_binary.append(is_binary)
        return len(self.costs) - 1

    def _row(self, low: float, high: float) -> int:
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    @staticmethod
    def _load(work: Work, d: int, start: int, stop: int) -> float:
        return work.rate * float(work.run[d, stop] - work.run[d, start])


def _bytes_of(work: Work, start: int, stop: int) -> float:
    return float(work.params[stop] - work.params[start] + work.active)
