"""The order in which a graph is cut, and what crosses a cut.

Some nodes are *shared*: whoever needs their values computes them again, because that is cheaper than shipping them. These
are constants, and small values (masks, positions, shapes) that depend only on small integer inputs. The other nodes stand
in a fixed `order`; a cut is a position in that order, and what crosses it are the *carried* values that are made before
it and read after it. Control-flow nodes are single nodes of the order, so that no cut lies inside of one; the outer values
that they capture count as read by them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from controller.models.graph import Graph
from controller.models.naming import block_name
from controller.models.observing import Observation
from controller.models.scopes import scope_of

_MAX_SHARED_BYTES = 64 << 10
_MAX_SHARED_CONSTANT_BYTES = 4 << 10
_MAX_SHARED_TOTAL_BYTES = 1 << 20
"""What all shared nodes together write: some tens of microseconds, and the same on every machine, unlike a measured time."""
_HOIST_GAP = 64
"""Nodes between a value and its first reader that make its producer look hoisted."""
_HOIST_DEPTH = 12
_CHEAP_OPS = frozenset(
    [
        "Abs",
        "Add",
        "And",
        "Cast",
        "CastLike",
        "Clip",
        "Concat",
        "ConstantOfShape",
        "CumSum",
        "DequantizeLinear",
        "Div",
        "Equal",
        "Expand",
        "Flatten",
        "Floor",
        "Gather",
        "GatherElements",
        "GatherND",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "Log",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Pad",
        "Pow",
        "Range",
        "ReduceMax",
        "ReduceMin",
        "ReduceSum",
        "Reshape",
        "ScatterND",
        "Shape",
        "Sign",
        "Size",
        "Slice",
        "Split",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
        "Xor",
    ]
)
_RANDOM_OPS = frozenset(["Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Carried:
    """A value that may cross cuts: it crosses the cut at position p if `made <= p <= last`."""

    name: str
    made: int
    """1 + position of its producer in the order; 0 for inputs of the graph."""
    last: int
    """Position of its last reader; the length of the order for outputs of the graph."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A graph with its blocks: block i is `order[bounds[i]:bounds[i + 1]]`."""

    graph: Graph
    shared: frozenset[int]
    order: tuple[int, ...]
    carried: tuple[Carried, ...]
    bounds: tuple[int, ...]
    names: tuple[str, ...]
    atomic_reason: str = ""

    def crossing(self, block: int) -> tuple[str, ...]:
        """Names of the values that cross the cut before `block`."""
        at = self.bounds[block]
        return tuple(value.name for value in self.carried if value.made <= at <= value.last)

    def nodes(self, start: int, stop: int) -> tuple[int, ...]:
        """Positions in the graph of the nodes of blocks [start, stop), without the shared ones."""
        return self.order[self.bounds[start] : self.bounds[stop]]


def assemble(graph: Graph, shared: Iterable[int], bounds: tuple[int, ...], *, reason: str = "") -> Partition:
    """The partition of `graph` at given bounds, e.g. as they were stored."""
    shared = frozenset(shared)
    order = _order(graph, shared)
    names: list[str] = []
    for start, stop in itertools.pairwise(bounds):
        inside = order[start:stop]
        scopes = [scope_of(graph, at) for at in inside]
        names.append(block_name([graph.nodes[at] for at in inside], scopes, len(names), taken=names))
    return Partition(
        graph=graph, shared=shared, order=order, carried=_carried(graph, shared, order),
        bounds=bounds, names=tuple(names), atomic_reason=reason,
    )  # fmt: skip


def one_block(whole: Partition, reason: str) -> Partition:
    """The same graph without cuts."""
    return assemble(whole.graph, whole.shared, (0, len(whole.order)), reason=reason)


def lay_out(graph: Graph, seen: Observation) -> tuple[frozenset[int], tuple[int, ...], tuple[Carried, ...]]:
    """Shared nodes, the order of the others, and the values that may cross cuts."""
    constant = constant_nodes(graph)
    shared = constant | _cheap_nodes(graph, seen, constant)
    order = _order(graph, shared)
    if not order:  # a tiny integer graph: nothing is worth sharing
        shared, order = constant, _order(graph, constant)
    return shared, order, _carried(graph, shared, order)


def constant_nodes(graph: Graph) -> frozenset[int]:
    """Nodes that depend on no input of the graph; the runtime folds them when it loads."""
    known = set(graph.constant_bytes)
    found = set()
    for at, node in enumerate(graph.nodes):
        if node.op_type not in _RANDOM_OPS and known.issuperset(graph.reads[at]):
            found.add(at)
            known.update(node.output)
    return frozenset(found)


def _cheap_nodes(graph: Graph, seen: Observation, constant: frozenset[int]) -> frozenset[int]:
    """Nodes that depend only on small integer inputs and are small themselves: masks, positions, shapes."""
    integer = {name for name in graph.inputs if (fact := seen.values.get(name)) and not fact.is_float}
    known = {name for name in integer if seen.values[name].size_bytes <= _MAX_SHARED_BYTES}
    constants = {name for name, size in graph.constant_bytes.items() if size <= _MAX_SHARED_CONSTANT_BYTES}
    found: set[int] = set()
    for at, node in enumerate(graph.nodes):
        sizes = [seen.values[name].size_bytes if name in seen.values else math.inf for name in node.output]
        if at in constant:
            if node.op_type == "Constant" or max(sizes, default=0) <= _MAX_SHARED_CONSTANT_BYTES:
                constants.update(node.output)
        elif (
            node.op_type in _CHEAP_OPS
            and all(name in known or name in constants for name in graph.reads[at])
            and max(sizes) <= _MAX_SHARED_BYTES
        ):
            found.add(at)
            known.update(node.output)
    total_bytes = sum(seen.values[name].size_bytes for at in found for name in graph.nodes[at].output)
    return frozenset(found) if total_bytes <= _MAX_SHARED_TOTAL_BYTES else frozenset()


def _order(graph: Graph, shared: frozenset[int]) -> tuple[int, ...]:
    """The unshared nodes that an output of the graph depends on."""
    needed: set[int] = set()
    names = list(graph.outputs)
    while names:
        at = graph.producer.get(names.pop())
        if at is not None and at not in needed:
            needed.add(at)
            names.extend(graph.reads[at])
    return _with_hoisted_nodes_sunk(graph, sorted(needed - shared))


def _with_hoisted_nodes_sunk(graph: Graph, order: list[int]) -> tuple[int, ...]:
    """`order` with each shallow node that is first read far behind it moved to its first reader.

    Exporters compute the keys and values of all cross-attention layers in front; left there, all of them would cross every cut. Only nodes
    close to the model's inputs are moved: what they read is live anyway.
    """
    depth: dict[str, int] = {}
    for at in order:
        reached = 1 + max((depth.get(name, 0) for name in graph.reads[at]), default=0)
        depth |= dict.fromkeys(graph.nodes[at].output, reached)
    slots: dict[str, int] = {}
    """Value -> the least slot of any node that reads it."""
    keys: dict[int, tuple[int, int, int]] = {}
    for at in reversed(order):
        first = min((slots[name] for name in graph.nodes[at].output if name in slots), default=at)
        is_hoisted = first - at > _HOIST_GAP and depth[graph.nodes[at].output[0]] <= _HOIST_DEPTH
        slot = first if is_hoisted else at
        keys[at] = (slot, 0 if is_hoisted else 1, at)
        for name in graph.reads[at]:
            slots[name] = min(slots.get(name, slot), slot)
    return tuple(sorted(order, key=keys.__getitem__))


def _carried(graph: Graph, shared: frozenset[int], order: tuple[int, ...]) -> tuple[Carried, ...]:
    made = dict.fromkeys(graph.inputs, 0)
    for position, at in enumerate(order):
        made |= {name: position + 1 for name in graph.nodes[at].output if name}
    sources: dict[str, frozenset[str]] = {}
    for at in sorted(shared):
        read = frozenset().union(*(sources.get(name, frozenset([name])) for name in graph.reads[at]))
        sources |= dict.fromkeys(graph.nodes[at].output, read)
    last: dict[str, int] = {}
    for position, at in enumerate(order):
        for name in graph.reads[at]:
            last |= dict.fromkeys(sources.get(name, [name]), position)
    for name in graph.outputs:
        last |= dict.fromkeys(sources.get(name, [name]), len(order))
    return tuple(Carried(name, made[name], until) for name, until in last.items() if name in made)
