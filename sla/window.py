"""What a service attained in rolling windows, in bounded memory and in a form that survives restarts.

Four tiers: minutes for three hours, ten minutes for thirty hours, hours for eight days, days for three months. What grows too
old for one tier is folded into the next, so each request is counted in exactly one slot, and a window of up to 90 days is
at least as long as asked for and at most one slot longer (5 minutes at most 6, 6 hours at most 6 h 10 min, 7 days at most 7 d 1 h).

Whoever received a report decides by its own clock in which minute the report's requests are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from sla.errors import InvalidInputError
from sla.hours import HOUR_S, Hour, HourLog
from sla.sketch import MAX_COUNT, MIN_KEY, Buckets, Histogram, check_buckets, merge_buckets

SLICE_S: Final = 60
"""Throughput is judged in slices of this length."""
TIERS: Final = ((SLICE_S, 3 * 3600), (600, 30 * 3600), (3600, 8 * 86_400), (86_400, 91 * 86_400))
"""(length of a slot, how long the tier keeps it), seconds."""
BLOCK_S: Final = TIERS[1][0]
"""The grain in which the recent past is looked at to tell the near future."""
SERVED_SHARE: Final = 0.95
"""A slice is bad when less than this share of what was offered (of what was promised, if more was offered) was answered."""

Ints = npt.NDArray[np.int64]


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


@dataclass(slots=True)
class Sums:
    """What was counted in one window."""

    ok: int = 0
    failed: int = 0
    slices: int = 0
    """Minutes in which requests were offered."""
    bad_slices: int = 0
    """Minutes in which less was served than was offered and promised."""
    observed: float = 0.0
    """Minutes in which the service's ingresses were heard of."""
    latency: Histogram = field(default_factory=Histogram)
    """Of the requests that were answered."""

    @property
    def requests(self) -> int:
        return self.ok + self.failed


class _Slot(msgspec.Struct):
    """One slot; `buckets` while it is filled, `keys` and `counts` afterwards (a tenth of the memory)."""

    ok: int = 0
    failed: int = 0
    slices: int = 0
    bad_slices: int = 0
    observed: float = 0.0
    buckets: Buckets = {}
    keys: bytes = b""
    counts: bytes = b""

    def sparse(self) -> tuple[Ints, Ints]:
        keys, counts = np.frombuffer(self.keys, np.int16), np.frombuffer(self.counts, np.int64)
        return keys.astype(np.int64), counts

    def pack(self) -> None:
        """Close the slot."""
        if self.buckets:
            whole = self.histogram()
            at = np.flatnonzero(whole.counts)
            self.keys, self.counts = (at + MIN_KEY).astype(np.int16).tobytes(), whole.counts[at].tobytes()
            self.buckets = {}

    def histogram(self) -> Histogram:
        whole = Histogram()
        self.add_latency_to(whole)
        return whole

    def add_latency_to(self, whole: Histogram) -> None:
        if self.keys:
            whole.add(*self.sparse())
        whole.add_buckets(self.buckets)

    def judged(self, promised_rps: float | None) -> tuple[int, int]:
        """(1, 1 if it is bad) for a minute in which requests were offered; promised None: whatever was offered."""
        offered = self.ok + self.failed
        if offered == 0:
            return 0, 0
        due = offered if promised_rps is None else min(float(offered), promised_rps * SLICE_S)
        return 1, int(self.ok < SERVED_SHARE * due)


class _Saved(msgspec.Struct):
    tiers: tuple[dict[int, _Slot], ...]
    version: int
    born_s: float | None = None
    promised_rps: float | None = None
    promised_ms: float | None = None
    hours: tuple[Hour, ...] = ()


class ServiceWindow:
    """Requests of one service over time. The caller's wall clock decides where a request is counted."""

    def __init__(self) -> None:
        self._tiers: tuple[dict[int, _Slot], ...] = tuple({} for _ in TIERS)
        self._minute: int | None = None
        self.born_s: float | None = None
        """When it was first told anything; what was before is not missing."""
        self.hours = HourLog()
        self._promised_rps: float | None = None
        self._promised_ms: float | None = None

    def promise(self, throughput_rps: float, latency_p99_ms: float) -> None:
        """What is promised from now on: minutes and hours are judged by it when they end."""
        self._promised_rps, self._promised_ms = throughput_rps, latency_p99_ms

    def fold(self, now_s: float, ok: int, failed: int, buckets: Mapping[int, int]) -> None:
        """Count requests that ended about now, with the latency sketch of those that were answered.

        Raises InvalidInputError, and counts nothing, when a number is out of bounds.
        """
        if min(ok, failed) < 0:
            raise InvalidInputError(f"A report counts {ok} and {failed} requests; accepted is 0 or more.")
        check_buckets(buckets)
        slot = self._slot(now_s)
        slot.ok += ok
        slot.failed += failed
        merge_buckets(slot.buckets, buckets)

    def observe(self, at_s: float, share: float = 1.0) -> None:
        """The minute around `at_s` was observed: `share` of the service's ingresses reported. The last word counts."""
        self._slot(at_s).observed = min(max(share, 0.0), 1.0)

    def status(
        self,
        now_s: float,
        window_s: float,
        *,
        latency_p99_ms: float | None = None,
        availability_sla: float | None = None,
    ) -> WindowStatus:
        """What was attained in the last `window_s` seconds, judged where a target is given."""
        sums = self.sums(now_s, (window_s,))[0]
        availability = sums.ok / sums.requests if sums.requests else None
        p99 = sums.latency.quantile(0.99)
        return WindowStatus(
            requests=sums.requests,
            ok=sums.ok,
            availability=availability,
            p50_ms=sums.latency.quantile(0.5),
            p95_ms=sums.latency.quantile(0.95),
            p99_ms=p99,
            latency_met=None if p99 is None or latency_p99_ms is None else p99 <= latency_p99_ms,
            availability_met=None
            if availability is None or availability_sla is None
            else availability >= availability_sla,
        )

    def sums(self, now_s: float, windows_s: Sequence[float]) -> list[Sums]:
        """What was counted in each of the last `windows_s` seconds; all of them in one walk over the slots."""
        found: dict[int, Sums] = {}
        running = Sums()
        newest_first = sorted(self._slots_until(now_s), key=lambda entry: -entry[1])
        order = sorted(range(len(windows_s)), key=lambda at: windows_s[at])
        walk = iter(newest_first)
        pending = next(walk, None)
        for at in order:
            start_s = now_s - windows_s[at]
            while pending is not None and pending[1] > start_s:
                self._add_to(running, pending[0], pending[2])
                pending = next(walk, None)
            found[at] = _copy(running)
        return [found[at] for at in range(len(windows_s))]

    def between(self, start_s: float, end_s: float) -> Sums:
        """What was counted in slots that lie wholly within [start, end)."""
        sums = Sums()
        for tier, (length_s, _) in enumerate(TIERS):
            for number, slot in self._tiers[tier].items():
                if start_s <= number * length_s and (number + 1) * length_s <= end_s:
                    self._add_to(sums, tier, slot)
        return sums

    def blocks(self, now_s: float) -> list[tuple[float, Sums]]:
        """(start, what was counted) of the last 30 hours in blocks of `BLOCK_S`, oldest first.

        Blocks without a request and the one under way are left out.
        """
        whole: dict[int, Sums] = {}
        for tier in (0, 1):
            for number, slot in self._tiers[tier].items():
                block = number * TIERS[tier][0] // BLOCK_S
                self._add_to(whole.setdefault(block, Sums()), tier, slot)
        return [
            (float(block * BLOCK_S), sums)
            for block, sums in sorted(whole.items())
            if sums.requests and (block + 1) * BLOCK_S <= now_s
        ]

    def to_bytes(self) -> bytes:
        """Everything, to be kept."""
        saved = _Saved(
            tiers=self._tiers,
            version=2,
            born_s=self.born_s,
            promised_rps=self._promised_rps,
            promised_ms=self._promised_ms,
            hours=self.hours.all(),
        )
        return msgspec.msgpack.encode(saved)

    @staticmethod
    def from_bytes(data: bytes) -> ServiceWindow:
        """What `to_bytes` wrote. Raises InvalidInputError for anything else."""
        try:
            saved = msgspec.msgpack.decode(data, type=_Saved)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidInputError(f"The saved window cannot be read: {error}.") from error
        if saved.version != 2 or len(saved.tiers) != len(TIERS):
            raise InvalidInputError("The saved window is of another version.")
        window = ServiceWindow()
        for tier, slots in zip(window._tiers, saved.tiers, strict=True):
            for number, slot in slots.items():
                _check(slot)
                tier[number] = slot
        window.born_s, window.hours = saved.born_s, HourLog(saved.hours)
        window._promised_rps, window._promised_ms = saved.promised_rps, saved.promised_ms
        return window

    def _slot(self, at_s: float) -> _Slot:
        """The minute's slot, open."""
        minute = int(at_s // SLICE_S)
        if self.born_s is None:
            self.born_s = at_s
        if minute != self._minute:
            self._close_hours(at_s)
            self._roll(at_s)
            self._minute = minute
        slot = self._tiers[0].get(minute)
        if slot is None:
            slot = self._tiers[0][minute] = _Slot()
        return slot

    def _slots_until(self, now_s: float) -> Iterator[tuple[int, float, _Slot]]:
        """(tier, end, slot) of everything that has begun: a clock that was set back leaves slots in the future."""
        for tier, (length_s, _) in enumerate(TIERS):
            for number, slot in self._tiers[tier].items():
                if number * length_s <= now_s:
                    yield tier, float((number + 1) * length_s), slot

    def _add_to(self, sums: Sums, tier: int, slot: _Slot) -> None:
        slices, bad = slot.judged(self._promised_rps) if tier == 0 else (slot.slices, slot.bad_slices)
        sums.ok += slot.ok
        sums.failed += slot.failed
        sums.slices += slices
        sums.bad_slices += bad
        sums.observed += slot.observed
        slot.add_latency_to(sums.latency)

    def _close_hours(self, now_s: float) -> None:
        """Note every hour that has ended and is not noted yet."""
        ended = {
            number * length_s // HOUR_S
            for (length_s, _), slots in zip(TIERS[:3], self._tiers, strict=False)
            for number in slots
            if (number * length_s // HOUR_S + 1) * HOUR_S <= now_s
        }
        for number in sorted(ended):
            if number in self.hours:
                continue
            start_s = float(number * HOUR_S)
            sums = self.between(start_s, start_s + HOUR_S)
            self.hours.add(
                Hour(
                    start_s=start_s,
                    ok=sums.ok,
                    failed=sums.failed,
                    slow=0 if self._promised_ms is None else sums.latency.slower_than(self._promised_ms),
                    p99_ms=sums.latency.quantile(0.99),
                    slices=sums.slices,
                    bad_slices=sums.bad_slices,
                    observed=sums.observed,
                )
            )

    def _roll(self, now_s: float) -> None:
        """Close minutes; move what is too old for its tier to the next one; forget what is too old for the last."""
        for slot in self._tiers[0].values():
            slot.pack()
        for tier, (length_s, kept_s) in enumerate(TIERS):
            slots = self._tiers[tier]
            for number in [n for n in slots if (n + 1) * length_s <= now_s - kept_s]:
                slot = slots.pop(number)
                if tier == 0:
                    slot.slices, slot.bad_slices = slot.judged(self._promised_rps)
                if tier + 1 < len(TIERS):
                    _merge(self._tiers[tier + 1], number * length_s // TIERS[tier + 1][0], slot)


def _merge(slots: dict[int, _Slot], number: int, slot: _Slot) -> None:
    there = slots.get(number)
    if there is None:
        slots[number] = slot
        return
    there.ok += slot.ok
    there.failed += slot.failed
    there.slices += slot.slices
    there.bad_slices += slot.bad_slices
    there.observed += slot.observed
    whole = there.histogram()
    slot.add_latency_to(whole)
    there.keys = there.counts = b""
    there.buckets = whole.to_buckets()
    there.pack()


def _copy(sums: Sums) -> Sums:
    latency = Histogram()
    latency.counts = sums.latency.counts.copy()
    return Sums(sums.ok, sums.failed, sums.slices, sums.bad_slices, sums.observed, latency)


def _check(slot: _Slot) -> None:
    """Raises InvalidInputError unless a slot is one that `to_bytes` could have written."""
    check_buckets(slot.buckets)
    if len(slot.keys) % 2 or len(slot.counts) != 4 * len(slot.keys):
        raise InvalidInputError("A slot of the saved window is damaged.")
    keys, counts = slot.sparse()
    check_buckets(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
    if (
        len(set(keys.tolist())) != len(keys)
        or not 0 <= min(slot.ok, slot.failed) <= max(slot.ok, slot.failed) <= MAX_COUNT
    ):
        raise InvalidInputError("A slot of the saved window is damaged.")
