"""What a model does on a sample: the type, shape and size of every value.

The unoptimised graph is run under ONNX Runtime's profiler, which reports the type and shape of what each node reads and
writes. Unlike adding every value as an output, this costs no memory.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from controller.models.graph import Graph, tensor_bytes
from controller.models.sessions import Arrays, open_session, run

_PREFIX = "tidegate_"
_EVENT = "_kernel_time"


@dataclass(frozen=True, slots=True)
class ValueFact:
    """One value as observed on the sample."""

    elem_type: int
    """`onnx.TensorProto.DataType`."""
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def is_float(self) -> bool:
        """False for integers and booleans: ids, masks, positions."""
        return bool(onnx.helper.tensor_dtype_to_np_dtype(self.elem_type).kind == "f")


@dataclass(frozen=True, slots=True)
class Observation:
    """What the sample showed. A value that is missing was not seen as a tensor and cannot cross a cut."""

    values: Mapping[str, ValueFact]


def observe(graph: Graph, sample: Arrays, name: str) -> Observation:
    """Run `graph` on `sample`. Raises ModelError if it cannot run."""
    labelled = onnx.ModelProto()
    labelled.CopyFrom(graph.model)
    del labelled.graph.node[:]
    labelled.graph.node.extend(graph.nodes)
    for at, node in enumerate(labelled.graph.node):
        node.name = f"{_PREFIX}{at}"
    with tempfile.TemporaryDirectory(prefix="tidegate-observe-") as scratch:
        session = open_session(
            labelled.SerializeToString(),
            name,
            optimise=False,
            profile_prefix=str(Path(scratch, "profile")),
            weights=graph.weights,
        )
        run(session, sample, graph.outputs, name)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return _digest(graph, events, sample, _half_precision(graph))


def _half_precision(graph: Graph) -> frozenset[str]:
    """Values of type float16 by the operators' own rules: the CPU computes them in float32, and its profiler says so."""
    half = onnx.TensorProto.FLOAT16
    has_half = any(tensor.data_type == half for tensor in graph.model.graph.initializer) or any(
        attribute.name == "to" and attribute.i == half for node in graph.nodes for attribute in node.attribute
    )
    if not has_half and all(v.type.tensor_type.elem_type != half for v in graph.model.graph.input):
        return frozenset()
    inferred = onnx.shape_inference.infer_shapes(graph.model).graph
    values = (*inferred.value_info, *inferred.output)
    return frozenset(value.name for value in values if value.type.tensor_type.elem_type == half)


def _digest(graph: Graph, events: list[dict[str, Any]], sample: Arrays, half: frozenset[str]) -> Observation:
    values = {key: _fact(str(array.dtype), array.shape) for key, array in sample.items()}
    guessed: dict[str, ValueFact | None] = {}
    for event in events:
        label = str(event.get("name", ""))
        if event.get("cat") != "Node" or not label.startswith(_PREFIX) or not label.endswith(_EVENT):
            continue
        at = label[len(_PREFIX) : -len(_EVENT)]
        if not at.isdigit():
            continue
        node = graph.nodes[int(at)]
        values |= _pair(node.output, event["args"].get("output_type_shape", []))
        # Nodes that the runtime replaces by their definition have no event; their readers tell what they wrote.
        guessed |= _pair(node.input, event["args"].get("input_type_shape", []))
    merged = {key: fact for key, fact in (_stored(graph) | guessed | values).items() if fact is not None}
    for key in half & merged.keys():
        if merged[key].elem_type == onnx.TensorProto.FLOAT:
            merged[key] = ValueFact(onnx.TensorProto.FLOAT16, merged[key].shape, merged[key].size_bytes // 2)
    return Observation(merged)


def _stored(graph: Graph) -> dict[str, ValueFact | None]:
    """Weights, which the runtime does not report once it has packed them for its kernels."""
    tensors = {tensor.name: tensor for tensor in graph.model.graph.initializer}
    for node in graph.nodes:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            tensors[node.output[0]] = node.attribute[0].t
    return {
        name: ValueFact(tensor.data_type, tuple(tensor.dims), tensor_bytes(tensor)) for name, tensor in tensors.items()
    }


def _pair(names: Any, entries: list[dict[str, list[int]]]) -> dict[str, ValueFact | None]:
    """Names with their facts; nothing if optional values are absent, so that the pairing would be a guess."""
    if len(names) != len(entries) or not all(names):
        return {}
    return {
        key: _fact(dtype, shape) for key, entry in zip(names, entries, strict=True) for dtype, shape in entry.items()
    }


def _fact(dtype: str, shape: Any) -> ValueFact | None:
    """None for what NumPy cannot hold as plain numbers (bfloat16, strings): such values never cross a cut."""
    numpy_name = {"float": "float32", "double": "float64"}.get(dtype, dtype)
    try:
        numpy_type = np.dtype(numpy_name)
    except TypeError:
        return None
    if numpy_type.kind not in "fiub":
        return None
    dims = tuple(int(dim) for dim in shape)
    return ValueFact(
        elem_type=int(onnx.helper.np_dtype_to_tensor_dtype(numpy_type)),
        shape=dims,
        size_bytes=math.prod(dims) * numpy_type.itemsize,
    )
