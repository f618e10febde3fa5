"""Emulated links, with a clock that only moves when it is told to."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.shaping import LinkShaper


class FakeTime:
    """A clock and its sleep: `advance` wakes whoever waited long enough, in any order they were due."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now_s + seconds, future))
        await future

    async def advance(self, seconds: float, *, last_first: bool = False) -> None:
        self.now_s += seconds
        due = [sleeper for sleeper in self._sleepers if sleeper[0] <= self.now_s + 1e-9]
        self._sleepers = [sleeper for sleeper in self._sleepers if sleeper not in due]
        for _, future in reversed(due) if last_first else due:
            if not future.done():
                future.set_result(None)
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def shaper(
    time: FakeTime, delay_ms: float = 0, jitter_ms: float = 0, bandwidth_bytes_per_s: float | None = None
) -> LinkShaper:
    return LinkShaper(delay_ms, jitter_ms, bandwidth_bytes_per_s, Random(7), clock=time.clock, sleep=time.sleep)


async def test_frames_queue_for_the_bandwidth_and_share_the_delay() -> None:
    time = FakeTime()
    link = shaper(time, delay_ms=50, bandwidth_bytes_per_s=1000)
    left: list[int] = []

    async def send(number: int) -> None:
        await link.delay(100)
        left.append(number)

    tasks = [asyncio.create_task(send(number)) for number in range(3)]
    await settle()
    assert left == []
    await time.advance(0.14)
    assert left == []
    await time.advance(0.01)  # 100 ms of bandwidth and 50 ms of delay
    assert left == [0]
    await time.advance(0.1)
    assert left == [0, 1]
    await time.advance(0.1)
    assert left == [0, 1, 2]
    await asyncio.gather(*tasks)


async def test_a_timer_that_fires_early_does_not_overtake() -> None:
    time = FakeTime()
    link = shaper(time, delay_ms=10)
    left: list[int] = []

    async def send(number: int) -> None:
        await link.delay(1)
        left.append(number)

    tasks = [asyncio.create_task(send(number)) for number in range(4)]
    await settle()
    await time.advance(1.0, last_first=True)
    assert left == [0, 1, 2, 3]
    await asyncio.gather(*tasks)


async def test_a_cancelled_frame_does_not_let_later_ones_overtake_earlier_ones() -> None:
    time = FakeTime()
    link = shaper(time, delay_ms=10)
    left: list[int] = []

    async def send(number: int) -> None:
        await link.delay(1)
        left.append(number)

    tasks = [asyncio.create_task(send(number)) for number in range(3)]
    await settle()
    tasks[1].cancel()
    await settle()
    await time.advance(1.0, last_first=True)
    assert left == [0, 2]
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_link_without_limits_does_not_wait() -> None:
    time = FakeTime()
    await asyncio.wait_for(shaper(time).delay(10**9), timeout=1)
    assert time.now_s == 100.0


@given(
    sends=st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 0.5)), max_size=30),
    jitter_ms=st.floats(0, 100),
    bandwidth_bytes_per_s=st.none() | st.floats(1e3, 1e9),
)
def test_releases_are_in_order_and_never_faster_than_the_link(
    sends: list[tuple[int, float]], jitter_ms: float, bandwidth_bytes_per_s: float | None
) -> None:
    link = LinkShaper(20, jitter_ms, bandwidth_bytes_per_s, Random(1))
    now_s = began_s = 5.0
    last_s, total_bytes = 0.0, 0
    for n_bytes, pause_s in sends:
        now_s += pause_s
        release_s = link.release_at_s(n_bytes, now_s)
        total_bytes += n_bytes
        assert release_s >= last_s
        assert release_s >= now_s
        if bandwidth_bytes_per_s is not None:
            assert release_s - began_s >= total_bytes / bandwidth_bytes_per_s - 1e-6
        last_s = release_s


def test_jitter_has_the_given_spread() -> None:
    link = LinkShaper(1000, 10, None, Random(3))
    delays_s = [link.release_at_s(1, float(10 * turn)) - 10 * turn for turn in range(2000)]
    mean_s = sum(delays_s) / len(delays_s)
    deviation_s = (sum((delay_s - mean_s) ** 2 for delay_s in delays_s) / len(delays_s)) ** 0.5
    assert mean_s == pytest.approx(1.0, abs=0.002)
    assert deviation_s == pytest.approx(0.010, rel=0.1)
