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
    """Cost of each node of the graph; control flow and operators of other domains by their measured time, at the rate of the rest."""
    shapes = {name: fact.shape for name, fact in seen.values.items()}
    costs = [_cost(node, graph.reads[at], shapes) for at, node in enumerate(graph.nodes)]
    known = [at for at, cost in enumerate(costs) if cost is not None]
    known_ms = sum(seen.node_ms[at] for at in known)
    rate = sum(costs[at] or 0.0 for at in known) / known_ms if known_ms > 0 else 1.0
    return [seen.node_ms[at] * rate if cost is None else cost for at, cost in enumerate(costs)]


def _cost(node: Any, reads: tuple[str, ...], shapes: Mapping[str, Shape]) -> float | None:
    """None if it cannot be told from shapes."""
    if node.domain not in ("", "ai.onnx") or next(subgraphs(node), None) is not None:
        return None
    if node.op_type in _FREE:
        return 0.0
    written = [shapes[name] for name in node.output if name in shapes]
    read = [shapes[name] for name in reads if name in shapes]
    elements = sum(map(math.prod, written))
    per_element = _PER_TRANSCENDENTAL if node.op_type in _TRANSCENDENTAL else _PER_ELEMENT
    return per_element * elements + _products(node.op_type, read, written)


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
