"""One line per hour, kept for two months: enough for a monthly report that names the worst hours."""

from __future__ import annotations

from typing import Final

import msgspec

HOUR_S: Final = 3600
HOURS_KEPT: Final = 63 * 24
"""The report of a month can be asked for during the whole month after it."""


class Hour(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one hour was like, judged by the contract that held when it ended."""

    start_s: float
    ok: int
    failed: int
    slow: int
    """Answered later than the promised p99."""
    p99_ms: float | None
    slices: int
    bad_slices: int
    observed: float
    """Minutes in which the service's ingresses were heard of, 0 to 60."""

    @property
    def requests(self) -> int:
        return self.ok + self.failed


class HourLog:
    """The newest hours of one service."""

    def __init__(self, hours: tuple[Hour, ...] = ()) -> None:
        self._hours = {int(hour.start_s // HOUR_S): hour for hour in hours[-HOURS_KEPT:]}

    def __contains__(self, number: int) -> bool:
        return number in self._hours

    def add(self, hour: Hour) -> None:
        """Keep an hour; the oldest falls out when there are too many."""
        self._hours[int(hour.start_s // HOUR_S)] = hour
        while len(self._hours) > HOURS_KEPT:
            self._hours.pop(min(self._hours))

    def within(self, start_s: float, end_s: float) -> list[Hour]:
        """The hours that lie in [start, end), oldest first."""
        return [hour for _, hour in sorted(self._hours.items()) if start_s <= hour.start_s < end_s]

    def all(self) -> tuple[Hour, ...]:
        """Every hour, oldest first."""
        return tuple(hour for _, hour in sorted(self._hours.items()))
