"""Costs from shapes: the operators that matter, and nothing from the clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from controller.models.costing import node_costs, node_works
from controller.models.graph import build_graph
from controller.models.observing import observe


@pytest.mark.parametrize(
    ("op", "x", "w", "options", "products"),
    [
        ("MatMul", (2, 5, 8), (8, 3), {}, 2 * 5 * 8 * 3),
        ("Gemm", (5, 8), (8, 3), {}, 5 * 8 * 3),
        ("Conv", (1, 4, 10, 10), (6, 4, 3, 3), {}, 6 * 4 * 3 * 3 * 8 * 8),
        ("Conv", (1, 4, 10, 10), (4, 1, 3, 3), {"group": 4}, 4 * 3 * 3 * 8 * 8),
        ("ConvTranspose", (1, 4, 5, 5), (4, 6, 2, 2), {"strides": [2, 2]}, 4 * 6 * 2 * 2 * 5 * 5),
        ("Gather", (100, 8), (3, 3), {}, 0),
    ],
)
def test_matrix_products_count_their_multiply_accumulates(
    op: str, x: tuple[int, ...], w: tuple[int, ...], options: dict[str, Any], products: int, build: Any
) -> None:
    weight = np.zeros(w, np.int64 if op == "Gather" else np.float32)
    model = build([helper.make_node(op, ["x", "w"], ["y"], **options)], [("x", list(x))], [("y", None)], w=weight)
    graph = build_graph(model, "it")
    seen = observe(graph, {"x": np.ones(x, np.float32)}, "it")
    (cost,) = node_costs(graph, seen)
    assert cost - 5 * np.prod(seen.values["y"].shape) == products


def test_the_work_of_a_block_is_counted_by_kind(build: Any) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Flatten", ["c"], ["flat"]),
        helper.make_node("MatMul", ["flat", "v"], ["y"]),
    ]
    model = build(
        nodes, [("x", [1, 4, 10, 10])], [("y", None)], w=np.ones((6, 4, 3, 3), np.float32), v=np.ones((384, 5), np.float32)
    )  # fmt: skip
    graph = build_graph(model, "it")
    seen = observe(graph, {"x": np.ones((1, 4, 10, 10), np.float32)}, "it")
    conv, flat, product = node_works(graph, seen)
    assert (conv.conv_flops, conv.matmul_flops, conv.moved_bytes) == (2 * 216 * 64, 0, 4 * (400 + 384))
    assert (product.matmul_flops, product.conv_flops, product.moved_bytes) == (2 * 384 * 5, 0, 4 * (384 + 5))
    assert flat.moved_bytes == flat.other_flops == flat.matmul_flops == 0, "a view costs nothing"


def test_control_flow_costs_what_its_weights_tell_and_not_what_was_measured(build: Any) -> None:
    def branch(name: str) -> Any:
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["p"]),
            helper.make_node("MatMul", ["p", f"own_{name}"], [name]),
        ]
        own = numpy_helper.from_array(np.ones((8, 16), np.float32), f"own_{name}")
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)], [own])

    gate = helper.make_node("If", ["flag"], ["y"], name="gate", then_branch=branch("a"), else_branch=branch("b"))
    inputs = [("x", [4, 8]), ("flag", [], TensorProto.BOOL)]
    graph = build_graph(build([gate], inputs, [("y", None)], w=np.ones((8, 8), np.float32)), "it")
    seen = observe(graph, {"x": np.ones((4, 8), np.float32), "flag": np.array(True)}, "it")
    assert node_costs(graph, seen) == [5 * 4 * 16 + (8 * 8 + 8 * 16) * 4]
