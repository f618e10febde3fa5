"""Edits of a graph keep what it computes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from controller.models.transforms import append_ctc_head
from controller.services.graph_edits import HALF, IMAGENET, charset_of, name_result, take_pixels
from sla.errors import ModelError


def recogniser() -> onnx.ModelProto:
    """Means over the height of a picture, through a 3 -> 5 matrix, to class scores [N, W, 5]."""
    weights = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[2], keepdims=0),
        helper.make_node("Transpose", ["mean"], ["columns"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["columns", "weights"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["classes"], axis=2),
    ]
    graph = helper.make_graph(
        nodes,
        "recogniser",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, "H", "W"])],
        [helper.make_tensor_value_info("classes", TensorProto.FLOAT, ["N", "W", 5])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    model.metadata_props.add(key="character", value="a\nb\nc")
    return model


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs: list[np.ndarray] = session.run(None, feeds)
    return outputs


PICTURE = np.random.default_rng(2).integers(0, 256, (2, 3, 8, 6), np.uint8)


@pytest.mark.parametrize("normalisation", [IMAGENET, HALF], ids=["imagenet", "half"])
def test_pixels_are_normalised_inside_the_graph(normalisation: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    mean, std = (np.array(part, np.float32).reshape(1, 3, 1, 1) for part in normalisation)
    (expected,) = run(recogniser(), {"x": (PICTURE.astype(np.float32) / 255 - mean) / std})
    (found,) = run(take_pixels(recogniser(), normalisation), {"pixels": PICTURE})  # type: ignore[arg-type]
    assert np.allclose(found, expected, atol=1e-5)


def test_a_renamed_result_is_the_same() -> None:
    picture = PICTURE.astype(np.float32)
    renamed = name_result(recogniser())
    assert [output.name for output in renamed.graph.output] == ["result"]
    assert np.array_equal(run(renamed, {"x": picture})[0], run(recogniser(), {"x": picture})[0])


def test_edits_leave_the_original_alone() -> None:
    model = recogniser()
    before = model.SerializeToString()
    name_result(take_pixels(model, HALF))
    assert model.SerializeToString() == before


def test_the_charset_ends_with_the_space() -> None:
    assert charset_of(recogniser()) == b"a\nb\nc\n "


def test_a_model_without_a_charset_is_refused() -> None:
    model = recogniser()
    del model.metadata_props[:]
    with pytest.raises(ModelError, match="no character list"):
        charset_of(model)


def test_a_model_with_two_outputs_is_refused() -> None:
    with pytest.raises(ModelError, match="2 outputs"):
        name_result(append_ctc_head(recogniser()))
