"""Which line answers, and which part of it."""

from __future__ import annotations

import numpy as np
import pytest

from agents.steps.answers import choose, split_line


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("Total: 41.00 EUR", ("Total", "41.00 EUR")),
        ("Total：41.00 EUR", ("Total", "41.00 EUR")),
        ("Total :41.00", ("Total", "41.00")),
        ("Boarding time: 10:45", ("Boarding time", "10:45")),
        ("Boarding time:10:45", ("Boarding time", "10:45")),
        ("Opens 10:45", ("", "Opens 10:45")),
        ("INVOICE", ("", "INVOICE")),
        ("Total:", ("", "Total:")),
        (": 41", ("", ": 41")),
        ("", ("", "")),
    ],
)
def test_a_line_splits_at_its_first_colon_that_is_no_time(line: str, parts: tuple[str, str]) -> None:
    assert split_line(line) == parts


def test_a_line_with_a_key_is_preferred_to_a_nearer_title() -> None:
    lines = ["INVOICE NUMBER", "Invoice no: 7", "Date: 1"]
    best, likeness = choose(lines, np.array([0.9, 0.6, 0.1]), np.array([0.9, 0.7, 0.1]))
    assert best == 1
    assert likeness == pytest.approx(0.75 * 0.7 + 0.25 * 0.6)


def test_without_any_key_the_nearest_line_answers() -> None:
    assert choose(["first", "second"], np.array([0.2, 0.3]), np.array([0.2, 0.3]))[0] == 1


def test_a_likeness_is_never_below_zero() -> None:
    assert choose(["a: b"], np.array([-0.4]), np.array([-0.2])) == (0, 0.0)
