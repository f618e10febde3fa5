"""Lists of cheapest routes against all routes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.partition import Route, Work, busy_of, latency_of, link_load, memory_of, priced
from policies.sharing_lists import cheapest_routes
from tests.policies.chains import every_route, fits, is_allowed, tiny_work


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), most=st.integers(1, 40), extra=st.sampled_from([0.0, 3.0, np.inf]))
def test_the_cheapest_of_all_routes(seed: int, most: int, extra: float) -> None:
    rng = np.random.default_rng(seed)
    work, room = tiny_work(rng, 4, 5), rng.uniform(4, 20, 4)
    price, load_price = rng.uniform(0, 1, 4), rng.uniform(0, 1, 4)

    def cost(route: Route) -> float:
        by_device = price @ memory_of(work, route) + load_price @ busy_of(work, route)
        return 0.3 * latency_of(work, route) + float(by_device)

    allowed = [r for r in every_route(4, 5) if is_allowed(work, r) and fits([work], [r], room)]
    costs = sorted(cost(r) for r in allowed)
    programme = priced(work, room, price=price, load_price=load_price, latency_weight=0.3)
    if not allowed:
        assert np.isinf(programme.least)
        return
    expected = [c for c in costs if c <= (costs[0] + extra) * (1 + 1e-12)]
    found = cheapest_routes(work, programme, extra, most)
    routes = [found.route(at) for at in range(len(found))]
    assert len(set(routes)) == len(routes)
    assert [cost(r) for r in routes] == pytest.approx(expected[:most])
    assert found.extra + costs[0] == pytest.approx(expected[:most])
    assert found.is_all == (len(expected) <= most)


def test_what_a_list_says_of_its_routes() -> None:
    work: Work = tiny_work(np.random.default_rng(4), 3, 4)
    found = cheapest_routes(work, priced(work, np.full(3, 99.0)), np.inf, 1000)
    assert len(found) > 10
    for at in range(len(found)):
        route = found.route(at)
        assert found.load[at] == pytest.approx(busy_of(work, route))
        assert found.memory[at] == pytest.approx(memory_of(work, route))
        assert found.latency[at] == pytest.approx(work.rate * latency_of(work, route))
        assert found.link[at] == pytest.approx(link_load(work, route))
