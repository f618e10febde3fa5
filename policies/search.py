"""Joint search over the stages of one service: which layout of each stage, under one rough score of the whole.

The rough score follows `policies.predict` and `policies.score` in array form (no distributions): good enough to tell which
few plans deserve the full prediction. Stages are placed heaviest first by beam search; then each stage in turn is chosen
again with the others held, until nothing improves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.latency import Floats
from policies.layouts import Ints, Table
from policies.score import Weights
from sla.contract import Contract

BEAM = 16
ROWS_PER_SCENARIO = 30
LATENCY_TIE = 0.05
"""What a p99 at its limit adds (twice this): among plans that score alike the quicker one is preferred ..."""
HOP_TIE = 0.003
"""... and the one with fewer shards."""
MAX_PER_SIGNATURE = 2


@dataclass(frozen=True, slots=True)
class Yard:
    """What the rough score needs besides the layouts."""

    contract: Contract
    weights: Weights
    rate_rps: float
    busy: Floats
    """[A] utilisation without this service's ONNX stages."""
    free_bytes: Floats
    """[A]"""
    least_saturation: float
    """Of the entry, whatever is placed there."""
    base_delay_ms: float
    sigma_latency: float
    sigma_capacity: float

    def score(
        self, busy: Floats, delay: Floats, variance: Floats, jitter_variance: Floats, link: Floats, hops: Floats
    ) -> Floats:
        """Rough scores; `busy` is [A, ...], the others [...], all per request in milliseconds."""
        saturation, needed, wait = self.loads(busy)
        return self.judge(
            saturation.max(axis=0), needed.max(axis=0), wait.sum(axis=0), delay, variance, jitter_variance, link, hops
        )

    def least(self, busy: Floats, jitter_variance: Floats) -> Floats:
        """What no full prediction can score below: saturation and jitter as they are, without any risk."""
        saturation, _, _ = self.loads(busy)
        return np.asarray(
            self.weights.saturation * saturation.max(axis=0) + self.weights.jitter * self._jitter(jitter_variance)
        )

    def loads(self, busy: Floats) -> tuple[Floats, Floats, Floats]:
        """Per agent [A, ...]: saturation, the share of its free time that is needed, and the time in its queues."""
        before = self.busy.reshape(-1, *(1 for _ in busy.shape[1:]))
        ours = busy * (self.rate_rps / 1000.0)
        load = before + ours
        saturation = np.where(busy > 0, np.minimum(load, 1.0), self.least_saturation)
        np.minimum(load, 0.98, out=load)
        wait = load / (1.0 - load)
        wait *= busy
        return saturation, ours / (1.0 - before), wait

    def judge(
        self, saturation: Floats, needed: Floats, wait: Floats, delay: Floats, variance: Floats, jitter_variance: Floats,
        link: Floats, hops: Floats,
    ) -> Floats:  # fmt: skip
        """Rough scores of what `loads` found, over all agents."""
        p99 = self.base_delay_ms + delay + (3.0 * 0.55) * wait + 2.4 * np.sqrt(variance)
        needed = np.maximum(needed, link * (self.rate_rps / 1000.0))
        late = p99 / self.contract.latency_p99_ms
        kept = within(late, self.sigma_latency) * within(needed, self.sigma_capacity)
        w = self.weights
        tie = LATENCY_TIE * late / (late + 1.0) + HOP_TIE * hops
        parts = w.saturation * saturation + w.jitter * self._jitter(jitter_variance) + w.risk * (1.0 - kept)
        return np.asarray(parts + tie)

    def _jitter(self, variance: Floats) -> Floats:
        jitter = np.sqrt(variance)
        return np.asarray(jitter / (jitter + self.weights.jitter_reference * self.contract.latency_p99_ms))


def within(ratio: Floats, sigma: float) -> Floats:
    """Probability that a quantity predicted at `ratio` of its limit keeps it: a logistic stand-in for the log-normal."""
    return np.asarray(1.0 / (1.0 + np.minimum(ratio, 1e3) ** (1.702 / sigma)))


@dataclass(frozen=True, slots=True)
class _Beam:
    """B partial choices: what they add up to, and the row chosen in each table (-1: not yet)."""

    busy: Floats
    delay: Floats
    variance: Floats
    jitter_variance: Floats
    link: Floats
    memory: Floats
    accuracy: Floats
    hops: Floats
    rows: Ints

    @staticmethod
    def empty(stages: int, agents: int) -> _Beam:
        zero, wide = np.zeros(1), np.zeros((1, agents))
        return _Beam(wide, zero, zero, zero, zero, wide, np.ones(1), zero, np.full((1, stages), -1, dtype=np.int64))

    def pick(self, table: Table, at: int, states: Ints, rows: Ints) -> _Beam:
        """The states extended by one row each."""
        chosen = self.rows[states].copy()
        chosen[:, at] = rows
        return _Beam(
            self.busy[states] + table.busy[rows],
            self.delay[states] + table.delay[rows],
            self.variance[states] + table.variance[rows],
            self.jitter_variance[states] + table.jitter_variance[rows],
            np.maximum(self.link[states], table.link[rows]),
            self.memory[states] + table.memory[rows],
            self.accuracy[states] * table.accuracy[rows],
            self.hops[states] + table.hops[rows],
            chosen,
        )


def prefilter(table: Table, yard: Yard, floor: float, best_others: float, *, is_only: bool = False) -> Table:
    """Rows that could be part of a good whole: legal alone, and among the best in at least one of several surroundings.

    Surroundings: as it is, and with each agent in turn kept busy by the other stages, unless this is the only stage.
    Single agents always stay.
    """
    legal = (table.memory <= yard.free_bytes).all(axis=1) & (table.accuracy * best_others >= floor - 1e-9)
    if not legal.all():
        table = table.take(np.flatnonzero(legal))
    if len(table) <= ROWS_PER_SCENARIO:
        return table
    scores = _scores(table, yard)[None] if is_only else _surrounded(table, yard)
    keep = (table.lanes[:, 2] < 0) & (table.hops == 1)
    for variant in range(len(table.variants)):
        rows = np.flatnonzero(table.lanes[:, 0] == variant)
        if len(rows):
            depth = min(ROWS_PER_SCENARIO, len(rows))
            keep[rows[np.argpartition(scores[:, rows], depth - 1, axis=1)[:, :depth]]] = True
    return table.take(np.flatnonzero(keep))


def _scores(table: Table, yard: Yard) -> Floats:
    return yard.score(table.busy.T, table.delay, table.variance, table.jitter_variance, table.link, table.hops)


def _surrounded(table: Table, yard: Yard) -> Floats:
    """[1 + A, L] scores of the rows as they are, and with each agent in turn kept busy by other stages, as long as by this one.

    What others put on an agent counts toward its saturation and queue, so it is added to the layout's own.
    """
    busy = np.ascontiguousarray(table.busy.T)
    loads = [yard.loads(busy), yard.loads(busy + float(np.median(table.busy.sum(axis=1))))]
    agents, rows = busy.shape
    saturation, needed, wait = (np.empty((1 + agents, rows)) for _ in range(3))
    for around in range(1 + agents):
        # Only one agent differs from the surroundings as they are.
        parts = [np.array(part) for part in loads[0]]
        if around:
            for part, changed in zip(parts, loads[1], strict=True):
                part[around - 1] = changed[around - 1]
        saturation[around], needed[around], wait[around] = (
            parts[0].max(axis=0),
            parts[1].max(axis=0),
            parts[2].sum(axis=0),
        )
    return yard.judge(
        saturation, needed, wait, table.delay, table.variance, table.jitter_variance, table.link, table.hops
    )


def search(
    tables: Sequence[Table], yard: Yard, floor: float, limit: int, kinds: Ints
) -> list[tuple[float, tuple[int, ...]]]:
    """Up to `limit` different choices of one row per table, best rough score first; empty when none is legal.

    `kinds` [A] says which agents are alike; choices that differ only in which of two alike agents does what come last.
    """
    named = [table.signatures(np.arange(len(yard.busy))) for table in tables]
    order = [0]
    if len(tables) > 1:
        order = sorted(range(len(tables)), key=lambda at: -float(np.median(tables[at].busy.sum(axis=1))))
    beam, rough = _Beam.empty(len(tables), len(yard.busy)), np.zeros(1)
    for depth, at in enumerate(order):
        others = float(np.prod([tables[o].accuracy.max() for o in order[depth + 1 :]]))
        beam, rough = _extend(beam, tables, at, yard, floor / max(others, 1e-9), BEAM, named)
        if not len(beam.rows):
            return []
    found: dict[tuple[int, ...], float] = {}
    for state in range(len(beam.rows)):
        rows, score = tuple(int(r) for r in beam.rows[state]), float(rough[state])
        if state < 3 and len(tables) > 1:  # With one table the beam has seen every row.
            rows, score = _polish(rows, score, tables, yard, floor, named)
        found[rows] = score
    ranked = sorted((score, rows) for rows, score in found.items())
    return _different(ranked, tables, limit, kinds)


def least_scores(choices: Sequence[tuple[int, ...]], tables: Sequence[Table], yard: Yard) -> list[float]:
    """`Yard.least` of choices of one row per table."""
    rows = np.array(choices, dtype=np.int64).T
    busy = sum(table.busy[chosen] for table, chosen in zip(tables, rows, strict=True))
    jitter = sum(table.jitter_variance[chosen] for table, chosen in zip(tables, rows, strict=True))
    least: list[float] = yard.least(np.asarray(busy).T, np.asarray(jitter)).tolist()
    return least


def _extend(
    beam: _Beam, tables: Sequence[Table], at: int, yard: Yard, floor: float, width: int, named: Sequence[Ints]
) -> tuple[_Beam, Floats]:
    """The best `width` choices of a row of one table for each state, and their scores; `named` are the rows' signatures."""
    table = tables[at]
    scores = yard.score(
        beam.busy.T[:, :, None] + table.busy.T[:, None, :],
        beam.delay[:, None] + table.delay[None],
        beam.variance[:, None] + table.variance[None],
        beam.jitter_variance[:, None] + table.jitter_variance[None],
        np.maximum(beam.link[:, None], table.link[None]),
        beam.hops[:, None] + table.hops[None],
    )
    legal = (beam.memory.T[:, :, None] + table.memory.T[:, None, :] <= yard.free_bytes[:, None, None]).all(axis=0)
    legal &= beam.accuracy[:, None] * table.accuracy[None] >= floor - 1e-9
    flat = np.where(legal, scores, np.inf).ravel()
    first = _lowest(flat, 8 * width)
    picked = first[:1].tolist() if width == 1 else _varied(first, beam.rows, named, at, width)
    states, rows = np.divmod(np.array(picked, dtype=np.int64), len(table))
    return beam.pick(table, at, states, rows), flat[picked]


def _lowest(values: Floats, many: int) -> Ints:
    """Indices of the smallest finite values, at most so many, in rising order."""
    some = min(len(values), many)
    first = np.argpartition(values, some - 1)[:some]
    first = first[np.argsort(values[first], kind="stable")]
    return np.asarray(first[np.isfinite(values[first])])


def _varied(first: Ints, states: Ints, named: Sequence[Ints], at: int, width: int) -> list[int]:
    """Up to `width` of these (state, row) indices, in their order, with at most `MAX_PER_SIGNATURE` that are alike."""
    before = [tuple(int(named[o][r]) for o, r in enumerate(rows) if r >= 0) for rows in states]
    names, count = named[at], len(named[at])
    picked: list[int] = []
    seen: dict[tuple[int, ...], int] = {}
    for index in first.tolist():
        state, row = divmod(index, count)
        key = (*before[state], int(names[row]))
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= MAX_PER_SIGNATURE:
            picked.append(index)
        if len(picked) == width:
            break
    return picked


def _polish(
    rows: tuple[int, ...], score: float, tables: Sequence[Table], yard: Yard, floor: float, named: Sequence[Ints]
) -> tuple[tuple[int, ...], float]:
    """Choose each stage again with the others held, until a whole round changes nothing."""
    for _ in range(4):
        before = score
        for at in range(len(tables)):
            beam = _Beam.empty(len(tables), len(yard.busy))
            for other, row in enumerate(rows):
                if other != at:
                    beam = beam.pick(tables[other], other, np.zeros(1, dtype=np.int64), np.array([row]))
            best, scores = _extend(beam, tables, at, yard, floor, 1, named)
            if len(scores) and float(scores[0]) < score - 1e-9:
                rows, score = tuple(int(r) for r in best.rows[0]), float(scores[0])
        if score >= before - 1e-9:
            break
    return rows, score


def _different(
    ranked: list[tuple[float, tuple[int, ...]]], tables: Sequence[Table], limit: int, kinds: Ints
) -> list[tuple[float, tuple[int, ...]]]:
    """The best of each signature first, then the others, so that a short list still offers different ideas."""
    leaders: list[tuple[float, tuple[int, ...]]] = []
    others: list[tuple[float, tuple[int, ...]]] = []
    seen: set[tuple[int, ...]] = set()
    named = [table.signatures(kinds) for table in tables]
    for entry in ranked:
        key = tuple(int(named[at][row]) for at, row in enumerate(entry[1]))
        (others if key in seen else leaders).append(entry)
        seen.add(key)
    return [*leaders, *others][:limit]
