"""Hard limits: who may hold which shard, and how much memory a plan takes. Never traded for score."""

from __future__ import annotations

import math

from policies.costs import CostModel, PredictSettings
from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, ServiceId
from policies.plan import GRAIN, Plan, Span
from policies.service import OnnxStage
from policies.snapshot import ServiceView
from sla.contract import Contract


def is_fresh(agent: AgentView, settings: PredictSettings) -> bool:
    """Whether its numbers may justify a move."""
    return agent.state == "live" and agent.age_ms <= settings.stale_after_ms


def allowed_in(agent: AgentView, contract: Contract) -> bool:
    """Whether the contract's zones and privacy let any stage run there."""
    if contract.zones and agent.zone not in contract.zones:
        return False
    return not (agent.is_cloud and contract.privacy == "raw-stays-on-edge")


def may_see_raw(agent: AgentView, contract: Contract) -> bool:
    """Whether raw user data may reach this agent."""
    return contract.privacy == "any" or not agent.is_cloud


def may_hold(agent: AgentView, contract: Contract, stage: OnnxStage, span: Span) -> bool:
    """Whether zones and privacy let this agent run these blocks of a stage."""
    if not allowed_in(agent, contract):
        return False
    return not stage.raw or span.start > 0 or may_see_raw(agent, contract)


def usable_bytes(agent: AgentView, settings: PredictSettings) -> int:
    """What shards may take on this agent once the headroom is set aside."""
    return int(agent.memory_budget_bytes * (1.0 - settings.memory_headroom))


Held = dict[AgentId, dict[tuple[ModelName, int, int], int]]
"""Agent -> shard file (model, first block, last block) -> bytes when loaded."""


def held_by(costs: CostModel, view: ServiceView, plan: Plan) -> Held:
    """Every shard file that a plan loads, fallbacks included; a file that serves twice on an agent is loaded once."""
    held: Held = {}
    stages = {stage.name: stage for stage in view.spec.onnx_stages()}
    for planned in plan.stages:
        stage = stages.get(planned.stage)
        if stage is None or planned.model not in costs.snapshot.models:
            continue
        sums = costs.sums(planned.model)
        items = costs.items(view, stage)
        for lane in planned.lanes:
            share = max(1.0, items * len(lane.share) / GRAIN)
            for shard in lane.shards:
                size = sums.params(shard.blocks) + int(sums.model.activation_bytes * share)
                _hold(held, shard.agent, (planned.model, shard.blocks.start, shard.blocks.stop), size)
        for agent in planned.fallback:
            size = int(sums.param_bytes[-1]) + int(sums.model.activation_bytes * max(1.0, items))
            _hold(held, agent, (planned.model, 0, sums.whole.stop), size)
    return held


def memory_of(held: Held) -> dict[AgentId, int]:
    return {agent: sum(files.values()) for agent, files in held.items()}


def foreign_memory(costs: CostModel, service_id: ServiceId) -> dict[AgentId, int]:
    """What other services' running plans take on each agent."""
    taken = {name: agent.booked.held_bytes for name, agent in costs.agents.items() if agent.booked.held_bytes}
    for other, view in costs.snapshot.services.items():
        if other != service_id and view.running is not None:
            for agent, size in memory_of(held_by(costs, view, view.running)).items():
                taken[agent] = taken.get(agent, 0) + size
    return taken


def accuracy_of(costs: CostModel, view: ServiceView, plan: Plan) -> float:
    """Of a plan's models: the product, since each stage works on what the one before got right."""
    stages = {stage.name: stage for stage in view.spec.onnx_stages()}
    chosen = ((stages.get(planned.stage), costs.sums(planned.model).model) for planned in plan.stages)
    return math.prod(model.accuracy if stage is None else stage.accuracy(model) for stage, model in chosen)


def _hold(held: Held, agent: AgentId, file: tuple[ModelName, int, int], size: int) -> None:
    files = held.setdefault(agent, {})
    files[file] = max(files.get(file, 0), size)
