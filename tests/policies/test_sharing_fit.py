"""A "no" of the quick test is certain."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.partition import bottleneck_of
from policies.sharing_fit import may_fit
from tests.policies.chains import every_route, fits, is_allowed, tiny_work


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_room_is_overlooked(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = tiny_work(rng, 3, 4)
    room, load, at_most = rng.uniform(0, 15, (20, 3)), rng.uniform(0, 15, (20, 3)), 20.0
    says = may_fit(work, room, at_most - load, at_most)
    routes = [r for r in every_route(3, 4) if is_allowed(work, r)]
    for at in range(20):
        there_is = any(fits([work], [r], room[at]) and bottleneck_of([work], [r], load[at]) <= at_most for r in routes)
        assert says[at] or not there_is


def test_it_says_no() -> None:
    work = tiny_work(np.random.default_rng(0), 3, 4)
    none, ample = np.zeros((1, 3)), np.full((1, 3), 99.0)
    assert may_fit(work, np.vstack([none, ample, ample]), np.vstack([ample, none, ample]), 99.0).tolist() == [
        False,
        False,
        True,
    ]
