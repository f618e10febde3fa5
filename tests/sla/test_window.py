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


traffic = st.lists(
    st.tuples(st.floats(0, 20 * DAY_S), st.integers(0, 50), st.integers(0, 50), st.floats(1, 5000)), max_size=30
)


@given(first=traffic, second=traffic)
def test_two_windows_sum_to_the_window_of_both(
    first: list[tuple[float, int, int, float]], second: list[tuple[float, int, int, float]]
) -> None:
    one, other, both = ServiceWindow(), ServiceWindow(), ServiceWindow()
    for window, entries in ((one, first), (other, second), (both, first + second)):
        for at, ok, failed, ms in sorted(entries):
            window.fold(NOW_S + at, ok, failed, buckets(*[ms] * ok))
    spans = (3600.0, DAY_S, 7 * DAY_S, 30 * DAY_S)
    end = NOW_S + 20 * DAY_S
    for window in (one, other, both):
        window.observe(end)  # Everything rolls to where it belongs at the same time.
    for a, b, whole in zip(one.sums(end, spans), other.sums(end, spans), both.sums(end, spans), strict=True):
        assert (a.ok + b.ok, a.failed + b.failed) == (whole.ok, whole.failed)
        assert (a.latency.counts + b.latency.counts == whole.latency.counts).all()


@given(entries=traffic)
def test_longer_windows_hold_shorter_ones_and_slots_end_where_they_should(
    entries: list[tuple[float, int, int, float]],
) -> None:
    window, now = ServiceWindow(), NOW_S + 20 * DAY_S
    for at, ok, failed, _ in sorted(entries):
        window.fold(NOW_S + at, ok, failed, {})
    lengths = [300.0, 1800.0, 3600.0, 7200.0, 21_600.0, DAY_S, 3 * DAY_S, 7 * DAY_S, 28 * DAY_S]
    slack = [60, 60, 60, 60, 600, 600, 3600, 3600, DAY_S]
    found = [sums.requests for sums in window.sums(now, lengths)]
    assert found == sorted(found)
    window.observe(now)
    for sums, length, late in zip(window.sums(now, lengths), lengths, slack, strict=True):
        least = sum(ok + failed for at, ok, failed, _ in entries if at > 20 * DAY_S - length)
        most = sum(ok + failed for at, ok, failed, _ in entries if at >= 20 * DAY_S - length - late)
        assert least <= sums.requests <= most


def test_a_clock_that_was_set_back_hides_the_future_only() -> None:
    window = ServiceWindow()
    window.fold(NOW_S + 7200, 5, 0, {})
    window.fold(NOW_S, 3, 0, {})
    assert window.sums(NOW_S, (3600.0,))[0].ok == 3
    assert window.sums(NOW_S + 7200, (3 * 3600.0,))[0].ok == 8


def test_hours_are_noted_when_they_end_and_judged_by_the_promise_of_then() -> None:
    window = ServiceWindow()
    start = NOW_S // 3600 * 3600
    window.promise(1.0, 100.0)
    for minute in range(60):
        window.fold(start + 60 * minute, 5, 1, buckets(50, 50, 50, 50, 200))
        window.observe(start + 60 * minute)
    assert window.hours.all() == ()
    window.promise(1.0, 1000.0)
    window.fold(start + 3600, 1, 0, buckets(5))
    (hour,) = window.hours.all()
    assert (hour.ok, hour.failed, hour.slices, hour.bad_slices, hour.observed) == (300, 60, 60, 60, 60.0)
    assert hour.slow == 0
    assert hour.p99_ms == pytest.approx(200, rel=0.02)
    again = ServiceWindow.from_bytes(window.to_bytes())
    assert again.hours.within(start, start + 3600) == [hour]


def test_hours_of_a_pause_are_noted_later() -> None:
    window = ServiceWindow()
    for hour in (0, 1, 40, 90):
        window.fold(NOW_S + 3600 * hour, 1, 0, {})
    assert [hour.ok for hour in window.hours.all()] == [1, 1, 1]


def test_between_takes_whole_slots_of_any_tier() -> None:
    window, midnight = ServiceWindow(), NOW_S // DAY_S * DAY_S
    for hour in range(24 * 12):
        window.fold(midnight + 3600 * hour + 5, 1, 0, {})
    assert window.between(midnight, midnight + DAY_S).ok == 24
    assert window.between(midnight, midnight + 12 * DAY_S).ok == 24 * 12
    assert window.between(midnight + 11 * DAY_S, midnight + 12 * DAY_S).ok == 24


def test_blocks_are_ten_whole_minutes() -> None:
    window, start = ServiceWindow(), NOW_S // 600 * 600
    for minute in range(25):
        window.fold(start + 60 * minute, 2, 1, buckets(10, 300))
    found = [(at, sums.ok, sums.failed, sums.latency.slower_than(100.0)) for at, sums in window.blocks(start + 1500)]
    assert found == [(start, 20, 10, 10), (start + 600, 20, 10, 10)]
