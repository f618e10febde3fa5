"""Pruning follows the memory bandwidth, within bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.pruning import MAX_STRENGTH, MIN_STRENGTH, keep_ratio, next_strength


@pytest.mark.parametrize(
    ("use", "expected"), [(0.9, 0.18), (0.85, 0.3), (0.5, 0.3), (0.3, 0.3), (0.2, 0.39), (math.nan, 0.3)]
)
def test_the_printed_factors(use: float, expected: float) -> None:
    assert next_strength(0.3, use) == pytest.approx(expected)


@given(strength=st.floats(0, 1), uses=st.lists(st.floats(0, 1), max_size=40))
def test_it_never_leaves_its_bounds(strength: float, uses: list[float]) -> None:
    for use in uses:
        strength = next_strength(strength, use)
        assert MIN_STRENGTH <= strength <= MAX_STRENGTH
        assert 1 - MAX_STRENGTH <= keep_ratio(strength) <= 1
