"""A decoder with a pruned cache, registered beside its base. It reads and writes more than its base, so it is a model and a service of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controller.models.cache_accuracy import decodings_of, keep_curve
from controller.models.graph import build_graph, read_file, read_model
from controller.models.kv_cache import KEEP_RATIO, CachedAttention, cached_attention, past_inputs, prune_cache
from controller.models.registry import ModelRegistry
from controller.models.samples import check_sample
from controller.models.sessions import Arrays, open_session, run
from controller.models.variants import fidelity_of
from sla.errors import ModelError, NotFoundError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachePruning:
    """What was measured."""

    content: bytes
    sample: Arrays
    """Inputs of the pruned model, everything kept."""
    fidelity: float
    """Of everything kept to the base, by mean cosine: what pruning itself changes in this call, which should be nothing."""
    cosine: float
    difference: float
    knobs: dict[str, tuple[tuple[float, float], ...]]
    """What each keep ratio leaves of the accuracy; empty where the caches do not grow from inputs, so that it could not be measured."""
    cache_ratio: float
    """Bytes of the caches that come out at `keep` over those that come out of the base."""
    size_ratio: float


def pruned_cache(
    registry: ModelRegistry, base: str, samples: Sequence[Arrays], *, keep: float, protect: int
) -> CachePruning:
    """Prune the cache of a registered decoder. Raises NotFoundError, or ModelError if its caches are not found."""
    path = registry.blob_path(registry.profile(base).sha256)
    if path is None:
        raise NotFoundError(f"The registry has lost the file of {base}; add the model again.")
    if not samples:
        raise ModelError(f"A variant of {base} is measured on samples; there is none.")
    original = read_file(path)
    model = read_model(original, base)[0]
    graph = build_graph(model, base)
    layers = cached_attention(model)
    content = prune_cache(model, layers, protect=protect).SerializeToString(deterministic=True)
    one, other = open_session(original, base), open_session(content, base)
    caches = [name for layer in layers for name in (layer.key, layer.value)]
    pairs: list[tuple[Arrays, Arrays]] = []
    before = after = 0
    for sample in (check_sample(graph, each, base) for each in samples):
        whole = run(one, sample, graph.outputs, base)
        pairs.append((whole, run(other, {**sample, KEEP_RATIO: np.array(1, np.float32)}, graph.outputs, base)))
        kept = run(other, {**sample, KEEP_RATIO: np.array(keep, np.float32)}, caches, base)
        before += sum(whole[name].nbytes for name in caches)
        after += sum(array.nbytes for array in kept.values())
    fidelity, cosine, worst = fidelity_of(pairs, class_scores=False)
    full = {**check_sample(graph, samples[0], base), KEEP_RATIO: np.array(1, np.float32)}
    knobs = _knobs(model, layers, samples, one, other, base)
    return CachePruning(
        content, full, fidelity, cosine, worst, knobs, after / max(before, 1), len(content) / len(original)
    )  # fmt: skip


def _knobs(
    model: Any, layers: Sequence[CachedAttention], samples: Sequence[Arrays], one: Any, other: Any, base: str
) -> dict[str, tuple[tuple[float, float], ...]]:
    try:
        past = past_inputs(model, layers)
        return {KEEP_RATIO: keep_curve(one, other, past, decodings_of(samples, past), base)}
    except ModelError as error:
        # A decoder whose caller keeps a mask or positions by entry cannot be decoded here; it still can be pruned.
        _log.warning("what a keep ratio of %s costs could not be measured: %s", base, error)
        return {}
