from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.latency import (
    Grid,
    Queue,
    Track,
    lognormal,
    mixture,
    normal_cdf,
    normal_cdf_at,
    parallel,
    pipeline,
    point,
    series,
    waiting,
)

GRID = Grid.up_to(1000.0)
means = st.floats(5.0, 120.0)


@given(mean=means, variation=st.floats(0.05, 0.6))
def test_a_lognormal_keeps_its_moments(mean: float, variation: float) -> None:
    d = lognormal(GRID, mean, mean * variation)
    assert d.mass.sum() == pytest.approx(1.0)
    assert d.mean_ms() == pytest.approx(mean, rel=0.02, abs=0.5)
    assert d.std_ms() == pytest.approx(mean * variation, rel=0.15, abs=1.5)


@given(a=means, b=means)
def test_series_adds_means_and_variances(a: float, b: float) -> None:
    x, y = lognormal(GRID, a, 0.3 * a), lognormal(GRID, b, 0.2 * b)
    total = series([x, y])
    assert total.mean_ms() == pytest.approx(x.mean_ms() + y.mean_ms(), rel=0.01)
    assert total.std_ms() == pytest.approx(np.hypot(x.std_ms(), y.std_ms()), rel=0.03, abs=0.5)


@given(a=means, b=means, q=st.floats(0.05, 0.99))
def test_the_slowest_of_two_is_never_quicker_than_either(a: float, b: float, q: float) -> None:
    x, y = lognormal(GRID, a, 0.3 * a), lognormal(GRID, b, 0.3 * b)
    both = parallel([x, y])
    assert both.quantile_ms(q) >= max(x.quantile_ms(q), y.quantile_ms(q)) - 2 * GRID.step_ms
    assert both.quantile_ms(q) <= series([x, y]).quantile_ms(q) + 2 * GRID.step_ms


@given(busy=st.floats(0.2, 0.95), wait=st.floats(1.0, 50.0))
def test_waiting_has_its_mean_and_its_share_of_no_wait(busy: float, wait: float) -> None:
    d = waiting(Grid.up_to(40.0 * wait), busy, wait)
    assert d.mean_ms() == pytest.approx(wait, rel=0.08)
    assert 1.0 - d.exceeds(d.grid.step_ms) >= 1.0 - busy - 1e-6


@given(mean=means, q1=st.floats(0.01, 0.99), q2=st.floats(0.01, 0.99))
def test_quantiles_rise(mean: float, q1: float, q2: float) -> None:
    d = lognormal(GRID, mean, 0.4 * mean)
    low, high = sorted((q1, q2))
    assert d.quantile_ms(low) <= d.quantile_ms(high)
    assert d.exceeds(d.quantile_ms(high)) == pytest.approx(1.0 - high, abs=0.02)


def test_a_point_has_no_spread_and_a_mixture_mixes() -> None:
    assert point(GRID, 123.4).mean_ms() == pytest.approx(123.4)
    mixed = mixture([(3.0, point(GRID, 100.0)), (1.0, point(GRID, 200.0))])
    assert mixed.mean_ms() == pytest.approx(125.0)


def test_the_tail_beyond_the_grid_is_kept_in_its_last_bin() -> None:
    d = lognormal(Grid.up_to(100.0), 90.0, 60.0)
    assert d.mass.sum() == pytest.approx(1.0)
    assert d.quantile_ms(0.99) > 95.0


def test_without_queues_the_array_form_equals_the_parts() -> None:
    alone, lanes = Track(50.0, 10.0), [Track(80.0, 20.0), Track(60.0, 30.0)]
    made = pipeline(GRID, alone, [lanes])
    slowest = parallel([lognormal(GRID, lane.mean_ms, lane.std_ms) for lane in lanes])
    parts = series([lognormal(GRID, 50.0, 10.0), slowest])
    for q in (0.1, 0.5, 0.95, 0.99):
        assert made.quantile_ms(q) == pytest.approx(parts.quantile_ms(q), rel=0.01)


def test_one_queue_is_waited_in_as_it_is() -> None:
    made = pipeline(GRID, Track(50.0, 10.0, (Queue(0.3, 5.0),)), [])
    parts = series([lognormal(GRID, 50.0, 10.0), waiting(GRID, 0.3, 5.0)])
    for q in (0.1, 0.5, 0.95, 0.99):
        assert made.quantile_ms(q) == pytest.approx(parts.quantile_ms(q), rel=0.01)


def test_lanes_that_wait_for_the_same_requests_wait_no_longer_than_one_of_them() -> None:
    """Steady lanes of equal length behind equal queues end together; independent ones would be held up by either."""
    lane = Track(80.0, 0.1, (Queue(0.5, 40.0),))
    one, three = pipeline(GRID, Track(1.0, 0.1), [[lane]]), pipeline(GRID, Track(1.0, 0.1), [[lane, lane, lane]])
    for q in (0.3, 0.5, 0.9, 0.99):
        assert three.quantile_ms(q) == pytest.approx(one.quantile_ms(q), rel=0.01)


queues = st.lists(st.builds(Queue, st.floats(0.05, 1.0), st.floats(0.0, 40.0), st.floats(0.7, 3.0)), max_size=3).map(
    tuple
)
tracks = st.builds(Track, st.floats(1.0, 200.0), st.floats(0.1, 50.0), queues)


@given(alone=tracks, stages=st.lists(st.lists(tracks, min_size=1, max_size=3), max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_pipeline_keeps_its_mass_its_mean_and_the_order_of_its_quantiles(
    alone: Track, stages: list[list[Track]]
) -> None:
    grid = Grid.up_to(20_000.0)
    made = pipeline(grid, alone, stages)
    assert made.mass.sum() == pytest.approx(1.0)
    assert made.quantile_ms(0.5) <= made.quantile_ms(0.95) <= made.quantile_ms(0.99)

    def mean(track: Track) -> float:
        return track.mean_ms + sum(queue.mean_ms for queue in track.queues)

    least = mean(alone) + sum(max(mean(track) for track in stage) for stage in stages)
    most = mean(alone) + sum(sum(mean(track) for track in stage) for stage in stages)
    assert least - 3 * grid.step_ms - 0.01 * least <= made.mean_ms() <= most + 3 * grid.step_ms + 0.01 * most


def test_the_table_of_the_normal_distribution_agrees_with_the_function() -> None:
    z = np.linspace(-6, 6, 50)
    assert normal_cdf(z) == pytest.approx([normal_cdf_at(float(x)) for x in z], abs=1e-5)
