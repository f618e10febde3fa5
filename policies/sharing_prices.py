"""What a byte and a unit of load are worth on devices that several works share: the linear relaxation, by columns.

Dantzig and Wolfe 1960: shares of routes instead of whole routes are placed, so that the least latency, or the least load of the
busiest device, is a linear programme with one column per route. It starts from a few routes; its dual values are prices, and the
programme of each work finds the routes that are worth adding. What it says at the end no placement of whole routes can beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.latency import Floats
from policies.partition import Objective, Programme, Route, Work, bottleneck_of, busy_of, latency_of, memory_of, priced
from policies.sharing_lists import Routes, cheapest_routes

ROUNDS = 40
COLUMNS_PER_ROUND = 12
PIVOTS = 400
CLOSE = 1e-3
"""The relaxation is solved when it is at most this share above what is proven."""
OVERDRAW = 30.0
"""Times the value of the routes to start from: what it costs to need twice the memory of the average device."""
FLAT = 0.2
"""How much of the value the bytes of all devices together cost more when prices are flattened, and how much of the price of load is spread."""
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Problem:
    """Works to place together."""

    works: Sequence[Work]
    free: Floats
    """[D] bytes."""
    base: Floats
    """[D] load before."""
    objective: Objective


@dataclass(frozen=True, slots=True)
class Priced:
    """The works under the prices that prove most."""

    bound: float
    """No placement is better than this (of those that keep to what was asked)."""
    programmes: Sequence[Programme]
    """One per work."""
    load_price: Floats
    """[D] of a unit of load."""
    price: Floats
    """[D] of a byte."""


class Relaxation:
    """Remembers the routes that were worth adding, from one question to the next."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._columns: list[tuple[int, Routes]] = []
        """Of which work, and which."""

    def below(self, at_most: float, start: Sequence[Route]) -> Priced | None:
        """Prices for placements of at most this value (see `Objective`); None when some work has no such route by itself.

        `start` are any routes, one per work; they need not fit.
        """
        master = _Master(self.problem, start, at_most)
        for at, routes in self._columns:
            master.add(at, routes)
        best: Priced | None = None
        for _ in range(ROUNDS):
            load_price, price, value = master.prices()
            now = self._priced(load_price, price, at_most)
            if np.isinf(now.bound):
                return None
            if best is None or now.bound > best.bound:
                best = now
            if best.bound >= min(at_most, value - CLOSE * abs(value)):
                break
            for at, (work, programme) in enumerate(zip(self.problem.works, now.programmes, strict=True)):
                routes = cheapest_routes(work, programme, np.inf, COLUMNS_PER_ROUND)
                self._columns.append((at, routes))
                master.add(at, routes)
        return best

    def flattened(self, sharp: Priced, at_most: float) -> Priced:
        """The same with a little of every price spread over all devices.

        What is not short in the relaxation is free there, so the cheapest routes waste it; whole routes may need it.
        """
        share, devices = FLAT, len(self.problem.free)
        price = sharp.price + share * abs(sharp.bound) / max(float(self.problem.free.sum()), 1.0)
        is_load = self.problem.objective == "throughput"
        load_price = (1.0 - share) * sharp.load_price + share / devices if is_load else sharp.load_price
        return self._priced(load_price, price, at_most)

    def _priced(self, load_price: Floats, price: Floats, at_most: float) -> Priced:
        problem = self.problem
        is_load = problem.objective == "throughput"
        programmes = [
            priced(
                work, problem.free, base=problem.base, price=price, load_price=load_price,
                at_most=at_most if is_load else np.inf, latency_weight=0.0 if is_load else work.rate,
            )
            for work in problem.works
        ]  # fmt: skip
        least = sum(programme.least for programme in programmes)
        return Priced(least + float(load_price @ problem.base - price @ problem.free), programmes, load_price, price)


class _Master:
    """The linear programme over the routes so far, by the revised simplex method: small enough to invert the basis at every step.

    Rows: load of each device, bytes of each device, one route per work. Columns: what each device has left of either, the bottleneck,
    what memory is overdrawn by (so that there is always an answer to start from), then routes.
    """

    def __init__(self, problem: Problem, start: Sequence[Route], at_most: float) -> None:
        self.problem, self.at_most = problem, at_most
        works, devices = problem.works, len(problem.free)
        self.unit = max(float(problem.free.mean()), 1.0)
        """Bytes that count as one."""
        load = np.stack([busy_of(w, r) for w, r in zip(works, start, strict=True)])
        memory = np.stack([memory_of(w, r) for w, r in zip(works, start, strict=True)]) / self.unit
        latency = np.array([w.rate * latency_of(w, r) for w, r in zip(works, start, strict=True)])
        total_load, overdrawn = load.sum(axis=0) + problem.base, memory.sum(axis=0) - problem.free / self.unit
        dear = OVERDRAW * float(latency.sum() if problem.objective == "latency" else total_load.max())

        self.right = np.concatenate([-problem.base, problem.free / self.unit, np.ones(len(works))])
        left = np.eye(len(self.right), 2 * devices)
        of_loads, of_bytes = left[:, :devices].sum(axis=1), left[:, devices:].sum(axis=1)
        self.columns = np.column_stack([left, -of_loads, -of_bytes])
        self.costs = np.zeros(2 * devices + 2)
        bottleneck, overdraw = 2 * devices, 2 * devices + 1
        self.costs[bottleneck] = 1.0 if problem.objective == "throughput" else 0.0
        self.costs[overdraw] = dear
        # The start: each work on its route, a bottleneck as high as the busiest device, memory overdrawn as far as need be.
        self.basis = list(range(2 * devices))
        self.basis[int(total_load.argmax())] = bottleneck
        if overdrawn.max() > 0:
            self.basis[devices + int(overdrawn.argmax())] = overdraw
        for at, (work, route) in enumerate(zip(works, start, strict=True)):
            self.basis.append(len(self.costs))
            self._append(at, latency[[at]], load[[at]], memory[[at]])
            if problem.objective == "throughput" and bottleneck_of([work], [route], problem.base) > at_most:
                self.costs[-1] += dear

    def add(self, at: int, routes: Routes) -> None:
        """More routes of the work `at`, of which those count that keep to what is asked."""
        if self.problem.objective == "throughput":
            busiest = np.maximum((routes.load + self.problem.base).max(axis=1), routes.link)
            kept = busiest <= self.at_most
        else:
            kept = np.ones(len(routes), dtype=bool)
        self._append(at, routes.latency[kept], routes.load[kept], routes.memory[kept] / self.unit)

    def _append(self, at: int, latency: Floats, load: Floats, memory: Floats) -> None:
        mine = np.zeros((len(self.problem.works), len(latency)))
        mine[at] = 1.0
        self.columns = np.column_stack([self.columns, np.vstack([load.T, memory.T, mine])])
        self.costs = np.append(self.costs, latency if self.problem.objective == "latency" else np.zeros(len(latency)))

    def prices(self) -> tuple[Floats, Floats, float]:
        """Of a unit of load [D] and of a byte [D], and the value of the relaxation over these routes."""
        for _ in range(PIVOTS):
            inverse = np.linalg.inv(self.columns[:, self.basis])
            values = inverse @ self.right
            duals = self.costs[self.basis] @ inverse
            reduced = self.costs - duals @ self.columns
            enters = int(reduced.argmin())
            if reduced[enters] > -_TOLERANCE * max(1.0, float(np.abs(self.costs).max())):
                break
            direction = inverse @ self.columns[:, enters]
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.where(direction > _TOLERANCE, np.maximum(values, 0.0) / direction, np.inf)
            self.basis[int(steps.argmin())] = enters
        count = len(self.problem.free)
        load_price, price = np.maximum(-duals[:count], 0.0), np.maximum(-duals[count : 2 * count], 0.0)
        if self.problem.objective == "throughput":
            load_price = load_price / load_price.sum() if load_price.any() else np.full(count, 1.0 / count)
        return load_price, price / self.unit, float(self.costs[self.basis] @ values)
