"""What a service attained in a rolling window, in bounded memory and in a form that survives restarts.

Three tiers: minutes for three hours, hours for eight days, days for three months. What grows too old for one tier is folded into
the next, so each request is counted in exactly one slot, and a window of up to 90 days ends within one slot of where it
should: a minute, an hour or a day.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from sla.errors import InvalidInputError
from sla.sketch import Buckets, LatencySketch, check_buckets, merge_buckets

TIERS: Final = ((60, 3 * 3600), (3600, 8 * 86_400), (86_400, 91 * 86_400))
"""(length of a slot, how long the tier keeps it), seconds."""


class WindowStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What was attained; None means that there was nothing to judge, which is neither kept nor broken."""

    requests: int
    ok: int
    availability: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    latency_met: bool | None = None
    availability_met: bool | None = None


class _Slot(msgspec.Struct):
    ok: int = 0
    failed: int = 0
    buckets: Buckets = {}


class _Saved(msgspec.Struct):
    tiers: tuple[dict[int, _Slot], ...]
    version: int = 1


class ServiceWindow:
    """Requests of one service over time. The caller's wall clock decides where a request is counted."""

    def __init__(self) -> None:
        self._tiers: tuple[dict[int, _Slot], ...] = tuple({} for _ in TIERS)

    def fold(self, now_s: float, ok: int, failed: int, buckets: Mapping[int, int]) -> None:
        """Count requests that ended about now, with the latency sketch of those that were answered.

        Raises InvalidInputError, and counts nothing, when a number is out of bounds.
        """
        if min(ok, failed) < 0:
            raise InvalidInputError(f"A report counts {ok} and {failed} requests; accepted is 0 or more.")
        check_buckets(buckets)
        self._roll(now_s)
        _add(self._tiers[0], int(now_s // TIERS[0][0]), _Slot(ok, failed, dict(buckets)))

    def status(
        self,
        now_s: float,
        window_s: float,
        *,
        latency_p99_ms: float | None = None,
        availability_sla: float | None = None,
    ) -> WindowStatus:
        """What was attained in the last `window_s` seconds, judged where a target is given."""
        sketch = LatencySketch()
        buckets: Buckets = {}
        ok = failed = 0
        for slot in self._since(now_s - window_s):
            ok, failed = ok + slot.ok, failed + slot.failed
            merge_buckets(buckets, slot.buckets)
        sketch.add_buckets(buckets)
        requests = ok + failed
        availability = ok / requests if requests else None
        p99 = sketch.quantile(0.99)
        return WindowStatus(
            requests=requests,
            ok=ok,
            availability=availability,
            p50_ms=sketch.quantile(0.5),
            p95_ms=sketch.quantile(0.95),
            p99_ms=p99,
            latency_met=None if p99 is None or latency_p99_ms is None else p99 <= latency_p99_ms,
            availability_met=None
            if availability is None or availability_sla is None
            else availability >= availability_sla,
        )

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(_Saved(tiers=self._tiers))

    @staticmethod
    def from_bytes(data: bytes) -> ServiceWindow:
        """What `to_bytes` wrote. Raises InvalidInputError for anything else."""
        try:
            saved = msgspec.msgpack.decode(data, type=_Saved)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidInputError(f"The saved window cannot be read: {error}.") from error
        if saved.version != 1 or len(saved.tiers) != len(TIERS):
            raise InvalidInputError("The saved window is of another version.")
        window = ServiceWindow()
        for tier, slots in zip(window._tiers, saved.tiers, strict=True):
            for number, slot in slots.items():
                check_buckets(slot.buckets)
                tier[number] = slot
        return window

    def _since(self, start_s: float) -> Iterator[_Slot]:
        for (length_s, _), slots in zip(TIERS, self._tiers, strict=True):
            for number, slot in slots.items():
                if (number + 1) * length_s > start_s:
                    yield slot

    def _roll(self, now_s: float) -> None:
        """Move what is too old for its tier to the next one; forget what is too old for the last."""
        for tier, (length_s, kept_s) in enumerate(TIERS):
            slots = self._tiers[tier]
            for number in [n for n in slots if (n + 1) * length_s <= now_s - kept_s]:
                slot = slots.pop(number)
                if tier + 1 < len(TIERS):
                    _add(self._tiers[tier + 1], number * length_s // TIERS[tier + 1][0], slot)


def _add(slots: dict[int, _Slot], number: int, slot: _Slot) -> None:
    there = slots.get(number)
    if there is None:
        slots[number] = slot
    else:
        there.ok += slot.ok
        there.failed += slot.failed
        merge_buckets(there.buckets, slot.buckets)
