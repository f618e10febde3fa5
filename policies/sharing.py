"""Works that share devices and memory, placed together: is there a placement better than the best one so far, and by how much?

Each question is answered in three steps. The linear relaxation says what a byte and a unit of load are worth on every device, and what
no placement can beat (`sharing_prices`). Under these prices a placement that answers the question can hold no route that costs more
beyond its work's cheapest one than the answer and that bound are apart, so the routes are listed, cheapest first (`sharing_lists`). Then
lists are combined (`sharing_join`). As long as no list has to be cut off this is exact, and a "no" is a proof.

One work alone is exact by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from policies.latency import Floats
from policies.partition import Objective, Route, Work, best_route, bottleneck_of, busy_of, latency_of, memory_of
from policies.sharing_join import Joined, joined
from policies.sharing_lists import cheapest_routes
from policies.sharing_prices import Priced, Problem, Relaxation

QUESTIONS = 10
GAIN = 1e-3
"""What is less than this share better is not looked for."""
NEAR = 0.015
"""When no more than this share is left to gain, anything better is asked for; before that, half of what is left."""
LISTED = {2: 4000}
"""How many routes are listed for that many works."""
LISTED_MANY = 2000
RESPONSE_ROUNDS = 3


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
    search = _Search(Problem(works, free, before, objective))
    search.one_by_one()
    if search.best is None or not quick:
        search.ask()
        search.respond()
    return search.best


class _Search:
    """The best placement so far, and the way to better ones."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.best: list[Route] | None = None
        self.value = (np.inf, np.inf)
        """By the objective, then by the other one."""

    def offer(self, routes: list[Route] | None) -> None:
        if routes is None:
            return
        works = self.problem.works
        total = sum(w.rate * latency_of(w, r) for w, r in zip(works, routes, strict=True))
        worst = bottleneck_of(works, routes, self.problem.base)
        value = (total, worst) if self.problem.objective == "latency" else (worst, total)
        if value < self.value:
            self.best, self.value = routes, value

    def one_by_one(self) -> None:
        """One work after the other into what is left, the largest or the smallest first."""
        works = self.problem.works
        ranked = sorted(range(len(works)), key=lambda at: -float(works[at].params[-1]))
        for order in (ranked, ranked[::-1]):
            self.offer(self._placed(order, {}))

    def respond(self) -> None:
        """Each work again beside the others, and each pair one after the other, until nothing improves."""
        count = len(self.problem.works)
        for _ in range(RESPONSE_ROUNDS):
            before = self.value
            for again in (*itertools.permutations(range(count), 1), *itertools.permutations(range(count), 2)):
                if self.best is not None:
                    held = {at: route for at, route in enumerate(self.best) if at not in again}
                    self.offer(self._placed(again, held))
            if self.value >= before:
                return

    def _placed(self, order: Sequence[int], held: dict[int, Route]) -> list[Route] | None:
        """Each work of `order` as well as can be beside the routes that are held, and from then on its own too."""
        works, routes = self.problem.works, dict(held)
        room, load = self.problem.free.copy(), self.problem.base.copy()
        for at, route in held.items():
            room, load = room - memory_of(works[at], route), load + busy_of(works[at], route)
        for at in order:
            found = best_route(works[at], room, self.problem.objective, base=load)
            if found is None:
                return None
            routes[at] = found
            room, load = room - memory_of(works[at], found), load + busy_of(works[at], found)
        return [routes[at] for at in range(len(works))]

    def _apart(self) -> list[Route] | None:
        """Each work as if it were alone; None when one does not even fit so."""
        problem = self.problem
        routes = [best_route(work, problem.free, problem.objective, base=problem.base) for work in problem.works]
        return None if None in routes else [route for route in routes if route is not None]

    def ask(self) -> None:
        """Questions, until what is known and what was not found meet."""
        start = self.best or self._apart()
        if start is None:
            return
        relaxation = Relaxation(self.problem)
        missed = 0.0
        """Nothing below this was found."""
        is_flat = False
        for _ in range(QUESTIONS):
            top = self.value[0] * (1.0 - GAIN)
            if missed >= top:
                return
            below = (missed + top) / 2 if 0.0 < missed < top * (1.0 - NEAR) else top
            priced = relaxation.below(below, self.best or start)
            if priced is None or priced.bound >= below:
                missed = below
            elif not missed and priced.bound < top * (1.0 - NEAR) and np.isfinite(top):
                missed = priced.bound
            else:
                for flat in (is_flat, not is_flat) if below == top else (is_flat,):
                    found = self._combined(relaxation.flattened(priced, below) if flat else priced, below)
                    if found.routes is not None or found.is_all:
                        break
                self.offer(found.routes)
                if found.is_all and found.routes is not None:
                    return
                if found.routes is None:
                    missed, is_flat = below, not is_flat
                elif self.value[0] * (1.0 - GAIN) <= missed:
                    missed = priced.bound  # There is something after all where nothing had been found.

    def _combined(self, priced: Priced, below: float) -> Joined:
        """Out of the routes that the prices leave; if the work of which most are left finds no place at the end, another one may."""
        works, slack = self.problem.works, below - priced.bound
        most = LISTED.get(len(works), LISTED_MANY)
        lists = [cheapest_routes(w, p, slack, most) for w, p in zip(works, priced.programmes, strict=True)]
        by_length = sorted(range(len(works)), key=lambda at: (-len(lists[at]), lists[at].extra[-1]))
        found = Joined(None, False)
        for last in by_length[:2]:
            found = joined(self.problem, lists, below, slack, last)
            if found.routes is not None or found.is_all:
                break
        return found
