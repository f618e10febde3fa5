from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.replay import Replay, _generated, _poisson, _requests, trace_directory
from benchmarks.sla import Forecasts, forecasts
from sla.errors import SettingsError


def generated(seed: int, hours: float) -> Replay:
    return _requests("generated", *_generated(seed, hours), _poisson(seed), seed)


def test_generated_days_are_calm_and_bad_and_the_same_every_time() -> None:
    day = generated(1, 3.0)
    assert day.seconds() == pytest.approx(3 * 3600, abs=5)
    assert np.array_equal(day.latency_ms, generated(1, 3.0).latency_ms)
    assert 30 < np.median(day.latency_ms) < 80
    assert np.all(day.second[day.minute(7)] // 60 == 7)


def test_forecasts_are_scored_against_what_happened() -> None:
    single, whole = forecasts([generated(2, 2.5)], steps=1)
    assert len(single.said) == 3 * len(whole.said) > 0
    assert single.brier() <= single.brier_of_climatology()
    assert sum(count for _, count, _, _ in single.bins()) == len(single.said)


def test_calibration_error_and_brier_by_hand() -> None:
    book = Forecasts()
    book.said, book.happened, book.persistent = (
        [0.0, 0.0, 1.0, 0.5],
        [False, True, True, True],
        [False, False, True, True],
    )
    assert book.calibration_error() == pytest.approx((2 * 0.5 + 0.5) / 4)
    assert book.brier() == pytest.approx((1 + 0.25) / 4)
    assert book.brier_of_climatology() == pytest.approx(0.75 * 0.25)
    assert book.brier_of_persistence() == pytest.approx(0.25)
    assert book.undecided().said == [0.5]


def test_the_directory_of_traces_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEGATE_TRACES", str(tmp_path))
    assert trace_directory() == tmp_path
    monkeypatch.setenv("TIDEGATE_TRACES", str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError):
        trace_directory()
