"""How much of the memory bandwidth our shards use. Estimated: bytes are counted from files and shapes, and caches may save some of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from agents.messages import ShardFile

_SMOOTHING_S = 2.0
"""Reports come every half second, and a run may take as long: the use is averaged over about this time."""


class BandwidthMeter:
    """Counts what runs move; `use` compares it with what the device was measured to copy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()
        self._moved_bytes = 0
        self._bytes_per_s = 0.0

    def ran(
        self, file: ShardFile, feed: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], items: int
    ) -> None:
        """One run of a shard has ended."""
        self._moved_bytes += moved_bytes(file, feed, outputs, items)

    def use(self, copy_bytes_per_s: float | None) -> float | None:
        """Share of the bandwidth used lately, [0, 1]; None while the device was not measured. Call it about once per report."""
        now_s = self._clock()
        passed_s = now_s - self._since_s
        if passed_s > 0.0:
            weight = min(1.0, passed_s / _SMOOTHING_S)
            self._bytes_per_s += weight * (self._moved_bytes / passed_s - self._bytes_per_s)
            self._since_s, self._moved_bytes = now_s, 0
        if copy_bytes_per_s is None or not copy_bytes_per_s > 0.0:
            return None
        return min(1.0, self._bytes_per_s / copy_bytes_per_s)


def moved_bytes(file: ShardFile, feed: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray], items: int) -> int:
    """Bytes that one run reads and writes: the weights once, and the activations, of which at least inputs and outputs are known."""
    ends = sum(tensor.nbytes for tensor in (*feed.values(), *outputs.values()))
    return file.size_bytes + max(ends, file.moved_bytes_per_item * items)
