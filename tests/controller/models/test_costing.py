"""Costs from shapes: the operators that matter, and what is left to the clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from controller.models.costing import node_costs
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


def test_control_flow_costs_what_was_measured_at_the_rate_of_the_rest(captured: Any) -> None:
    graph = build_graph(captured, "it")
    seen = observe(graph, {"x": np.ones((2, 128), np.float32), "flag": np.array(True)}, "it")
    costs = node_costs(graph, seen)
    known_ms = sum(ms for at, ms in enumerate(seen.node_ms) if at != 2)
    assert costs[2] == pytest.approx(seen.node_ms[2] * (sum(costs) - costs[2]) / known_ms)
