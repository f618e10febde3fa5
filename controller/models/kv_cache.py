"""Pruning the key/value cache of a decoder, as a graph transform with the keep ratio as an input: it changes from call to call, nothing is reloaded.

The entries that received most attention from the queries of this call, over all heads and layers, are kept, and the newest always. One choice is
made for all layers, so that one mask and one list of positions stay valid; the model tells it as `kept_entries`, by which
the caller prunes what it holds per entry itself (a mask, positions). For a decoder that looks at an image this is the cross-modal importance:
what the text asks of the patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sla.errors import ModelError

KEEP_RATIO = "keep_ratio"
"""Name of the added input: a float32 scalar in (0, 1]."""
KEPT_ENTRIES = "kept_entries"
"""Name of the added output: int64 [items, kept], ascending."""
_MIN_OPSET = 13
_PREFIX = "/cache_pruning"


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """One layer: the names of its attention weights and of its cache outputs."""

    weights: str
    """Output of the softmax, [items, heads, queries, entries]."""
    key: str
    """Output of the model, [items, heads, entries, width]."""
    value: str


def prune_cache(model: Any, layers: Sequence[CachedAttention], *, protect: int = 1) -> Any:
    """A new model whose cache outputs hold only the kept entries; the newest `protect` of them always.

    Raises ModelError if a named value is missing or the opset is older than 13.
    """
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset < _MIN_OPSET or not layers or protect < 1:
        raise ModelError(
            f"Cache pruning needs opset {_MIN_OPSET} or newer, at least one layer and one protected entry."
        )
    pruned = onnx.ModelProto()
    pruned.CopyFrom(model)
    graph = pruned.graph
    _check(graph, layers)
    for layer in layers:
        for name in (layer.key, layer.value):
            _rename_inside(graph, name)
    nodes = _Nodes(graph)
    index = _choose(nodes, [layer.weights for layer in layers], protect)
    for layer in layers:
        for name in (layer.key, layer.value):
            first = nodes.add("Transpose", [_inner(name)], f"{name}_by_entry", perm=[0, 2, 1, 3])
            kept = nodes.add("GatherND", [first, index], f"{name}_kept", batch_dims=1)
            graph.node.append(
                helper.make_node("Transpose", [kept], [name], name=f"{_PREFIX}/{name}", perm=[0, 2, 1, 3])
            )
    graph.input.append(helper.make_tensor_value_info(KEEP_RATIO, TensorProto.FLOAT, []))
    graph.output.append(helper.make_tensor_value_info(KEPT_ENTRIES, TensorProto.INT64, [None, None]))
    for output in graph.output:
        if any(output.name in (layer.key, layer.value) for layer in layers):
            output.type.tensor_type.shape.dim[2].Clear()
    return pruned


def cached_attention(model: Any) -> list[CachedAttention]:
    """The layers of a decoder whose outputs are its caches, found from the graph. Raises ModelError if there are none.

    Cache outputs come in pairs whose names differ in `key` and `value` only; a layer's attention weights are the first softmax
    that is computed from its keys.
    """
    outputs = [value.name for value in model.graph.output]
    keys = [name for name in outputs if "key" in name and name.replace("key", "value") in outputs]
    if not keys:
        raise ModelError(
            "The model has no pairs of cache outputs whose names differ in `key` and `value`; its cache cannot be pruned.",
            found=", ".join(outputs)[:200], accepted="outputs such as present.0.key and present.0.value",
        )  # fmt: skip
    producer = {name: node for node in model.graph.node for name in node.output}
    readers: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return [CachedAttention(_weights_of(key, producer, readers), key, key.replace("key", "value")) for key in keys]


def past_inputs(model: Any, layers: Sequence[CachedAttention]) -> dict[str, str]:
    """Cache output -> the input that it grows from, and that takes it at the next step. Raises ModelError if a cache grows from no input."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name for value in model.graph.input} - weights
    producer = {name: node for node in model.graph.node for name in node.output}
    return {name: _grown_from(name, inputs, producer) for layer in layers for name in (layer.key, layer.value)}


def _grown_from(cache: str, inputs: set[str], producer: dict[str, Any]) -> str:
    source = cache
    while source not in inputs and source in producer and producer[source].op_type in ("Identity", "Concat"):
        source = producer[source].input[0]  # the past stands before what is new
    if source not in inputs:
        raise ModelError(f"The cache output {cache!r} grows from no input of the model.", found=cache)
    return source


def _weights_of(key: str, producer: dict[str, Any], readers: dict[str, list[Any]]) -> str:
    source = key
    while source in producer and producer[source].op_type == "Identity":
        source = producer[source].input[0]
    seen, waiting = {source}, [source]
    while waiting:  # breadth first, so that the nearest softmax is found
        for node in readers.get(waiting.pop(0), []):
            if node.op_type == "Softmax":
                return str(node.output[0])
            fresh = [name for name in node.output if name not in seen]
            seen.update(fresh)
            waiting.extend(fresh)
    raise ModelError(f"No softmax is computed from the cache output {key!r}; its cache cannot be pruned.", found=key)


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Appends nodes with names of our own."""

    graph: Any

    def add(self, op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.graph.node.append(
            helper.make_node(op, inputs, [f"{_PREFIX}/{name}"], name=f"{_PREFIX}/{name}_{op}", **attributes)
        )
        return f"{_PREFIX}/{name}"

    def constant(self, name: str, array: Any) -> str:
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(array), f"{_PREFIX}/{name}"))
        return f"{_PREFIX}/{name}"

    def top(self, scores: str, count: str, name: str, *, largest: int) -> tuple[str, str]:
        made = [f"{_PREFIX}/{name}", f"{_PREFIX}/{name}_at"]
        self.graph.node.append(
            helper.make_node(
                "TopK", [scores, count], made, name=f"{_PREFIX}/{name}_TopK", axis=1, largest=largest, sorted=1
            )
        )
        return made[0], made[1]


def _choose(nodes: _Nodes, weights: list[str], protect: int) -> str:
    """Nodes that choose the entries; the name of their index [items, kept, 1]."""
    axes, one = nodes.constant("axes", np.array([1, 2])), nodes.constant("one", np.array([1]))
    received = [nodes.add("ReduceSum", [name, axes], f"received_{at}", keepdims=0) for at, name in enumerate(weights)]
    importance = nodes.add("Sum", received, "importance")
    count = nodes.add("Gather", [nodes.add("Shape", [importance], "shape"), one], "count", axis=0)
    share = nodes.add("Mul", [nodes.add("Cast", [count], "count_f", to=TensorProto.FLOAT), KEEP_RATIO], "share")
    wanted = nodes.add("Cast", [nodes.add("Ceil", [share], "whole")], "wanted", to=TensorProto.INT64)
    least = nodes.add("Min", [count, nodes.constant("protect", np.array([protect]))], "least")
    kept = nodes.add("Min", [nodes.add("Max", [wanted, least], "at_least"), count], "kept_count")
    zero, step = nodes.constant("zero", np.array(0)), nodes.constant("step", np.array(1))
    positions = nodes.add("Range", [zero, nodes.add("Squeeze", [count], "count_scalar"), step], "positions")
    newest = nodes.add("GreaterOrEqual", [positions, nodes.add("Sub", [count, least], "first_newest")], "newest")
    bonus = nodes.add(
        "Where", [newest, nodes.constant("much", np.float32(1e9)), nodes.constant("nothing", np.float32(0))], "bonus"
    )
    _, best = nodes.top(nodes.add("Add", [importance, bonus], "scores"), kept, "best", largest=1)
    in_order, _ = nodes.top(nodes.add("Cast", [best], "best_f", to=TensorProto.FLOAT), kept, "in_order", largest=0)
    nodes.graph.node.append(
        helper.make_node("Cast", [in_order], [KEPT_ENTRIES], name=f"{_PREFIX}/{KEPT_ENTRIES}", to=TensorProto.INT64)
    )
    return nodes.add("Unsqueeze", [KEPT_ENTRIES, nodes.constant("last", np.array([-1]))], "index")


def _inner(name: str) -> str:
    return f"{_PREFIX}/{name}_all"


def _rename_inside(graph: Any, name: str) -> None:
    """The value gets a name of its own inside the graph; `name` becomes free for the pruned output."""
    for node in graph.node:
        node.input[:] = [_inner(name) if value == name else value for value in node.input]
        node.output[:] = [_inner(name) if value == name else value for value in node.output]


def _check(graph: Any, layers: Sequence[CachedAttention]) -> None:
    outputs = {value.name for value in graph.output}
    made = {name for node in graph.node for name in node.output}
    for layer in layers:
        if layer.weights not in made:
            raise ModelError(
                f"No operator of the model produces the attention weights {layer.weights!r}.", found=layer.weights
            )
        for name in (layer.key, layer.value):
            if name not in outputs or name not in made:
                raise ModelError(f"{name!r} is not a cache output of the model.", found=name)
    taken = outputs | made | {value.name for value in graph.input}
    if not taken.isdisjoint({KEEP_RATIO, KEPT_ENTRIES}):
        raise ModelError("The cache of this model is pruned already.")
