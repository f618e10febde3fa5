"""Reading an ONNX model from outside into a graph that can be cut; everything that is wrong with it ends here.

Invariant of a `Graph`: its nodes stand in an order in which every value is produced before it is read, every value has
one producer, and every name that a node reads (also from inside a subgraph) is a graph input, an initializer or the
output of an earlier node.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import onnx

from sla.errors import ModelError

MAX_MODEL_BYTES = (1 << 31) - 1
"""Protocol buffers cannot hold more. The weights of a larger model stay in their own files; each of its shards must be smaller."""
MAX_WEIGHT_BYTES = 1 << 40
_MAX_UNFOLDING = 4
"""Weights may be named more than once and packed two to a byte; more than this is no model but a trap."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A validated model with the indices that cutting needs. Positions are indices into `nodes`."""

    model: Any
    """The `onnx.ModelProto`; never changed after validation."""
    nodes: tuple[Any, ...]
    reads: tuple[tuple[str, ...], ...]
    """Names that each node reads, including outer values that its subgraphs capture."""
    captures: dict[int, tuple[str, ...]]
    """For nodes with subgraphs: the outer values that they capture."""
    producer: dict[str, int]
    constant_bytes: dict[str, int]
    """Initializers by name with their size."""
    inputs: tuple[str, ...]
    """True inputs: initializers that old files also list as inputs are not among them."""
    outputs: tuple[str, ...]
    weights: Path | None = None
    """Where the files of weights lie that are too large to be drawn into the model; None if it holds all of them."""


def read_model(source: Path | bytes, name: str, *, weights: Path | None = None) -> tuple[Any, bool]:
    """The parsed `onnx.ModelProto` with external data drawn in, and whether there was none of that.

    External data that makes the model larger than one file may be is checked and stays where it is: beside the file, or in `weights`
    for a model that is given as bytes. Raises ModelError with one sentence.
    """
    content = source if isinstance(source, bytes) else read_file(source)
    if len(content) > MAX_MODEL_BYTES:
        raise ModelError(f"{name} has {len(content)} bytes; an ONNX file may have at most {MAX_MODEL_BYTES}.")
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # google.protobuf raises DecodeError, which has no type stubs and no public base
        raise _not_onnx(name, "its content cannot be decoded or is cut short") from error
    if not model.graph.node or not model.opset_import:
        raise _not_onnx(name, "it holds no graph with operators")
    external = _draw_in_external_data(model, source.parent if isinstance(source, Path) else weights, name)
    return model, not external


def read_file(path: Path) -> bytes:
    """The file's bytes. Raises ModelError if it cannot be read or is too large for one ONNX file."""
    try:
        if path.stat().st_size > MAX_MODEL_BYTES:
            raise ModelError(f"{path} is larger than {MAX_MODEL_BYTES} bytes, the most that an ONNX file may have.")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.", found=str(path)) from error


def build_graph(model: Any, name: str, *, weights: Path | None = None) -> Graph:
    """Validate `model` and index it; `weights` is where data lies that `read_model` left outside. Raises ModelError with one sentence."""
    graph = model.graph
    constants = {tensor.name: tensor_bytes(tensor) for tensor in graph.initializer}
    constants |= {sparse.values.name: tensor_bytes(sparse.values) for sparse in graph.sparse_initializer}
    inputs = tuple(value.name for value in graph.input if value.name not in constants)
    outputs = tuple(value.name for value in graph.output)
    if not inputs:
        raise ModelError(f"{name} has no inputs; a model needs at least one to be served.", pointer="/graph/input")
    if not outputs:
        raise ModelError(f"{name} has no outputs; a model needs at least one to be served.", pointer="/graph/output")
    captured = [captured_names(node) for node in graph.node]
    reads = [tuple(dict.fromkeys([*filter(None, n.input), *c])) for n, c in zip(graph.node, captured, strict=True)]
    order = _topological_order(graph.node, reads, {*inputs, *constants}, name)
    nodes = tuple(graph.node[i] for i in order)
    producer = {value: at for at, node in enumerate(nodes) for value in node.output if value}
    unmade = [value for value in outputs if value not in producer and value not in inputs and value not in constants]
    if unmade:
        raise ModelError(f"{name} promises the output {unmade[0]!r}, which no operator produces.", found=unmade[0])
    return Graph(
        model=model,
        nodes=nodes,
        reads=tuple(reads[i] for i in order),
        captures={at: captured[i] for at, i in enumerate(order) if captured[i]},
        producer=producer,
        constant_bytes=constants,
        inputs=inputs,
        outputs=outputs,
        weights=weights if any(is_external(tensor) for tensor in graph.initializer) else None,
    )


def shard_limit_bytes(graph: Graph) -> int:
    """The most that a file of its blocks may have, for a model that one file cannot hold; 0 for others."""
    return 0 if graph.weights is None else MAX_MODEL_BYTES


def external_files(content: bytes) -> list[str]:
    """Where a model says that its weights lie outside; empty for what is no model, which whoever reads it next says."""
    try:
        model = onnx.load_model_from_string(content)
    except Exception:  # google.protobuf's DecodeError, see `read_model`
        return []
    tensors = (tensor for tensor in _all_tensors(model.graph) if is_external(tensor))
    return sorted({_location(tensor) for tensor in tensors})


def _location(tensor: Any) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def metadata(source: Path | bytes, name: str) -> dict[str, str]:
    """The model's custom metadata, e.g. `character` of the recognition models (their symbols, one per line)."""
    return {entry.key: entry.value for entry in read_model(source, name)[0].metadata_props}


def subgraphs(node: Any) -> Iterator[Any]:
    """The graphs inside a control-flow node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def captured_names(node: Any) -> tuple[str, ...]:
    """Outer values that the node's subgraphs read, in order of first use."""
    return tuple(dict.fromkeys(name for graph in subgraphs(node) for name in _free_names(graph)))


def _free_names(graph: Any) -> Iterator[str]:
    known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    known |= {sparse.values.name for sparse in graph.sparse_initializer}
    for node in graph.node:
        for name in (*node.input, *captured_names(node)):
            if name and name not in known:
                yield name
        known.update(node.output)
    for value in graph.output:
        if value.name not in known:
            yield value.name


def _topological_order(nodes: Any, reads: list[tuple[str, ...]], known: set[str], name: str) -> list[int]:
    """Positions of `nodes` so that values come before their readers; the given order wherever it is one already."""
    producer: dict[str, int] = {}
    for at, node in enumerate(nodes):
        for value in filter(None, node.output):
            if value in producer or value in known:
                raise ModelError(f"{name} produces the value {value!r} twice.", found=value)
            producer[value] = at
    waiting: list[int] = []
    readers: dict[int, list[int]] = {}
    for at, names in enumerate(reads):
        sources = set()
        for value in names:
            if value in producer:
                sources.add(producer[value])
            elif value not in known:
                raise ModelError(f"{name} reads the value {value!r}, which nothing produces.", found=value)
        waiting.append(len(sources))
        for source in sources:
            readers.setdefault(source, []).append(at)
    ready = [at for at, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        at = heapq.heappop(ready)
        order.append(at)
        for reader in readers.get(at, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        stuck = nodes[next(at for at, count in enumerate(waiting) if count > 0)]
        raise ModelError(
            f"{name} has a cycle through the operator {stuck.name or stuck.op_type!r}; a graph may have none."
        )
    return order


def tensor_bytes(tensor: Any) -> int:
    """Size of a stored tensor's values."""
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return int(math.prod(tensor.dims) * dtype.itemsize)


def _all_tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for inner in subgraphs(node):
            yield from _all_tensors(inner)


def _draw_in_external_data(model: Any, base: Path | None, name: str) -> bool:
    """True if there was external data."""
    external = [t for t in _all_tensors(model.graph) if t.data_location == onnx.TensorProto.EXTERNAL]
    if not external:
        return False
    if base is None:
        raise ModelError(
            f"{name} keeps weights in other files; give the file's path, or save it with its weights inside."
        )
    for tensor in external:
        _check_location(tensor, base, name)
    claimed = sum(tensor_bytes(tensor) for tensor in external)
    _check_claim(claimed, {_location(tensor) for tensor in external}, base, name)
    size = model.ByteSize() + claimed
    if size > MAX_MODEL_BYTES:
        for tensor in external:
            _check_extent(tensor, base, name)
        if len(external) > sum(map(is_external, model.graph.initializer)) or size > MAX_WEIGHT_BYTES:
            raise ModelError(f"{name} has {size} bytes with its weights, in a form that cannot be split into files.")
        return True
    for tensor in external:
        _draw_in(tensor, base, name)
    return True


def _check_claim(claimed_bytes: int, locations: set[str], base: Path, name: str) -> None:
    """Refuse a small file of weights that unfolds into very many, because its bytes are named again and again."""
    files = [base / location for location in locations]
    held_bytes = sum(path.stat().st_size for path in files if path.is_file())
    if all(path.is_file() for path in files) and claimed_bytes > _MAX_UNFOLDING * held_bytes:
        raise ModelError(
            f"{name} claims {claimed_bytes} bytes of weights in files that hold {held_bytes}.",
            found=str(claimed_bytes), accepted=f"at most {_MAX_UNFOLDING * held_bytes}",
        )  # fmt: skip


def _draw_in(tensor: Any, base: Path, name: str) -> None:
    """Put a tensor's values into it; their place was checked. (onnx's own reader refuses files with several hard links, which ours are.)"""
    place = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = int(place.get("offset", 0)), int(place.get("length", tensor_bytes(tensor)))
        if not 0 <= length <= tensor_bytes(tensor):
            raise ValueError(f"{tensor.name} would have {length} bytes")
        with (base / place["location"]).open("rb") as file:
            file.seek(offset)
            values = file.read(length)
        if len(values) < length:
            raise ValueError(f"{place['location']} does not hold the {length} bytes of {tensor.name} at {offset}")
    except (OSError, ValueError) as error:
        why = f"{place['location']}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise ModelError(f"{name} keeps weights in other files that cannot be read: {why}.") from error
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.DEFAULT
    tensor.raw_data = values


def is_external(tensor: Any) -> bool:
    """Whether the tensor's values lie in another file."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def with_values(tensor: Any, weights: Path | None) -> Any:
    """The tensor with its values inside; reads them from their file in `weights` if they lie outside. Raises ModelError."""
    if not is_external(tensor) or weights is None:
        return tensor
    place = {entry.key: entry.value for entry in tensor.external_data}
    try:
        with (weights / place["location"]).open("rb") as file:
            file.seek(int(place.get("offset", 0)))
            values = file.read(tensor_bytes(tensor))
    except (OSError, KeyError, ValueError) as error:
        raise ModelError(f"The weights {tensor.name!r} can no longer be read: {error}.", found=tensor.name) from error
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=values)


def _check_extent(tensor: Any, base: Path, name: str) -> None:
    """Refuse weights that are not there in full."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    offset, length = int(place.get("offset", 0)), int(place.get("length", tensor_bytes(tensor)))
    path = base / place["location"]
    held = path.stat().st_size if path.is_file() else 0
    if offset < 0 or length != tensor_bytes(tensor) or offset + length > held:
        raise ModelError(
            f"{name} keeps the weights {tensor.name!r} in {place['location']!r}, which does not hold the {tensor_bytes(tensor)} bytes at {offset}.",
            found=tensor.name,
        )


def _check_location(tensor: Any, base: Path, name: str) -> None:
    """Refuse a location that leaves the model's own directory, by its spelling or through a symbolic link."""
    location = _location(tensor)
    parts = PurePosixPath(location).parts + PureWindowsPath(location).parts
    rooted = PurePosixPath(location).is_absolute() or bool(PureWindowsPath(location).anchor)
    if not location or rooted or ".." in parts or not (base / location).resolve().is_relative_to(base.resolve()):
        raise ModelError(
            f"{name} keeps weights in {location!r}, which is outside of the model's own directory.",
            found=location,
            accepted="a relative path below the model's directory",
        )


def _not_onnx(name: str, why: str) -> ModelError:
    return ModelError(f"{name} is not an ONNX model: {why}.", found=name, accepted="a complete .onnx file")


def first_line(error: BaseException) -> str:
    """The first line of a foreign error's text, bounded, without its full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:240].rstrip(". ")
