"""The equivalence gate: cutting and splitting are believed only after both ways were run on a sample and compared.

Tolerances, and why:
- *chain* (all blocks in series against the whole): the same operators run, so most models come out bit for bit the same. Where a
  cut keeps the runtime from fusing, sums round differently; up to `CLOSE` of the largest magnitude is accepted and reported.
- *split* (items in groups against all at once): the same tolerance, except for models that quantise activations dynamically, where the
  scale is that of the whole batch by construction. For those each item's output must point the same way (cosine at least
  `MIN_COSINE`, which is what int8 itself costs); the profile's proof says so.
- integers and booleans must be equal, always.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from controller.models.extraction import Declaration, Piece, extract, piece, serialise
from controller.models.graph import Graph
from controller.models.layout import Partition
from controller.models.sessions import Arrays, open_session, run

CLOSE = 1e-4
"""Largest accepted difference, relative to the largest magnitude of the output."""
MIN_COSINE = 0.999
MIN_TIMED_RUNS, MAX_TIMED_RUNS = 2, 6
TIGHT = 0.03
"""Timing stops when one more run lowers the sum of the blocks' best times by less than this share."""
_DYNAMIC_QUANTISATION = frozenset(["DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"])

Array = np.ndarray[Any, Any]


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared when a model was registered."""

    chain_error: float
    """Largest difference of all blocks in series from the whole, relative; 0 when bit for bit the same."""
    split: str
    """One sentence on the split axis: proven, and how, or why not."""


@dataclass(slots=True)
class Chain:
    """All blocks of a partition, loaded one by one, as they would run on different agents."""

    name: str
    pieces: list[Piece]
    sessions: list[Any]
    file_bytes: list[int]
    best_ms: list[float] = field(default_factory=list)
    """Shortest time of each block since `forget_times`; the least disturbed one is the block's own cost."""

    @classmethod
    def load(
        cls, cut: Partition, declared: Mapping[str, Declaration], name: str, *, steps: Sequence[int] | None = None
    ) -> Chain:
        """Extract and load every block, or the ranges of blocks between `steps`. Raises ModelError if the runtime refuses one."""
        ranges = list(itertools.pairwise(range(len(cut.names) + 1) if steps is None else steps))
        pieces = [piece(cut, start, stop) for start, stop in ranges]
        chain = cls(name, pieces, [], [], [math.inf] * len(pieces))
        for start, stop in ranges:
            file = serialise(extract(cut, start, stop, declared))
            chain.sessions.append(open_session(file, f"block {start} of {name}"))
            chain.file_bytes.append(len(file))
        return chain

    def run(self, feeds: Mapping[str, Array]) -> Arrays:
        """Everything that any block read or wrote; updates `best_ms`."""
        values = dict(feeds)
        for at, (part, session) in enumerate(zip(self.pieces, self.sessions, strict=True)):
            needed = {key: values[key] for key in part.inputs}
            began_s = time.thread_time()  # sessions have one thread: what else the machine does is not counted
            made = run(session, needed, part.outputs, f"block {at} of {self.name}")
            self.best_ms[at] = min(self.best_ms[at], (time.thread_time() - began_s) * 1000)
            values |= made
        return values

    def time(self, feeds: Mapping[str, Array]) -> tuple[float, ...]:
        """Milliseconds of each block on `feeds`: the best of a few runs after one that warms up; fewer runs if they agree."""
        self.run(feeds)
        self.best_ms = [math.inf] * len(self.pieces)
        before_ms = math.inf
        for number in range(1, MAX_TIMED_RUNS + 1):
            self.run(feeds)
            now_ms = sum(self.best_ms)
            if number >= MIN_TIMED_RUNS and now_ms > before_ms * (1 - TIGHT):
                break
            before_ms = now_ms
        return tuple(self.best_ms)


def difference(expected: Array, actual: Array) -> float:
    """Largest difference relative to the largest finite magnitude; 0 if bit for bit the same, infinity if not comparable."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return math.inf
    if np.array_equal(expected, actual, equal_nan=expected.dtype.kind == "f"):
        return 0.0
    if expected.dtype.kind != "f":
        return math.inf
    special = ~np.isfinite(expected)
    if (
        not np.array_equal(expected[special], actual[special], equal_nan=True)
        or not np.isfinite(actual[~special]).all()
    ):
        return math.inf
    left, right = expected[~special].astype(np.float64), actual[~special].astype(np.float64)
    return float(np.abs(left - right).max() / max(np.abs(left).max(), np.finfo(np.float32).tiny))


def largest_difference(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> float:
    """The worst `difference` of any output."""
    return max(difference(array, actual[key]) for key, array in expected.items())


def prove_split(graph: Graph, session: Any, sample: Arrays, together: Arrays, name: str) -> tuple[bool, str]:
    """Whether items along axis 0 are independent, with one sentence; `together` are the outputs for all items at once.

    The items run as first and rest, and as all but the last and last, so that every item is seen at another place of another
    batch.
    """
    items = {array.shape[0] if array.ndim else 0 for array in (*sample.values(), *together.values())}
    count = next(iter(items))
    if len(items) != 1 or count < 2:
        return False, "not proven: inputs and outputs do not all have the items (at least two) along their first axis"
    if not _distinct(sample, count):
        return False, "not proven: all items of the sample are alike"
    worst, dynamic = 0.0, any(node.op_type in _DYNAMIC_QUANTISATION for node in graph.nodes)
    for groups in (((0, 1), (1, count)), ((0, count - 1), (count - 1, count))):
        apart = _run_groups(graph, session, sample, groups, name)
        worst = max(worst, largest_difference(together, apart))
        if worst > CLOSE and not (dynamic and _same_direction(together, apart)):
            return False, f"not proven: running items apart changes the result (relative difference {worst:.2g})"
    if worst > CLOSE:
        return True, f"proven within cosine {MIN_COSINE}: activations are quantised with the scale of the whole batch"
    return True, "proven: bit for bit the same" if worst == 0 else f"proven: relative difference {worst:.2g}"


def items_until(cut: Partition, chain: Chain, sample: Arrays) -> int:
    """How many leading blocks are proven to act item by item on `sample`, so that the items may be gathered behind them.

    What crosses the cut behind them must have the items along axis 0, and be the same for items that run apart.
    """
    count = next(iter(sample.values())).shape[0]
    if count < 2 or any(array.ndim == 0 or array.shape[0] != count for array in sample.values()):
        return 0
    together = chain.run(sample)
    groups = ((0, 1), (1, count))
    parts = [chain.run({key: array[start:stop] for key, array in sample.items()}) for start, stop in groups]
    until = 0
    for block in range(1, len(cut.names)):
        crossing = {name: together[name] for name in cut.crossing(block)}
        if any(array.ndim == 0 or array.shape[0] != count for array in crossing.values()):
            continue
        if any(part[name].ndim == 0 for part in parts for name in crossing):
            continue
        apart = {name: np.concatenate([part[name] for part in parts]) for name in crossing}
        if largest_difference(crossing, apart) > CLOSE:
            break
        until = block
    return until


def _run_groups(graph: Graph, session: Any, sample: Arrays, groups: Sequence[tuple[int, int]], name: str) -> Arrays:
    parts = [
        run(session, {key: array[start:stop] for key, array in sample.items()}, graph.outputs, name)
        for start, stop in groups
    ]
    return {key: np.concatenate([part[key] for part in parts]) for key in graph.outputs}


def _distinct(sample: Arrays, count: int) -> bool:
    """True if every item differs from the one before it: with equal items any mixing of items would go unseen."""
    return all(
        any(
            not np.array_equal(array[item - 1], array[item], equal_nan=array.dtype.kind == "f")
            for array in sample.values()
        )
        for item in range(1, count)
    )


def _same_direction(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> bool:
    return all(_cosine(expected[key], actual[key]) >= MIN_COSINE for key in expected)


def _cosine(expected: Array, actual: Array) -> float:
    """The smallest cosine of any item; -1 for integers that differ, which have no direction."""
    if expected.dtype.kind != "f" or expected.shape != actual.shape:
        return 1.0 if np.array_equal(expected, actual) else -1.0
    return min(item_cosines(expected, actual))


def item_cosines(expected: Array, actual: Array) -> list[float]:
    """Cosine of each item along axis 0; 1 where both are nothing, 0 where one of the two is, and for other shapes."""
    if expected.shape != actual.shape or expected.ndim == 0:
        return [1.0 if np.array_equal(expected, actual) else 0.0]
    left, right = (array.reshape(len(array), -1).astype(np.float64) for array in (expected, actual))
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    dots = (left * right).sum(axis=1)
    alike = np.where(left.any(axis=1) | right.any(axis=1), 0.0, 1.0)
    cosines: list[float] = np.where(lengths > 0, dots / np.where(lengths > 0, lengths, 1.0), alike).tolist()
    return cosines
