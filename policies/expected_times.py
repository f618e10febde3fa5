"""What a plan is expected to take, for the ingresses that will serve by it (`policies.route_times`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from policies.ids import AgentId, ModelName, StageName
from policies.plan import Plan, Span, StagePlan, mean_items
from policies.predict import Predictor
from policies.route_times import RouteTimes, ShardTime, StageTime, WayTime
from policies.service import OnnxStage
from sla.errors import NotFoundError


def expected_times(predictor: Predictor, plan: Plan) -> RouteTimes:
    """What `plan` is expected to take under the predictor's snapshot.

    Raises NotFoundError when the plan names an agent or a model that the snapshot does not have.
    """
    named = plan.agents().union(*(stage.fallback for stage in plan.stages))
    if gone := sorted(named - predictor.costs.agents.keys()):
        raise NotFoundError(f"The plan of {plan.service_id} names {gone[0]}, which is not here.")
    planned = {stage.stage: stage for stage in plan.stages}
    found: dict[StageName, StageTime] = {}
    rest_ms = 0.0
    for stage in reversed(predictor.view.spec.stages):
        if not isinstance(stage, OnnxStage):
            rest_ms += predictor.costs.python_ms(predictor.view, stage, predictor.entry)
        elif (placed := planned.get(stage.name)) is not None:
            found[stage.name], own_ms = _stage(predictor, stage, placed, rest_ms)
            rest_ms += own_ms
    return RouteTimes(promise_ms=predictor.view.contract.latency_p99_ms, stages=found)


def _stage(predictor: Predictor, stage: OnnxStage, placed: StagePlan, rest_ms: float) -> tuple[StageTime, float]:
    """The stage's ways, and what its slowest lane takes."""
    whole = Span(0, placed.lanes[0].shards[-1].blocks.stop)
    lanes = tuple(
        _way(predictor, stage, placed.model, [(shard.agent, shard.blocks) for shard in lane.shards])
        for lane in placed.lanes
    )
    fallbacks = {agent: _way(predictor, stage, placed.model, [(agent, whole)]) for agent in placed.fallback}
    items = predictor.costs.items(predictor.view, stage) if stage.axis is not None else 1.0
    shares = [mean_items(lane.share, items) for lane in placed.lanes]
    own_ms = max(
        way.travel_ms(share) + sum(shard.run_ms(share) for shard in way.shards)
        for way, share in zip(lanes, shares, strict=True)
    )
    return StageTime(lanes=lanes, fallbacks=fallbacks, rest_ms=rest_ms), own_ms


def _way(
    predictor: Predictor, stage: OnnxStage, model: ModelName, hops: Sequence[tuple[AgentId, Span]]
) -> WayTime:  # fmt: skip
    costs, sums = predictor.costs, predictor.costs.sums(model)
    shards, link_ms, link_per_item_ms = [], 0.0, 0.0
    each = 1.0 if stage.axis is not None else costs.items(predictor.view, stage)
    entry = predictor.entry if predictor.entry is not None else hops[0][0]
    answer_bytes = sums.bytes_before(sums.whole.stop)
    for (src, _), (agent, blocks) in itertools.pairwise([(entry, Span(0, 0)), *hops]):
        # A run's time is linear in its items.
        one_ms, two_ms = (costs.run_ms(stage.name, model, agent, blocks, each * items) for items in (1.0, 2.0))
        shards.append(ShardTime(agent=agent, fixed_ms=2.0 * one_ms - two_ms, per_item_ms=two_ms - one_ms))
        link_ms += predictor.settings.hop_overhead_ms
        if src != agent:
            link = costs.link(src, agent)
            sent_bytes = sums.bytes_before(blocks.start, stage.activations)
            link_ms += link.rtt_ms
            link_per_item_ms += each * 1000.0 * (sent_bytes + answer_bytes) / max(link.bandwidth_bytes_per_s, 1.0)
            link_per_item_ms += each * sums.convert_ms(blocks.start, stage.activations)
    return WayTime(shards=tuple(shards), link_ms=link_ms, link_per_item_ms=link_per_item_ms)
