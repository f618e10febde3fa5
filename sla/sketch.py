"""Latencies as a sketch: any quantile within 1 % of the true value, mergeable, small, and safe to accept from a wire.

The sketch is DDSketch (Masson, Rim, Lee: "DDSketch: A fast and fully-mergeable quantile sketch with relative-error guarantees",
VLDB 2019) from the `ddsketch` package; here it gets milliseconds, bounds, and a sparse form for messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ddsketch.ddsketch import BaseDDSketch
from ddsketch.mapping import LogarithmicMapping
from ddsketch.store import DenseStore

from sla.errors import InvalidInputError

RELATIVE_ERROR = 0.01
MIN_MS = 1e-3
MAX_MS = 1e7
"""Latencies are clamped to this range (a microsecond to almost three hours)."""
MAX_COUNT = 10**12
"""Requests that one bucket of a message may claim."""

_MAPPING = LogarithmicMapping(RELATIVE_ERROR)
MIN_KEY: int = _MAPPING.key(MIN_MS)
MAX_KEY: int = _MAPPING.key(MAX_MS)

Buckets = dict[int, int]
"""Bucket number -> requests in it; the sparse form of a sketch."""


class LatencySketch:
    """Counts of latencies in logarithmic buckets; at most about 1,150 of them whatever is added."""

    def __init__(self) -> None:
        self._store = DenseStore()
        self._sketch = BaseDDSketch(_MAPPING, self._store, DenseStore(), 0.0)

    @property
    def count(self) -> int:
        return int(self._sketch.count + 0.5)

    def add(self, ms: float, count: int = 1) -> None:
        """Count latencies. Not-a-number is dropped; what lies outside the range is clamped."""
        if not math.isnan(ms) and count > 0:
            self._sketch.add(min(max(ms, MIN_MS), MAX_MS), float(count))

    def quantile(self, q: float) -> float | None:
        """The latency that a share `q` of requests does not exceed, within 1 %; None while empty."""
        value = self._sketch.get_quantile_value(q)
        return None if value is None else float(value)

    def merge(self, other: LatencySketch) -> None:
        """Add everything that another sketch counted."""
        self._sketch.merge(other._sketch)

    def to_buckets(self) -> Buckets:
        """The sparse form, for messages and for keeping."""
        offset = self._store.offset
        return {at + offset: round(count) for at, count in enumerate(self._store.bins) if count > 0}

    def add_buckets(self, buckets: Mapping[int, int]) -> None:
        """Add a sparse form. Raises InvalidInputError, and adds nothing, when it is out of bounds."""
        check_buckets(buckets)
        for key, count in buckets.items():
            self._sketch.add(_MAPPING.value(key), float(count))


def check_buckets(buckets: Mapping[int, int]) -> None:
    """Raises InvalidInputError unless every bucket and every count is one that a sketch can have."""
    if len(buckets) > MAX_KEY - MIN_KEY + 1:
        raise InvalidInputError(
            f"A latency sketch has {len(buckets)} buckets; there are {MAX_KEY - MIN_KEY + 1}.",
            found=f"{len(buckets)} buckets",
        )
    for key, count in buckets.items():
        if not (MIN_KEY <= key <= MAX_KEY and 0 < count <= MAX_COUNT):
            raise InvalidInputError(
                f"Bucket {key} of a latency sketch counts {count}; accepted are buckets {MIN_KEY} to {MAX_KEY} with 1 to {MAX_COUNT}.",
                found=f"{key}: {count}", accepted=f"{MIN_KEY} to {MAX_KEY}, counts 1 to {MAX_COUNT}",
            )  # fmt: skip


def merge_buckets(into: Buckets, buckets: Mapping[int, int]) -> None:
    """Add the counts of `buckets`, which must have been checked."""
    for key, count in buckets.items():
        into[key] = into.get(key, 0) + count
