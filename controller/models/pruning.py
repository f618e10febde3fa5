"""Token pruning as a graph transform: behind a chosen layer the tokens that say least are dropped, and everything later works on fewer.

Tokens are scored by their mean absolute activation. The kept ones stay in their order, so positions that were added before remain right.
A model that needs all tokens again in the end (a map per patch) gets them back at `restore`: dropped tokens as they were at the pruning.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from controller.models.graph import Graph
from controller.models.scopes import layer_edges
from sla.errors import ModelError

_MIN_OPSET = 12
_AXES_ARE_INPUTS_SINCE = 18
_PREFIX = "/token_pruning"


def layer_outputs(graph: Graph) -> tuple[str, ...]:
    """The values that leave the layers of a transformer, in order: where tokens can be pruned. Empty if no layers are known."""
    edges = layer_edges(graph, range(len(graph.nodes)))
    return tuple(graph.nodes[edge - 1].output[0] for edge in edges if edge > 0)


def prune_tokens(model: Any, *, after: str, keep: float, protect: int = 1, restore: str | None = None) -> Any:
    """A new model in which of the value `after` [items, tokens, width] only a share `keep` of the tokens goes on.

    The first `protect` tokens (class tokens) are always kept and not counted. `restore` names a later value [items, tokens, width] of which
    the readers get all tokens again. Raises ModelError if a value is not produced by an operator or the opset is older than 12.
    """
    if not 0 < keep <= 1 or protect < 0:
        raise ModelError(
            f"A keep ratio of {keep} with {protect} protected tokens is impossible.",
            found=str(keep),
            accepted="0 < keep <= 1",
        )
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset < _MIN_OPSET:
        raise ModelError(
            f"Token pruning needs opset {_MIN_OPSET} or newer, not {opset}.",
            found=str(opset),
            accepted=f">= {_MIN_OPSET}",
        )
    pruned = onnx.ModelProto()
    pruned.CopyFrom(model)
    graph = pruned.graph
    if any(node.name.startswith(_PREFIX) for node in graph.node):
        raise ModelError("The tokens of this model are pruned already.")
    _insert_behind(graph, after, f"{_PREFIX}/kept", _pruning_nodes(graph, after, keep, protect, opset))
    if restore is not None:
        _insert_behind(graph, restore, f"{_PREFIX}/restored", _restoring_nodes(after, restore))
    touched = {after, restore}
    stale = [value for value in graph.value_info if value.name not in touched]
    del graph.value_info[:]
    # Shapes that the file claims of later values are no longer true.
    graph.value_info.extend(value for value in stale if value.name in _names_before(graph, after))
    return pruned


def _pruning_nodes(graph: Any, value: str, keep: float, protect: int, opset: int) -> list[Any]:
    def constant(name: str, array: Any) -> str:
        graph.initializer.append(numpy_helper.from_array(np.asarray(array), f"{_PREFIX}/{name}"))
        return f"{_PREFIX}/{name}"

    def node(op: str, inputs: list[str], *outputs: str, **attributes: Any) -> Any:
        made = [f"{_PREFIX}/{name}" if name else "" for name in outputs]
        return helper.make_node(op, inputs, made, name=f"{_PREFIX}/{outputs[-1]}_{op}", **attributes)

    def own(name: str) -> str:
        return f"{_PREFIX}/{name}"

    axes_in = opset >= _AXES_ARE_INPUTS_SINCE
    last = constant("last_axis", np.array([-1]))
    mean = (
        node("ReduceMean", [own("magnitude"), last], "scores", keepdims=0)
        if axes_in
        else node("ReduceMean", [own("magnitude")], "scores", axes=[-1], keepdims=0)
    )
    unsqueeze = (
        node("Unsqueeze", [own("chosen"), last], "index")
        if opset >= 13
        else node("Unsqueeze", [own("chosen")], "index", axes=[2])
    )
    zero, one = constant("zero", np.array([0])), constant("one", np.array([1]))
    return [
        node("Abs", [value], "magnitude"),
        mean,
        node(
            "Slice",
            [own("scores"), constant("first", np.array([protect])), constant("end", np.array([1 << 31])), one],
            "eligible",
        ),
        node("Shape", [own("eligible")], "shape"),
        node("Gather", [own("shape"), one], "count", axis=0),
        node("Cast", [own("count")], "count_f", to=onnx.TensorProto.FLOAT),
        node("Mul", [own("count_f"), constant("ratio", np.float32(keep))], "share"),
        node("Ceil", [own("share")], "whole"),
        node("Cast", [own("whole")], "kept_count", to=onnx.TensorProto.INT64),
        node("TopK", [own("eligible"), own("kept_count")], "best", "best_at", axis=1, largest=1, sorted=0),
        node("Cast", [own("best_at")], "best_at_f", to=onnx.TensorProto.FLOAT),
        # Back into the order of the tokens; ONNX has no sort of integers.
        node("TopK", [own("best_at_f"), own("kept_count")], "in_order", "unused", axis=1, largest=0, sorted=1),
        node("Cast", [own("in_order")], "at", to=onnx.TensorProto.INT64),
        node("Add", [own("at"), constant("protected", np.array([protect]))], "shifted"),
        node("Gather", [own("shape"), zero], "items", axis=0),
        node("Concat", [own("items"), constant("protected_count", np.array([protect]))], "protected_shape", axis=0),
        node("Expand", [constant("protected_at", np.arange(protect).reshape(1, protect)), own("protected_shape")], "front"),
        node("Concat", [own("front"), own("shifted")], "chosen", axis=1),
        unsqueeze,
        node("GatherND", [value, own("index")], "kept", batch_dims=1),
    ]  # fmt: skip


def _restoring_nodes(after: str, value: str) -> list[Any]:
    size, index = f"{_PREFIX}/restored_shape", f"{_PREFIX}/restored_index"
    return [
        helper.make_node("Shape", [value], [size], name=f"{_PREFIX}/restored_shape_Shape"),
        helper.make_node("Expand", [f"{_PREFIX}/index", size], [index], name=f"{_PREFIX}/restored_index_Expand"),
        helper.make_node(
            "ScatterElements", [after, index, value], [f"{_PREFIX}/restored"], name=f"{_PREFIX}/restored_ScatterElements", axis=1
        ),
    ]  # fmt: skip


def _insert_behind(graph: Any, value: str, replacement: str, nodes: list[Any]) -> None:
    """Put `nodes` behind the producer of `value`; who read `value` so far reads `replacement`. Raises ModelError."""
    producer = next((at for at, node in enumerate(graph.node) if value in node.output), None)
    if producer is None:
        raise ModelError(f"No operator of the model produces {value!r}.", found=value)
    if any(output.name == value for output in graph.output):
        raise ModelError(f"{value!r} is an output of the model; its tokens cannot be replaced.", found=value)
    for node in graph.node:
        if not node.name.startswith(_PREFIX):
            node.input[:] = [replacement if name == value else name for name in node.input]
    rest = list(graph.node)[producer + 1 :]
    del graph.node[producer + 1 :]
    graph.node.extend([*nodes, *rest])


def _names_before(graph: Any, value: str) -> set[str]:
    """Values that are made before `value`, in file order."""
    made: set[str] = set()
    for outputs in _outputs(graph.node):
        if value in outputs:
            break
        made.update(outputs)
    return made


def _outputs(nodes: Iterable[Any]) -> Iterable[list[str]]:
    for node in nodes:
        yield list(node.output)
