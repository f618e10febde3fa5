"""Quality knobs: fewer tokens, fewer bits, and what each costs, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.vlm import build_vlm
from controller.models.calibration import CalibrationSet, load_set, make_set, save_set
from controller.models.graph import build_graph
from controller.models.precision import at_precision
from controller.models.pruning import layer_outputs, prune_tokens
from controller.models.registry import ModelRegistry
from controller.models.sessions import Arrays, open_session, run
from controller.models.variants import activation_cost, add_variant, variant_names
from sla.errors import ModelError


@pytest.fixture(scope="module")
def vision() -> Any:
    """16 tokens per tile, three layers."""
    return build_vlm().vision


def tiles(seed: int, count: int = 2) -> Arrays:
    return {"tiles": np.random.default_rng(seed).standard_normal((count, 3, 32, 32)).astype(np.float32)}


def outputs(model: Any, sample: Arrays) -> np.ndarray:
    name = model.graph.output[0].name
    return run(open_session(model.SerializeToString(), "it"), sample, [name], "it")[name]


def test_a_keep_ratio_of_one_changes_nothing(vision: Any) -> None:
    after = layer_outputs(build_graph(vision, "it"))[1]
    sample = tiles(1)
    for protect in (0, 1):
        same = prune_tokens(vision, after=after, keep=1.0, protect=protect)
        onnx.checker.check_model(same)
        np.testing.assert_allclose(outputs(vision, sample), outputs(same, sample), rtol=0, atol=1e-5)


def test_the_tokens_with_the_highest_activation_go_on_in_their_order(vision: Any) -> None:
    graph = build_graph(vision, "it")
    after = layer_outputs(graph)[1]
    exposed = onnx.ModelProto()
    exposed.CopyFrom(prune_tokens(vision, after=after, keep=0.5, protect=1))
    for name in (after, "/token_pruning/kept"):
        exposed.graph.output.append(onnx.ValueInfoProto(name=name))
    sample = tiles(2, count=3)
    names = [value.name for value in exposed.graph.output]
    made = run(open_session(exposed.SerializeToString(), "it"), sample, names, "it")
    whole, kept, final = made[after], made["/token_pruning/kept"], made[names[0]]
    assert kept.shape == (3, 1 + 8, 64)  # ceil(0.5 x 15) and the protected one
    assert final.shape == kept.shape
    for item in range(3):
        scores = np.abs(whole[item]).mean(axis=-1)
        best = np.sort(np.argsort(-scores[1:], kind="stable")[:8]) + 1
        assert np.array_equal(kept[item], whole[item][[0, *best]])


def test_restored_tokens_stand_where_they_were(vision: Any) -> None:
    layers = layer_outputs(build_graph(vision, "it"))
    all_kept = prune_tokens(vision, after=layers[1], keep=1.0, protect=0, restore=layers[2])
    half = prune_tokens(vision, after=layers[1], keep=0.5, protect=0, restore=layers[2])
    expected = outputs(vision, tiles(3))
    np.testing.assert_allclose(outputs(all_kept, tiles(3)), expected, rtol=0, atol=1e-5)
    found = outputs(half, tiles(3))
    assert found.shape == expected.shape
    assert (expected * found).sum() / np.linalg.norm(expected) / np.linalg.norm(found) > 0.7


def test_later_blocks_and_later_cuts_shrink(vision: Any, tmp_path: Path) -> None:
    registry = ModelRegistry(tmp_path)
    whole = registry.add("whole", vision.SerializeToString(), axis="patch", samples=tiles(4))
    after = layer_outputs(build_graph(vision, "it"))[1]
    pruned = registry.add(
        "pruned",
        prune_tokens(vision, after=after, keep=0.5, protect=0).SerializeToString(),
        axis="patch",
        samples=tiles(4),
    )
    assert pruned.split_axis == "patch"
    assert registry.proof("pruned").chain_error <= 1e-6
    assert pruned.blocks[-2].cut_bytes_per_item == whole.blocks[-2].cut_bytes_per_item // 2


@pytest.mark.parametrize(
    ("keep", "after", "words"),
    [(0.0, None, "impossible"), (0.5, "nothing", "produces 'nothing'"), (0.5, "patches", "is an output")],
)
def test_pruning_that_makes_no_sense_is_refused(keep: float, after: str | None, words: str, vision: Any) -> None:
    with pytest.raises(ModelError, match=words):
        prune_tokens(vision, after=after or layer_outputs(build_graph(vision, "it"))[0], keep=keep)


def calibration(**changes: Any) -> CalibrationSet:
    samples = {"indoor": [tiles(seed, 1) for seed in range(6)], "outdoor": [tiles(seed, 1) for seed in range(6, 8)]}
    arguments: dict[str, Any] = {"weights": {"indoor": 0.4, "outdoor": 0.6}, "preprocessing": "tiles-v1", "least": 8}
    return make_set(samples, **{**arguments, **changes})


def test_a_calibration_set_is_kept_with_its_scenes_and_weights(tmp_path: Path) -> None:
    made = calibration()
    save_set(made, tmp_path / "set.npz")
    read = load_set(tmp_path / "set.npz", least=8)
    assert read.manifest == made.manifest
    assert all(np.array_equal(a["tiles"], b["tiles"]) for a, b in zip(read.samples, made.samples, strict=True))
    drawn = list(read.weighted())
    assert [any(np.array_equal(sample["tiles"], s["tiles"]) for s in read.samples[:6]) for sample in drawn].count(
        True
    ) == 3
    assert len(drawn) == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"least": 256}, "at least 256"),
        ({"weights": {"indoor": 1.0}}, "are not those with weights"),
        ({"weights": {"indoor": 0.4, "outdoor": 0.4}}, "sum to 1"),
    ],
)
def test_a_calibration_set_that_must_not_be_used_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        calibration(**changes)


def test_a_file_that_is_no_calibration_set_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    path.write_bytes(b"PK nothing")
    with pytest.raises(ModelError, match="not a calibration set"):
        load_set(path)


def test_static_int8_wants_the_same_preprocessing(vision: Any) -> None:
    with pytest.raises(ModelError, match="made by the preprocessing"):
        at_precision(vision, "int8-static", calibration(), preprocessing="tiles-v2")
    with pytest.raises(ModelError, match="needs a calibration set"):
        at_precision(vision, "int8-static")


def test_variants_are_registered_with_the_accuracy_that_was_measured(vision: Any, tmp_path: Path) -> None:
    registry = ModelRegistry(tmp_path)
    registry.add("vision", vision.SerializeToString(), axis="patch", samples=tiles(1), accuracy=0.9)
    samples = [tiles(seed) for seed in range(20, 23)]
    transforms = {
        "fp16": lambda model: at_precision(model, "fp16"),
        "int8-dynamic": lambda model: at_precision(model, "int8-dynamic"),
        "int8-static": lambda model: at_precision(model, "int8-static", calibration(), preprocessing="tiles-v1"),
    }
    found = {
        name: add_variant(registry, "vision", name, make, samples, axis="patch") for name, make in transforms.items()
    }
    assert found["fp16"].cosine > 0.9999
    assert found["fp16"].size_ratio < 0.6
    for variant in found.values():
        assert 0.97 < variant.fidelity <= 1
        assert variant.profile.accuracy == pytest.approx(0.9 * variant.fidelity)
    assert found["int8-static"].size_ratio < 0.5
    assert set(variant_names(registry, "vision")) == {"vision", *(f"vision.{name}" for name in transforms)}


def test_a_variant_is_measured_on_samples(vision: Any, tmp_path: Path) -> None:
    registry = ModelRegistry(tmp_path)
    registry.add("vision", vision.SerializeToString(), samples=tiles(1))
    with pytest.raises(ModelError, match="there is none"):
        add_variant(registry, "vision", "fp16", lambda model: model, [])


def test_the_cost_of_activations_in_fewer_bits_is_measured(vision: Any, tmp_path: Path) -> None:
    registry = ModelRegistry(tmp_path)
    registry.add("vision", vision.SerializeToString(), axis="patch", samples=tiles(1))
    half, byte = (activation_cost(registry, "vision", [2, 3], how, [tiles(5)]) for how in ("fp16", "int8"))
    assert half.bytes_ratio == pytest.approx(0.5, abs=0.01)
    assert byte.bytes_ratio < 0.3
    assert 0 < half.difference < byte.difference < 0.05
    assert half.cosine > byte.cosine > 0.999
