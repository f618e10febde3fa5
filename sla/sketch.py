"""Latencies as a sketch: any quantile within 1 % of the true value, mergeable, small, and safe to accept from a wire.

The sketch is DDSketch (Masson, Rim, Lee: "DDSketch: A fast and fully-mergeable quantile sketch with relative-error guarantees",
VLDB 2019) from the `ddsketch` package; here it gets milliseconds, bounds, and a sparse form for messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
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


SIZE = MAX_KEY - MIN_KEY + 1
VALUES_MS: npt.NDArray[np.float64] = np.array([_MAPPING.value(key) for key in range(MIN_KEY, MAX_KEY + 1)])
"""The latency that each bucket stands for; every latency in it is within 1 % of that."""


class Histogram:
    """Sums of many sketches as one column of counts: quick to add to, and it counts what is slower than a limit."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(SIZE, dtype=np.int64)

    def add(self, keys: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
        """Add counts of different buckets, which must have been checked."""
        self.counts[keys - MIN_KEY] += counts

    def add_values(self, values_ms: npt.NDArray[np.float64]) -> None:
        """Count many latencies at once, into the buckets that `LatencySketch.add` would choose."""
        bounded = np.clip(values_ms[~np.isnan(values_ms)], MIN_MS, MAX_MS)
        keys = np.ceil(np.log(bounded) / math.log(_MAPPING.gamma)).astype(np.int64)
        np.add.at(self.counts, np.clip(keys, MIN_KEY, MAX_KEY) - MIN_KEY, 1)

    def add_buckets(self, buckets: Mapping[int, int]) -> None:
        """Add a sparse form, which must have been checked."""
        for key, count in buckets.items():
            self.counts[key - MIN_KEY] += count

    def to_buckets(self) -> Buckets:
        """The sparse form."""
        return {int(at) + MIN_KEY: int(self.counts[at]) for at in np.flatnonzero(self.counts)}

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def quantile(self, q: float) -> float | None:
        """The latency that a share `q` of requests does not exceed, within 1 %; None while empty. The same as `LatencySketch`."""
        reached = np.cumsum(self.counts)
        total = int(reached[-1])
        if total == 0:
            return None
        at = int(np.searchsorted(reached, q * (total - 1), side="right"))
        return float(VALUES_MS[min(at, SIZE - 1)])

    def slower_than(self, limit_ms: float) -> int:
        """How many took longer than `limit_ms`; those within 1 % of it may be counted either way."""
        return int(self.counts[int(np.searchsorted(VALUES_MS, limit_ms, side="right")) :].sum())
