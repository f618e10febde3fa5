"""Real weights beyond the demo's: a voice activity detector with state and control flow; a ViT and a T5 (marked slow: 165 MB)."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from controller.models.proving import largest_difference
from controller.models.registry import ModelRegistry
from controller.models.sessions import Arrays, open_session, run
from controller.models.sharding_zoo import SPECIMENS, fetch_specimen, specimen_sample
from policies.plan import Span
from sla.errors import NotFoundError

LAYERS = {
    "vit-s": [f"backbone.encoder.layer.{n}" for n in range(12)],
    "t5-encoder-int8": [f"enc.block.{n}" for n in range(1, 8)],
    "minilm-l3": [f"model.0.auto_model.encoder.layer.{n}" for n in range(2)],
    "t5-decoder-int8": [f"decoder.block.{n}" for n in range(8)],
}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    return ModelRegistry(tmp_path_factory.mktemp("specimens"))


def add(registry: ModelRegistry, name: str, cache: Path) -> Arrays:
    sample = specimen_sample(name)
    registry.add(name, fetch_specimen(name, cache), samples=sample)
    return sample


def in_series(registry: ModelRegistry, name: str, spans: list[Span], sample: Arrays) -> Arrays:
    values = dict(sample)
    outputs: Arrays = {}
    for span in spans:
        part = registry.part(name, span)
        feeds = {key: values[key] for key in part.inputs}
        outputs = run(open_session(part.content, name), feeds, part.outputs, name)
        values |= outputs
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_transformer_is_cut_at_every_layer_and_gives_the_same_bits(
    name: str, registry: ModelRegistry, zoo_cache: Path
) -> None:
    sample = add(registry, name, zoo_cache)
    blocks = registry.profile(name).blocks
    assert set(LAYERS[name]) <= {block.name for block in blocks}
    count = len(blocks)
    expected = in_series(registry, name, [Span(0, count)], sample)
    spans = [Span(a, b) for a, b in itertools.pairwise([0, 1, count // 3, count - 2, count])]
    assert largest_difference(expected, in_series(registry, name, spans, sample)) == 0


def test_control_flow_is_one_block_and_says_why(registry: ModelRegistry, zoo_cache: Path) -> None:
    add(registry, "silero-vad", zoo_cache)
    profile = registry.profile("silero-vad")
    assert len(profile.blocks) == 1
    assert "If 'If_0' captures outer values (input, state)" in profile.atomic_reason


def test_state_that_is_carried_between_calls_stays_right_over_shards(registry: ModelRegistry, zoo_cache: Path) -> None:
    sample = add(registry, "silero-vad-16k", zoo_cache)
    count = len(registry.profile("silero-vad-16k").blocks)
    assert count > 1
    rng = np.random.default_rng(3)
    whole_state = cut_state = sample["state"]
    for _ in range(5):
        sound = (rng.standard_normal(sample["input"].shape) / 10).astype(np.float32)
        feeds = {**sample, "input": sound}
        whole = in_series(registry, "silero-vad-16k", [Span(0, count)], {**feeds, "state": whole_state})
        cut = in_series(registry, "silero-vad-16k", [Span(0, 1), Span(1, count)], {**feeds, "state": cut_state})
        assert largest_difference(whole, cut) == 0
        whole_state, cut_state = whole["stateN"], cut["stateN"]
    assert not np.array_equal(whole_state, sample["state"])


def test_names_that_are_not_there(zoo_cache: Path) -> None:
    assert len(SPECIMENS) == 6
    with pytest.raises(NotFoundError, match="no specimen"):
        fetch_specimen("gpt", zoo_cache)
