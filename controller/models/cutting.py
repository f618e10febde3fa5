"""Where a graph is cut into blocks: at every layer of a transformer; elsewhere where few bytes are live, in blocks of about the same cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from controller.models.costing import node_costs
from controller.models.fusion import behind_fused, convolution_residuals, fused_values
from controller.models.graph import Graph
from controller.models.layout import Carried, Partition, assemble, constant_nodes, lay_out
from controller.models.observing import Observation
from controller.models.scopes import layer_edges

MAX_BLOCKS = 8
"""Of a graph whose layers are not known."""
MAX_LAYER_CUTS = 63
MAX_CROSSING_VALUES = 32
"""A frame holds 64 tensors; the inputs of the whole model travel beside those that cross."""
_MAX_CANDIDATES = 64
_MIN_BLOCK_SHARE = 0.02
_BYTES_WEIGHT = 0.1
"""A cut that carries as much as the median candidate weighs like one block of eight that is 0.9 times too large."""
_WORTHWHILE = 0.97
"""One more block must make the largest one at least 3 % smaller."""
_MIN_LAYER_SHARE = 0.002
"""Of the cost: what is less between two layers stays with its neighbour."""
_FUSION_PENALTY = 4.0
"""Where a cut would separate what the runtime fuses, its bytes count this many times."""


def partition(graph: Graph, seen: Observation, *, max_blocks: int = MAX_BLOCKS) -> Partition:
    """Cut `graph` into at most `max_blocks` blocks of about the same cost; one block with a reason if that cannot be."""
    shared, order, carried = lay_out(graph, seen)
    candidates = _candidates(graph, seen, order, carried)
    by_node = node_costs(graph, seen)
    costs = [by_node[at] for at in order]
    edges = sorted({behind_fused(graph, order, edge) for edge in layer_edges(graph, order)})
    cuts = _at_layers(edges, candidates, costs) if max_blocks >= MAX_BLOCKS else []
    cuts = cuts or _choose(candidates, costs, max_blocks)
    return assemble(
        graph, shared, (0, *cuts, len(order)), reason="" if cuts else _why_atomic(graph, order, bool(candidates))
    )


def cut_positions(graph: Graph, seen: Observation) -> int:
    """At how many places the graph could be cut."""
    _, order, carried = lay_out(graph, seen)
    return len(_candidates(graph, seen, order, carried))


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
    fused = fused_values(graph, order)
    constants = {name for at in constant_nodes(graph) for name in graph.nodes[at].output}
    residual = convolution_residuals(graph, order, frozenset(constants.union(graph.constant_bytes)))
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


def _at_layers(edges: Sequence[int], candidates: Sequence[_Candidate], costs: Sequence[float]) -> list[int]:
    """The edges that can be cut, without those that would leave next to nothing on one side; empty if there are too many."""
    possible = {candidate.at for candidate in candidates}
    until = [0.0, *itertools.accumulate(costs)]
    least = _MIN_LAYER_SHARE * until[-1]
    cuts: list[int] = []
    for edge in edges:
        since = cuts[-1] if cuts else 0
        if edge in possible and until[edge] - until[since] >= least and until[-1] - until[edge] >= least:
            cuts.append(edge)
    return cuts if len(cuts) <= MAX_LAYER_CUTS else []


def _choose(candidates: list[_Candidate], costs: Sequence[float], max_blocks: int) -> list[int]:
    """Cuts that make the largest block smallest at a moderate number of bytes; empty if nothing is gained."""
    total = sum(costs)
    if not candidates or max_blocks < 2 or total <= 0:
        return []
    until = [0.0]
    for cost in costs:
        until.append(until[-1] + cost / total)
    thinned = _thin(candidates, until)
    best: list[int] = []
    largest = 1.0
    for blocks in range(2, max_blocks + 1):
        cuts = _balance(thinned, until, blocks)
        edges = [0, *cuts, len(costs)]
        share = max(until[b] - until[a] for a, b in itertools.pairwise(edges))
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
