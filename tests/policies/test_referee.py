"""A few instances against HiGHS; `python -m benchmarks solver` runs hundreds."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.referee import optimum, random_problem
from policies.partition import latency_of
from policies.sharing import best_routes

PROVEN_QUICKLY = (2, 6, 12, 14, 16, 20)
"""Seeds of which HiGHS proves the optimum within a second or two."""


@pytest.mark.parametrize("seed", PROVEN_QUICKLY)
def test_within_one_percent_of_the_optimum(seed: int) -> None:
    works, free = random_problem(np.random.default_rng(seed))
    proven, value = optimum(works, free, "latency", seconds=60.0)
    assert proven
    routes = best_routes(works, free, "latency")
    assert (routes is None) == (value is None)
    if routes is not None and value is not None:
        ours = sum(w.rate * latency_of(w, r) for w, r in zip(works, routes, strict=True))
        assert ours <= 1.01 * value
