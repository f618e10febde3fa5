"""Where a graph is cut into blocks: at positions where few bytes are live, so that the blocks cost about the same.

Some nodes are *shared*: whoever needs their values computes them again, because that is cheaper than shipping them. These
are constants, and small values (masks, positions, shapes) that depend only on small integer inputs. The other nodes stand
in a fixed `order`; a cut is a position in that order, and what crosses it are the *carried* values that are made before
it and read after it. Control-flow nodes are single nodes of the order, so that no cut lies inside of one; the outer values
that they capture count as read by them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controller.models.graph import Graph
from controller.models.naming import block_name
from controller.models.observing import Observation

MAX_BLOCKS = 8
MAX_CROSSING_VALUES = 32
"""A frame holds 64 tensors; the inputs of the whole model travel beside those that cross."""
_MAX_SHARED_BYTES = 64 << 10
_MAX_SHARED_CONSTANT_BYTES = 4 << 10
_MAX_SHARED_TIME_SHARE = 0.05
_MAX_CANDIDATES = 64
_MIN_BLOCK_SHARE = 0.02
_BYTES_WEIGHT = 0.1
"""A cut that carries as much as the median candidate weighs like one block of eight that is 0.9 times too large."""
_WORTHWHILE = 0.97
"""One more block must make the largest one at least 3 % smaller."""

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
_FUSED_WITH_BEFORE = frozenset(
    [
        "Add",
        "BatchNormalization",
        "Clip",
        "Div",
        "Elu",
        "Erf",
        "Gelu",
        "GlobalAveragePool",
        "HardSigmoid",
        "HardSwish",
        "LayerNormalization",
        "LeakyRelu",
        "Mul",
        "ReduceMean",
        "Relu",
        "Sigmoid",
        "SkipLayerNormalization",
        "Softmax",
        "Sub",
        "Tanh",
    ]
)
"""The runtime computes these in the same pass as what they read, or in its memory layout, if nothing else reads it."""
_FUSION_PENALTY = 4.0


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


def partition(graph: Graph, seen: Observation, *, max_blocks: int = MAX_BLOCKS) -> Partition:
    """Cut `graph` into at most `max_blocks` blocks of about the same cost; one block with a reason if that cannot be."""
    shared, order, carried = lay_out(graph, seen)
    candidates = _candidates(graph, seen, order, carried)
    cost_ms = [seen.node_ms[at] for at in order]
    cuts = _choose(candidates, cost_ms, max_blocks)
    return assemble(
        graph, shared, (0, *cuts, len(order)), reason="" if cuts else _why_atomic(graph, order, bool(candidates))
    )


def assemble(graph: Graph, shared: Iterable[int], bounds: tuple[int, ...], *, reason: str = "") -> Partition:
    """The partition of `graph` at given bounds, e.g. as they were stored."""
    shared = frozenset(shared)
    order = _order(graph, shared)
    names: list[str] = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        names.append(block_name([graph.nodes[at] for at in order[start:stop]], len(names), taken=names))
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
    total_ms = sum(ms for at, ms in enumerate(seen.node_ms) if at not in constant)
    affordable = sum(seen.node_ms[at] for at in found) <= _MAX_SHARED_TIME_SHARE * total_ms
    return frozenset(found) if affordable else frozenset()


def _order(graph: Graph, shared: frozenset[int]) -> tuple[int, ...]:
    """The unshared nodes that an output of the graph depends on."""
    needed: set[int] = set()
    names = list(graph.outputs)
    while names:
        at = graph.producer.get(names.pop())
        if at is not None and at not in needed:
            needed.add(at)
            names.extend(graph.reads[at])
    return tuple(sorted(needed - shared))


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


@dataclass(frozen=True, slots=True)
class _Candidate:
    at: int
    size_bytes: float
    """Bytes that cross; more where the cut would separate what the runtime fuses."""


def _candidates(
    graph: Graph, seen: Observation, order: tuple[int, ...], carried: Sequence[Carried]
) -> list[_Candidate]:
    """The positions where every live value is a known tensor and there are not too many of them."""
    starts: list[list[Carried]] = [[] for _ in range(len(order) + 1)]
    for value in carried:
        starts[value.made].append(value)
    fused = _fused_values(graph, order)
    residual = _convolution_residuals(graph, order)
    live: list[Carried] = []
    found = []
    for at in range(len(order)):
        live = [value for value in (*live, *starts[at]) if value.last >= at]
        if at == 0 or len(live) > MAX_CROSSING_VALUES:
            continue
        facts = [seen.values.get(value.name) for value in live]
        size = sum(fact.size_bytes for fact in facts if fact is not None)
        if None not in facts:
            harms = any(value.name in fused or value.name in residual for value in live)
            penalty = _FUSION_PENALTY if harms else 1.0
            found.append(_Candidate(at, size * penalty))
    return found


def _fused_values(graph: Graph, order: tuple[int, ...]) -> frozenset[str]:
    """Values that the optimised whole model never makes: all their readers are computed together with their producer.

    A cut there is correct, but it rounds differently and costs a pass over memory.
    """
    readers: dict[str, list[int]] = {}
    for at in order:
        for name in graph.reads[at]:
            readers.setdefault(name, []).append(at)
    fused: set[str] = set()

    def joins(at: int) -> bool:
        node = graph.nodes[at]
        return node.op_type in _FUSED_WITH_BEFORE or (node.op_type == "Identity" and not fused.isdisjoint(node.output))

    for at in reversed(order):
        fused.update(name for name in graph.nodes[at].output if name in readers and all(map(joins, readers[name])))
    return frozenset(fused)


def _convolution_residuals(graph: Graph, order: tuple[int, ...]) -> frozenset[str]:
    """Values that are added to the result of a convolution: the runtime adds them in the same pass, in a layout of its own."""

    def origin(name: str) -> str:
        """The value that `name` renames."""
        at = graph.producer.get(name)
        return origin(graph.reads[at][0]) if at is not None and graph.nodes[at].op_type == "Identity" else name

    def convolved(name: str) -> bool:
        """True for the result of a convolution, perhaps with a constant added."""
        at = graph.producer.get(origin(name))
        if at is None:
            return False
        node = graph.nodes[at]
        if node.op_type in ("Add", "BatchNormalization"):
            bias = all(other in graph.constant_bytes for other in graph.reads[at][1:])
            return bias and convolved(graph.reads[at][0])
        return bool(node.op_type == "Conv")

    found: set[str] = set()
    for at in order:
        if graph.nodes[at].op_type == "Add" and len(graph.reads[at]) == 2:
            one, other = graph.reads[at]
            found.update({one, origin(one)} if convolved(other) and one not in graph.constant_bytes else ())
            found.update({other, origin(other)} if convolved(one) and other not in graph.constant_bytes else ())
    return frozenset(found)


def _choose(candidates: list[_Candidate], cost_ms: Sequence[float], max_blocks: int) -> list[int]:
    """Cuts that make the largest block smallest at a moderate number of bytes; empty if nothing is gained."""
    total = sum(cost_ms)
    if not candidates or max_blocks < 2 or total <= 0:
        return []
    until = [0.0]
    for ms in cost_ms:
        until.append(until[-1] + ms / total)
    thinned = _thin(candidates, until)
    best: list[int] = []
    largest = 1.0
    for blocks in range(2, max_blocks + 1):
        cuts = _balance(thinned, until, blocks)
        edges = [0, *cuts, len(cost_ms)]
        share = max(until[b] - until[a] for a, b in zip(edges, edges[1:], strict=False))
        if cuts and share < _WORTHWHILE * largest:
            best, largest = cuts, share
    return best


def _thin(candidates: list[_Candidate], until: Sequence[float]) -> list[_Candidate]:
    """The leanest candidate of each small slice of the cost, so that choosing stays fast on large graphs."""
    leanest: dict[int, _Candidate] = {}
    for candidate in candidates:
        slot = min(int(until[candidate.at] * _MAX_CANDIDATES), _MAX_CANDIDATES - 1)
        if slot not in leanest or candidate.size_bytes < leanest[slot].size_bytes:
            leanest[slot] = candidate
    return [leanest[slot] for slot in sorted(leanest)]


def _balance(candidates: list[_Candidate], until: Sequence[float], blocks: int) -> list[int]:
    """`blocks - 1` cuts that minimise the unevenness of the blocks plus the weight of what crosses; empty if impossible.

    Dynamic programming over (number of blocks so far, last cut); every block has at least `_MIN_BLOCK_SHARE` of the cost.
    """
    reference = sorted(c.size_bytes for c in candidates)[len(candidates) // 2] or 1.0
    edges = [0, *(c.at for c in candidates), len(until) - 1]
    weight = [0.0, *(_BYTES_WEIGHT * c.size_bytes / reference for c in candidates), 0.0]
    goal = 1 / blocks
    reach: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for number in range(1, blocks + 1):
        stops = [len(edges) - 1] if number == blocks else range(1, len(edges) - 1)
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for stop in stops:
            options = [
                (score + ((share - goal) / goal) ** 2 / blocks + weight[stop], (*path, edges[stop]))
                for start, (score, path) in reach.items()
                if start < stop and (share := until[edges[stop]] - until[edges[start]]) >= _MIN_BLOCK_SHARE
            ]
            if options:
                following[stop] = min(options)
        reach = following
    if len(edges) - 1 not in reach:
        return []
    return list(reach[len(edges) - 1][1][:-1])


def _why_atomic(graph: Graph, order: tuple[int, ...], has_candidates: bool) -> str:
    captures = [(graph.nodes[at], graph.captures[at]) for at in order if at in graph.captures]
    if captures:
        node, names = captures[0]
        label = f"{node.op_type} {node.name!r}" if node.name else node.op_type
        return f"the control flow of {label} captures outer values ({', '.join(names[:4])}) and is never cut inside"
    if len(order) < 2:
        return "the graph has a single operator that does work"
    return (
        "no cut would make the blocks smaller"
        if has_candidates
        else "at every position too many values, or values that cannot be shipped, are live"
    )
