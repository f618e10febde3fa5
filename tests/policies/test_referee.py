"""A few instances against HiGHS; `python -m benchmarks solver` runs hundreds."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.referee import PRECISION, optimum, random_problem
from policies.partition import bottleneck_of, latency_of
from policies.sharing import best_routes

PROVEN_QUICKLY = (2, 6, 12, 14, 16, 20)
"""Seeds of which HiGHS proves the optimum within a second or two."""


@pytest.mark.parametrize("seed", PROVEN_QUICKLY)
def test_within_one_percent_of_the_optimum(seed: int) -> None:
    works, free = random_problem(np.random.default_rng(seed))
    routes = best_routes(works, free, "latency")
    verdict = optimum(works, free, "latency", seconds=60.0, known=routes)
    assert verdict.is_proven
    assert (routes is None) == (verdict.value is None)
    if routes is not None and verdict.value is not None:
        ours = sum(w.rate * latency_of(w, r) for w, r in zip(works, routes, strict=True))
        assert verdict.bound - 1e-9 <= ours <= 1.01 * verdict.value


@pytest.mark.parametrize("seed", [3, 11, 25, 27, 29])
def test_no_bottleneck_is_below_what_the_referee_finds_by_itself(seed: int) -> None:
    works, free = random_problem(np.random.default_rng(seed))
    routes = best_routes(works, free, "throughput")
    assert routes is not None
    alone, helped = (optimum(works, free, "throughput", seconds=60.0, known=known) for known in (None, routes))
    assert alone.is_proven
    assert helped.is_proven
    assert alone.value is not None
    assert helped.value is not None
    assert alone.value == pytest.approx(helped.value, rel=PRECISION)
    assert alone.bound * (1.0 - 1e-9) <= bottleneck_of(works, routes)
