"""One route for each of several works, so that all fit together and the value is below what is asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from policies.latency import Floats
from policies.layouts import Ints
from policies.partition import Route, best_route
from policies.sharing_fit import may_fit
from policies.sharing_lists import Routes
from policies.sharing_prices import Problem

KEPT = 4000
"""So many choices for some of the works are carried on to the next work, the cheapest under the prices."""
PAIRS = 2_000_000
"""To find them, at most so many pairs of a choice and one more route are looked at; first `FIRST_PAIRS`, then more and more."""
FIRST_PAIRS = 30_000
HALVINGS = 6
"""How closely the least bottleneck is looked for that each choice may allow."""
VERIFIED = 32
"""How many choices are then looked at exactly."""
_CHUNK = 200_000
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Joined:
    """What came of it."""

    routes: list[Route] | None
    """One per work; None when none were found."""
    is_all: bool
    """Whether all routes were looked at, so that there is nothing better: nothing at all if no routes were found, for the latency also
    nothing better than those found."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """N ways to choose routes for some of the works, cheapest first."""

    extra: Floats
    latency: Floats
    load: Floats
    memory: Floats
    picks: Ints
    """[N, works so far] indices into their lists."""

    def __len__(self) -> int:
        return len(self.extra)


def joined(problem: Problem, lists: Sequence[Routes], below: float, slack: float, last: int) -> Joined:
    """Routes with a value below `below`, where those that cost `slack` more than the cheapest are known to be no better.

    Work by work, the shortest list first and the work `last` at the end. A bottleneck is only a limit for each device, so the last work
    need not come from its list: which choices leave enough room for it is asked of all its routes. Latencies add up, so there the
    list it is, unless any placement is welcome.
    """
    count = len(problem.free)
    order = sorted(range(len(lists)), key=lambda at: (at == last, len(lists[at])))
    chosen = _Chosen(np.zeros(1), np.zeros(1), problem.base[None], np.zeros((1, count)), np.zeros((1, 0), np.int64))
    is_all = True
    for at in order[:-1]:
        rows, columns, is_every = _pairs(problem, chosen, lists[at], below, slack, enough=KEPT)
        is_all = is_all and is_every and lists[at].is_all
        cost = chosen.extra[rows] + lists[at].extra[columns]
        kept = np.argsort(cost, kind="stable")[:KEPT]
        chosen = _extended(chosen, lists[at], rows[kept], columns[kept])
    if problem.objective == "latency" and np.isfinite(below):
        rows, columns, is_every = _pairs(problem, chosen, lists[last], below, slack, enough=PAIRS)
        is_all = is_all and is_every and lists[last].is_all
        if not len(rows):
            return Joined(None, is_all)
        least = int((chosen.latency[rows] + lists[last].latency[columns]).argmin())
        row, route = int(rows[least]), lists[last].route(int(columns[least]))
        return Joined(_routes(lists, order, chosen, row, route), is_all)
    may_do = _roomiest(problem, chosen, below, below - slack, last)
    for row in may_do[:VERIFIED]:
        found = best_route(
            problem.works[last], problem.free - chosen.memory[row], problem.objective, base=chosen.load[row],
            at_most=below if problem.objective == "throughput" else np.inf,
        )  # fmt: skip
        if found is not None:
            return Joined(_routes(lists, order, chosen, row, found), False)
    return Joined(None, is_all and len(may_do) <= VERIFIED)


def _routes(lists: Sequence[Routes], order: Sequence[int], chosen: _Chosen, row: int, last: Route) -> list[Route]:
    picked = {at: lists[at].route(int(pick)) for at, pick in zip(order[:-1], chosen.picks[row], strict=True)}
    return [picked.get(at, last) for at in range(len(lists))]


def _roomiest(problem: Problem, chosen: _Chosen, below: float, bound: float, last: int) -> list[int]:
    """Rows beside which the last work may find room, those first that may allow the least bottleneck."""
    rows = np.arange(len(chosen))
    found: list[list[int]] = []
    low, high, at = bound, below, below
    for _ in range(HALVINGS):
        fits = may_fit(problem.works[last], problem.free - chosen.memory[rows], at - chosen.load[rows], at)
        if fits.any():
            rows = rows[fits]
            found.append(rows.tolist())
            high = at
        else:
            low = at
        at = (low + high) / 2
        if not found or not np.isfinite(at):
            break
    return list(dict.fromkeys(row for rows in reversed(found) for row in rows))


def _extended(chosen: _Chosen, routes: Routes, rows: Ints, columns: Ints) -> _Chosen:
    return _Chosen(
        chosen.extra[rows] + routes.extra[columns],
        chosen.latency[rows] + routes.latency[columns],
        chosen.load[rows] + routes.load[columns],
        chosen.memory[rows] + routes.memory[columns],
        np.column_stack([chosen.picks[rows], columns]),
    )


def _pairs(
    problem: Problem, chosen: _Chosen, routes: Routes, below: float, slack: float, *, enough: int
) -> tuple[Ints, Ints, bool]:
    """Choices and routes that fit together, the cheapest pairs at least until there are `enough`, and whether these are all."""
    devices = np.argsort(-(chosen.load.mean(axis=0) + routes.load.mean(axis=0)), kind="stable") if len(chosen) else ()
    wanted = FIRST_PAIRS
    while True:
        limit, is_every = _cheapest(chosen.extra, routes.extra, slack, wanted)
        found = [
            _fitting(problem, chosen, routes, rows, columns, below, devices)
            for rows, columns in _within(chosen.extra, routes.extra, limit)
        ]
        count = sum(len(rows) for rows, _ in found)
        if is_every or count >= enough or wanted >= PAIRS:
            nothing = np.zeros(0, dtype=np.int64)
            rows, columns = (np.concatenate([nothing, *(pair[i] for pair in found)]) for i in (0, 1))
            return rows, columns, is_every and count <= enough
        wanted = min(8 * wanted, PAIRS)


def _cheapest(first: Floats, second: Floats, slack: float, wanted: int) -> tuple[float, bool]:
    """Up to which sum, `slack` at most, two ascending lists have `wanted` pairs at most, and whether that is `slack` itself."""

    def pairs(limit: float) -> int:
        return int(np.searchsorted(second, limit - first, side="right").sum())

    if not len(first) or not len(second):
        return 0.0, True
    low, high = 0.0, min(slack, float(first[-1] + second[-1])) * (1 + _ROUNDING)
    if pairs(high) <= wanted:
        return high, True
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if pairs(middle) <= wanted else (low, middle)
    return low, False


def _within(first: Floats, second: Floats, limit: float) -> Iterator[tuple[Ints, Ints]]:
    """Indices of the pairs of two ascending lists whose sum is at most `limit`, in chunks."""
    counts = np.searchsorted(second, limit - first, side="right")
    ends = np.cumsum(counts)
    at = 0
    while at < len(first) and counts[at]:
        stop = min(max(at + 1, int(np.searchsorted(ends, ends[at] - counts[at] + _CHUNK))), len(first))
        mine = counts[at:stop]
        yield np.repeat(np.arange(at, stop), mine), np.arange(mine.sum()) - np.repeat(np.cumsum(mine) - mine, mine)
        at = stop


def _fitting(
    problem: Problem, chosen: _Chosen, routes: Routes, rows: Ints, columns: Ints, below: float, devices: Sequence[int] | Ints
) -> tuple[Ints, Ints]:  # fmt: skip
    """The pairs that fit and may still be below `below`; the busiest device first, where most of them fail."""
    room = problem.free * (1 + _ROUNDING)
    if problem.objective == "latency":
        fits = chosen.latency[rows] + routes.latency[columns] < below
        rows, columns = rows[fits], columns[fits]
    for d in devices:
        fits = chosen.memory[:, d].take(rows) + routes.memory[:, d].take(columns) <= room[d]
        if problem.objective == "throughput":
            fits &= chosen.load[:, d].take(rows) + routes.load[:, d].take(columns) < below
        rows, columns = rows[fits], columns[fits]
    return rows, columns
