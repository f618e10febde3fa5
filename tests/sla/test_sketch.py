from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla.errors import InvalidInputError
from sla.sketch import MAX_KEY, MAX_MS, MIN_KEY, Histogram, LatencySketch

latencies = st.lists(st.floats(0.01, 60_000.0), min_size=1, max_size=200)


def filled(values: list[float]) -> LatencySketch:
    sketch = LatencySketch()
    for value in values:
        sketch.add(value)
    return sketch


def exact(values: list[float], q: float) -> float:
    return sorted(values)[int(q * (len(values) - 1))]


@given(values=latencies, q=st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_quantiles_are_within_one_percent(values: list[float], q: float) -> None:
    assert filled(values).quantile(q) == pytest.approx(exact(values, q), rel=0.0101)


@given(a=latencies, b=latencies)
def test_merging_equals_adding_everything_to_one(a: list[float], b: list[float]) -> None:
    merged, over_wire = filled(a), filled(a)
    merged.merge(filled(b))
    over_wire.add_buckets(filled(b).to_buckets())
    assert merged.to_buckets() == over_wire.to_buckets() == filled(a + b).to_buckets()
    assert merged.count == len(a) + len(b)


def test_an_empty_sketch_knows_nothing() -> None:
    assert LatencySketch().quantile(0.99) is None
    assert LatencySketch().to_buckets() == {}


def test_values_outside_the_range_are_clamped_and_nan_is_dropped() -> None:
    sketch = filled([0.0, -5.0, math.inf, math.nan, 1e300])
    assert sketch.count == 4
    assert sketch.quantile(1.0) == pytest.approx(MAX_MS, rel=0.0101)
    assert len(sketch.to_buckets()) == 2


@pytest.mark.parametrize("buckets", [{MIN_KEY - 1: 1}, {MAX_KEY + 1: 1}, {0: 0}, {0: -3}, {0: 10**30}])
def test_buckets_out_of_bounds_are_refused_as_a_whole(buckets: dict[int, int]) -> None:
    sketch = LatencySketch()
    with pytest.raises(InvalidInputError):
        sketch.add_buckets({1: 5, **buckets})
    assert sketch.count == 0


@given(values=latencies, q=st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]), limit=st.floats(0.1, 70_000.0))
def test_a_histogram_says_the_same(values: list[float], q: float, limit: float) -> None:
    histogram = Histogram()
    histogram.add_buckets(filled(values).to_buckets())
    assert histogram.to_buckets() == filled(values).to_buckets()
    at_once = Histogram()
    at_once.add_values(np.array([*values, math.nan]))
    assert at_once.to_buckets() == histogram.to_buckets()
    assert histogram.quantile(q) == pytest.approx(filled(values).quantile(q))
    slower = histogram.slower_than(limit)
    assert sum(v > limit * 1.0101 for v in values) <= slower <= sum(v > limit / 1.0101 for v in values)


def test_an_empty_histogram_knows_nothing() -> None:
    assert Histogram().quantile(0.5) is None
    assert Histogram().slower_than(1.0) == Histogram().count == 0
