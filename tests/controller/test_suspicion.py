"""How suspicious a silence is, as numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.suspicion import fold_delay, phi


def suspicion(silence_ms: float, mean_ms: float = 500.0, std_ms: float = 100.0) -> float:
    return float(phi(np.array([silence_ms]), np.array([mean_ms]), np.array([std_ms]))[0])


def test_phi_is_the_logarithm_of_the_chance_that_a_report_still_comes() -> None:
    # At the mean the chance is one half; at three deviations the normal tail is 0.00135.
    assert suspicion(500, std_ms=200) == pytest.approx(-np.log10(0.5))
    assert suspicion(500 + 3 * 200, std_ms=200) == pytest.approx(-np.log10(0.00135), rel=0.02)


@given(
    silence_ms=st.floats(0, 1e9), mean_ms=st.floats(1, 1e6), std_ms=st.floats(0, 1e6), longer_ms=st.floats(0, 1e6),
)  # fmt: skip
def test_phi_is_finite_never_negative_and_grows_with_silence(
    silence_ms: float, mean_ms: float, std_ms: float, longer_ms: float
) -> None:
    now = suspicion(silence_ms, mean_ms, std_ms)
    assert np.isfinite(now)
    assert now >= 0
    assert suspicion(silence_ms + longer_ms, mean_ms, std_ms) >= now


@given(st.lists(st.floats(1, 5000), min_size=1, max_size=300))
@settings(max_examples=50)
def test_mean_and_variance_stay_within_what_was_seen(delays: list[float]) -> None:
    mean, var = delays[0], 0.0
    for delay in delays:
        mean, var = fold_delay(mean, var, delay)
    assert min(delays) - 1e-6 <= mean <= max(delays) + 1e-6
    assert 0 <= var <= (max(delays) - min(delays)) ** 2 + 1e-6


def test_delays_that_vary_earn_patience() -> None:
    assert suspicion(2000, std_ms=500) < suspicion(2000, std_ms=100)


def test_delays_that_never_varied_do_not_make_any_lateness_a_certainty() -> None:
    assert suspicion(600, std_ms=0.0) < 1.0
