"""The linear core of planning, against known answers and against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.partition import Objective, Route, Work, best_route, bottleneck_of, latency_of
from tests.policies.chains import chain, fits, least_value, problems, value_of


def layers(route: Route, devices: int) -> list[int]:
    taken = {d: stop - start for d, start, stop in route}
    return [taken.get(d, 0) for d in range(devices)]


def test_the_slowest_stage_and_the_sum_are_different_objectives() -> None:
    """exo issue 957, 40 layers on five machines. The times per layer are derived from the printed figures: 12 layers at 2.907 ms
    are the 34.88 ms of the split by memory, 10 of them the 29.07 ms; the others give the sums 138.4 and 132.6 ms."""
    machines = [3.6993, 2.907, 3.3, 2.8, 5.807]
    work, room = chain(machines, 40), np.array([7.0, 12.0, 8.0, 10.0, 6.0])
    fast = best_route(work, room, "throughput")
    short = best_route(work, room, "latency")
    assert fast is not None
    assert short is not None
    assert layers(fast, 5) == [7, 10, 8, 10, 5]
    assert bottleneck_of([work], [fast]) == pytest.approx(29.07, abs=0.005)
    assert latency_of(work, fast) == pytest.approx(138.4, abs=0.05)
    assert layers(short, 5) == [7, 12, 8, 10, 3]
    assert bottleneck_of([work], [short]) == pytest.approx(34.88, abs=0.005)
    assert latency_of(work, short) == pytest.approx(132.6, abs=0.05)


def test_one_device_and_leaving_one_out_are_legal() -> None:
    """exo issue 489: two machines joined are slower than the better one."""
    hop = np.full((2, 2, 11), 30.0)
    work = chain([2.5, 5.0], 10, hop=hop)
    assert best_route(work, np.array([99.0, 99.0]), "latency") == ((0, 0, 10),)


def test_nothing_fits() -> None:
    work = chain([1.0, 1.0], 10)
    assert best_route(work, np.array([4.0, 5.0]), "latency") is None


@settings(max_examples=60, deadline=None)
@given(problem=problems(works=1), objective=st.sampled_from(["latency", "throughput"]))
def test_one_work_is_exact(problem: tuple[list[Work], np.ndarray, np.ndarray], objective: Objective) -> None:
    (work,), room, base = problem
    best = least_value([work], room, objective, base)
    found = best_route(work, room, objective, base=base)
    assert (found is None) == (best is None)
    if found is not None:
        assert fits([work], [found], room)
        assert value_of([work], [found], objective, base) == pytest.approx(best)
