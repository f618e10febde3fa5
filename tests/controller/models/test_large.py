"""Models that are larger than one ONNX file may be: their weights stay in files of their own, and each shard holds its part.

Here "too large" begins at 40 KB instead of 2 GB; nothing else is different.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from controller.models import extraction, graph
from controller.models.proving import largest_difference
from controller.models.registry import ModelRegistry
from controller.models.samples import generate_sample
from controller.models.sessions import open_session, run
from policies.plan import Span
from sla.errors import ModelError

LIMIT = 40_000


@pytest.fixture
def large(mlp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six layers with 16 KB each in one file of weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    path = directory / "large.onnx"
    copied = onnx.ModelProto()
    copied.CopyFrom(mlp)
    onnx.save(copied, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    for module in (graph, extraction):
        monkeypatch.setattr(module, "MAX_MODEL_BYTES", LIMIT)
    return path


def test_a_model_that_no_file_can_hold_is_cut_into_shards_that_can(large: Path, mlp: Any, tmp_path: Path) -> None:
    registry = ModelRegistry(tmp_path / "registry")
    profile = registry.add("large", large, axis="patch")
    assert profile.split_axis == "patch"
    assert len(profile.blocks) == 6
    assert profile.shard_limit_bytes == LIMIT
    assert all(16_384 < block.file_bytes < LIMIT for block in profile.blocks)
    sample = generate_sample(graph.build_graph(mlp, "it"), 3, "it")
    values = dict(sample)
    for span in (Span(0, 2), Span(2, 3), Span(3, 5), Span(5, 6)):
        part = registry.part("large", span)
        assert len(part.content) < LIMIT
        values |= run(
            open_session(part.content, "part"), {key: values[key] for key in part.inputs}, part.outputs, "part"
        )
    outputs = [output.name for output in mlp.graph.output]
    expected = run(open_session(mlp.SerializeToString(), "whole"), sample, outputs, "whole")
    assert largest_difference(expected, values) == 0


def test_what_no_file_can_hold_is_not_promised_as_a_shard(large: Path, tmp_path: Path) -> None:
    registry = ModelRegistry(tmp_path / "registry")
    registry.add("large", large)
    with pytest.raises(ModelError, match="must be placed as smaller shards"):
        registry.shard_file("large", Span(0, 6))


def test_weights_that_are_cut_short_are_refused(large: Path, tmp_path: Path) -> None:
    weights = large.parent / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="does not hold the 16384 bytes"):
        ModelRegistry(tmp_path / "registry").add("large", large)


def test_weights_that_were_taken_away_later_are_missed(large: Path, tmp_path: Path) -> None:
    registry = ModelRegistry(tmp_path / "registry")
    registry.add("large", large)
    (large.parent / "weights.bin").unlink()
    with pytest.raises(ModelError, match="does not hold"):
        registry.shard_file("large", Span(0, 1))


def test_a_path_out_of_the_directory_is_refused_here_too(large: Path, tmp_path: Path) -> None:
    model = onnx.load(large, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "../weights.bin"
    large.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="outside"):
        ModelRegistry(tmp_path / "registry").add("large", large)
