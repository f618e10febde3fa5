from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.latency import (
    Grid,
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


def test_the_array_form_equals_the_parts() -> None:
    alone = Track(50.0, 10.0, ((0.3, 5.0),))
    lanes = [Track(80.0, 20.0, ((0.5, 10.0), (0.2, 4.0))), Track(60.0, 30.0)]
    made = pipeline(GRID, alone, [lanes])

    def by_hand(track: Track) -> object:
        return series([lognormal(GRID, track.mean_ms, track.std_ms), *(waiting(GRID, b, w) for b, w in track.queues)])

    parts = series([by_hand(alone), parallel([by_hand(lane) for lane in lanes])])  # type: ignore[list-item]
    for q in (0.1, 0.5, 0.95, 0.99):
        assert made.quantile_ms(q) == pytest.approx(parts.quantile_ms(q), rel=0.01)


def test_the_table_of_the_normal_distribution_agrees_with_the_function() -> None:
    z = np.linspace(-6, 6, 50)
    assert normal_cdf(z) == pytest.approx([normal_cdf_at(float(x)) for x in z], abs=1e-5)
