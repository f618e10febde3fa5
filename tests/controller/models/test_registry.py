"""The registry: what it promises of profiles, shard files, golden blobs, and of being interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from agents.engine import GOLDEN_INPUT, GOLDEN_OUTPUT
from agents.messages import ShardFile
from agents.wire import decode_tensors
from controller.models.blobs import content_hash
from controller.models.registry import ModelRegistry
from controller.models.sessions import Arrays, open_session, run
from policies.ids import ModelName
from policies.plan import Span, file_key
from sla.errors import ModelError, NotFoundError


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    return ModelRegistry(tmp_path)


def content_of(registry: ModelRegistry, sha256: str) -> bytes:
    path = registry.blob_path(sha256)
    assert path is not None
    content = path.read_bytes()
    assert content_hash(content) == sha256
    return content


def run_shard(registry: ModelRegistry, file: ShardFile, values: Arrays) -> Arrays:
    session = open_session(content_of(registry, file.sha256), "shard")
    return run(session, {name: values[name] for name in file.inputs}, file.outputs, "shard")


def files_below(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()}


def spans(count: int) -> Iterator[Span]:
    return (Span(start, stop) for start in range(count) for stop in range(start + 1, count + 1))


def test_cached_blobs_are_known_as_shard_files_of_the_model_as_it_is(registry: ModelRegistry, mlp: Any) -> None:
    registry.add("mlp", mlp.SerializeToString())
    shard = registry.shard_file("mlp", Span(0, 2))
    assert registry.file_keys([shard.sha256, "unknown"]) == {file_key(ModelName("mlp"), Span(0, 2))}
    changed = type(mlp)()
    changed.CopyFrom(mlp)
    numpy_weights = changed.graph.initializer[0]
    numpy_weights.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(numpy_weights), numpy_weights.name))
    registry.add("mlp", changed.SerializeToString())
    assert not registry.file_keys([shard.sha256]), "the old file is no file of the model under this name any more"


def test_a_profile_describes_every_block(registry: ModelRegistry, mlp: Any) -> None:
    profile = registry.add("mlp", mlp.SerializeToString(), axis="patch", accuracy=0.9)
    assert profile.split_axis == "patch"
    assert profile.accuracy == 0.9
    assert profile.input_bytes_per_item == 64 * 4
    assert profile.activation_bytes >= 2 * 64 * 4
    assert profile.sha256 == registry.shard_file("mlp", Span(0, len(profile.blocks))).sha256
    assert profile.timed_on is not None, "so that times can be transferred to other devices"
    assert sum(block.work.matmul_flops for block in profile.blocks if block.work) == 6 * 2 * 64 * 64
    for block in profile.blocks:
        assert block.fixed_ms >= 0
        assert block.per_item_ms >= 0
        assert block.fixed_ms + block.per_item_ms > 0
        assert block.cut_bytes_per_item == 64 * 4
    assert sum(block.param_bytes for block in profile.blocks) >= 6 * 64 * 64 * 4
    assert registry.profiles() == {"mlp": profile}
    assert registry.proof("mlp").chain_error <= 1e-6


def test_every_range_of_blocks_reproduces_its_golden_outputs(registry: ModelRegistry, residual: Any) -> None:
    profile = registry.add("residual", residual.SerializeToString(), axis="patch")
    assert len(profile.blocks) > 1
    for span in spans(len(profile.blocks)):
        file = registry.shard_file("residual", span)
        assert file.size_bytes == len(content_of(registry, file.sha256))
        assert file.memory_bytes > 0
        assert file.golden_sha256 is not None
        golden = decode_tensors(content_of(registry, file.golden_sha256))
        made = run_shard(registry, file, {name: golden[GOLDEN_INPUT + name] for name in file.inputs})
        assert {GOLDEN_OUTPUT + name for name in made} == {name for name in golden if name.startswith(GOLDEN_OUTPUT)}
        for name, array in made.items():
            np.testing.assert_allclose(array, golden[GOLDEN_OUTPUT + name], rtol=1e-4, atol=1e-6)


def test_what_is_known_is_not_examined_again_also_after_a_restart(tmp_path: Path, mlp: Any) -> None:
    first = ModelRegistry(tmp_path)
    profile = first.add("mlp", mlp.SerializeToString(), axis="patch")
    shard = first.shard_file("mlp", Span(0, 1))
    before = files_below(tmp_path)
    second = ModelRegistry(tmp_path)
    assert second.profile("mlp") == profile
    assert (
        second.add("mlp", mlp.SerializeToString(), axis="patch") == profile
    )  # times are measured, so they would differ
    assert second.shard_file("mlp", Span(0, 1)) == shard
    assert files_below(tmp_path) == before
    assert second.add("mlp", mlp.SerializeToString(), axis="patch", accuracy=0.5).accuracy == 0.5
    assert ModelRegistry(tmp_path).profile("mlp").accuracy == 0.5


def test_weights_count_wherever_they_are_stored(registry: ModelRegistry, build: Any) -> None:
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(np.ones((256, 256), np.float32)))
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    for name, model in {
        "constant": build([constant, product], [("x", ["n", 256])], [("y", ["n", 256])]),
        "initializer": build([product], [("x", ["n", 256])], [("y", ["n", 256])], w=np.ones((256, 256), np.float32)),
    }.items():
        (block,) = registry.add(name, model.SerializeToString()).blocks
        assert block.param_bytes >= 256 * 256 * 4


def test_another_way_of_adding_is_another_examination(registry: ModelRegistry, mlp: Any) -> None:
    assert registry.add("mlp", mlp.SerializeToString()).split_axis is None
    assert registry.proof("mlp").split == "not asked for"
    assert registry.add("mlp", mlp.SerializeToString(), axis="token").split_axis == "token"


def test_an_axis_that_is_not_proven_is_not_set(registry: ModelRegistry, build: Any) -> None:
    model = build([helper.make_node("Softmax", ["x"], ["y"], axis=0)], [("x", ["n", 8])], [("y", ["n", 8])])
    profile = registry.add("mixing", model.SerializeToString(), axis="patch")
    assert profile.split_axis is None
    assert profile.atomic_reason == "the graph has a single operator that does work"
    assert "not proven" in registry.proof("mixing").split


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "..", "-a", "a" * 65, "a b"])
def test_names_that_are_refused(name: str, registry: ModelRegistry, mlp: Any) -> None:
    with pytest.raises(ModelError, match="cannot name a model"):
        registry.add(name, mlp.SerializeToString())


def test_nothing_is_half_stored_when_a_model_is_refused(tmp_path: Path, build: Any, mlp: Any) -> None:
    registry = ModelRegistry(tmp_path)
    broken = build([helper.make_node("NoSuchOperator", ["x"], ["y"])], [("x", [2])], [("y", [2])])
    sequence = build([helper.make_node("SequenceConstruct", ["x"], ["y"])], [("x", [2])], [("y", None)])
    sequence.graph.output[0].CopyFrom(helper.make_tensor_sequence_value_info("y", 1, [2]))
    bad: list[tuple[bytes, dict[str, Any]]] = [
        (b"not a model", {}),
        (mlp.SerializeToString()[:-200], {}),
        (broken.SerializeToString(), {}),
        (sequence.SerializeToString(), {}),
        (mlp.SerializeToString(), {"samples": {"x": np.array([["a"]])}}),
        (mlp.SerializeToString(), {"samples": {"y": np.ones((2, 64), np.float32)}}),
        (mlp.SerializeToString(), {"samples": {"x": np.ones((2, 63), np.float32)}}),
        (mlp.SerializeToString(), {"samples": {"x": np.ones((2, 64), np.int64)}}),
        (mlp.SerializeToString(), {"accuracy": 1.5}),
    ]
    for content, options in bad:
        with pytest.raises(ModelError) as caught:
            registry.add("it", content, **options)
        assert "\n" not in str(caught.value)
    assert files_below(tmp_path) == set()
    assert registry.profiles() == {}


def test_a_refused_model_leaves_the_one_that_had_the_name(registry: ModelRegistry, mlp: Any) -> None:
    profile = registry.add("it", mlp.SerializeToString())
    with pytest.raises(ModelError):
        registry.add("it", b"not a model")
    assert registry.profile("it") == profile


def test_what_is_not_there_is_not_found(registry: ModelRegistry, mlp: Any) -> None:
    registry.add("mlp", mlp.SerializeToString())
    for span in (Span(0, 99), Span(-1, 1), Span(1, 1), Span(2, 1)):
        with pytest.raises(NotFoundError):
            registry.shard_file("mlp", span)
    with pytest.raises(NotFoundError, match="tidegate model add"):
        registry.profile("other")
    for sha256 in ("../models/mlp.json", "0" * 64, ""):
        assert registry.blob_path(sha256) is None


def test_records_that_were_damaged_or_are_of_another_version_are_examined_anew(tmp_path: Path, mlp: Any) -> None:
    registry = ModelRegistry(tmp_path)
    registry.add("mlp", mlp.SerializeToString())
    record = tmp_path / "models" / "mlp.json"
    whole = record.read_bytes()
    for damaged in (b"", whole[:50], whole.replace(b'"version":', b'"version":9')):
        record.write_bytes(damaged)
        again = ModelRegistry(tmp_path)
        assert again.profiles() == {}
        assert len(again.add("mlp", mlp.SerializeToString()).blocks) > 1


def test_a_lost_blob_is_made_again(tmp_path: Path, mlp: Any) -> None:
    registry = ModelRegistry(tmp_path)
    profile = registry.add("mlp", mlp.SerializeToString())
    path = registry.blob_path(profile.sha256)
    assert path is not None
    path.unlink()
    assert registry.add("mlp", mlp.SerializeToString()).sha256 == profile.sha256
    assert registry.blob_path(profile.sha256) is not None


def test_threads_may_add_and_ask_at_once(registry: ModelRegistry, mlp: Any, residual: Any) -> None:
    models = {"mlp": mlp.SerializeToString(), "residual": residual.SerializeToString()}
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            profile = registry.add(name, models[name], axis="patch")
            assert {registry.shard_file(name, span).model for span in spans(len(profile.blocks))} == {name}
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in (*models, *models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert set(registry.profiles()) == set(models)


def test_two_names_for_one_content_are_two_models(registry: ModelRegistry, mlp: Any) -> None:
    for name in ("one", "two"):
        registry.add(name, mlp.SerializeToString())
        assert registry.shard_file(name, Span(0, 1)).model == name


def test_assets_are_kept_by_their_hash(registry: ModelRegistry) -> None:
    sha256 = registry.add_asset(b"a\nb")
    assert registry.add_asset(b"a\nb") == sha256
    assert content_of(registry, sha256) == b"a\nb"
