"""Greedy CTC decoding and charsets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agents.steps.ctc import decode, load_charset
from sla.errors import ModelError

CHARSET = ("a", "b", "c", " ")


def test_repeats_collapse_and_blanks_separate() -> None:
    ids = np.array([[1, 1, 0, 1, 2, 2, 3]])
    scores = np.array([[1.0, 0.1, 0.1, 0.9, 0.8, 0.1, 0.7]], np.float32)
    ((text, score),) = decode(ids, scores, CHARSET)
    assert text == "aabc"
    assert score == pytest.approx((1.0 + 0.9 + 0.8 + 0.7) / 4)


def test_spaces_inside_stay_and_outside_go() -> None:
    assert decode(np.array([[4, 1, 4, 2, 4]]), np.ones((1, 5), np.float32), CHARSET)[0][0] == "a b"


def test_nothing_read_is_an_empty_text_without_confidence() -> None:
    assert decode(np.zeros((2, 4), np.int64), np.ones((2, 4), np.float32), CHARSET) == [("", 0.0), ("", 0.0)]


def test_the_charset_of_another_model_is_noticed() -> None:
    with pytest.raises(ModelError, match="class 9, but its charset has 4 symbols"):
        decode(np.array([[9]]), np.ones((1, 1), np.float32), CHARSET)


def test_shapes_must_agree() -> None:
    with pytest.raises(ModelError, match=r"both must be \[N, T\]"):
        decode(np.zeros((1, 2), np.int64), np.ones((1, 3), np.float32), CHARSET)


def test_a_charset_keeps_symbols_that_look_like_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "charset"
    path.write_bytes("a\n\u2028\n\u3000\n ".encode())
    assert load_charset(path) == ("a", "\u2028", "\u3000", " ")


def test_a_file_that_is_no_charset_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "charset"
    path.write_text("a\n\n\nb")
    with pytest.raises(ModelError, match="not a list of symbols"):
        load_charset(path)
