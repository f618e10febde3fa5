"""What completes a placement: shards that fit into files, and who runs a stage when one of its lanes fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from policies.costs import CostModel, ProfileSums
from policies.fleet import AgentView
from policies.ids import AgentId
from policies.limits import held_by, may_hold, usable_bytes
from policies.plan import Plan, StagePlan
from policies.predict import Predictor
from policies.service import OnnxStage

FALLBACKS = 2
LANE_PENALTY = 2.0
"""An agent outside the lanes is preferred unless it is this many times slower: it does not share the lane's failure."""


def with_fallbacks(predictor: Predictor, plan: Plan, agents: Sequence[AgentView]) -> Plan:
    """`plan` with the fallbacks of every stage chosen anew among `agents`, as far as memory allows, and its shards `in_files`.

    At least one of them is outside the stage's lanes when there is such an agent with room; two distinct agents are
    chosen when there are, so that no single failure takes the lane and every fallback.
    """
    specs = {stage.name: stage for stage in predictor.view.spec.onnx_stages()}
    stages = [msgspec.structs.replace(stage, fallback=()) for stage in in_files(predictor.costs, plan).stages]
    held = {a: dict(files) for a, files in held_by(predictor.costs, predictor.view, _with(plan, stages)).items()}
    free = {a.id: usable_bytes(a, predictor.settings) - predictor.foreign_memory.get(a.id, 0) for a in agents}
    for at in sorted(range(len(stages)), key=lambda at: -_params(predictor, stages[at])):
        stage = stages[at]
        spec = specs[stage.stage]
        sums = predictor.costs.sums(stage.model)
        if not sums.fits_one_file(sums.whole):
            continue  # A fallback holds the whole model as one shard.
        items = predictor.costs.items(predictor.view, spec)
        size = int(sums.param_bytes[-1]) + int(sums.model.activation_bytes * max(1.0, items))
        file = (stage.model, 0, sums.whole.stop)
        chosen: list[AgentId] = []
        for agent in _ranked(predictor, spec, stage, agents, items):
            files = held.setdefault(agent.id, {})
            grown = {**files, file: max(size, files.get(file, 0))}
            if sum(grown.values()) <= free[agent.id]:
                held[agent.id] = grown
                chosen.append(agent.id)
            if len(chosen) == FALLBACKS:
                break
        stages[at] = msgspec.structs.replace(stage, fallback=tuple(chosen))
    return _with(plan, stages)


def in_files(costs: CostModel, plan: Plan) -> Plan:
    """`plan` with each shard whose file would be too large as several on the same agent, one after the other."""
    return _with(plan, [_in_files(costs.sums(stage.model), stage) for stage in plan.stages])


def _in_files(sums: ProfileSums, stage: StagePlan) -> StagePlan:
    if not sums.model.shard_limit_bytes:
        return stage
    lanes = []
    for lane in stage.lanes:
        shards = (msgspec.structs.replace(s, blocks=run) for s in lane.shards for run in sums.files(s.blocks))
        lanes.append(msgspec.structs.replace(lane, shards=tuple(shards)))
    return msgspec.structs.replace(stage, lanes=tuple(lanes))


def _ranked(
    predictor: Predictor, spec: OnnxStage, stage: StagePlan, agents: Sequence[AgentView], items: float
) -> Iterable[AgentView]:
    """Agents that may run the whole stage, quickest first; those in its lanes count as slower."""
    sums = predictor.costs.sums(stage.model)
    in_lanes = {shard.agent for lane in stage.lanes for shard in lane.shards}
    contract = predictor.view.contract

    def cost(agent: AgentView) -> tuple[float, AgentId]:
        run = predictor.costs.run_ms(spec.name, stage.model, agent.id, sums.whole, items)
        if predictor.entry is not None and predictor.entry != agent.id:
            link = predictor.costs.link(predictor.entry, agent.id)
            run += link.rtt_ms + 1000.0 * items * sums.bytes_before(0) / max(link.bandwidth_bytes_per_s, 1.0)
        return run * (LANE_PENALTY if agent.id in in_lanes else 1.0), agent.id

    able = sorted((a for a in agents if may_hold(a, contract, spec, sums.whole)), key=cost)
    outside = [a for a in able if a.id not in in_lanes]
    inside = [a for a in able if a.id in in_lanes]
    if not outside or not inside:
        return able
    # Two of the quickest, but one of them outside the lanes; the rest follow in case these do not fit.
    first = able[0]
    second = next(a for a in (outside if first.id in in_lanes else able[1:]) if a is not first)
    return [first, second, *(a for a in able if a is not first and a is not second)]


def _params(predictor: Predictor, stage: StagePlan) -> int:
    return int(predictor.costs.sums(stage.model).param_bytes[-1])


def _with(plan: Plan, stages: Iterable[StagePlan]) -> Plan:
    return msgspec.structs.replace(plan, stages=tuple(stages))
