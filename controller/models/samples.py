"""Samples to run a model on: given by the caller, or generated from the shapes that the graph declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from controller.models.graph import Graph
from controller.models.sessions import Arrays
from policies.service import Axis
from sla.errors import ModelError

SAMPLE_ITEMS = 4
"""Items along a split axis: enough to see whether one item influences another."""
_SEED = 7
_IMAGE_SIDE = 224
_SEQUENCE = 16
_MAX_SAMPLE_BYTES = 64 << 20


def check_sample(graph: Graph, samples: Mapping[str, np.ndarray[Any, Any]], name: str) -> Arrays:
    """The caller's sample in C order. Raises ModelError unless it has exactly the inputs of the graph."""
    if set(samples) != set(graph.inputs):
        raise ModelError(
            f"The sample for {name} has {', '.join(sorted(samples)) or 'no inputs'}; the model reads {', '.join(graph.inputs)}.",
            found=", ".join(sorted(samples)),
            accepted=", ".join(graph.inputs),
        )
    for key, array in samples.items():
        if array.dtype.kind not in "fiub":
            raise ModelError(
                f"The sample for {name} has {array.dtype} in {key!r}; only numbers are accepted.", found=key
            )
    if sum(array.nbytes for array in samples.values()) > _MAX_SAMPLE_BYTES:
        raise ModelError(f"The sample for {name} is larger than {_MAX_SAMPLE_BYTES >> 20} MB.")
    return {key: np.ascontiguousarray(samples[key]) for key in graph.inputs}


def generate_sample(graph: Graph, items: int, name: str) -> Arrays:
    """A sample with `items` different items where the first dimension is open; the same at every call.

    Open dimensions get usual sizes: 224 for pictures, 16 for sequences. Integers are ids within the tables that they index, masks are
    ones. Raises ModelError if an input has a type that cannot be guessed.
    """
    rng = np.random.default_rng(_SEED)
    declared = {value.name: value for value in graph.model.graph.input}
    sample = {}
    for key in graph.inputs:
        tensor = declared[key].type.tensor_type
        if tensor.elem_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
            raise ModelError(f"The input {key!r} of {name} is not a tensor of numbers; give a sample.", found=key)
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        shape = _shape([d.dim_value if d.HasField("dim_value") else 0 for d in tensor.shape.dim], items)
        if int(np.prod(shape, dtype=np.float64)) * dtype.itemsize > _MAX_SAMPLE_BYTES:
            raise ModelError(
                f"The input {key!r} of {name} is too large ({list(shape)}) to generate a sample; give one.", found=key
            )
        sample[key] = _values(key, dtype, shape, _highest_id(graph, key), rng)
    return sample


def likely_axis(content: bytes) -> Axis | None:
    """What axis 0 of the inputs may mean, to be proven: items of text if ids come in, else of pictures; None if it is not open."""
    try:
        graph = onnx.load_model_from_string(content).graph
    except Exception:  # google.protobuf's DecodeError; whoever reads the model next says what is wrong with it
        return None
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value.type.tensor_type for value in graph.input if value.name not in weights]
    first = [tensor.shape.dim[0] if tensor.shape.dim else None for tensor in inputs]
    if not first or any(dim is None or dim.dim_value > 0 for dim in first):
        return None
    if len({dim.dim_param for dim in first if dim is not None and dim.dim_param}) > 1:
        return None
    integers = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    return "token" if any(tensor.elem_type in integers for tensor in inputs) else "patch"


def first_item(sample: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    """The sample cut down to the first item of axis 0."""
    return {key: array[:1] for key, array in sample.items()}


def _shape(dims: list[int], items: int) -> tuple[int, ...]:
    usual = _IMAGE_SIDE if len(dims) >= 4 else _SEQUENCE
    return tuple(dim if dim > 0 else (items if at == 0 else usual) for at, dim in enumerate(dims))


def _values(
    key: str, dtype: np.dtype[Any], shape: tuple[int, ...], highest: int, rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    lowered = key.lower()
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if "mask" in lowered:
        return np.ones(shape, dtype)
    if "type" in lowered or "segment" in lowered:
        return np.zeros(shape, dtype)
    return rng.integers(0, highest + 1, shape).astype(dtype)


def _highest_id(graph: Graph, key: str) -> int:
    """The largest value that every table indexed by this input (directly or through a Cast) has; 1 if it indexes none."""
    sizes = {tensor.name: tensor.dims[0] for tensor in graph.model.graph.initializer if tensor.dims}
    rows, names = [], {key}
    for node in graph.nodes:
        if node.op_type in ("Cast", "Identity") and node.input[0] in names | sizes.keys():
            names.update(node.output if node.input[0] in names else ())
            if node.input[0] in sizes:
                sizes[node.output[0]] = sizes[node.input[0]]
        elif node.op_type == "Gather" and node.input[1] in names and node.input[0] in sizes:
            rows.append(sizes[node.input[0]])
    return int(min(rows)) - 1 if rows else 1
