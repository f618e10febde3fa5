"""One model, from graph to profile: observe, cut, prove, time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from agents.activations import packed_bytes
from controller.models.costing import node_works
from controller.models.cutting import partition
from controller.models.extraction import Declaration, declare, loosened, piece
from controller.models.graph import Graph
from controller.models.layout import Partition, constant_nodes, one_block
from controller.models.observing import Observation, observe
from controller.models.packages import Progress
from controller.models.proving import CLOSE, Chain, Proof, items_until, largest_difference, prove_split
from controller.models.samples import first_item
from controller.models.sanity import check_outputs
from controller.models.scopes import layer_edges
from controller.models.sessions import Arrays, open_session, run
from policies.roofline import BlockWork
from policies.service import ActivationFormat, Axis, BlockProfile

_FEWER_BITS: tuple[ActivationFormat, ...] = ("fp16", "int8")
RESIDENT_FACTOR = 2.0
"""ONNX Runtime keeps weights about twice (as loaded, and packed for its kernels); measured 1.9 to 2.4 on the models of the zoo."""
ARENA_FACTOR = 2.5
"""Its arena against the values that are live at once: workspaces and rounding; measured 2.2 to 2.5."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What is known of a model after it was examined."""

    cut: Partition
    declared: dict[str, Declaration]
    blocks: tuple[BlockProfile, ...]
    input_bytes: int
    activation_bytes: int
    split: bool
    split_until: int | None
    """Leading blocks that act item by item where the whole does not; None where that was not looked for."""
    proof: Proof
    trace: Arrays
    """Every value at every cut, with inputs and outputs, for one item."""


def examine(
    graph: Graph,
    content: bytes,
    sample: Arrays,
    axis: Axis | None,
    name: str,
    progress: Progress = lambda sentence: None,
) -> Examination:
    """Examine the model whose bytes are `content`. Raises ModelError if it cannot run on the sample."""
    one = first_item(sample) if axis else sample
    items = next(iter(sample.values())).shape[0] if axis else 1
    whole = open_session(content, name, weights=graph.weights)
    together = run(whole, sample, graph.outputs, name)
    check_outputs(graph, sample, together, name)
    progress(f"observing {name}: shapes and costs of {len(graph.nodes)} operators")
    seen = observe(graph, one, name)
    cut, declared, chain, error = _cut_and_prove(graph, seen, sample, together, name)
    progress(f"{name} is cut into {len(cut.names)} blocks; relative difference in series {error:.2g}")
    split, sentence, until = False, "not asked for", None
    if axis:
        split, sentence = prove_split(graph, whole, sample, together, name)
        until = len(cut.names) if split else items_until(cut, chain, sample)
    if axis:
        progress(f"items of {name}: {sentence}")
    progress(f"profiling the blocks of {name}")
    many_ms = chain.time(sample) if items > 1 else None
    one_ms = chain.time(one)
    trace = chain.run(one) | run(whole, one, graph.outputs, name)
    return Examination(
        cut=cut, declared=declared, blocks=_profiles(cut, seen, chain.file_bytes, one_ms, many_ms, items),
        input_bytes=sum(array.nbytes for array in one.values()), activation_bytes=_activation_bytes(cut, seen),
        split=split, split_until=until, proof=Proof(chain_error=error, split=sentence), trace=trace,
    )  # fmt: skip


def _cut_and_prove(
    graph: Graph, seen: Observation, sample: Arrays, together: Arrays, name: str
) -> tuple[Partition, dict[str, Declaration], Chain, float]:
    """The partition with its chain; a single block if the chain does not give what the whole gives.

    What a shard knows of the dimensions that come in decides what the runtime fuses in it; of two ways to declare them the one that gives
    what the whole gives is kept, bit for bit if there is one.
    """
    cut = partition(graph, seen)
    declared = declare(cut, seen)
    chain, error = _tried(cut, declared, sample, together, name)
    if error > 0 and (loose := loosened(declared)) != declared:
        other, other_error = _tried(cut, loose, sample, together, name)
        if other_error < error:
            declared, chain, error = loose, other, other_error
    if error > CLOSE:
        reason = f"cutting it changes the result (relative difference {error:.2g})"
        cut, declared = one_block(cut, reason), {}
        chain = Chain.load(cut, declared, name)
        error = _chain_error(chain, sample, together)
    return cut, declared, chain, error if math.isfinite(error) else 1.0


def _tried(
    cut: Partition, declared: dict[str, Declaration], sample: Arrays, together: Arrays, name: str
) -> tuple[Chain, float]:
    """All blocks in series, and their error; of a transformer also that of its halves, in which more is fused than in single layers."""
    chain = Chain.load(cut, declared, name)
    error = _chain_error(chain, sample, together)
    count = len(cut.names)
    if error == 0 and count > 2 and layer_edges(cut.graph, cut.order):
        halves = Chain.load(cut, declared, name, steps=(0, count // 2, count))
        error = _chain_error(halves, sample, together)
    return chain, error


def _chain_error(chain: Chain, sample: Arrays, together: Arrays) -> float:
    return largest_difference(together, chain.run(sample))


def _profiles(
    cut: Partition,
    seen: Observation,
    file_bytes: list[int],
    one_ms: tuple[float, ...],
    many_ms: tuple[float, ...] | None,
    items: int,
) -> tuple[BlockProfile, ...]:
    constant, works = constant_nodes(cut.graph), node_works(cut.graph, seen)
    profiles = []
    for block, name in enumerate(cut.names):
        last = block == len(cut.names) - 1
        fixed_ms, per_item_ms = line_through(one_ms[block], many_ms[block] if many_ms else None, items)
        leaving = cut.graph.outputs if last else cut.crossing(block + 1)
        profiles.append(
            BlockProfile(
                name=name,
                fixed_ms=fixed_ms,
                per_item_ms=per_item_ms,
                param_bytes=int(RESIDENT_FACTOR * _weight_bytes(cut, seen, block, constant)),
                cut_bytes_per_item=sum(seen.values[key].size_bytes for key in leaving if key in seen.values),
                file_bytes=file_bytes[block],
                work=_work(cut, seen, block, constant, works),
                cut_bytes_as={} if last else {how: _bytes_as(seen, leaving, how) for how in _FEWER_BITS},
            )
        )
    return tuple(profiles)


def _bytes_as(seen: Observation, names: Iterable[str], how: ActivationFormat) -> int:
    """Bytes of the named values where those of float32 travel as `how`."""
    facts = [seen.values[name] for name in names if name in seen.values]
    return sum(
        packed_bytes(fact.shape, how) if fact.elem_type == TensorProto.FLOAT else fact.size_bytes for fact in facts
    )


def _work(
    cut: Partition, seen: Observation, block: int, constant: frozenset[int], works: Sequence[BlockWork]
) -> BlockWork:
    """What a block computes and moves for one item; what the runtime folds into constants is not computed again."""
    nodes = [works[at] for at in piece(cut, block, block + 1).nodes if at not in constant]

    def total(name: str) -> float:
        return float(sum(getattr(node, name) for node in nodes))

    return BlockWork(
        matmul_flops=total("matmul_flops"), conv_flops=total("conv_flops"), other_flops=total("other_flops"),
        moved_bytes=total("moved_bytes"), weight_bytes=float(_weight_bytes(cut, seen, block, constant)),
    )  # fmt: skip


def line_through(one_ms: float, many_ms: float | None, items: int) -> tuple[float, float]:
    """(fixed, per item) through the two measured points; neither is negative."""
    if many_ms is None:
        return 0.0, one_ms
    per_item_ms = (many_ms - one_ms) / (items - 1)
    if per_item_ms <= 0:
        return one_ms, 0.0
    if per_item_ms >= one_ms:
        return 0.0, many_ms / items
    return one_ms - per_item_ms, per_item_ms


def _weight_bytes(cut: Partition, seen: Observation, block: int, constant: frozenset[int]) -> int:
    """Size of the constants that the block's own computation reads, after the runtime has folded what it can."""
    graph = cut.graph
    read = {name for at in piece(cut, block, block + 1).nodes if at not in constant for name in graph.reads[at]}
    sizes: Mapping[str, int] = graph.constant_bytes
    total = sum(sizes[name] for name in read if name in sizes)
    folded = (name for name in read if graph.producer.get(name, -1) in constant and name in seen.values)
    return total + sum(seen.values[name].size_bytes for name in folded)


def _activation_bytes(cut: Partition, seen: Observation) -> int:
    """Peak of what is live at once for one item, with the runtime's arena."""
    change = [0] * (len(cut.order) + 2)
    for value in cut.carried:
        if value.name in seen.values:
            change[value.made] += seen.values[value.name].size_bytes
            change[min(value.last, len(cut.order)) + 1] -= seen.values[value.name].size_bytes
    live = peak = 0
    for step in change:
        live += step
        peak = max(peak, live)
    return int(ARENA_FACTOR * peak)
