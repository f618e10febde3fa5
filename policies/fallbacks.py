"""What completes a placement: shards that fit into files, and who runs a stage when one of its lanes fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from policies.costs import CostModel, ProfileSums
from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, StageName
from policies.limits import held_by, may_hold
from policies.plan import Plan, StagePlan
from policies.predict import Predictor

FALLBACKS = 2
LANE_PENALTY = 2.0
"""An agent outside the lanes is preferred unless it is this many times slower: it does not share the lane's failure."""


def with_fallbacks(predictor: Predictor, plan: Plan, agents: Sequence[AgentView]) -> Plan:
    """`plan` with the fallbacks of every stage chosen anew among `agents`; see `Spares`."""
    return Spares(predictor, agents).complete(plan)


class Spares:
    """Chooses fallbacks among the same agents for many plans: how quick each is for a whole stage is found out once."""

    def __init__(self, predictor: Predictor, agents: Sequence[AgentView]) -> None:
        self._p = predictor
        self._agents = agents
        self._free = {a.id: predictor.room_bytes(a) for a in agents}
        self._specs = {stage.name: stage for stage in predictor.view.spec.onnx_stages()}
        self._times: dict[tuple[StageName, ModelName], list[tuple[float, AgentId]]] = {}

    def complete(self, plan: Plan) -> Plan:
        """`plan` with fallbacks as far as memory allows, and its shards `in_files`.

        At least one of them is outside the stage's lanes when there is such an agent with room; two distinct agents are
        chosen when there are, so that no single failure takes the lane and every fallback.
        """
        p = self._p
        bare = _with(plan, [_backed(stage, ()) for stage in in_files(p.costs, plan).stages])
        held, stages = held_by(p.costs, p.view, bare), list(bare.stages)
        for at in sorted(range(len(stages)), key=lambda at: -_params(p, stages[at])):
            stage = stages[at]
            sums = p.costs.sums(stage.model)
            if not sums.fits_one_file(sums.whole):
                continue  # A fallback holds the whole model as one shard.
            items = p.costs.items(p.view, self._specs[stage.stage])
            size = int(sums.param_bytes[-1]) + int(sums.model.activation_bytes * max(1.0, items))
            file = (stage.model, 0, sums.whole.stop)
            chosen: list[AgentId] = []
            for agent in self._ranked(stage):
                files = held.get(agent, {})
                grown = {**files, file: max(size, files.get(file, 0))}
                if sum(grown.values()) <= self._free[agent]:
                    held[agent] = grown
                    chosen.append(agent)
                if len(chosen) == FALLBACKS:
                    break
            stages[at] = _backed(stage, tuple(chosen))
        return _with(plan, stages)

    def _ranked(self, stage: StagePlan) -> list[AgentId]:
        """Agents that may run the whole stage, quickest first; those in its lanes count as slower."""
        in_lanes = {shard.agent for lane in stage.lanes for shard in lane.shards}
        times = self._whole(stage.stage, stage.model)
        able = [a for _, a in sorted((ms * (LANE_PENALTY if a in in_lanes else 1.0), a) for ms, a in times)]
        outside = [a for a in able if a not in in_lanes]
        if not outside or len(outside) == len(able):
            return able
        # Two of the quickest, but one of them outside the lanes; the rest follow in case these do not fit.
        first = able[0]
        second = next(a for a in (outside if first in in_lanes else able[1:]) if a != first)
        return [first, second, *(a for a in able if a not in (first, second))]

    def _whole(self, name: StageName, model: ModelName) -> list[tuple[float, AgentId]]:
        """What all of a stage takes on each agent that may run it, with the way there."""
        found = self._times.get((name, model))
        if found is None:
            p, spec, sums = self._p, self._specs[name], self._p.costs.sums(model)
            items = p.costs.items(p.view, spec)
            found = []
            for agent in self._agents:
                if not may_hold(agent, p.view.contract, spec, sums.whole):
                    continue
                ms = p.costs.run_ms(name, model, agent.id, sums.whole, items)
                if p.entry is not None and p.entry != agent.id:
                    link = p.costs.link(p.entry, agent.id)
                    ms += link.rtt_ms + 1000.0 * items * sums.bytes_before(0) / max(link.bandwidth_bytes_per_s, 1.0)
                found.append((ms, agent.id))
            self._times[name, model] = found
        return found


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


def _params(predictor: Predictor, stage: StagePlan) -> int:
    return int(predictor.costs.sums(stage.model).param_bytes[-1])


def _backed(stage: StagePlan, fallback: tuple[AgentId, ...]) -> StagePlan:
    return StagePlan(stage=stage.stage, model=stage.model, axis=stage.axis, lanes=stage.lanes, fallback=fallback)


def _with(plan: Plan, stages: Iterable[StagePlan]) -> Plan:
    return Plan(service_id=plan.service_id, epoch=plan.epoch, stages=tuple(stages))
