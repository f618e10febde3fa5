"""The linear core of planning: cut chains of blocks over many devices, for the least latency or the least bottleneck.

A *work* is one chain of blocks (a stage of a service) with what it costs on each device and on each link. Each device runs at
most one contiguous run of a chain's blocks. For one work the answer is exact: a dynamic programme over (set of devices used,
last device, blocks done). Works that share devices and memory are placed together in `policies.sharing`.

Everything here is linear (no queues, no spread); `policies.solve` judges what comes out of it by the full prediction.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from policies.latency import Floats
from policies.layouts import Ints

Objective = Literal["latency", "throughput"]
MAX_DEVICES = 8
_SLACK = 1.0 + 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One chain of B blocks on D devices; times are milliseconds of one request."""

    run: Floats
    """[D, B+1] prefix sums of the run time."""
    params: Floats
    """[B+1] prefix sums of the bytes that the blocks take."""
    active: float
    """Bytes that each device in use takes besides."""
    enter: Floats
    """[D] from where requests come in to the first device, both ways, with the overhead of the hop; inf where not allowed."""
    hop: Floats
    """[D, D, B+1] from one device to the next at a cut; inf where not allowed."""
    enter_busy: Floats
    """[D] how long one request keeps that link busy."""
    hop_busy: Floats
    """[D, D, B+1]"""
    rate: float = 1.0
    """Requests per millisecond, or any weight: what loads are multiplied with."""

    @property
    def devices(self) -> int:
        return len(self.enter)

    @property
    def blocks(self) -> int:
        return len(self.params) - 1


Hop = tuple[int, int, int]
"""Device, first block, one past the last."""
Route = tuple[Hop, ...]


def latency_of(work: Work, route: Route) -> float:
    """Milliseconds of one request along a route."""
    total = float(work.enter[route[0][0]])
    for (a, _, cut), (b, _, _) in itertools.pairwise(route):
        total += float(work.hop[a, b, cut])
    return total + sum(float(work.run[d, stop] - work.run[d, start]) for d, start, stop in route)


def busy_of(work: Work, route: Route) -> Floats:
    """[D] what a route adds to the load of each device."""
    busy = np.zeros(work.devices)
    for d, start, stop in route:
        busy[d] += work.rate * (work.run[d, stop] - work.run[d, start])
    return busy


def link_load(work: Work, route: Route) -> float:
    """Load of the route's busiest link; links are not shared between works."""
    worst = float(work.enter_busy[route[0][0]])
    for (a, _, cut), (b, _, _) in itertools.pairwise(route):
        worst = max(worst, float(work.hop_busy[a, b, cut]))
    return work.rate * worst


def memory_of(work: Work, route: Route) -> Floats:
    """[D] bytes."""
    held = np.zeros(work.devices)
    for d, start, stop in route:
        held[d] += work.params[stop] - work.params[start] + work.active
    return held


def bottleneck_of(works: Sequence[Work], routes: Sequence[Route], base: Floats | None = None) -> float:
    """Load of the busiest device or link."""
    busy = sum((busy_of(w, r) for w, r in zip(works, routes, strict=True)), np.zeros(works[0].devices))
    links = max(link_load(w, r) for w, r in zip(works, routes, strict=True))
    return max(links, float((busy + (0.0 if base is None else base)).max()))


def best_route(
    work: Work, free: Floats, objective: Objective, *, base: Floats | None = None, at_most: float = np.inf
) -> Route | None:
    """The exact optimum of one work, None when it does not fit into `free` [D] bytes.

    `base` [D] is the load that devices have already and `at_most` what no device and no link may exceed. For throughput, the
    quickest of the routes with the least bottleneck.
    """
    before = np.zeros(work.devices) if base is None else base
    if objective == "throughput":
        runs, links = _loads(work, before)
        least = Programme.of(_fitting(work, runs, free), *links, total=False).least
        if np.isinf(least) or least > at_most:
            return None
        at_most = least * _SLACK
    return priced(work, free, base=before, at_most=at_most).best_route()


def priced(
    work: Work,
    free: Floats,
    *,
    base: Floats | None = None,
    at_most: float = np.inf,
    price: Floats | None = None,
    load_price: Floats | None = None,
    latency_weight: float = 1.0,
) -> Programme:
    """All routes under the cost `latency_weight` x latency + `price` [D] x bytes + `load_price` [D] x load.

    No device holds more than `free` or is loaded beyond `at_most` together with `base`.
    """
    runs, (hop_load, enter_load) = _loads(work, np.zeros(work.devices) if base is None else base)
    time = work.run[:, None, :] - work.run[:, :, None]
    cost = latency_weight * time
    if load_price is not None:
        cost = cost + (load_price * work.rate)[:, None, None] * time
    if price is not None:
        cost = cost + price[:, None, None] * _sizes(work)[None]
    inside = _fitting(work, np.where(runs <= at_most, cost, np.inf), free)
    hop_latency, enter_latency = (np.where(np.isfinite(x), x, 0.0) for x in (work.hop, work.enter))
    return Programme.of(
        inside,
        hop=np.where((hop_load <= at_most) & np.isfinite(hop_load), latency_weight * hop_latency, np.inf),
        enter=np.where((enter_load <= at_most) & np.isfinite(enter_load), latency_weight * enter_latency, np.inf),
        total=True,
    )


def _loads(work: Work, base: Floats) -> tuple[Floats, tuple[Floats, Floats]]:
    """Loads that each run [D, B+1, B+1], each hop and each entry would bring; inf where it is not allowed."""
    time = work.run[:, None, :] - work.run[:, :, None]
    hop = np.where(np.isfinite(work.hop), work.rate * work.hop_busy, np.inf)
    enter = np.where(np.isfinite(work.enter), work.rate * work.enter_busy, np.inf)
    return base[:, None, None] + work.rate * time, (hop, enter)


def _sizes(work: Work) -> Floats:
    """[B+1, B+1] bytes of the blocks from the first index to the second."""
    return np.asarray(work.params[None, :] - work.params[:, None] + work.active)


def _fitting(work: Work, cost: Floats, free: Floats) -> Floats:
    """Costs [D, B+1, B+1] with inf where the blocks do not fit or their order is wrong."""
    ahead = np.arange(work.blocks + 1)[:, None] < np.arange(work.blocks + 1)[None, :]
    return np.where(ahead[None] & (_sizes(work)[None] <= free[:, None, None]), cost, np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Programme:
    """The least sum or the least maximum over all routes of one work, worked out for every way to begin."""

    inside: Floats
    """[D, B+1, B+1] what a run costs; inf where it is not allowed."""
    hop: Floats
    """[D, D, B+1]"""
    enter: Floats
    """[D]"""
    best: Floats
    """[2^D, D, B+1] the least over all routes of the first blocks that use just these devices (bit d of the first index says that
    device d is used) and end on this one."""
    total: bool
    """Whether costs add up; otherwise the largest one counts."""

    @classmethod
    def of(cls, inside: Floats, hop: Floats, enter: Floats, *, total: bool) -> Programme:
        count, blocks = len(enter), inside.shape[1] - 1
        join = np.add if total else np.maximum
        best = np.full((1 << count, count, blocks + 1), np.inf)
        for d in range(count):
            # A route's first run starts at block 0.
            best[1 << d, d] = join(enter[d], inside[d, 0])
        for d, sources in _steps_of(count, min(count, blocks)):
            held = best[sources]
            at_cut = join(held, hop[None, :, d, :]).min(axis=1)
            best[sources | (1 << d), d] = join(at_cut[:, :, None], inside[d]).min(axis=1)
        return cls(inside, hop, enter, best, total)

    @property
    def least(self) -> float:
        """Of all whole routes; inf when there is none."""
        return float(self.best[:, :, -1].min())

    def best_route(self) -> Route | None:
        """A route of that cost: each step back is the one that gave its value."""
        if np.isinf(self.least):
            return None
        join = np.add if self.total else np.maximum
        mask, d = (int(i) for i in np.unravel_index(self.best[:, :, -1].argmin(), self.best.shape[:2]))
        route: list[Hop] = []
        stop = self.inside.shape[1] - 1
        while mask != 1 << d:
            mask &= ~(1 << d)
            reach = join(self.best[mask], self.hop[:, d, :])
            start = int(join(reach.min(axis=0), self.inside[d, :, stop]).argmin())
            route.append((d, start, stop))
            d, stop = int(reach[:, start].argmin()), start
        return ((d, 0, stop), *reversed(route))


@functools.cache
def _steps_of(count: int, longest: int) -> tuple[tuple[int, Ints], ...]:
    """(device, masks of which it extends the routes), shorter routes first, so that each step finds its routes ready."""
    masks = np.arange(1 << count)
    sizes = np.array([int(m).bit_count() for m in masks])
    return tuple(
        (d, masks[(sizes == size) & ((masks >> d) & 1 == 0)]) for size in range(1, longest) for d in range(count)
    )
