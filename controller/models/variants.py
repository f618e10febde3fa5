"""Variants of a registered model (other precision, pruned tokens), each added under its own name with its measured accuracy.

Accuracy of a variant is the accuracy of its base times its *fidelity*: the share of items whose strongest class is the same, for outputs of class scores; the
mean cosine of the outputs of each item otherwise. That stands in for right answers where nobody has a labelled set; a service that has one
measures its variants itself (`services.accuracy`). The gate holds plans to the contract's `accuracy_floor` with this figure.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.activations import pack, unpack
from controller.models.graph import read_file, read_model
from controller.models.proving import difference, item_cosines, largest_difference
from controller.models.registry import ModelRegistry
from controller.models.sessions import Arrays, open_session, run
from policies.ids import ModelName
from policies.plan import Span
from policies.service import ActivationFormat, Axis, ModelProfile
from sla.errors import ModelError, NotFoundError

_TIMED_RUNS = 3


@dataclass(frozen=True, slots=True)
class Variant:
    """What was measured of a variant against its base."""

    profile: ModelProfile
    fidelity: float
    """In [0, 1]; see the module."""
    cosine: float
    """Smallest cosine of any item of any output."""
    difference: float
    """Largest difference relative to the largest magnitude; infinite if shapes differ."""
    time_ratio: float
    """Time of a run over that of the base."""
    size_ratio: float


def add_variant(
    registry: ModelRegistry,
    base: str,
    suffix: str,
    transform: Callable[[Any], Any],
    samples: Sequence[Arrays],
    *,
    axis: Axis | None = None,
    class_scores: bool = False,
) -> Variant:
    """Register `transform` of `base` as `BASE.SUFFIX`, with its accuracy measured on `samples` (inputs of the model).

    Raises NotFoundError for an unknown base, ModelError if there is no sample or the variant cannot be examined; nothing is added then.
    """
    if not samples:
        raise ModelError(f"A variant of {base} is measured on samples; there is none.")
    before = registry.profile(base)
    path = registry.blob_path(before.sha256)
    if path is None:
        raise NotFoundError(f"The registry has lost the file of {base}; add the model again.")
    original = read_file(path)
    changed = transform(read_model(original, base)[0]).SerializeToString(deterministic=True)
    measured = _compare(original, changed, samples, f"{base}.{suffix}", class_scores)
    fidelity, cosine, error, time_ratio = measured
    name = f"{base}.{suffix}"
    profile = registry.add(name, changed, axis=axis, samples=samples[0], accuracy=before.accuracy * fidelity)
    return Variant(profile, fidelity, cosine, error, time_ratio, len(changed) / len(original))


def _compare(
    original: bytes, changed: bytes, samples: Sequence[Arrays], name: str, class_scores: bool
) -> tuple[float, float, float, float]:
    one, other = open_session(original, name), open_session(changed, name)
    outputs = [value.name for value in one.get_outputs()]
    cosines: list[float] = []
    alike: list[float] = []
    worst = 0.0
    for sample in samples:
        expected, found = run(one, sample, outputs, name), run(other, sample, outputs, name)
        worst = max(worst, largest_difference(expected, found))
        for key in outputs:
            cosines.extend(item_cosines(expected[key], found[key]))
            if class_scores and expected[key].shape == found[key].shape:
                same = expected[key].argmax(axis=-1) == found[key].argmax(axis=-1)
                alike.append(float(np.mean(same)))
    fidelity = statistics.fmean(alike) if alike else statistics.fmean(cosines)
    first = samples[0]
    ratio = _time_ms(lambda: run(other, first, outputs, name)) / _time_ms(lambda: run(one, first, outputs, name))
    return min(1.0, max(0.0, fidelity)), min(cosines), worst, ratio


def _time_ms(once: Callable[[], Mapping[str, Any]]) -> float:
    times = []
    for _ in range(_TIMED_RUNS):
        began_s = time.perf_counter()
        once()
        times.append((time.perf_counter() - began_s) * 1000)
    return max(min(times), 1e-6)


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """What sending activations in fewer bits costs at some cuts of a model."""

    cosine: float
    """Smallest cosine of any item of any output to the result without it."""
    difference: float
    """Largest difference relative to the largest magnitude."""
    bytes_ratio: float
    """Bytes that cross the cuts over those without it."""


def activation_cost(
    registry: ModelRegistry, name: str, cuts: Sequence[int], how: ActivationFormat, samples: Sequence[Arrays]
) -> ActivationCost:
    """Run the model as shards between `cuts` (numbers of blocks), with values packed at each of them, against running it plainly.

    Raises NotFoundError for a model or a cut that is not there.
    """
    count = len(registry.profile(name).blocks)
    parts = [registry.part(name, Span(a, b)) for a, b in itertools.pairwise([0, *sorted(cuts), count])]
    sessions = [open_session(part.content, name) for part in parts]
    cosines: list[float] = []
    worst, plain_bytes, packed_bytes = 0.0, 0, 0
    for sample in samples:
        plainly, packed = dict(sample), dict(sample)
        for at, (part, session) in enumerate(zip(parts, sessions, strict=True)):
            plainly |= run(session, {key: plainly[key] for key in part.inputs}, part.outputs, name)
            packed |= run(session, {key: packed[key] for key in part.inputs}, part.outputs, name)
            if at < len(parts) - 1:
                needed = {key for later in parts[at + 1 :] for key in later.inputs}
                onward = {key: value for key, value in packed.items() if key in needed}
                sent, which = pack(onward, how)
                plain_bytes += sum(value.nbytes for value in onward.values())
                packed_bytes += sum(value.nbytes for value in sent.values())
                packed |= unpack(sent, which)
        outputs = {key: (plainly[key], packed[key]) for key in parts[-1].outputs}
        cosines.extend(cosine for pair in outputs.values() for cosine in item_cosines(*pair))
        worst = max(worst, *(difference(*pair) for pair in outputs.values()))
    return ActivationCost(min(cosines), worst, packed_bytes / max(plain_bytes, 1))


def variant_names(registry: ModelRegistry, base: str) -> tuple[ModelName, ...]:
    """The base and its variants, for the `variants` of a stage."""
    return tuple(name for name in sorted(registry.profiles()) if name == base or name.startswith(f"{base}."))
