"""Small graphs that each show one thing that cutting must get right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

Build = Callable[..., Any]


@pytest.fixture(scope="session")
def build() -> Build:
    """Make a model from nodes, inputs and outputs as (name, dims) or (name, dims, type), and weights as arrays by name."""

    def make(nodes: list[Any], inputs: list[tuple[Any, ...]], outputs: list[tuple[Any, ...]], **weights: Any) -> Any:
        graph = helper.make_graph(
            nodes,
            "test",
            [_value(*value) for value in inputs],
            [_value(*value) for value in outputs],
            [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)

    return make


def _value(name: str, dims: list[Any], elem_type: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, elem_type, dims)


def _weight(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / 4).astype(np.float32)


@pytest.fixture(scope="session")
def mlp(build: Build) -> Any:
    """Six equal layers, each a matrix product and an activation; items along axis 0 are independent."""
    nodes, weights, last = [], {}, "x"
    for layer in range(6):
        weights[f"w{layer}"] = _weight(layer, 64, 64)
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"], name=f"/layer.{layer}/product"))
        last = f"h{layer}"
        nodes.append(helper.make_node("Tanh", [f"m{layer}"], [last], name=f"/layer.{layer}/tanh"))
    return build(nodes, [("x", ["n", 64])], [(last, ["n", 64])], **weights)


@pytest.fixture(scope="session")
def residual(build: Build) -> Any:
    """Features of the first layer stay live beside the rest until the end, and an early value is an output as well."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["early"]), helper.make_node("Tanh", ["early"], ["features"])]
    last = "features"
    for layer in range(5):
        nodes.append(helper.make_node("MatMul", [last, "w"], [f"m{layer}"]))
        nodes.append(helper.make_node("Add", [f"m{layer}", "features"], [f"h{layer}"]))
        last = f"h{layer}"
    return build(nodes, [("x", ["n", 48])], [("early", ["n", 48]), (last, ["n", 48])], w=_weight(1, 48, 48))


@pytest.fixture(scope="session")
def masked(build: Build) -> Any:
    """Every layer reads a mask that is made from a small integer input, like the attention masks of text models."""
    nodes = [
        helper.make_node("Cast", ["mask"], ["mask_f"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["one", "mask_f"], ["absent"]),
        helper.make_node("Mul", ["absent", "minus"], ["bias_flat"]),
        helper.make_node("Unsqueeze", ["bias_flat", "axes"], ["bias"]),
    ]
    last = "x"
    for layer in range(4):
        nodes.append(helper.make_node("MatMul", [last, "w"], [f"m{layer}"]))
        nodes.append(helper.make_node("Add", [f"m{layer}", "bias"], [f"b{layer}"]))
        nodes.append(helper.make_node("Softmax", [f"b{layer}"], [f"h{layer}"]))
        last = f"h{layer}"
    weights = {"one": np.float32(1), "minus": np.float32(-10), "axes": np.array([1]), "w": _weight(2, 96, 96)}
    inputs = [("x", ["n", 32, 96]), ("mask", ["n", 96], TensorProto.INT64)]
    return build(nodes, inputs, [(last, ["n", 32, 96])], **weights)


@pytest.fixture(scope="session")
def captured(build: Build) -> Any:
    """An If whose branches capture outer values, between two ordinary layers."""

    def branch(op: str) -> Any:
        inner = helper.make_node(op, ["h", "x"], [f"{op}_out"])
        return helper.make_graph([inner], op, [], [helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, None)])

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Tanh", ["m"], ["h"]),
        helper.make_node("If", ["flag"], ["chosen"], name="gate", then_branch=branch("Add"), else_branch=branch("Sub")),
        helper.make_node("MatMul", ["chosen", "w"], ["m2"]),
        helper.make_node("Tanh", ["m2"], ["y"]),
    ]
    inputs = [("x", ["n", 128]), ("flag", [], TensorProto.BOOL)]
    return build(nodes, inputs, [("y", ["n", 128])], w=_weight(3, 128, 128))
