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
        before = self.busy.reshape(-1, *(1 for _ in busy.shape[1:]))
        ours = busy * (self.rate_rps / 1000.0)
        load = before + ours
        saturation = np.where(busy > 0, np.minimum(1.0, load), self.least_saturation).max(axis=0)
        load = np.minimum(load, 0.98)
        wait = 0.55 * (load / (1.0 - load) * busy).sum(axis=0)
        p99 = self.base_delay_ms + delay + 3.0 * wait + 2.4 * np.sqrt(variance)
        needed = np.maximum((ours / (1.0 - before)).max(axis=0), link * (self.rate_rps / 1000.0))
        late = p99 / self.contract.latency_p99_ms
        kept = within(late, self.sigma_latency) * within(needed, self.sigma_capacity)
        jitter = np.sqrt(jitter_variance)
        jitter = jitter / (jitter + self.weights.jitter_reference * self.contract.latency_p99_ms)
        w = self.weights
        tie = LATENCY_TIE * late / (late + 1.0) + HOP_TIE * hops
        return np.asarray(w.saturation * saturation + w.jitter * jitter + w.risk * (1.0 - kept) + tie)


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


def prefilter(table: Table, yard: Yard, floor: float, best_others: float) -> Table:
    """Rows that could be part of a good whole: legal alone, and among the best in at least one of several surroundings.

    Surroundings: as it is, and with each agent in turn kept busy by the other stages. Single agents always stay.
    """
    legal = (table.memory <= yard.free_bytes).all(axis=1) & (table.accuracy * best_others >= floor - 1e-9)
    table = table.take(np.flatnonzero(legal))
    if len(table) <= ROWS_PER_SCENARIO:
        return table
    agents = table.busy.shape[1]
    own = float(np.median(table.busy.sum(axis=1)))
    surroundings = [np.zeros(agents), *(own * np.eye(agents))]
    keep = set(np.flatnonzero((table.lanes[:, 2] < 0) & (table.hops == 1)).tolist())
    for variant in np.unique(table.lanes[:, 0]):
        rows = np.flatnonzero(table.lanes[:, 0] == variant)
        some, depth = table.take(rows), min(ROWS_PER_SCENARIO, len(rows))
        busy = np.ascontiguousarray(some.busy.T)
        for around in surroundings:
            # What other stages put on an agent counts toward saturation, so it is added to the layout's own.
            scores = yard.score(
                busy + around[:, None], some.delay, some.variance, some.jitter_variance, some.link, some.hops
            )
            keep.update(rows[np.argpartition(scores, depth - 1)[:depth]].tolist())
    return table.take(np.array(sorted(keep), dtype=np.int64))


def search(
    tables: Sequence[Table], yard: Yard, floor: float, limit: int, kinds: Ints
) -> list[tuple[float, tuple[int, ...]]]:
    """Up to `limit` different choices of one row per table, best rough score first; empty when none is legal.

    `kinds` [A] says which agents are alike; choices that differ only in which of two alike agents does what come last.
    """
    order = sorted(range(len(tables)), key=lambda at: -float(np.median(tables[at].busy.sum(axis=1))))
    beam = _Beam.empty(len(tables), len(yard.busy))
    for depth, at in enumerate(order):
        others = float(np.prod([tables[o].accuracy.max() for o in order[depth + 1 :]]))
        beam, _ = _extend(beam, tables, at, yard, floor / max(others, 1e-9), BEAM)
        if not len(beam.rows):
            return []
    found: dict[tuple[int, ...], float] = {}
    rough = _rough(beam, yard)
    for state in range(len(beam.rows)):
        rows, score = tuple(int(r) for r in beam.rows[state]), float(rough[state])
        if state < 3 and len(tables) > 1:  # With one table the beam has seen every row.
            rows, score = _polish(rows, score, tables, yard, floor)
        found[rows] = score
    ranked = sorted((score, rows) for rows, score in found.items())
    return _different(ranked, tables, limit, kinds)


def _extend(
    beam: _Beam, tables: Sequence[Table], at: int, yard: Yard, floor: float, width: int
) -> tuple[_Beam, Floats]:
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
    some = min(len(flat), 8 * width)
    first = np.argpartition(flat, some - 1)[:some]
    first = first[np.argsort(flat[first], kind="stable")]
    first = first[np.isfinite(flat[first])]
    itself = np.arange(len(yard.busy))
    before = [
        tuple(tables[o].signature(int(r), itself) for o, r in enumerate(rows) if r >= 0) for rows in beam.rows
    ]  # fmt: skip
    picked: list[int] = []
    seen: dict[tuple[tuple[int, ...], ...], int] = {}
    for index in first:
        state, row = divmod(int(index), len(table))
        key = (*before[state], table.signature(row, itself))
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= MAX_PER_SIGNATURE:
            picked.append(int(index))
        if len(picked) == width:
            break
    states, rows = np.divmod(np.array(picked, dtype=np.int64), len(table))
    return beam.pick(table, at, states, rows), flat[picked]


def _rough(beam: _Beam, yard: Yard) -> Floats:
    return yard.score(beam.busy.T, beam.delay, beam.variance, beam.jitter_variance, beam.link, beam.hops)


def _polish(
    rows: tuple[int, ...], score: float, tables: Sequence[Table], yard: Yard, floor: float
) -> tuple[tuple[int, ...], float]:
    """Choose each stage again with the others held, until a whole round changes nothing."""
    for _ in range(4):
        before = score
        for at in range(len(tables)):
            beam = _Beam.empty(len(tables), len(yard.busy))
            for other, row in enumerate(rows):
                if other != at:
                    beam = beam.pick(tables[other], other, np.zeros(1, dtype=np.int64), np.array([row]))
            best, scores = _extend(beam, tables, at, yard, floor, 1)
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
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for entry in ranked:
        key = tuple(tables[at].signature(row, kinds) for at, row in enumerate(entry[1]))
        (others if key in seen else leaders).append(entry)
        seen.add(key)
    return [*leaders, *others][:limit]
