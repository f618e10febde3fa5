"""What plans turned out to do, once one of them has served: measured for the plan that runs, estimated for one that did not.

An estimate is the prediction with all shard times that were measured since, corrected by how far the running plan's measured p99 was from its
own prediction, as far as the two plans have shards in common: estimate = predicted x (measured / predicted of the running plan) ^ s, where s
is the share of the plan's shards that the running plan has too.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from policies.ids import ServiceId
from policies.plan import Plan, StagePlan
from policies.predict import Predictor
from policies.snapshot import Snapshot, measure_key

MAX_CORRECTION = 3.0
"""A ratio beyond this, or below its inverse, tells of something else than the plan."""


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """The p99 that a plan brought, or would have brought."""

    p99_ms: float
    how: Literal["measured", "estimated"]


def effect_of(plan: Plan, snapshot: Snapshot, service_id: ServiceId) -> Effect | None:
    """None while too little was measured of the running plan, or where an agent of the plan is gone."""
    view = snapshot.services[service_id]
    running, measured_ms = view.running, view.measured_p99_ms
    if running is None or measured_ms is None or not (plan.agents() | running.agents()) <= snapshot.fleet.agents.keys():
        return None
    if _served_by(plan) == _served_by(running):
        return Effect(p99_ms=measured_ms, how="measured")
    # Without the predictor's own correction, which other plans inherit whatever they have in common.
    bare = msgspec.structs.replace(view, measured_p99_ms=None)
    world = msgspec.structs.replace(snapshot, services={**snapshot.services, service_id: bare})
    wanted, ran = Predictor(world, service_id).predict_all([plan, running])
    ratio = min(max(measured_ms / max(ran.p99_ms, 1e-3), 1 / MAX_CORRECTION), MAX_CORRECTION)
    return Effect(p99_ms=wanted.p99_ms * ratio ** shared(plan, running), how="estimated")


def _served_by(plan: Plan) -> tuple[StagePlan, ...]:
    """What serves; the agents that it could fall back to make no difference."""
    return tuple(msgspec.structs.replace(stage, fallback=()) for stage in plan.stages)


def shared(plan: Plan, other: Plan) -> float:
    """Share of a plan's shards that another plan has too: the same blocks of the same stage on the same agent."""
    mine, theirs = (
        [measure_key(s.stage, s.agent, s.blocks.start, s.blocks.stop) + s.model for s in each.shards()] for each in (plan, other)
    )  # fmt: skip
    return sum(key in theirs for key in mine) / len(mine) if mine else 0.0
