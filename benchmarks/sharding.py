"""Sharding of any model: where models can be cut, what cutting costs, and what the quality knobs bring.

One thread, all shards in one process, no transport between them. Times are of the processor, so that the ratios hold on a busy machine.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.common import Row, at_most, median_ratio, side_by_side
from benchmarks.cutting import chain_of
from benchmarks.vlm import VOCABULARY, build_vlm
from controller.cli import cache_dir
from controller.models.cutting import cut_positions, partition
from controller.models.graph import Graph, build_graph, read_model
from controller.models.layout import Partition
from controller.models.observing import observe
from controller.models.proving import item_cosines, largest_difference
from controller.models.pruning import layer_outputs, prune_tokens
from controller.models.registry import ModelRegistry
from controller.models.scopes import scope_of
from controller.models.sessions import Arrays, open_session
from controller.models.sessions import run as run_session
from controller.models.sharding_zoo import SPECIMENS, fetch_specimen, specimen_sample
from controller.models.transforms import append_ctc_head
from controller.models.variants import activation_cost
from controller.models.zoo import ZOO, fetch_zoo, zoo_sample
from policies.plan import Span
from policies.service import ActivationFormat, Axis, ModelProfile

MODELS: Final = ("orientation", "det-small", "rec-small", "minilm-int8", "minilm-l3", "vit-s", "t5-encoder-int8", "t5-decoder-int8", "silero-vad", "silero-vad-16k", "vlm")  # fmt: skip
QUICK_MODELS: Final = ("rec-small", "minilm-int8", "vit-s", "t5-decoder-int8", "silero-vad-16k", "vlm")
LAYERS: Final = {"minilm-int8": 6, "minilm-l3": 3, "vit-s": 12, "t5-encoder-int8": 8, "t5-decoder-int8": 8, "vlm": 12}
"""Transformer layers, as the models' authors count them."""
OVERHEAD_GOAL: Final = 1.05
KEEP_RATIO: Final = 0.7
PRUNED_TIME_GOAL: Final = 0.8
MANY_NODES: Final = 10_000
MANY_NODES_GOAL_S: Final = 30.0
_PRUNED_BEHIND_LAYER = 3
_HEAVY = frozenset(["Add", "Gemm", "LayerNormalization", "MatMul", "MatMulInteger", "Softmax"])
"""What tells whose layer a block holds: exporters hoist small nodes of later layers to the front, and quantisers leave few names."""
_LAYER = re.compile(r"(layer|block|cross_attention)\.\d+")
_WORTH_CUTTING_MS = 1.0
"""Below this, calling the runtime is itself some per cent of the time, and nobody would cut the model."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to be measured, with a sample."""

    name: str
    content: bytes
    sample: Arrays
    axis: Axis | None


def run(quick: bool) -> list[Row]:
    """Rows for each model, then for token pruning and for a very large graph."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        registry = ModelRegistry(Path(scratch))
        for name in QUICK_MODELS if quick else MODELS:
            rows.extend(_sharded(registry, subject(name), rounds=9 if quick else 41))
        rows.extend(_pruned(registry, rounds=7 if quick else 21))
        rows.extend(_activations(registry))
    rows.append(_many_nodes())
    return rows


def subject(name: str) -> Subject:
    """The model of that name; downloads it when it is not in the cache."""
    cache = Path(cache_dir())
    if name == "vlm":
        rng = np.random.default_rng(3)
        tiles = rng.standard_normal((7, 3, 32, 32)).astype(np.float32)
        sample: Arrays = {"tiles": tiles, "input_ids": rng.integers(0, VOCABULARY, (4, 16))}
        return Subject(name, build_vlm(width=256).whole.SerializeToString(), sample, None)
    if name in SPECIMENS:
        return Subject(name, fetch_specimen(name, cache).read_bytes(), specimen_sample(name), None)
    model = onnx.load(fetch_zoo(name, cache))
    model = append_ctc_head(model) if name.startswith("rec-") else model
    return Subject(name, model.SerializeToString(), zoo_sample(name), ZOO[name].axis)


def _sharded(registry: ModelRegistry, it: Subject, rounds: int) -> list[Row]:
    began_s = time.perf_counter()
    graph = build_graph(read_model(it.content, it.name)[0], it.name)
    seen = observe(graph, it.sample, it.name)
    cut = partition(graph, seen)
    blocks = len(cut.names)
    cut_s = time.perf_counter() - began_s
    profile = registry.add(it.name, it.content, axis=it.axis, samples=it.sample)
    cuts = [block.cut_bytes_per_item for block in profile.blocks[:-1]]
    rows = [
        Row(
            name=f"{it.name}, cuts", value=blocks - 1, unit="cuts",
            note=profile.atomic_reason or f"at any of {cut_positions(graph, seen)} places",
        ),
        Row(name=f"{it.name}, time to cut", value=cut_s, unit="s", note=f"{len(graph.nodes)} operators"),
    ]  # fmt: skip
    if it.name in LAYERS:
        rows.append(_layers_row(it.name, cut))
    if not cuts:
        return rows
    rows.append(Row(name=f"{it.name}, bytes at the best cut", value=min(cuts), unit="bytes per item"))
    counts = [count for count in (1, 2, 4) if count <= len(profile.blocks)]
    ways = {count: chain_of(registry, profile, count, it.sample) for count in counts}
    times_s = side_by_side({str(count): way for count, way in ways.items()}, rounds, time.thread_time)
    whole_ms = statistics.median(times_s["1"]) * 1000
    for count in counts[1:]:
        ratio = median_ratio(times_s[str(count)], times_s["1"])
        name, note = f"{it.name}, {count} shards / whole", f"whole {whole_ms:.1f} ms"
        if whole_ms < _WORTH_CUTTING_MS:
            rows.append(Row(name=name, value=ratio, unit="ratio", runs=rounds, note=f"{note}: one call costs more"))
        else:
            rows.append(at_most(name, ratio, "ratio", OVERHEAD_GOAL, runs=rounds, note=note))
    difference = _largest(ways[1](), [ways[count]() for count in counts[1:]])
    rows.append(at_most(f"{it.name}, max difference", difference, "relative", 0.0, runs=1))
    return rows


def _layers_row(name: str, cut: Partition) -> Row:
    """How many layers share no block with another one."""
    apart: set[str] = set()
    together: set[str] = set()
    for block in range(len(cut.names)):
        inside = {_layer(cut.graph, at) for at in cut.nodes(block, block + 1) if cut.graph.nodes[at].op_type in _HEAVY}
        inside.discard("")
        (together if len(inside) > 1 else apart).update(inside)
    value, goal = len(apart - together), LAYERS[name]
    what = f"{name}, layers that can be placed apart"
    return Row(name=what, value=value, unit="layers", goal=f">= {goal}", holds=value >= goal)


def _layer(graph: Graph, at: int) -> str:
    """The numbered layer of a node, e.g. `encoder/layer.3`; empty if it is in none."""
    scope = scope_of(graph, at)
    depth = next((depth for depth, part in enumerate(scope) if _LAYER.fullmatch(part)), None)
    return "" if depth is None else "/".join(scope[: depth + 1])


def _largest(whole: Arrays, others: list[Arrays]) -> float:
    return max(largest_difference(whole, other) for other in others)


def _pruned(registry: ModelRegistry, rounds: int) -> list[Row]:
    """The ViT up to its final embedding, with and without its tokens pruned behind an early layer."""
    it = subject("vit-s")
    profile = registry.add(it.name, it.content, samples=it.sample)
    part = registry.part(it.name, Span(0, len(profile.blocks) - 1))
    tower = onnx.load_model_from_string(part.content)
    layers = layer_outputs(build_graph(tower, "tower"))
    embedding = next(value for value in tower.graph.output if value.name == layers[-1])
    del tower.graph.output[:]
    tower.graph.output.append(embedding)
    pruned = prune_tokens(tower, after=layers[_PRUNED_BEHIND_LAYER + 1], keep=KEEP_RATIO)
    spans = [
        _remaining(registry, registry.add(name, model.SerializeToString(), samples=part_sample(part.sample, model)))
        for name, model in (("tower", tower), ("tower-pruned", pruned))
    ]
    ways = {str(at): _runner(registry, *span) for at, span in enumerate(spans)}
    times_s = side_by_side(ways, rounds, time.thread_time)
    ratio = median_ratio(times_s["1"], times_s["0"])
    note = f"{len(layers) - 2 - _PRUNED_BEHIND_LAYER} remaining layers at keep ratio {KEEP_RATIO}"
    cosine = _embedding_cosine(tower, pruned, it.sample)
    cuts = [span[0].blocks[-2].cut_bytes_per_item for span in spans]
    return [
        at_most("token pruning, time of what remains", ratio, "ratio", PRUNED_TIME_GOAL, runs=rounds, note=note),
        Row(name="token pruning, bytes at later cuts", value=cuts[1] / cuts[0], unit="ratio"),
        Row(name="token pruning, cosine of the final embedding", value=cosine, unit="cosine", note="class token, one picture of noise"),
    ]  # fmt: skip


def _activations(registry: ModelRegistry) -> list[Row]:
    """The ViT in four shards whose activations travel in fewer bits."""
    it = subject("vit-s")
    formats: tuple[ActivationFormat, ...] = ("fp16", "int8")
    rows = []
    for how in formats:
        cost = activation_cost(registry, it.name, [4, 7, 10], how, [it.sample])
        note = f"three cuts, {cost.bytes_ratio:.2f} of the bytes, relative difference {cost.difference:.2g}"
        rows.append(
            Row(name=f"activations as {how}, cosine of the result", value=cost.cosine, unit="cosine", note=note)
        )
    return rows


def part_sample(sample: Mapping[str, Any], model: Any) -> Arrays:
    """Those of the values that the model reads."""
    return {value.name: sample[value.name] for value in model.graph.input}


def _remaining(registry: ModelRegistry, profile: ModelProfile) -> tuple[ModelProfile, Span]:
    """The blocks behind the layer where tokens are pruned; the pruning itself is in the first of them."""
    name = f".layer.{_PRUNED_BEHIND_LAYER}"
    at = next(number for number, block in enumerate(profile.blocks) if block.name.endswith(name))
    return profile, Span(at + 1, len(profile.blocks))


def _runner(registry: ModelRegistry, profile: ModelProfile, blocks: Span) -> Any:
    part = registry.part(profile.name, blocks)
    session = open_session(part.content, profile.name)
    return lambda: run_session(session, part.sample, part.outputs, profile.name)


def _embedding_cosine(one: Any, other: Any, sample: Arrays) -> float:
    outputs = [one.graph.output[0].name]
    made = [
        next(iter(run_session(open_session(m.SerializeToString(), "tower"), sample, outputs, "tower").values()))
        for m in (one, other)
    ]
    return min(item_cosines(made[0][:, 0], made[1][:, 0]))


def _many_nodes() -> Row:
    content = many_nodes(MANY_NODES).SerializeToString()
    began_s = time.perf_counter()
    graph = build_graph(read_model(content, "large")[0], "large")
    seen = observe(graph, {"x": np.ones((1, 64), np.float32)}, "large")
    blocks = len(partition(graph, seen).names)
    seconds = time.perf_counter() - began_s
    return at_most(
        "a graph of 10,000 operators, time to cut", seconds, "s", MANY_NODES_GOAL_S, runs=1, note=f"{blocks} blocks"
    )


def many_nodes(count: int) -> Any:
    """A long chain of cheap operators."""
    nodes, last = [], "x"
    for at in range(count):
        op = ("Tanh", "Mul", "Add")[at % 3]
        nodes.append(helper.make_node(op, [last] if op == "Tanh" else [last, "c"], [f"v{at}"], name=f"/n{at}"))
        last = f"v{at}"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])]
    outputs = [helper.make_tensor_value_info(last, TensorProto.FLOAT, ["n", 64])]
    weights = [numpy_helper.from_array(np.full(64, 0.5, np.float32), "c")]
    graph = helper.make_graph(nodes, "large", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
