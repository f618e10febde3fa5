"""The real models of the service: every one can be cut, exactly, and is split where it must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.models.proving import CLOSE, largest_difference
from controller.models.registry import ModelRegistry
from controller.models.sessions import Arrays, open_session, run
from controller.models.transforms import append_ctc_head
from controller.models.zoo import ASSETS, ZOO, fetch_zoo, zoo_sample
from policies.plan import Span
from sla.errors import NotFoundError

BLOCKS = {
    "orientation": 7, "det-tiny": 7, "det-base": 8, "det-small": 8, "rec-tiny": 8, "rec-base": 8, "rec-small": 8, "minilm-int8": 6,
}  # fmt: skip
"""Cuts depend on shapes only, so they are the same everywhere; minilm comes apart at its six layers."""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    return ModelRegistry(tmp_path_factory.mktemp("registry"))


@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_the_zoo_is_cut_into_shards_that_give_its_result(
    name: str, zoo_cache: Path, registry: ModelRegistry
) -> None:
    transform = append_ctc_head if name.startswith("rec-") else None
    sample = zoo_sample(name)
    profile = registry.add(name, fetch_zoo(name, zoo_cache), axis=ZOO[name].axis, samples=sample, transform=transform)
    blocks = len(profile.blocks)
    assert blocks == BLOCKS[name]
    assert profile.split_axis == ZOO[name].axis
    assert registry.proof(name).chain_error <= CLOSE
    expected = _run(registry, name, [Span(0, blocks)], sample)
    made = _run(registry, name, [Span(0, 1), Span(1, blocks // 2), Span(blocks // 2, blocks)], sample)
    assert largest_difference(expected, made) <= CLOSE


def test_the_mask_of_minilm_is_made_again_rather_than_shipped(zoo_cache: Path, registry: ModelRegistry) -> None:
    registry.add("minilm-int8", fetch_zoo("minilm-int8", zoo_cache), axis="token", samples=zoo_sample("minilm-int8"))
    profile = registry.profile("minilm-int8")
    second = registry.shard_file("minilm-int8", Span(len(profile.blocks) // 2, len(profile.blocks)))
    assert "attention_mask" in second.inputs
    assert len(second.inputs) <= 4
    for block in profile.blocks[:-1]:
        assert block.cut_bytes_per_item < 40_000  # one [16, 384] float32 tensor and the small integer inputs


def test_assets_and_unknown_names(zoo_cache: Path) -> None:
    assert set(ASSETS) == {"tokenizer.json"}
    assert fetch_zoo("tokenizer.json", zoo_cache).read_bytes().startswith(b"{")
    with pytest.raises(NotFoundError, match="not in the zoo"):
        fetch_zoo("gpt", zoo_cache)


def _run(registry: ModelRegistry, name: str, chain: list[Span], sample: Arrays) -> Arrays:
    values, outputs = dict(sample), dict[str, object]()
    for span in chain:
        file = registry.shard_file(name, span)
        path = registry.blob_path(file.sha256)
        assert path is not None
        session = open_session(path.read_bytes(), name)
        made = run(session, {key: values[key] for key in file.inputs}, file.outputs, name)
        values |= made
        outputs = made
    return outputs
