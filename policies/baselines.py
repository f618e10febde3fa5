"""Simple policies for honest comparison: what people do without a solver. Each has the form of `policies.decide.Policy`.

They respect what is law (privacy, accuracy floor) and pass the same gate as everybody; they know nothing of load, jitter or risk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from policies.decide import Memory, Policy
from policies.decision import Proposal
from policies.fallbacks import with_fallbacks
from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, ServiceId
from policies.layouts import Terrain, chains_of
from policies.limits import may_hold
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.predict import Predictor
from policies.score import Scored
from policies.service import OnnxStage
from policies.snapshot import Snapshot
from policies.solve import usable_agents
from sla.errors import InfeasibleError

Hops = tuple[tuple[AgentId, Span], ...]
Place = Callable[[Predictor, OnnxStage, ModelName, list[AgentView]], Hops]
"""Where one stage's blocks go, given the agents that may hold at least its tail."""


def static(
    snapshot: Snapshot, service_id: ServiceId, scored: Sequence[Scored], memory: Memory
) -> tuple[Proposal | None, Memory]:
    """The first plan for ever."""
    if snapshot.services[service_id].running is not None or not scored:
        return None, memory
    return Proposal(plan=scored[0].plan, proposer="static", trigger="start"), memory


def edge_only(
    snapshot: Snapshot, service_id: ServiceId, scored: Sequence[Scored], memory: Memory
) -> tuple[Proposal | None, Memory]:
    """Every stage whole on the quickest edge device."""
    return _placed("edge-only", _quickest(is_cloud=False), snapshot, service_id), memory


def cloud_only(
    snapshot: Snapshot, service_id: ServiceId, scored: Sequence[Scored], memory: Memory
) -> tuple[Proposal | None, Memory]:
    """Every stage whole in the cloud; what privacy keeps at the edge on the quickest edge device."""
    return _placed("cloud-only", _quickest(is_cloud=True), snapshot, service_id), memory


def memory_proportional(
    snapshot: Snapshot, service_id: ServiceId, scored: Sequence[Scored], memory: Memory
) -> tuple[Proposal | None, Memory]:
    """Blocks over all devices in proportion to their memory, as peer-to-peer runtimes do."""
    return _placed("memory-proportional", _by_memory, snapshot, service_id), memory


def latency_greedy(
    snapshot: Snapshot, service_id: ServiceId, scored: Sequence[Scored], memory: Memory
) -> tuple[Proposal | None, Memory]:
    """Each stage by itself at the one cut with the least latency, blind to queues.

    Source: Kang et al., "Neurosurgeon: Collaborative Intelligence Between the Cloud and Mobile Edge", ASPLOS 2017.
    """
    return _placed("latency-greedy", _least_latency, snapshot, service_id), memory


BASELINES: dict[str, Policy] = {
    "static": static, "edge-only": edge_only, "cloud-only": cloud_only, "memory-proportional": memory_proportional,
    "latency-greedy": latency_greedy,
}  # fmt: skip


def _placed(name: str, place: Place, snapshot: Snapshot, service_id: ServiceId) -> Proposal | None:
    p = Predictor(snapshot, service_id)
    try:
        agents = usable_agents(p)
        stages = tuple(_stage(p, stage, place, agents) for stage in p.view.spec.onnx_stages())
    except InfeasibleError:
        return None
    plan = with_fallbacks(p, Plan(service_id=service_id, epoch=0, stages=stages), agents)
    return Proposal(plan=plan, proposer=name, trigger="better-plan")


def _stage(p: Predictor, stage: OnnxStage, place: Place, agents: list[AgentView]) -> StagePlan:
    """One lane with the most accurate variant. Raises InfeasibleError when no agent may see the stage's input."""
    model = max(stage.variants, key=lambda m: stage.accuracy(p.costs.sums(m).model))
    hops = place(p, stage, model, agents)
    lane = make_lane(stage.name, model, None, WHOLE_AXIS, hops)
    return StagePlan(stage=stage.name, model=model, axis=None, lanes=(lane,))


def _able(p: Predictor, stage: OnnxStage, model: ModelName, agents: list[AgentView]) -> list[AgentView]:
    whole = p.costs.sums(model).whole
    able = [a for a in agents if may_hold(a, p.view.contract, stage, whole)]
    if not able:
        raise InfeasibleError(f"No agent may run stage {stage.name} from its first block on.")
    return able


def _quickest(*, is_cloud: bool) -> Place:
    def place(p: Predictor, stage: OnnxStage, model: ModelName, agents: list[AgentView]) -> Hops:
        able = _able(p, stage, model, agents)
        best = min(able, key=lambda a: (a.is_cloud != is_cloud, a.slowdown, a.id))
        return ((best.id, p.costs.sums(model).whole),)

    return place


def _by_memory(p: Predictor, stage: OnnxStage, model: ModelName, agents: list[AgentView]) -> Hops:
    allowed = {a.id for a in _able(p, stage, model, agents)}
    tail = [a for a in agents if may_hold(a, p.view.contract, stage, Span(1, 2))]
    order = sorted(tail, key=lambda a: (a.id not in allowed, -a.memory_budget_bytes, a.id))
    blocks = p.costs.sums(model).whole.stop
    reached = np.cumsum([a.memory_budget_bytes for a in order], dtype=np.float64)
    ends = [round(blocks * float(r / reached[-1])) for r in reached]
    # The first device holds block 0 even if its share rounds to nothing: the order is what keeps raw data at the edge.
    ends[0] = max(1, ends[0])
    hops = []
    start = 0
    for agent, end in zip(order, ends, strict=True):
        if end > start:
            hops.append((agent.id, Span(start, end)))
            start = end
    return tuple(hops)


def _least_latency(p: Predictor, stage: OnnxStage, model: ModelName, agents: list[AgentView]) -> Hops:
    _able(p, stage, model, agents)
    terrain = Terrain.of(p.costs, agents, p.entry)
    chains = chains_of(stage, p.costs.sums(model), terrain, p.view, p.settings.hop_overhead_ms)
    assert chains is not None
    items = p.costs.items(p.view, stage)
    run = (chains.busy_fixed + items * chains.busy_item).sum(axis=1)
    best = int(np.argmin(chains.delay_fixed + items * chains.delay_item + run))
    head, tail, cut = (int(column[best]) for column in (chains.head, chains.tail, chains.cut))
    if head == tail:
        return ((agents[head].id, Span(0, cut)),)
    return ((agents[head].id, Span(0, cut)), (agents[tail].id, Span(cut, chains.blocks)))
