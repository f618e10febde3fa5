"""Emulated links: a sender that holds frames back as a slower link would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Protocol


class Shaper(Protocol):
    """Awaited before a frame is written."""

    async def delay(self, n_bytes: int) -> None:
        """Returns when a frame of `n_bytes` may leave; frames leave in the order of the calls."""
        ...


class LinkShaper:
    """One direction of a link with the given delay, jitter (standard deviation of a normal) and bandwidth.

    Frames queue for the bandwidth one after another, and are then delayed side by side, as on a real link; none overtakes.
    `clock` and `sleep` are arguments so that tests need not wait.
    """

    def __init__(
        self,
        delay_ms: float,
        jitter_ms: float,
        bandwidth_bytes_per_s: float | None,
        rng: Random,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._delay_s = delay_ms / 1000
        self._jitter_s = jitter_ms / 1000
        self._bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self._rng = rng
        self._clock = clock
        self._sleep = sleep
        self._free_s = 0.0
        """When the bandwidth is free again."""
        self._last_release_s = 0.0
        self._last_left: asyncio.Future[None] | None = None

    def release_at_s(self, n_bytes: int, now_s: float) -> float:
        """When a frame that is handed over at `now_s` leaves; books its share of the bandwidth."""
        start_s = max(now_s, self._free_s)
        self._free_s = start_s + (n_bytes / self._bandwidth_bytes_per_s if self._bandwidth_bytes_per_s else 0.0)
        late_s = max(0.0, self._delay_s + (self._rng.gauss(0.0, self._jitter_s) if self._jitter_s else 0.0))
        self._last_release_s = max(self._last_release_s, self._free_s + late_s)
        return self._last_release_s

    async def delay(self, n_bytes: int) -> None:
        """Wait for this frame's turn. A cancelled wait keeps its place, so that later frames still do not overtake."""
        now_s = self._clock()
        wait_s = self.release_at_s(n_bytes, now_s) - now_s
        before, left = self._last_left, asyncio.get_running_loop().create_future()
        self._last_left = left
        try:
            if wait_s > 0:
                await self._sleep(wait_s)
            # Timers are coarse: a later frame's timer may fire first.
            if before is not None and not before.done():
                await asyncio.wait([before])
        finally:
            _follow(before, left)


def _follow(before: asyncio.Future[None] | None, left: asyncio.Future[None]) -> None:
    if before is None or before.done():
        left.set_result(None)
    else:
        before.add_done_callback(lambda _: left.set_result(None))
