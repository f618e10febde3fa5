"""What the exporter called the parts of a graph: the scope of each node, and the layers of a transformer.

A scope is a tuple of components such as ("encoder", "layer.3", "attention"): an index stays with the word before it. It is read from the
node's own name where that is a path (`/encoder/layer.3/attention/MatMul`), else from the names of the weights that the node reads
(`encoder.layer.3.attention.bias`), which survive where exporters and quantisers rename nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from controller.models.graph import Graph

Scope = tuple[str, ...]

_INDEXED = re.compile(r".*[A-Za-z_][^.]*\.\d+")
_WRAPPERS = frozenset(["", "_orig_mod", "base_model", "inner", "m", "model", "module", "net"])
_MIN_LAYERS = 2


def scope_of(graph: Graph, at: int) -> Scope:
    """The scope of the node at position `at`; empty if nothing says so."""
    own = path_scope(graph.nodes[at].name)
    if own:
        return own
    weights = (_dotted(name) for name in graph.reads[at] if name in graph.constant_bytes)
    return max(weights, key=len, default=())


def path_scope(name: str) -> Scope:
    """The scope in a node's name; its last part is the node itself."""
    parts = [part for part in name.split(":")[0].strip("/").split("/") if part]
    return _without_wrappers(parts[:-1])


def _dotted(name: str) -> Scope:
    """The scope in a weight's name, e.g. `inner.encoder.layer.0.output.dense.bias`; empty if it is no such name."""
    parts: list[str] = []
    for part in name.strip("/").replace("/", ".").split("."):
        if part.isdigit() and parts:
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return _without_wrappers(parts[:-1]) if len(parts) > 2 else ()


def _without_wrappers(parts: list[str]) -> Scope:
    start = 0
    while start < len(parts) - 1 and parts[start] in _WRAPPERS:
        start += 1
    return tuple(parts[start:])


def layer_of(scope: Scope) -> tuple[Scope, int] | None:
    """(family, index) of the outermost numbered component, e.g. (("encoder", "layer"), 3); None if there is none."""
    for depth, part in enumerate(scope):
        if _INDEXED.fullmatch(part):
            word, _, index = part.rpartition(".")
            return (*scope[:depth], word), int(index)
    return None


def layer_edges(graph: Graph, order: Sequence[int]) -> tuple[int, ...]:
    """Positions in `order` where a layer of a transformer begins or ends; empty if the graph does not say so, or has none.

    A layer ends behind the last node of its scope: exporters hoist small nodes (scales, shapes) of later layers to the front, but leave
    none behind. A family of layers counts if most of them hold a softmax, which tells attention from the numbered parts of other networks.
    """
    ends: dict[Scope, dict[int, int]] = {}
    begins: dict[Scope, list[int]] = {}
    softmax = []
    for position, at in enumerate(order):
        if graph.nodes[at].op_type in ("Softmax", "Attention", "MultiHeadAttention"):
            softmax.append(position)
        layer = layer_of(scope_of(graph, at))
        if layer is not None:
            family, index = layer
            ends.setdefault(family, {})[index] = position + 1
            if index == min(ends[family]) and path_scope(graph.nodes[at].name):
                begins.setdefault(family, []).append(position)
    edges: set[int] = set()
    for family, by_index in ends.items():
        stops = [by_index[index] for index in sorted(by_index)]
        begin = _start(begins.get(family, []), stops[0])
        inside = sum(
            any(start <= at < stop for at in softmax) for start, stop in zip([begin or 0, *stops], stops, strict=False)
        )
        if len(stops) >= _MIN_LAYERS and stops == sorted(stops) and inside * 2 >= len(stops):
            edges.update(stops if begin is None else (begin, *stops))
    return tuple(sorted(edges))


def _start(positions: Sequence[int], stop: int) -> int | None:
    """Where the first layer, which ends at `stop`, begins; None if only weights tell, which most nodes do not read.

    A node far in front of the others was hoisted and is none of the layer's beginning.
    """
    if not positions:
        return None
    middle = positions[len(positions) // 2]
    return next(position for position in positions if middle - position <= 2 * max(1, stop - middle))
