"""What each keep ratio leaves of a decoder's accuracy, measured when its pruned variant is made.

What pruning costs shows in the calls that follow, so sequences are decoded step by step with the cache that each ratio leaves, beside the
unpruned decoder. As for other variants, accuracy is stood in for by fidelity: the mean cosine of the outputs that are no cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controller.models.kv_cache import KEEP_RATIO
from controller.models.proving import item_cosines
from controller.models.sessions import Arrays, run
from policies.service import Knob

RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""What is measured; below the least of them nothing is known, so an accuracy floor allows nothing there."""
KEEP_KNOB = Knob(name="keep", input=KEEP_RATIO, default=1.0, low=0.05, high=1.0)
_STEPS = 6
_MAX_DECODINGS = 8


@dataclass(frozen=True, slots=True)
class Decoding:
    """One sequence."""

    cache: Arrays
    """Cache inputs of the first step."""
    steps: tuple[Arrays, ...]
    """All other inputs of each step."""


def decodings_of(samples: Sequence[Arrays], past: Mapping[str, str]) -> list[Decoding]:
    """Sequences that begin at samples of single calls and go on with what the samples behind them feed, around to the first again."""
    caches = set(past.values())
    fed = [{key: value for key, value in sample.items() if key not in caches} for sample in samples]
    found = []
    for at in range(min(len(samples), _MAX_DECODINGS)):
        begins = {key: value for key, value in samples[at].items() if key in caches}
        alike = [one for one in (*fed[at:], *fed[:at]) if _shapes(one) == _shapes(fed[at])]
        found.append(Decoding(begins, tuple(alike[step % len(alike)] for step in range(_STEPS))))
    return found


def keep_curve(
    plain: Any, pruned: Any, past: Mapping[str, str], decodings: Sequence[Decoding], name: str, *,
    ratios: Sequence[float] = RATIOS,
) -> tuple[tuple[float, float], ...]:  # fmt: skip
    """(keep ratio, share of the accuracy that is left) for each ratio, from the largest on.

    `plain` and `pruned` are sessions of the decoder without and with pruning; `past` maps each cache output to the input that takes it at
    the next step. Raises ModelError if they cannot run.
    """
    outputs = [value.name for value in plain.get_outputs()]
    expected = [_decoded(plain, decoding, outputs, past, {}, name) for decoding in decodings]
    points = []
    for ratio in sorted(ratios, reverse=True):
        turned = {KEEP_RATIO: np.array(ratio, np.float32)}
        found = [_decoded(pruned, decoding, outputs, past, turned, name) for decoding in decodings]
        points.append((ratio, _fidelity(expected, found)))
    return tuple(points)


def _decoded(
    session: Any, decoding: Decoding, outputs: Sequence[str], past: Mapping[str, str], turned: Arrays, name: str
) -> list[Arrays]:
    """What each step but the first gives besides the cache: the first sees no pruned cache yet."""
    cache, results = dict(decoding.cache), []
    for step in decoding.steps:
        made = run(session, {**cache, **step, **turned}, outputs, name)
        cache = {taken: made[given] for given, taken in past.items()}
        results.append({key: value for key, value in made.items() if key not in past})
    return results[1:]


def _fidelity(expected: Sequence[Sequence[Arrays]], found: Sequence[Sequence[Arrays]]) -> float:
    cosines = [
        cosine
        for one, other in zip(expected, found, strict=True)
        for left, right in zip(one, other, strict=True)
        for key in left
        for cosine in item_cosines(left[key], right[key])
    ]
    return min(1.0, max(0.0, statistics.fmean(cosines)))


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {key: array.shape for key, array in arrays.items()}
