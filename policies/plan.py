"""What a plan is: shards that tile each model's index space exactly once, and a fallback for each stage.

A model's index space is patch x token x block. Items of a request (crops, sequences) are only known when it arrives, so
patch and token ranges are shares of the items in thousandths (`GRAIN`); block ranges are block numbers.
A stage runs as parallel *lanes*; each lane takes one share of the items through a chain of shards.
"""

from __future__ import annotations

import msgspec

from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.service import Axis, ModelProfile, OnnxStage, ServiceSpec

GRAIN = 1000
"""Shares of an axis are counted in thousandths, so that tiling is exact integer arithmetic."""


class Span(msgspec.Struct, frozen=True, order=True):
    """Half-open integer range [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


WHOLE_AXIS = Span(0, GRAIN)


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A box in one model's index space, on one agent."""

    stage: StageName
    model: ModelName
    agent: AgentId
    blocks: Span
    patch: Span = WHOLE_AXIS
    token: Span = WHOLE_AXIS


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One share of a stage's items, taken through a chain of shards in block order."""

    share: Span
    shards: tuple[Shard, ...]


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one ONNX stage runs: lanes that cover the items, and agents that can each run all of it when a lane fails."""

    stage: StageName
    model: ModelName
    axis: Axis | None
    lanes: tuple[Lane, ...]
    fallback: tuple[AgentId, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides where a service runs; compare `layout()` to compare placements."""

    service_id: ServiceId
    epoch: int
    stages: tuple[StagePlan, ...]

    def shards(self) -> tuple[Shard, ...]:
        """All shards that serve normally, in pipeline order (fallbacks are not among them)."""
        return tuple(shard for stage in self.stages for lane in stage.lanes for shard in lane.shards)

    def agents(self) -> frozenset[AgentId]:
        """The agents that serve normally."""
        return frozenset(shard.agent for shard in self.shards())

    def layout(self) -> tuple[StagePlan, ...]:
        """What two plans have in common when they place the work alike, whatever their epoch."""
        return self.stages


def file_key(model: ModelName, blocks: Span) -> str:
    """What the file of these blocks is called where an agent's cache is told (`AgentView.warmed`)."""
    return f"{model}:{blocks.start}-{blocks.stop}"


def make_lane(
    stage: StageName, model: ModelName, axis: Axis | None, share: Span, hops: tuple[tuple[AgentId, Span], ...]
) -> Lane:
    """A lane whose shards carry `share` on the axis that is split."""
    patch = share if axis == "patch" else WHOLE_AXIS
    token = share if axis == "token" else WHOLE_AXIS
    shards = tuple(
        Shard(stage=stage, model=model, agent=agent, blocks=blocks, patch=patch, token=token) for agent, blocks in hops
    )
    return Lane(share=share, shards=shards)


def cover_faults(plan: Plan, spec: ServiceSpec, models: dict[ModelName, ModelProfile]) -> list[str]:
    """Why `plan` does not tile the index space of every stage exactly once; empty when it does."""
    planned = {stage.stage: stage for stage in plan.stages}
    wanted = spec.onnx_stages()
    faults = [f"stage {name} is not part of {spec.id}" for name in planned.keys() - {stage.name for stage in wanted}]
    for stage in wanted:
        if stage.name not in planned:
            faults.append(f"stage {stage.name} is placed nowhere")
        else:
            faults.extend(_stage_faults(planned[stage.name], stage, models))
    return faults


def _stage_faults(planned: StagePlan, stage: OnnxStage, models: dict[ModelName, ModelProfile]) -> list[str]:
    model = models.get(planned.model)
    if model is None or planned.model not in stage.variants:
        return [f"stage {stage.name} cannot run model {planned.model}"]
    faults = []
    if len(planned.lanes) > 1 and (planned.axis is None or planned.axis != stage.axis or model.split_axis is None):
        faults.append(f"stage {stage.name} may not be split over several lanes: its items are not proven independent")
    if not _tiles([lane.share for lane in planned.lanes], WHOLE_AXIS):
        faults.append(f"the lanes of stage {stage.name} do not cover its items exactly once")
    whole = Span(0, len(model.blocks))
    for lane in planned.lanes:
        if not _tiles([shard.blocks for shard in lane.shards], whole):
            faults.append(
                f"a lane of stage {stage.name} does not run each of its {whole.stop} blocks exactly once, in order"
            )
        wrong = [
            s
            for s in lane.shards
            if s.stage != planned.stage or s.model != planned.model or _share_of(s, planned.axis) != lane.share
        ]
        if wrong:
            faults.append(f"a shard of stage {stage.name} contradicts its lane")
    return faults


def _share_of(shard: Shard, axis: Axis | None) -> Span:
    if axis == "patch":
        return shard.patch if shard.token == WHOLE_AXIS else Span(0, 0)
    if axis == "token":
        return shard.token if shard.patch == WHOLE_AXIS else Span(0, 0)
    return WHOLE_AXIS if shard.patch == shard.token == WHOLE_AXIS else Span(0, 0)


def _tiles(spans: list[Span], whole: Span) -> bool:
    """True if the spans, in the order given, are non-empty and abut from `whole.start` to `whole.stop`."""
    at = whole.start
    for span in spans:
        if span.start != at or span.stop <= span.start:
            return False
        at = span.stop
    return at == whole.stop


def items_of(share: Span, count: int) -> Span:
    """Which of `count` items a share holds; the shares of a tiling give a tiling of the items (some may be empty)."""
    return Span(share.start * count // GRAIN, share.stop * count // GRAIN)


def mean_items(share: Span, mean: float) -> float:
    """How many items a share holds where requests have so many in the mean: items are whole, so of seven it holds four rather than 4.6.

    Taken as if every request had one of the two whole numbers next to the mean; the shares of a tiling give the mean.
    """
    if len(share) == GRAIN:
        return mean
    low = int(mean)
    part = mean - low
    return (1.0 - part) * len(items_of(share, low)) + part * len(items_of(share, low + 1))
