"""Works that share devices and memory, placed together: columns with prices, then exact best responses.

Memory (and, for throughput, load) gets a price per device. Each round asks for the best routes of every work under the prices,
keeps them in a pool, combines one route per work from the pools so that everything fits, and moves the prices toward what is
overdrawn. The best combination is then improved by placing each work, and each pair of works, again exactly. The prices damp,
so it ends; one work alone is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from policies.latency import Floats
from policies.partition import (
    Objective,
    Route,
    Work,
    best_route,
    bottleneck_of,
    busy_of,
    latency_of,
    link_load,
    memory_of,
    priced_routes,
)

PRICE_ROUNDS = 40
SETS_PER_ROUND = 24
BEAM = 600
RESPONSE_ROUNDS = 4
MAX_PAIRED = 4
MAX_SHIFT = 4
MAX_ORDERS = 6
MAX_SQUEEZES = 20
SQUEEZE = 0.005
SHIFT_ROUNDS = 6


@dataclass(slots=True)
class _Pool:
    """Routes of one work that were found so far, as columns."""

    routes: list[Route] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    link: list[float] = field(default_factory=list)
    memory: list[Floats] = field(default_factory=list)
    busy: list[Floats] = field(default_factory=list)
    known: set[Route] = field(default_factory=set)

    def add(self, work: Work, route: Route) -> None:
        if route not in self.known:
            self.known.add(route)
            self.routes.append(route)
            self.latency.append(work.rate * latency_of(work, route))
            self.link.append(link_load(work, route))
            self.memory.append(memory_of(work, route))
            self.busy.append(busy_of(work, route))


@dataclass(slots=True)
class _Joint:
    """One problem while it is solved."""

    works: Sequence[Work]
    free: Floats
    objective: Objective
    base: Floats
    pools: list[_Pool]
    best: list[Route] | None = None
    value: tuple[float, float] = (np.inf, np.inf)

    def offer(self, routes: list[Route] | None) -> None:
        if routes is None:
            return
        for work, pool, route in zip(self.works, self.pools, routes, strict=True):
            pool.add(work, route)
        total = sum(w.rate * latency_of(w, r) for w, r in zip(self.works, routes, strict=True))
        worst = bottleneck_of(self.works, routes, self.base)
        value = (total, worst) if self.objective == "latency" else (worst, total)
        if value < self.value:
            self.best, self.value = routes, value

    def in_order(self, order: Sequence[int], held: Sequence[Route | None] = ()) -> list[Route] | None:
        """The works of `order` placed one after the other beside the `held` routes of the others."""
        room, load = self.free.copy(), self.base.copy()
        routes: list[Route | None] = list(held) or [None] * len(self.works)
        for at in order:
            routes[at] = None
        for work, route in zip(self.works, routes, strict=True):
            if route is not None:
                room, load = room - memory_of(work, route), load + busy_of(work, route)
        for at in order:
            route = best_route(self.works[at], room, self.objective, base=load)
            if route is None:
                return None
            routes[at] = route
            room, load = room - memory_of(self.works[at], route), load + busy_of(self.works[at], route)
        return [route for route in routes if route is not None]

    def priced(self) -> tuple[Floats, Floats, float]:
        """Rounds of prices; see the module. The last prices, and what latency weighs beside them."""
        count = len(self.free)
        size = max(float(self.free.mean()), 1.0)
        typical = float(np.mean([w.rate * w.run.min(axis=0)[-1] for w in self.works]))
        price, load_price = np.zeros(count), np.full(count, 0.0 if self.objective == "latency" else 1.0)
        weight = 1.0 if self.objective == "latency" else 0.02
        for round_ in range(PRICE_ROUNDS):
            wanted = []
            for work, pool in zip(self.works, self.pools, strict=True):
                found = priced_routes(
                    work, self.free, base=self.base, at_most=self._bound(), many=SETS_PER_ROUND, price=price / work.rate,
                    load_price=load_price / work.rate, latency_weight=weight,
                )  # fmt: skip
                for route in found:
                    pool.add(work, route)
                if found:
                    wanted.append((work, found[0]))
            if not all(pool.routes for pool in self.pools):
                break
            self.offer(self.combined(price, load_price, weight))
            held = sum((memory_of(w, r) for w, r in wanted), np.zeros(count))
            over = (held - self.free) / size
            step = 1.0 / (1.0 + 0.25 * round_)
            price = np.maximum(0.0, price + 3.0 * step * typical / size * over)
            if self.objective == "throughput":
                busy = sum((busy_of(w, r) for w, r in wanted), self.base.copy())
                share = busy / max(float(busy.max()), 1e-12)
                load_price = load_price * np.exp(1.2 * step * (share - share.mean()))
                load_price *= count / load_price.sum()
        return price, load_price, weight

    def _bound(self) -> float:
        return self.value[0] if self.objective == "throughput" else np.inf

    def combined(self, price: Floats, load_price: Floats, weight: float) -> list[Route] | None:
        """One route of each pool so that memory suffices: beam search, the largest work first."""
        order = sorted(range(len(self.works)), key=lambda at: -float(self.works[at].params[-1]))
        memory, busy = np.zeros((1, len(self.free))), self.base[None].copy()
        latency, link, picks = np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64)
        for at in order:
            pool = self.pools[at]
            mine = np.stack(pool.memory)
            memory = memory[:, None, :] + mine[None]
            fits = (memory <= self.free * (1 + 1e-12)).all(axis=2)
            states, rows = np.nonzero(fits)
            if not len(states):
                return None
            memory = memory[states, rows]
            busy = busy[states] + np.stack(pool.busy)[rows]
            latency = latency[states] + np.array(pool.latency)[rows]
            link = np.maximum(link[states], np.array(pool.link)[rows])
            picks = np.concatenate([picks[states], rows[:, None]], axis=1)
            worst = np.maximum(busy.max(axis=1), link)
            rank = latency if self.objective == "latency" else worst + 1e-9 * latency
            if at != order[-1]:
                rank = (
                    weight * latency + memory @ price + (busy @ load_price if self.objective == "throughput" else 0.0)
                )
            keep = np.argsort(rank, kind="stable")[:BEAM]
            memory, busy, latency, link, picks = memory[keep], busy[keep], latency[keep], link[keep], picks[keep]
        chosen = dict(zip(order, picks[0].tolist(), strict=True))
        return [self.pools[at].routes[chosen[at]] for at in range(len(self.works))]

    def shifted(self, price: Floats, load_price: Floats, weight: float) -> None:
        """Move the cuts of the best routes by a few blocks, all works at once, until that improves nothing."""
        for _ in range(SHIFT_ROUNDS):
            if self.best is None:
                return
            before = self.value
            for work, pool, route in zip(self.works, self.pools, self.best, strict=True):
                for moved in _neighbours(route):
                    pool.add(work, moved)
            self.offer(self.combined(price, load_price, weight))
            if self.value >= before:
                return

    def squeeze(self, load_price: Floats) -> None:
        """For throughput: lower what any device may carry by a little, and look for cheap routes that keep to it."""
        if self.objective == "latency" or self.best is None or len(self.works) > MAX_PAIRED:
            return
        prices = (np.ones(len(self.free)), load_price, 1.0 / np.maximum(load_price, 1e-6))
        orders = list(itertools.permutations(range(len(self.works))))[:MAX_ORDERS]
        for order, price in itertools.product(orders, prices):
            for _ in range(MAX_SQUEEZES):
                found = self._within(order, price, (1.0 - SQUEEZE) * self.value[0])
                if found is None:
                    break
                self.offer(found)

    def _within(self, order: Sequence[int], load_price: Floats, at_most: float) -> list[Route] | None:
        room, load = self.free.copy(), self.base.copy()
        routes: dict[int, Route] = {}
        for at in order:
            work = self.works[at]
            route = priced_routes(
                work, room, base=load, at_most=at_most, many=1, load_price=load_price / work.rate, latency_weight=1e-3
            )
            if not route:
                return None
            routes[at] = route[0]
            room, load = room - memory_of(work, route[0]), load + busy_of(work, route[0])
        return [routes[at] for at in range(len(self.works))]

    def respond(self) -> None:
        """Each work again with the others held, then pairs in both orders, until nothing improves."""
        count = len(self.works)
        groups: list[tuple[int, ...]] = [(at,) for at in range(count)]
        if count <= MAX_PAIRED:
            groups += list(itertools.permutations(range(count), 2))
        for _ in range(RESPONSE_ROUNDS):
            before = self.value
            for group in groups:
                if self.best is not None:
                    self.offer(self.in_order(group, self.best))
            if self.value >= before:
                return


def _neighbours(route: Route) -> list[Route]:
    """The route with one cut moved by up to `MAX_SHIFT` blocks, or with two cuts moved by one."""
    cuts = [stop for _, _, stop in route[:-1]]
    moves = [{at: by} for at in range(len(cuts)) for by in range(-MAX_SHIFT, MAX_SHIFT + 1) if by]
    moves += [
        {a: x, b: y} for a, b in itertools.combinations(range(len(cuts)), 2) for x in (-1, 1) for y in (-1, 1)
    ]  # fmt: skip
    found = []
    for move in moves:
        ends = [cut + move.get(at, 0) for at, cut in enumerate(cuts)]
        bounds = [0, *ends, route[-1][2]]
        if all(a < b for a, b in itertools.pairwise(bounds)):
            found.append(tuple((d, a, b) for (d, _, _), (a, b) in zip(route, itertools.pairwise(bounds), strict=True)))
    found += [
        (*route[:at], (route[at][0], route[at][1], route[at + 1][2]), *route[at + 2 :]) for at in range(len(cuts))
    ]
    return found


def best_routes(
    works: Sequence[Work], free: Floats, objective: Objective, base: Floats | None = None, *, quick: bool = False
) -> list[Route] | None:
    """Routes of works that share devices and memory; None when no way was found to fit them all. `quick` stops at the first way.

    Latency is the sum over the works, weighted by their rates; throughput the busiest device or link.
    """
    before = np.zeros(len(free)) if base is None else base
    if len(works) == 1:
        only = best_route(works[0], free, objective, base=before)
        return None if only is None else [only]
    joint = _Joint(works, free, objective, before, [_Pool() for _ in works])
    ranked = sorted(range(len(works)), key=lambda at: -float(works[at].params[-1]))
    for order in (ranked, ranked[::-1]):
        joint.offer(joint.in_order(order))
    if quick and joint.best is not None:
        return joint.best
    price, load_price, weight = joint.priced()
    for _ in range(RESPONSE_ROUNDS):
        value = joint.value
        joint.shifted(price, load_price, weight)
        joint.squeeze(load_price)
        joint.respond()
        if joint.value >= value:
            break
    return joint.best
