"""A contiguous range of blocks as an ONNX model of its own, holding only the weights that it uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import onnx

from controller.models.fusion import fused_activations
from controller.models.graph import MAX_MODEL_BYTES, Graph, with_values
from controller.models.layout import Partition
from controller.models.observing import Observation, ValueFact
from sla.errors import ModelError

Dims = tuple[int | str | None, ...]
_LOWEST_IR = 4
"""Older files must list initializers as inputs; ours never do."""


class Declaration(msgspec.Struct, frozen=True):
    """Type of a value that crosses a cut; a dimension that may differ from run to run is a symbol or None."""

    elem_type: int
    dims: Dims


@dataclass(frozen=True, slots=True)
class Piece:
    """What a range of blocks reads and writes."""

    nodes: tuple[int, ...]
    """Positions in the graph, shared nodes among them, in order."""
    constants: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def piece(cut: Partition, start: int, stop: int) -> Piece:
    """The nodes, weights, inputs and outputs of blocks [start, stop).

    A range that ends before the last block writes every value made in it that is read later. The last range writes all outputs of
    the model; one that an earlier block made comes in as an input and is passed through.
    """
    graph = cut.graph
    own = set(cut.nodes(start, stop)) | cut.shared
    nodes: set[int] = set()
    constants: dict[str, None] = {}
    inputs: dict[str, None] = {}
    outputs = _targets(cut, start, stop)
    waiting = list(reversed(outputs))
    while waiting:
        name = waiting.pop()
        at = graph.producer.get(name)
        if name in graph.constant_bytes:
            constants[name] = None
        elif at not in own:
            inputs[name] = None
        elif at is not None and at not in nodes:
            nodes.add(at)
            waiting.extend(reversed(graph.reads[at]))
    return Piece(
        nodes=tuple(sorted(nodes)),
        constants=tuple(name for name in graph.constant_bytes if name in constants),
        inputs=tuple(name for name in (*graph.inputs, *(v.name for v in cut.carried)) if inputs.pop(name, 0) is None),
        outputs=outputs,
    )


def _targets(cut: Partition, start: int, stop: int) -> tuple[str, ...]:
    low, high = cut.bounds[start], cut.bounds[stop]
    if stop == len(cut.bounds) - 1:
        return cut.graph.outputs
    return tuple(value.name for value in cut.carried if low < value.made <= high <= value.last)


def extract(cut: Partition, start: int, stop: int, declared: Mapping[str, Declaration]) -> Any:
    """Blocks [start, stop) as an `onnx.ModelProto`; `declared` has the type of every value that crosses a cut.

    Raises ModelError if their weights are more than one file may hold.
    """
    graph, source = cut.graph, cut.graph.model
    part = piece(cut, start, stop)
    size = sum(graph.constant_bytes[name] for name in part.constants)
    if size > MAX_MODEL_BYTES:
        raise ModelError(
            f"Blocks {start} to {stop} of {len(cut.names)} have {size / 1e9:.1f} GB of weights, more than one ONNX file may hold; "
            "they must be placed as smaller shards.",
            found=f"{size} bytes", accepted=f"at most {MAX_MODEL_BYTES}",
        )  # fmt: skip
    known = {value.name: value for value in (*source.graph.input, *source.graph.output)}
    model = onnx.ModelProto(
        ir_version=max(source.ir_version, _LOWEST_IR), producer_name="tidegate", opset_import=source.opset_import,
        functions=source.functions,
    )  # fmt: skip
    model.graph.name = f"{source.graph.name or 'graph'}[{start}:{stop}]"
    model.graph.node.extend(graph.nodes[at] for at in part.nodes)
    model.graph.input.extend(_value_info(name, known, declared) for name in part.inputs)
    model.graph.output.extend(_value_info(name, known, declared) for name in part.outputs)
    inner = {name for at in part.nodes for name in graph.nodes[at].output} - {*part.inputs, *part.outputs}
    model.graph.value_info.extend(value for value in source.graph.value_info if value.name in inner)
    wanted = set(part.constants)
    model.graph.initializer.extend(with_values(t, graph.weights) for t in source.graph.initializer if t.name in wanted)
    model.graph.sparse_initializer.extend(t for t in source.graph.sparse_initializer if t.values.name in wanted)
    for name in _fused_and_leaving(graph, part):
        _pass_on(model.graph, name, len(declared[name].dims))
    return model


def _fused_and_leaving(graph: Graph, part: Piece) -> list[str]:
    """Activations that only leave the piece, in the layout of convolutions."""
    read = {name for at in part.nodes for name in graph.reads[at]}
    leaving = [name for name in part.outputs if name not in read and name not in graph.outputs]
    fused = fused_activations(graph) if leaving else frozenset()
    return [name for name in leaving if name in fused and name not in part.inputs]


def _pass_on(piece_graph: Any, name: str, rank: int) -> None:
    """Let `name` leave the graph through a reshape that changes nothing, so that the runtime still fuses what computes it.

    The reshape copies the value once; two passes over it are saved (measured: a quarter of what a cut costs).
    """
    inner = f"{name}/leaving"
    for node in piece_graph.node:
        node.output[:] = [inner if made == name else made for made in node.output]
    same = onnx.numpy_helper.from_array(np.array([0] * (rank - 1) + [-1], np.int64), f"{inner}/shape")
    piece_graph.initializer.append(same)
    piece_graph.node.append(onnx.helper.make_node("Reshape", [inner, same.name], [name], name=f"{inner}/Reshape"))


def serialise(model: Any) -> bytes:
    """The model's bytes, the same for the same model, so that they can be named by their hash."""
    return bytes(model.SerializeToString(deterministic=True))


def _value_info(name: str, known: Mapping[str, Any], declared: Mapping[str, Declaration]) -> Any:
    if name in known:
        return known[name]
    declaration = declared[name]
    return onnx.helper.make_tensor_value_info(name, declaration.elem_type, list(declaration.dims))


def declare(cut: Partition, seen: Observation) -> dict[str, Declaration]:
    """Types of all values that cross a cut.

    The runtime makes some of its fusions only where it knows that dimensions are fixed or equal, so a shard must know what the whole
    model knows. A dimension is fixed only if shape inference proves it, because a fixed dimension of an input is enforced.
    Symbols are not enforced, and are taken over from the file.
    """
    names = {name for block in range(1, len(cut.names)) for name in cut.crossing(block)} - set(cut.graph.inputs)
    if not names:
        return {}
    proven = _dims_by_name(_inferred(cut.graph).graph.value_info)
    claimed = _dims_by_name(value for value in cut.graph.model.graph.value_info if value.name in names)
    return {
        name: _declaration(seen.values[name], proven.get(name, ()), claimed.get(name, ())) for name in sorted(names)
    }


def loosened(declared: Mapping[str, Declaration]) -> dict[str, Declaration]:
    """The same types without any dimension: a shard must not know more than the whole model either, or it fuses what the whole does not."""
    return {name: Declaration(value.elem_type, (None,) * len(value.dims)) for name, value in declared.items()}


def _declaration(fact: ValueFact, proven: Dims, claimed: Dims) -> Declaration:
    rank = len(fact.shape)
    proven = proven if len(proven) == rank else (None,) * rank
    claimed = claimed if len(claimed) == rank else (None,) * rank
    dims: list[int | str | None] = []
    for size, certain, claim in zip(fact.shape, proven, claimed, strict=True):
        symbols = [dim for dim in (claim, certain) if isinstance(dim, str)]
        dims.append(size if certain == size else next(iter(symbols), None))
    return Declaration(fact.elem_type, tuple(dims))


def _inferred(graph: Graph) -> Any:
    """The model with dimensions by the operators' own rules; what the file itself claims of inner values is not believed."""
    bare = onnx.ModelProto()
    bare.CopyFrom(graph.model)
    del bare.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(bare)


def _dims_by_name(values: Iterable[Any]) -> dict[str, Dims]:
    return {value.name: tuple(map(_dim, value.type.tensor_type.shape.dim)) for value in values}


def _dim(dim: Any) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return str(dim.dim_param) or None
