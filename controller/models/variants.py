"""Variants of a registered model (other precision, pruned tokens), each added under its own name with its measured accuracy.

With labels, accuracy is the share of items whose strongest class is the right one. Without, it is that of the base times the *fidelity*: the share of
items whose strongest class is that of the base, for outputs of class scores; the mean cosine of the outputs of each item otherwise. That stands
in for right answers where nobody has a labelled set. The gate holds plans to the contract's `accuracy_floor` with this figure.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from agents.activations import pack, unpack
from controller.models.graph import build_graph, read_file, read_model
from controller.models.packages import Progress
from controller.models.proving import item_cosines, largest_difference
from controller.models.registry import ModelRegistry
from controller.models.samples import SAMPLE_ITEMS, check_sample
from controller.models.sessions import Arrays, open_session, run
from policies.ids import ModelName
from policies.plan import Span
from policies.service import ActivationFormat, Axis, ModelProfile
from sla.errors import ModelError, NotFoundError

_TIMED_ROUNDS = 5

Labels = np.ndarray[Any, Any]


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
    """Processor time of a run over that of the base, both on one thread."""
    size_ratio: float
    right: float | None = None
    """Share of the labels that it got right; None without labels."""
    base_right: float | None = None


def add_variant(
    registry: ModelRegistry,
    base: str,
    suffix: str,
    transform: Callable[[Any], Any],
    samples: Sequence[Arrays],
    *,
    axis: Axis | None = None,
    class_scores: bool = False,
    labels: Labels | None = None,
    progress: Progress = lambda sentence: None,
) -> Variant:
    """Register `transform` of `base` as `BASE.SUFFIX`, with its accuracy measured on `samples` (inputs of the model).

    Raises NotFoundError for an unknown base; ModelError if there is no sample, if the variant cannot be examined, or if it cannot stand in
    for its base because it reads or writes something else. Nothing is added then.
    """
    name = f"{base}.{suffix}"
    if not samples:
        raise ModelError(f"A variant of {base} is measured on samples; there is none.")
    before = registry.profile(base)
    if before.shard_limit_bytes:
        raise ModelError(f"{base} is larger than one file may be; there is no room to run it beside a variant of it.")
    path = registry.blob_path(before.sha256)
    if path is None:
        raise NotFoundError(f"The registry has lost the file of {base}; add the model again.")
    original = read_file(path)
    model = read_model(original, base)[0]
    graph = build_graph(model, base)
    samples = [check_sample(graph, sample, base) for sample in samples]
    progress(f"making {name}")
    made = transform(model)
    _check_interface(model, made, name)
    changed = made.SerializeToString(deterministic=True)
    progress(f"comparing {name} with {base} on {len(samples)} sample{'s' if len(samples) > 1 else ''}")
    measured = _compare(original, changed, samples, name, class_scores, labels)
    accuracy = before.accuracy * measured.fidelity if measured.right is None else measured.right
    profile = registry.add(
        name, changed, axis=axis, samples=_for_proof(samples, axis), accuracy=accuracy, progress=progress
    )
    return Variant(
        profile, measured.fidelity, measured.cosine, measured.difference, measured.time_ratio, len(changed) / len(original),
        measured.right, measured.base_right,
    )  # fmt: skip


def _check_interface(model: Any, made: Any, name: str) -> None:
    """Raise ModelError unless `made` reads and writes the tensors of `model`, by name and type."""
    for kind in ("input", "output"):
        wanted, found = _types(model.graph, kind), _types(made.graph, kind)
        if wanted != found:
            raise ModelError(
                f"{name} cannot stand in for its base: its {kind}s are {_listed(found)}, not {_listed(wanted)}.",
                pointer=f"/graph/{kind}", found=_listed(found), accepted=_listed(wanted),
            )  # fmt: skip


def _types(graph: Any, kind: str) -> dict[str, str]:
    weights = {tensor.name for tensor in graph.initializer}
    values = getattr(graph, kind)
    return {
        value.name: onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
        for value in values
        if value.name not in weights
    }


def _listed(types: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in sorted(types.items()))


def _for_proof(samples: Sequence[Arrays], axis: Axis | None) -> Arrays:
    """A sample with a few different items along axis 0 where there is an axis to prove, made of single ones if need be."""
    first = samples[0]
    if axis is None or any(array.ndim == 0 or len(array) > 1 for array in first.values()):
        return first
    alike = [s for s in samples if all(s[key].shape == array.shape for key, array in first.items())][:SAMPLE_ITEMS]
    return {key: np.concatenate([sample[key] for sample in alike]) for key in first}


@dataclass(frozen=True, slots=True)
class _Measured:
    fidelity: float
    cosine: float
    difference: float
    time_ratio: float
    right: float | None
    base_right: float | None


def _compare(
    original: bytes, changed: bytes, samples: Sequence[Arrays], name: str, class_scores: bool, labels: Labels | None
) -> _Measured:
    one, other = open_session(original, name), open_session(changed, name)
    outputs = [value.name for value in one.get_outputs()]
    pairs = [(run(one, sample, outputs, name), run(other, sample, outputs, name)) for sample in samples]
    fidelity, cosine, worst = fidelity_of(pairs, class_scores=class_scores or labels is not None)
    right = base_right = None
    if labels is not None:
        base_right, right = (right_share([pair[at] for pair in pairs], labels, name) for at in (0, 1))
    return _Measured(fidelity, cosine, worst, _time_ratio(one, other, samples[0], outputs, name), right, base_right)


def fidelity_of(pairs: Sequence[tuple[Arrays, Arrays]], *, class_scores: bool) -> tuple[float, float, float]:
    """(fidelity, smallest cosine, largest difference) of outputs that were found to those that were expected."""
    cosines: list[float] = []
    alike: list[float] = []
    worst = 0.0
    for expected, found in pairs:
        worst = max(worst, largest_difference(expected, found))
        for key, array in expected.items():
            cosines.extend(item_cosines(array, found[key]))
            if class_scores and array.shape == found[key].shape and array.ndim:
                alike.append(float(np.mean(array.argmax(axis=-1) == found[key].argmax(axis=-1))))
    fidelity = statistics.fmean(alike) if alike else statistics.fmean(cosines)
    return min(1.0, max(0.0, fidelity)), min(cosines), worst


def right_share(outputs: Sequence[Arrays], labels: Labels, name: str) -> float:
    """Share of the items whose strongest class is the label, by the first output. Raises ModelError if they do not pair up."""
    scores = [next(iter(each.values())) for each in outputs]
    if any(array.ndim != 2 for array in scores):
        raise ModelError(
            f"Labels need class scores [items, classes]; the first output of {name} has shape {list(scores[0].shape)}.",
            found=str(list(scores[0].shape)), accepted="[items, classes]",
        )  # fmt: skip
    chosen = np.concatenate([array.argmax(axis=-1) for array in scores])
    if len(chosen) != len(labels):
        raise ModelError(
            f"There are {len(labels)} labels for {len(chosen)} items in the samples.",
            found=str(len(labels)), accepted=str(len(chosen)),
        )  # fmt: skip
    return float(np.mean(chosen == labels))


def _time_ratio(one: Any, other: Any, sample: Arrays, outputs: Sequence[str], name: str) -> float:
    """Best processor time of `other` over that of `one`, in turns, so that both see the same machine."""
    best = [float("inf"), float("inf")]
    for _ in range(_TIMED_ROUNDS):
        for at, session in enumerate((one, other)):
            began_s = time.thread_time()  # a session runs in the thread that calls it
            run(session, sample, outputs, name)
            best[at] = min(best[at], time.thread_time() - began_s)
    return best[1] / max(best[0], 1e-9)


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """What sending activations in fewer bits costs at some cuts of a model."""

    cosine: float
    """Smallest cosine of any item of any output to the result without it."""
    difference: float
    """Largest difference relative to the largest magnitude."""
    bytes_ratio: float
    """Bytes that cross the cuts over those without it."""
    fidelity: float
    """What is left of the accuracy, see the module."""


def activation_cost(
    registry: ModelRegistry,
    name: str,
    cuts: Sequence[int],
    how: ActivationFormat,
    samples: Sequence[Arrays],
    *,
    class_scores: bool = False,
) -> ActivationCost:
    """Run the model as shards between `cuts` (numbers of blocks), with values packed at each of them, against running it plainly.

    Raises NotFoundError for a model or a cut that is not there.
    """
    count = len(registry.profile(name).blocks)
    parts = [registry.part(name, Span(a, b)) for a, b in itertools.pairwise([0, *sorted(cuts), count])]
    sessions = [open_session(part.content, name) for part in parts]
    pairs: list[tuple[Arrays, Arrays]] = []
    plain_bytes, packed_bytes = 0, 0
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
        pairs.append(
            ({key: plainly[key] for key in parts[-1].outputs}, {key: packed[key] for key in parts[-1].outputs})
        )
    fidelity, cosine, worst = fidelity_of(pairs, class_scores=class_scores)
    return ActivationCost(cosine, worst, packed_bytes / max(plain_bytes, 1), fidelity)


def variant_names(registry: ModelRegistry, base: str) -> tuple[ModelName, ...]:
    """The base and its variants, for the `variants` of a stage."""
    return tuple(name for name in sorted(registry.profiles()) if name == base or name.startswith(f"{base}."))
