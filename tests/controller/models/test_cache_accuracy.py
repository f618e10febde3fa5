"""What each keep ratio leaves of a decoder's accuracy, over sequences, and the service around a pruned decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cached_decoder import build_decoder
from controller.models.cache_accuracy import KEEP_KNOB, decodings_of
from controller.models.cache_variants import CachePruning, pruned_cache
from controller.models.kv_cache import KEEP_RATIO
from controller.models.registry import ModelRegistry
from controller.services.single import Given, single_stage_service
from policies.ids import ModelName
from policies.knobs import kept_accuracy

DECODER = build_decoder()


def samples(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [
        {**DECODER.filled(20, seed=at), "x": rng.standard_normal((1, 1, 64)).astype(np.float32)} for at in range(count)
    ]


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    registry = ModelRegistry(tmp_path)
    registry.add("decoder", DECODER.model.SerializeToString(), samples=samples(1)[0], accuracy=0.9)
    return registry


@pytest.fixture
def pruned(registry: ModelRegistry) -> CachePruning:
    return pruned_cache(registry, "decoder", samples(3), keep=0.5, protect=1)


def test_samples_of_single_calls_become_sequences() -> None:
    given = samples(3)
    decodings = decodings_of(given, DECODER.past)
    assert len(decodings) == 3
    second = decodings[1]
    assert second.cache.keys() == set(DECODER.past.values())
    assert second.cache["past.key.0"] is given[1]["past.key.0"]
    assert [step["x"] is given[at]["x"] for step, at in zip(second.steps, (1, 2, 0, 1, 2, 0), strict=True)] == [
        True
    ] * 6


def test_what_a_ratio_leaves_is_measured_and_kept(
    pruned: CachePruning, registry: ModelRegistry, tmp_path: Path
) -> None:
    curve = pruned.knobs[KEEP_RATIO]
    assert [ratio for ratio, _ in curve] == [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    assert all(0.0 < share < 1.0 for _, share in curve)
    assert kept_accuracy(KEEP_KNOB, curve, 0.3) < kept_accuracy(KEEP_KNOB, curve, 0.9)
    given = Given(pruned.sample, None, 0.9, pruned.knobs)
    single_stage_service(registry, ModelName("decoder.cache"), pruned.content, given=given)
    kept = ModelRegistry(tmp_path).profile("decoder.cache")
    assert kept.knobs == pruned.knobs
    assert kept.accuracy == 0.9, "at its best end a knob costs nothing"


def test_a_service_around_it_has_the_ratio_as_a_knob_and_not_as_an_input(
    pruned: CachePruning, registry: ModelRegistry
) -> None:
    spec, profile, _ = single_stage_service(registry, ModelName("given"), pruned.content)
    (stage,) = spec.onnx_stages()
    assert stage.knobs == (KEEP_KNOB,)
    assert KEEP_RATIO not in stage.inputs
    assert KEEP_RATIO not in {tensor.name for tensor in spec.inputs}
    assert profile.knobs == {}, "what it costs was not measured by adding the file alone"
