from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla.errors import InvalidInputError
from sla.sketch import LatencySketch
from sla.window import TIERS, ServiceWindow

DAY_S = 86_400.0
NOW_S = 1_800_000_000.0


def buckets(*values_ms: float) -> dict[int, int]:
    sketch = LatencySketch()
    for value in values_ms:
        sketch.add(value)
    return sketch.to_buckets()


def test_it_counts_and_judges() -> None:
    window = ServiceWindow()
    window.fold(NOW_S, 3, 1, buckets(100, 200, 400))
    status = window.status(NOW_S, 7 * DAY_S, latency_p99_ms=150, availability_sla=0.7)
    assert (status.requests, status.ok, status.availability) == (4, 3, 0.75)
    assert status.p50_ms == pytest.approx(200, rel=0.02)
    assert (status.latency_met, status.availability_met) == (False, True)


def test_zero_traffic_is_not_missing_data() -> None:
    status = ServiceWindow().status(NOW_S, DAY_S, latency_p99_ms=1, availability_sla=0.999)
    assert status.requests == 0
    assert status.availability is None
    assert status.p99_ms is None
    assert status.latency_met is None
    assert status.availability_met is None


def test_what_is_older_than_the_window_no_longer_counts() -> None:
    window = ServiceWindow()
    window.fold(NOW_S, 10, 0, buckets(50))
    assert window.status(NOW_S + 30, 60).requests == 10
    assert window.status(NOW_S + 180, 60).requests == 0
    assert window.status(NOW_S + 180, 3600).requests == 10


@given(gaps=st.lists(st.floats(0, 5 * DAY_S), min_size=1, max_size=40))
def test_each_request_is_counted_once_whatever_tier_it_is_in(gaps: list[float]) -> None:
    window, now = ServiceWindow(), NOW_S
    for gap in gaps:
        now += gap
        window.fold(now, 1, 1, buckets(10))
    within = sum(1 for at in range(len(gaps)) if sum(gaps[at + 1 :]) < 88 * DAY_S)
    assert window.status(now, 90 * DAY_S).requests >= 2 * within
    assert window.status(now, 200 * DAY_S).requests <= 2 * len(gaps)
    if sum(gaps) < 88 * DAY_S:
        assert window.status(now, 90 * DAY_S).requests == 2 * len(gaps)


def test_memory_is_bounded_over_a_year_of_minutes() -> None:
    window = ServiceWindow()
    for step in range(0, 365 * 86_400, 20_011):
        window.fold(NOW_S + step, 1, 0, buckets(5))
    assert sum(len(tier) for tier in window._tiers) <= sum(kept // length + 2 for length, kept in TIERS)
    assert len(window.to_bytes()) < 200_000


def test_it_survives_a_restart() -> None:
    window = ServiceWindow()
    for hour in range(300):
        window.fold(NOW_S + hour * 3600, 2, 1, buckets(10.0 + hour))
    again = ServiceWindow.from_bytes(window.to_bytes())
    now = NOW_S + 300 * 3600
    assert again.status(now, 7 * DAY_S) == window.status(now, 7 * DAY_S)
    assert again.to_bytes() == window.to_bytes()


@pytest.mark.parametrize("data", [b"", b"\x00", b"{}", b"\x81\xa5tiers\x90", b"\xff" * 40])
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidInputError):
        ServiceWindow.from_bytes(data)


def test_a_report_out_of_bounds_counts_nothing() -> None:
    window = ServiceWindow()
    with pytest.raises(InvalidInputError):
        window.fold(NOW_S, -1, 0, {})
    with pytest.raises(InvalidInputError):
        window.fold(NOW_S, 1, 0, {10**6: 1})
    assert window.status(NOW_S, DAY_S).requests == 0
