"""What each node costs, in multiply-accumulates, from the shapes that were observed.

Balancing uses these figures and not measured times, so that the same model is cut at the same places on every machine and at every
load: the shards' hashes stay the same, and what agents have cached stays useful. Times are measured per block afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from controller.models.graph import Graph, subgraphs
from controller.models.observing import Observation
from policies.roofline import BlockWork

Shape = tuple[int, ...]

_CONVOLUTIONS = frozenset(["Conv", "ConvInteger", "QLinearConv", "ConvTranspose"])
_PRODUCTS = frozenset(["MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"])
_RECURRENT = frozenset(["LSTM", "GRU", "RNN"])
_TRANSCENDENTAL = frozenset(
    [
        "Celu",
        "Elu",
        "Erf",
        "Exp",
        "Gelu",
        "LayerNormalization",
        "Log",
        "Mish",
        "Pow",
        "Selu",
        "Sigmoid",
        "Softmax",
        "LogSoftmax",
        "Softplus",
        "Sqrt",
        "Tanh",
    ]
)
_FREE = frozenset(["Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze"])
_PER_ELEMENT = 5.0
_PER_TRANSCENDENTAL = 20.0
"""Against one multiply-accumulate of a matrix product; rough figures of one core with ONNX Runtime."""


def node_costs(graph: Graph, seen: Observation) -> list[float]:
    """Cost of each node of the graph.

    Inside control flow, and of operators of other domains, only the weights are known: each counts one multiply-accumulate for each row of
    the largest value that the node reads. That is rough, but the same at every look, as a measured time is not.
    """
    shapes = {name: fact.shape for name, fact in seen.values.items()}
    return [_cost(graph, at, shapes) for at in range(len(graph.nodes))]


def node_works(graph: Graph, seen: Observation) -> list[BlockWork]:
    """What each node computes and moves on the sample; weights are not counted, since several nodes may read one."""
    shapes = {name: fact.shape for name, fact in seen.values.items()}
    return [_work(graph, seen, at, shapes) for at in range(len(graph.nodes))]


def _work(graph: Graph, seen: Observation, at: int, shapes: Mapping[str, Shape]) -> BlockWork:
    products, elements = _parts(graph, at, shapes)
    values = {*graph.nodes[at].output, *graph.reads[at]} - graph.constant_bytes.keys()
    moved = sum(seen.values[name].size_bytes for name in values if name in seen.values)
    is_conv = graph.nodes[at].op_type in _CONVOLUTIONS
    return BlockWork(
        matmul_flops=0.0 if is_conv else 2.0 * products, conv_flops=2.0 * products if is_conv else 0.0,
        other_flops=2.0 * elements, moved_bytes=0.0 if _is_free(graph.nodes[at]) else float(moved), weight_bytes=0.0,
    )  # fmt: skip


def _cost(graph: Graph, at: int, shapes: Mapping[str, Shape]) -> float:
    return sum(_parts(graph, at, shapes))


def _is_free(node: Any) -> bool:
    return node.op_type in _FREE and node.domain in ("", "ai.onnx")


def _parts(graph: Graph, at: int, shapes: Mapping[str, Shape]) -> tuple[float, float]:
    """Multiply-accumulates of matrix products, and what the rest takes in the same unit."""
    node, reads = graph.nodes[at], graph.reads[at]
    if _is_free(node):
        return 0.0, 0.0
    written = [shapes[name] for name in node.output if name in shapes]
    read = [shapes[name] for name in reads if name in shapes]
    elements = sum(map(math.prod, written))
    inner = list(subgraphs(node))
    if inner or node.domain not in ("", "ai.onnx"):
        weights = max((_inner_weights(branch) for branch in inner), default=0)
        weights += sum(math.prod(shapes[name]) for name in reads if name in graph.constant_bytes and name in shapes)
        rows = max(
            (math.prod(shapes[name][:-1]) for name in reads if name in shapes and name not in graph.constant_bytes),
            default=1,
        )
        return float(weights * rows), _PER_ELEMENT * elements
    per_element = _PER_TRANSCENDENTAL if node.op_type in _TRANSCENDENTAL else _PER_ELEMENT
    return _products(node.op_type, read, written), per_element * elements


def _inner_weights(graph: Any) -> int:
    """Numbers that are stored in a subgraph, those of the heaviest branch where it branches again."""
    own: int = sum(math.prod(tensor.dims) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            own += math.prod(node.attribute[0].t.dims)
        own += max((_inner_weights(branch) for branch in subgraphs(node)), default=0)
    return own


def _products(op: str, read: list[Shape], written: list[Shape]) -> float:
    """Multiply-accumulates of the matrix products in the node; 0 if it has none."""
    if not read or not written:
        return 0.0
    data, out = read[0], written[0]
    weights = max((math.prod(shape) for shape in read[1:] if len(shape) >= 2), default=0)
    if op in _CONVOLUTIONS and len(out) > 2:
        places = data if op == "ConvTranspose" else out
        return float(weights * places[0] * math.prod(places[2:]))
    if op in _PRODUCTS and data:
        return float(math.prod(out) * data[-1])
    if op in _RECURRENT and len(data) == 3:
        return float(weights * data[0] * data[1])
    return 0.0
