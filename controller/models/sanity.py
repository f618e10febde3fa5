"""What a model writes must be worth serving: numbers, and at least one of them. What is not is traced to the operator that began it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from controller.models.graph import Graph
from controller.models.sessions import Arrays, open_session
from sla.errors import ModelError


def check_outputs(graph: Graph, sample: Arrays, outputs: Arrays, name: str) -> None:
    """Raise ModelError that names the output, the operator and the reason if an output is empty or holds NaN."""
    for key, array in outputs.items():
        if array.size == 0:
            raise ModelError(
                f"{name} writes {key!r} as {list(array.shape)}, with no element, on a sample of {_shapes(sample)} "
                f"({_node_label(graph, graph.producer.get(key))}); give a sample on which its dimensions are not zero.",
                found=key,
            )  # fmt: skip
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ModelError(
                f"{name} writes NaN in {key!r} on a sample of {_shapes(sample)}; {_first_nan(graph, sample, name)}.",
                found=key, accepted="outputs that are numbers",
            )  # fmt: skip


def _first_nan(graph: Graph, sample: Arrays, name: str) -> str:
    """Where NaN first appears, in words. Runs the graph once with every value as an output."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(graph.model)
    del exposed.graph.output[:]
    names = [value for node in graph.nodes for value in node.output if value]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=value) for value in names)
    session = open_session(exposed.SerializeToString(), name, optimise=False, weights=graph.weights)
    for value, array in zip(names, session.run(names, sample), strict=True):
        if isinstance(array, np.ndarray) and array.dtype.kind == "f" and np.isnan(array).any():
            return f"it first appears in {_node_label(graph, graph.producer[value])}"
    return "it appears only after the runtime has optimised the graph"


def _node_label(graph: Graph, at: int | None) -> str:
    if at is None:
        return "no operator writes it"
    node: Any = graph.nodes[at]
    return f"operator {node.name!r} ({node.op_type})" if node.name else f"operator number {at} ({node.op_type})"


def _shapes(sample: Arrays) -> str:
    return ", ".join(f"{key} {list(array.shape)}" for key, array in sample.items())
