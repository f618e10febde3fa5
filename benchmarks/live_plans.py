"""Different plans of one service for one fleet: single devices, chains, lanes, both, all variants, on this or the far side of a slow link."""

from __future__ import annotations

import itertools

import numpy as np

from policies.ids import AgentId, ServiceId
from policies.plan import GRAIN, WHOLE_AXIS, Lane, Plan, Span, StagePlan, make_lane
from policies.service import ModelProfile, OnnxStage
from policies.snapshot import Snapshot

CHAIN, SPLIT, SMALLER = 0.25, 0.5, 0.7
"""How often a lane is a chain, a splittable stage is split, and a stage takes its first (smallest) variant."""


def plans(snapshot: Snapshot, service: ServiceId, devices: tuple[AgentId, ...], wanted: int, seed: int) -> list[Plan]:
    """Plans that differ in layout, drawn at random; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    found: dict[tuple[StagePlan, ...], Plan] = {}
    stages = snapshot.services[service].spec.onnx_stages()
    while len(found) < wanted:
        count = int(rng.integers(1, len(devices) + 1))
        used = [devices[at] for at in rng.choice(len(devices), count, replace=False)]
        drawn = tuple(_stage(stage, snapshot, used, rng) for stage in stages)
        found[drawn] = Plan(service_id=snapshot.services[service].spec.id, epoch=0, stages=drawn)
    return list(found.values())


def _stage(stage: OnnxStage, snapshot: Snapshot, used: list[AgentId], rng: np.random.Generator) -> StagePlan:
    variant = stage.variants[0 if rng.random() < SMALLER else int(rng.integers(len(stage.variants)))]
    model = snapshot.models[variant]
    lanes = 1
    if stage.axis is not None and model.split_axis is not None and len(used) > 1 and rng.random() < SPLIT:
        lanes = int(rng.integers(2, min(3, len(used)) + 1))
    axis = stage.axis if lanes > 1 else None
    heads = [used[at] for at in rng.choice(len(used), lanes, replace=False)]
    shares = _shares(lanes, rng)
    made = [
        _lane(stage, model, axis, share, head, used, rng, may_chain=lanes < 3)
        for share, head in zip(shares, heads, strict=True)
    ]
    return StagePlan(stage=stage.name, model=variant, axis=axis, lanes=tuple(made))


def _lane(
    stage: OnnxStage, model: ModelProfile, axis: object, share: Span, head: AgentId, used: list[AgentId],
    rng: np.random.Generator, *, may_chain: bool,
) -> Lane:  # fmt: skip
    blocks = len(model.blocks)
    hops: tuple[tuple[AgentId, Span], ...] = ((head, Span(0, blocks)),)
    others = [agent for agent in used if agent != head]
    if may_chain and others and blocks > 1 and rng.random() < CHAIN:
        cut = _cut(model, rng)
        hops = ((head, Span(0, cut)), (others[int(rng.integers(len(others)))], Span(cut, blocks)))
    return make_lane(stage.name, model.name, stage.axis if axis is not None else None, share, hops)


def _cut(model: ModelProfile, rng: np.random.Generator) -> int:
    """A cut where few bytes cross: one of the cheaper half of all cuts."""
    sizes = np.array([block.cut_bytes_per_item for block in model.blocks[:-1]])
    cheap = np.flatnonzero(sizes <= np.median(sizes))
    return int(cheap[int(rng.integers(len(cheap)))]) + 1


def _shares(lanes: int, rng: np.random.Generator) -> list[Span]:
    """Shares of at least a fifth each."""
    if lanes == 1:
        return [WHOLE_AXIS]
    free = rng.dirichlet(np.ones(lanes)) * (1.0 - 0.2 * lanes) + 0.2
    edges = [0, *(round(GRAIN * edge) for edge in np.cumsum(free)[:-1]), GRAIN]
    return [Span(low, high) for low, high in itertools.pairwise(edges)]
