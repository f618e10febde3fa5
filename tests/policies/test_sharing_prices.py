"""The relaxation never promises less than what the best placement needs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.partition import Objective, Work, best_route
from policies.sharing_prices import Problem, Relaxation
from tests.policies.chains import chain, least_value, problems


@settings(max_examples=60, deadline=None)
@given(
    problem=problems(), objective=st.sampled_from(["latency", "throughput"]), share=st.sampled_from([1.0, 1.2, np.inf])
)
def test_no_placement_is_below_the_bound(
    problem: tuple[list[Work], np.ndarray, np.ndarray], objective: Objective, share: float
) -> None:
    works, room, base = problem
    least = least_value(works, room, objective, base)
    start = [best_route(work, room, objective, base=base) for work in works]
    if least is None or None in start:
        return
    at_most = least * share * (1 + 1e-9)
    relaxation = Relaxation(Problem(works, room, base, objective))
    found = relaxation.below(at_most, [route for route in start if route is not None])
    assert found is not None
    assert found.bound <= least * (1 + 1e-9)
    flat = relaxation.flattened(found, at_most)
    assert flat.bound <= least * (1 + 1e-9)


def test_bytes_cost_something_where_they_are_short() -> None:
    works = [chain([1.0, 4.0], 6), chain([1.0, 2.0], 6)]
    start = [((0, 0, 6),), ((0, 0, 6),)]  # both on the quick device: too much for it below
    short, ample = (
        Relaxation(Problem(works, room, np.zeros(2), "latency")).below(np.inf, start)
        for room in (np.array([6.0, 6.0]), np.array([12.0, 6.0]))
    )
    assert short is not None
    assert ample is not None
    assert short.price[0] > 0.0
    assert short.price[1] == 0.0
    assert not ample.price.any()
    assert short.bound > ample.bound
