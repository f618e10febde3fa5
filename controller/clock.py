"""The one place where the centre reads the time; tests advance a fake."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks: one that never jumps, for durations; one that people read, for records."""

    def now_ms(self) -> float:
        """Monotonic milliseconds."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> float:
        return time.monotonic() * 1000

    def wall_s(self) -> float:
        return time.time()
