"""What is refused, each in one sentence, and what is understood although it is unusual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from controller.models.graph import build_graph, metadata, read_model
from sla.errors import ModelError


def refusal(source: Path | bytes) -> str:
    """The sentence with which `source` is refused."""
    with pytest.raises(ModelError) as caught:
        build_graph(read_model(source, "it")[0], "it")
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"%PDF-1.7 not a model", b"\x08\x07"])
def test_what_is_not_onnx_is_refused(content: bytes) -> None:
    assert "is not an ONNX model" in refusal(content)


def test_every_truncation_is_refused(mlp: Any) -> None:
    content = mlp.SerializeToString()
    for length in (10, 100, len(content) // 2, len(content) - 1):
        refusal(content[:length])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "none.onnx")


@pytest.mark.parametrize(
    "location", ["../secret", "/etc/passwd", "a/../../secret", "C:\\secret", "..\\secret", "", "link/secret"]
)
def test_external_data_may_not_leave_the_directory(location: str, mlp: Any, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (tmp_path / "secret").write_bytes(b"\x00" * 64 * 64 * 4)
    (directory / "link").symlink_to(tmp_path)
    path = directory / "model.onnx"
    path.write_bytes(_external(mlp, location).SerializeToString())
    assert "outside of the model's own directory" in refusal(path)


def test_external_data_beside_the_model_is_drawn_in(mlp: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    (tmp_path / "weights.bin").write_bytes(mlp.graph.initializer[0].raw_data)
    path.write_bytes(_external(mlp, "weights.bin").SerializeToString())
    model, self_contained = read_model(path, "it")
    assert model.graph.initializer[0].raw_data == mlp.graph.initializer[0].raw_data
    assert not self_contained


def test_external_data_needs_a_path_and_the_file(mlp: Any, tmp_path: Path) -> None:
    content = _external(mlp, "absent.bin").SerializeToString()
    assert "give the file's path" in refusal(content)
    (tmp_path / "model.onnx").write_bytes(content)
    assert "cannot be read" in refusal(tmp_path / "model.onnx")


def _external(model: Any, location: str) -> Any:
    """The model with its first weight declared to lie in another file."""
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    tensor = moved.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return moved


def test_a_cycle_is_refused(build: Any) -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["a"], name="first"), helper.make_node("Relu", ["a"], ["b"])]
    assert "cycle" in refusal(build(nodes, [("x", ["n"])], [("b", ["n"])]).SerializeToString())


def test_a_graph_without_inputs_is_refused(build: Any) -> None:
    nodes = [helper.make_node("Relu", ["w"], ["y"])]
    assert "no inputs" in refusal(build(nodes, [], [("y", [2])], w=np.ones(2, np.float32)).SerializeToString())


def test_a_graph_without_outputs_is_refused(build: Any) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    assert "no outputs" in refusal(build(nodes, [("x", [2])], []).SerializeToString())


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([("Relu", "nowhere", "y")], "which nothing produces"),
        ([("Relu", "x", "y"), ("Tanh", "x", "y")], "twice"),
        ([("Relu", "x", "z")], "which no operator produces"),
    ],
)
def test_values_must_be_produced_once(nodes: list[tuple[str, str, str]], words: str, build: Any) -> None:
    made = [helper.make_node(op, [read], [written]) for op, read, written in nodes]
    assert words in refusal(build(made, [("x", [2])], [("y", [2])]).SerializeToString())


def test_nodes_in_the_wrong_order_are_sorted(build: Any) -> None:
    nodes = [helper.make_node("Tanh", ["a"], ["y"]), helper.make_node("Relu", ["x"], ["a"])]
    graph = build_graph(build(nodes, [("x", [2])], [("y", [2])]), "it")
    assert [node.op_type for node in graph.nodes] == ["Relu", "Tanh"]


def test_initializers_that_old_files_list_as_inputs_are_no_inputs(build: Any) -> None:
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    model = build(nodes, [("x", [2]), ("w", [2])], [("y", [2])], w=np.ones(2, np.float32))
    assert build_graph(model, "it").inputs == ("x",)


def test_captured_outer_values_are_reads(captured: Any) -> None:
    graph = build_graph(captured, "it")
    assert graph.captures == {2: ("h", "x")}
    assert graph.reads[2] == ("flag", "h", "x")


def test_metadata_of_a_model(mlp: Any) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(mlp)
    helper.set_model_props(model, {"character": "a\nb"})
    assert metadata(model.SerializeToString(), "it") == {"character": "a\nb"}


def test_a_small_file_that_unfolds_into_many_weights_is_refused(mlp: Any, tmp_path: Path) -> None:
    """Twelve tensors that all name the same 16 KB."""
    model = onnx.ModelProto()
    model.CopyFrom(mlp)
    for copy in range(6):
        model.graph.initializer.add().CopyFrom(mlp.graph.initializer[0])
        model.graph.initializer[-1].name = f"again{copy}"
    (tmp_path / "weights.bin").write_bytes(mlp.graph.initializer[0].raw_data)
    for tensor in model.graph.initializer:
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "weights.bin", "offset": "0", "length": "16384"}.items():
            tensor.external_data.add(key=key, value=value)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="claims 196608 bytes of weights in files that hold 16384"):
        read_model(path, "it")
