"""An activation that the runtime computes inside a convolution stays there when its value leaves a shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from controller.models.extraction import declare, extract, serialise
from controller.models.fusion import fused_activations
from controller.models.graph import build_graph
from controller.models.layout import assemble, lay_out
from controller.models.observing import observe
from controller.models.sessions import open_session, run


def _swish(x: str, out: str, how: str) -> list[Any]:
    if how == "HardSwish":
        return [helper.make_node("HardSwish", [x], [out])]
    operands = [x, f"{out}_gate"] if how == "x * gate" else [f"{out}_gate", x]
    gate = helper.make_node("HardSigmoid", [x], [f"{out}_gate"], alpha=1 / 6, beta=0.5)
    return [gate, helper.make_node("Mul", operands, [out])]


def _convolutions(how: str) -> Any:
    """Three convolutions of 16 channels, each with its activation."""
    rng = np.random.default_rng(4)
    nodes, weights, last = [], [], "x"
    for layer in range(3):
        weights.append(numpy_helper.from_array(rng.standard_normal((16, 16, 3, 3)).astype(np.float32) / 8, f"w{layer}"))
        nodes.append(helper.make_node("Conv", [last, f"w{layer}"], [f"c{layer}"], pads=[1, 1, 1, 1]))
        nodes.extend(_swish(f"c{layer}", f"h{layer}", how))
        last = f"h{layer}"
    dims = ["n", 16, "h", "w"]
    inputs, outputs = ([helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims)] for name in ("x", last))
    graph = helper.make_graph(nodes, "test", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize("how", ["HardSwish", "x * gate", "gate * x"])
def test_a_leaving_activation_is_still_fused_and_the_result_the_same(how: str, tmp_path: Path) -> None:
    model = _convolutions(how)
    graph = build_graph(model, "it")
    assert fused_activations(graph) == {"h0", "h1", "h2"}
    sample = {"x": np.random.default_rng(5).standard_normal((2, 16, 9, 7)).astype(np.float32)}
    seen = observe(graph, sample, "it")
    shared, order, _ = lay_out(graph, seen)
    cut = assemble(graph, shared, (0, len(order) // 3, len(order)))
    declared = declare(cut, seen)
    values = dict(sample)
    for block in (0, 1):
        content = serialise(extract(cut, block, block + 1, declared))
        onnx.checker.check_model(content)
        reads, makes = [(("x",), ("h0",)), (("h0",), ("h2",))][block]
        values |= run(open_session(content, "shard"), {key: values[key] for key in reads}, makes, "shard")
    whole = run(open_session(model.SerializeToString(), "whole"), sample, ["h2"], "whole")
    assert np.array_equal(values["h2"], whole["h2"])
    assert "HardSigmoid" not in _optimised(serialise(extract(cut, 0, 1, declared)), tmp_path / "shard.onnx")


def _optimised(content: bytes, path: Path) -> list[str]:
    """Operators that the runtime really runs."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(path).graph.node]


def test_an_activation_that_ends_the_model_or_is_read_again_is_left_alone() -> None:
    model = _convolutions("HardSwish")
    model.graph.node.append(helper.make_node("Add", ["h0", "h2"], ["y"]))
    model.graph.output[0].name = "y"
    graph = build_graph(model, "it")
    sample = {"x": np.ones((1, 16, 4, 4), np.float32)}
    seen = observe(graph, sample, "it")
    shared, order, _ = lay_out(graph, seen)
    cut = assemble(graph, shared, (0, 4, len(order)))  # h0 and h1 cross; the first block reads h0 itself
    first = extract(cut, 0, 1, declare(cut, seen))
    assert [node.output[0] for node in first.graph.node if node.op_type == "Reshape"] == ["h1"]
    assert all(node.op_type != "Reshape" for node in extract(cut, 1, 2, declare(cut, seen)).graph.node)
