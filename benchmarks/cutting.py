"""What cutting costs by itself: the whole model against 2 and 4 shards in one process, one thread, no transport between them."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from agents.messages import ShardFile
from benchmarks.common import Row, at_most, median_ratio, side_by_side
from controller.cli import cache_dir
from controller.models.proving import largest_difference
from controller.models.registry import ModelRegistry
from controller.models.sessions import Arrays, open_session
from controller.models.sessions import run as run_session
from controller.models.transforms import append_ctc_head
from controller.models.zoo import ZOO, fetch_zoo, zoo_sample
from policies.plan import Span
from policies.service import ModelProfile

MODELS: Final = ("rec-small", "rec-base", "det-small", "orientation", "minilm-int8")
SHARD_COUNTS: Final = (2, 4)
GOAL: Final = 1.05
SLACK: Final = 1.1
"""How much larger than it must be the largest shard may be where that lets fewer bytes cross."""


def run(quick: bool) -> list[Row]:
    """A time and two ratios for each model."""
    rounds = 15 if quick else 41
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as scratch:
        registry = ModelRegistry(Path(scratch))
        for name in MODELS:
            rows.extend(_measure(registry, name, rounds))
    return rows


def _measure(registry: ModelRegistry, name: str, rounds: int) -> list[Row]:
    sample = zoo_sample(name)
    profile = registry.add(
        name, fetch_zoo(name, Path(cache_dir())), axis=ZOO[name].axis, samples=sample,
        transform=append_ctc_head if name.startswith("rec-") else None,
    )  # fmt: skip
    ways = {count: chain_of(registry, profile, count, sample) for count in (1, *SHARD_COUNTS)}
    times_s = side_by_side({str(count): way for count, way in ways.items()}, rounds, time.thread_time)
    whole = ways[1]()
    items = next(iter(sample.values())).shape[0]
    rows = [
        Row(
            name=f"{name}, whole", value=statistics.median(times_s["1"]) * 1000, unit="ms", runs=rounds,
            note=f"{items} item{'s' if items > 1 else ''}, {len(profile.blocks)} blocks",
        )
    ]  # fmt: skip
    for count in SHARD_COUNTS:
        error = largest_difference(whole, ways[count]())
        note = "bit for bit the same" if error == 0 else f"largest relative difference {error:.2g}"
        ratio = median_ratio(times_s[str(count)], times_s["1"])
        rows.append(at_most(f"{name}, {count} shards / whole", ratio, "ratio", GOAL, runs=rounds, note=note))
    return rows


def chain_of(registry: ModelRegistry, profile: ModelProfile, shards: int, sample: Arrays) -> Callable[[], Arrays]:
    """A function that runs the model as so many shards in series and returns its outputs."""
    files = [registry.shard_file(profile.name, span) for span in even_spans(profile, shards)]
    loaded = [(file, _load(registry, file)) for file in files]

    def once() -> Arrays:
        values = dict(sample)
        for file, session in loaded:
            feeds = {name: values[name] for name in file.inputs}
            values |= run_session(session, feeds, file.outputs, profile.name)
        return {name: values[name] for name in files[-1].outputs}

    return once


def _load(registry: ModelRegistry, file: ShardFile) -> Any:
    path = registry.blob_path(file.sha256)
    assert path is not None, "the registry has just made it"
    return open_session(path.read_bytes(), f"{file.model} {file.blocks}")


def even_spans(profile: ModelProfile, shards: int) -> list[Span]:
    """Contiguous ranges of blocks, as many as asked for if there are so many blocks, chosen as a plan for equal devices would be.

    The largest shard, which limits the throughput, is within `SLACK` of the smallest possible; of those choices the one whose cuts carry
    the fewest bytes.
    """
    costs = [block.fixed_ms + block.per_item_ms for block in profile.blocks]
    until = [0.0, *itertools.accumulate(costs)]
    sent = [block.cut_bytes_per_item for block in profile.blocks]
    choices = itertools.combinations(range(1, len(costs)), min(shards, len(costs)) - 1)
    edges = [(0, *cuts, len(costs)) for cuts in choices]
    largest = [max(until[b] - until[a] for a, b in itertools.pairwise(each)) for each in edges]
    limit = SLACK * min(largest)
    fair = [each for each, share in zip(edges, largest, strict=True) if share <= limit]
    best = min(fair, key=lambda each: (sum(sent[cut - 1] for cut in each[1:-1]), each))
    return [Span(a, b) for a, b in itertools.pairwise(best)]
