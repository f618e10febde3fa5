"""A decoder with a pruned cache, registered beside its base. It reads and writes more than its base, so it is a model and a service of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.models.graph import build_graph, read_file, read_model
from controller.models.kv_cache import KEEP_RATIO, cached_attention, prune_cache
from controller.models.registry import ModelRegistry
from controller.models.samples import check_sample
from controller.models.sessions import Arrays, open_session, run
from controller.models.variants import fidelity_of
from sla.errors import ModelError, NotFoundError


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
    return CachePruning(content, full, fidelity, cosine, worst, after / max(before, 1), len(content) / len(original))
