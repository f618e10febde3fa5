"""Lists of a work's cheapest routes, as arrays: what is combined when works share devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.latency import Floats
from policies.layouts import Ints
from policies.partition import Programme, Route, Work

_ROUNDING = 1.0 + 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """N routes of one work, cheapest first."""

    extra: Floats
    """[N] how much each costs beyond the cheapest."""
    latency: Floats
    """[N] weighted by the work's rate."""
    link: Floats
    """[N] load of the busiest link."""
    load: Floats
    """[N, D]"""
    memory: Floats
    """[N, D] bytes."""
    hops: Ints
    """[N, D, 2] device and one past the last block of each hop, last hop first; device -1 where the route has fewer."""
    is_all: bool
    """Whether these are all routes that were asked for."""

    def __len__(self) -> int:
        return len(self.extra)

    def route(self, at: int) -> Route:
        stops = [(int(d), int(stop)) for d, stop in self.hops[at][::-1] if d >= 0]
        starts = [0, *(stop for _, stop in stops)]
        return tuple((d, start, stop) for (d, stop), start in zip(stops, starts, strict=False))


def cheapest_routes(work: Work, programme: Programme, extra: float, most: int) -> Routes:
    """The `most` cheapest of the routes that cost at most `extra` more than the cheapest one.

    Routes grow from their end, all at once. The programme tells what the rest of each will cost, so no more than `most` ends of each
    length have to be kept: each of those that are left out belongs only to dearer routes than the ones kept.
    """
    devices, blocks = work.devices, work.blocks
    limit = min((programme.least + extra) * _ROUNDING, np.finfo(np.float64).max)
    mask, last = np.nonzero(programme.best[:, :, blocks] <= limit)
    ends = _Ends(
        mask, last, np.full(len(mask), blocks), np.zeros(len(mask)), programme.best[mask, last, blocks],
        np.full((len(mask), devices, 2), -1),
    )  # fmt: skip
    whole: list[tuple[Floats, Ints]] = []
    is_all = True
    for length in range(devices):
        if len(ends.total) > most:
            is_all = False
            ends = ends.only(np.argpartition(ends.total, most)[:most])
            limit = float(ends.total.max()) * _ROUNDING
        ends.hops[:, length, 0], ends.hops[:, length, 1] = ends.last, ends.stop
        is_whole = ends.mask == 1 << ends.last
        whole.append((ends.total[is_whole], ends.hops[is_whole]))
        ends = ends.only(np.nonzero(~is_whole)[0]).longer(programme, limit)
    total, hops = np.concatenate([t for t, _ in whole]), np.concatenate([h for _, h in whole])
    order = np.argsort(total, kind="stable")
    is_all = is_all and len(order) <= most
    return _as_columns(work, total[order[:most]] - programme.least, hops[order[:most]], is_all)


@dataclass(slots=True)
class _Ends:
    """Ends of routes: what runs from block `stop` on is settled, and what runs before it ends on `last`."""

    mask: Ints
    """Devices of the rest, with `last`."""
    last: Ints
    stop: Ints
    cost: Floats
    """Of the settled part."""
    total: Floats
    """With the cheapest rest."""
    hops: Ints

    def only(self, kept: Ints) -> _Ends:
        return _Ends(
            self.mask[kept], self.last[kept], self.stop[kept], self.cost[kept], self.total[kept], self.hops[kept]
        )

    def longer(self, programme: Programme, limit: float) -> _Ends:
        """All ways to settle one more run whose cheapest rest keeps to the limit."""
        rest = self.mask & ~(1 << self.last)
        settled = self.cost[:, None] + programme.inside[self.last, :, self.stop]
        cost = settled[:, None, :] + programme.hop[:, self.last, :].transpose(1, 0, 2)
        total = cost + programme.best[rest]
        at, before, start = np.nonzero(total <= limit)
        return _Ends(rest[at], before, start, cost[at, before, start], total[at, before, start], self.hops[at])


def _as_columns(work: Work, extra: Floats, hops: Ints, is_all: bool) -> Routes:
    count = len(extra)
    latency, link = np.zeros(count), np.zeros(count)
    load, memory = np.zeros((count, work.devices)), np.zeros((count, work.devices))
    for length in range(work.devices):
        at = np.nonzero(hops[:, length, 0] >= 0)[0]
        device, stop = hops[at, length, 0], hops[at, length, 1]
        after = np.minimum(length + 1, work.devices - 1)
        before = np.where(length + 1 < work.devices, hops[at, after, 0], -1)
        start = np.where(before >= 0, hops[at, after, 1], 0)
        ms = work.run[device, stop] - work.run[device, start]
        load[at, device] = work.rate * ms
        memory[at, device] = work.params[stop] - work.params[start] + work.active
        came_ms = np.where(before >= 0, work.hop[before, device, start], work.enter[device])
        latency[at] += work.rate * (ms + came_ms)
        busy = np.where(before >= 0, work.hop_busy[before, device, start], work.enter_busy[device])
        link[at] = np.maximum(link[at], work.rate * busy)
    return Routes(extra, latency, link, load, memory, hops, is_all)
