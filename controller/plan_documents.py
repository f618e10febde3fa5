"""A plan as an operator writes it: the shards that `tidegate plan show --json` prints, edited and sent back."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from controller.views import PredictionOut, ReasonOut
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.plan import GRAIN, WHOLE_AXIS, Lane, Plan, Shard, Span, StagePlan
from policies.service import Axis, ServiceSpec
from sla.errors import InvalidInputError

MAX_SHARDS = 1024

Name = Annotated[str, Field(min_length=1, max_length=200)]
Thousandths = Annotated[int, Field(ge=0, le=GRAIN)]
Block = Annotated[int, Field(ge=0, le=1_000_000)]


class ShardIn(BaseModel):
    """One shard, as `views.ShardOut` shows it; of fallbacks only stage, model and agent matter."""

    model_config = {"extra": "forbid"}

    stage: Name
    model: Name
    agent: Name
    patch: tuple[Thousandths, Thousandths] = (0, GRAIN)
    token: tuple[Thousandths, Thousandths] = (0, GRAIN)
    blocks: tuple[Block, Block]
    block_count: int | None = None
    """Shown beside the blocks for the reader; not used."""
    role: Literal["serving", "fallback"] = "serving"


class PlanIn(BaseModel):
    """A whole plan."""

    model_config = {"extra": "forbid"}

    shards: Annotated[list[ShardIn], Field(min_length=1, max_length=MAX_SHARDS)]


class PlanQuestion(PlanIn):
    """What would this plan do?"""

    rps: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """At this many requests per second; by default at what is promised or offered now, whichever is more."""


class PlanAnswer(BaseModel):
    """What the gate says of a plan. Nothing has moved."""

    admissible: bool
    text: str
    """One sentence."""
    reasons: list[ReasonOut]
    score: float | None = None
    prediction: PredictionOut | None = None
    """None where the plan is refused for its form."""
    move_bytes: int | None = None
    move_ms: float | None = None
    """What going there from the running plan would push, and how long until it serves."""


class PlanStarted(BaseModel):
    """A plan that an operator wanted runs, and is pinned."""

    service_id: str
    epoch: int
    pinned: bool = True
    text: str
    prediction: PredictionOut | None = None


def plan_from(wanted: PlanIn, spec: ServiceSpec) -> Plan:
    """The plan that a document means, with epoch 0. Whether it is a legal one is for `policies.admit` to say.

    Shards of a stage with the same share of its items are a lane, in the order of their blocks. Raises InvalidInputError where
    the document means no plan at all.
    """
    axes = {stage.name: stage.axis for stage in spec.onnx_stages()}
    by_stage: dict[str, list[ShardIn]] = {}
    for shard in wanted.shards:
        by_stage.setdefault(shard.stage, []).append(shard)
    order = {stage.name: at for at, stage in enumerate(spec.onnx_stages())}
    names = sorted(by_stage, key=lambda name: order.get(StageName(name), len(order)))
    stages = tuple(_stage(StageName(name), by_stage[name], axes.get(StageName(name))) for name in names)
    return Plan(service_id=ServiceId(spec.id), epoch=0, stages=stages)


def _stage(name: StageName, shards: list[ShardIn], axis: Axis | None) -> StagePlan:
    if len({shard.model for shard in shards}) > 1:
        models = ", ".join(sorted({shard.model for shard in shards}))
        raise InvalidInputError(
            f"Stage {name} can run only one model at a time, not {models}.", pointer="/shards", found=models,
            accepted="the same model in all shards of a stage",
        )  # fmt: skip
    lanes: dict[tuple[Span, Span], list[Shard]] = {}
    for shard in shards:
        if shard.role == "serving":
            patch, token = Span(*shard.patch), Span(*shard.token)
            lanes.setdefault((patch, token), []).append(
                Shard(
                    stage=name, model=ModelName(shard.model), agent=AgentId(shard.agent), blocks=Span(*shard.blocks),
                    patch=patch, token=token,
                )
            )  # fmt: skip
    if not lanes:
        raise InvalidInputError(
            f"Stage {name} has a fallback but no shard that serves.", pointer="/shards", found="only fallbacks",
            accepted="at least one serving shard per stage",
        )  # fmt: skip
    is_split = len(lanes) > 1 or next(iter(lanes)) != (WHOLE_AXIS, WHOLE_AXIS)
    parts = [
        Lane(share=_share(patch, token, axis), shards=tuple(sorted(chain, key=lambda shard: shard.blocks)))
        for (patch, token), chain in lanes.items()
    ]
    return StagePlan(
        stage=name, model=ModelName(shards[0].model), axis=axis if is_split else None,
        lanes=tuple(sorted(parts, key=lambda lane: lane.share)),
        fallback=tuple(AgentId(shard.agent) for shard in shards if shard.role == "fallback"),
    )  # fmt: skip


def _share(patch: Span, token: Span, axis: Axis | None) -> Span:
    return token if axis == "token" else patch
