"""The one gate: whatever proposed a plan, nothing takes effect unless it is proven admissible here.

The checks go from cheap to dear and from form to substance: the plan covers every model exactly once, names only what exists,
uses live agents with fresh numbers, respects zones, privacy, memory and accuracy, and carries the load; a plan that did
not come from the solver may not score worse than the solver's by more than a tolerance. Each refusal is a typed reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import msgspec

from policies.constraints import bias, shifted
from policies.costs import PredictSettings
from policies.decision import Decision, Prediction, Proposal, Reason, ReasonCode, Trigger
from policies.ids import AgentId, ServiceId
from policies.limits import accuracy_of, may_see_raw, usable_bytes
from policies.plan import Plan, Span, cover_faults
from policies.predict import Predictor
from policies.score import Scored, Weights, score
from policies.service import OnnxStage
from policies.snapshot import Snapshot
from sla.contract import Contract

SCORE_TOLERANCE = 0.02
MAX_FALLBACKS = 4
MAX_LANES = 64
MAX_REASONS = 8

URGENT: frozenset[Trigger] = frozenset({"agent-lost", "start", "contract", "operator"})
"""Triggers that do not wait for link measurements."""

_WHY: dict[Trigger, ReasonCode] = {
    "contract": "first-plan", "start": "first-plan", "agent-lost": "agent-lost", "agent-joined": "better", "risk": "risk",
    "link": "risk", "better-plan": "better", "operator": "operator",
}  # fmt: skip


def admit(
    proposal: Proposal,
    snapshot: Snapshot,
    service_id: ServiceId | None = None,
    *,
    best: Scored | None = None,
    predictor: Predictor | None = None,
    weights: Weights | None = None,
    settings: PredictSettings | None = None,
    tolerance: float = SCORE_TOLERANCE,
    why: tuple[Reason, ...] = (),
) -> Decision:
    """The decision that follows from a proposal: its plan with prediction and score, or None with the reasons.

    `service_id` is the snapshot's key of the service (default: the plan's). With `best`, the solver's plan, a proposal
    may fall short of the contract when `best` does too (something must run), but not be worse than it by more than
    `tolerance`. Without it, a plan that is predicted to miss latency or throughput is refused. `why` are the reasons to
    give when it is admitted. Raises NotFoundError for an unknown service.
    """
    service = service_id or proposal.plan.service_id
    p = predictor or Predictor(snapshot, service, settings)
    faults = list(_limit_bounds(proposal.plan, p, service)) or plan_faults(proposal.plan, p, proposal.trigger)
    if faults:
        return _refused(proposal, service, faults)
    prediction = p.predict(proposal.plan)
    rules = p.view.constraints
    value = score(prediction, p.view.contract, shifted(weights or Weights(), rules))
    value += bias(proposal.plan, rules, p.costs.agents)
    faults = [*_memory(prediction, p), *_promises(prediction, p, best), *_compared(value, best, tolerance)]
    if faults:
        return msgspec.structs.replace(_refused(proposal, service, faults), prediction=prediction, score=value)
    reasons = why or (Reason(code=_WHY[proposal.trigger], text=summary(prediction, p.view.contract)),)
    return Decision(
        service_id=service,
        trigger=proposal.trigger,
        proposer=proposal.proposer,
        plan=proposal.plan,
        reasons=(*reasons, *_warnings(prediction, p)),
        prediction=prediction,
        score=value,
        rationale=proposal.rationale,
    )


def plan_faults(plan: Plan, p: Predictor, trigger: Trigger = "better-plan") -> list[Reason]:
    """Why the snapshot does not allow this plan at all, whatever it would score; memory needs a prediction."""
    models, spec = p.costs.snapshot.models, p.view.spec
    if cover := cover_faults(plan, spec, models):
        return [Reason(code="cover", text=fault) for fault in cover[:MAX_REASONS]]
    faults = [*_agents(plan, p), *_places(plan, p), *_files(plan, p), *_accuracy(plan, p)]
    if trigger not in URGENT and not faults:
        faults += _links(plan, p)
    return faults[:MAX_REASONS]


def summary(prediction: Prediction, contract: Contract) -> str:
    """What a plan promises, in words."""
    return (
        f"predicted p99 {prediction.p99_ms:.0f} of {contract.latency_p99_ms:g} ms, risk {100 * prediction.risk:.1f} %, "
        f"{prediction.bottleneck}"
    )


def _refused(proposal: Proposal, service: ServiceId, faults: list[Reason]) -> Decision:
    return Decision(
        service_id=service,
        trigger=proposal.trigger,
        proposer=proposal.proposer,
        plan=None,
        reasons=tuple(faults[:MAX_REASONS]),
        rationale=proposal.rationale,
    )


def _limit_bounds(plan: Plan, p: Predictor, service: ServiceId) -> Iterator[Reason]:
    if plan.service_id not in (service, p.view.spec.id):
        yield Reason(code="malformed", text=f"the plan is for {plan.service_id}, not for {service}")
    names = [stage.stage for stage in plan.stages]
    if len(set(names)) != len(names):
        yield Reason(code="malformed", text="the plan names a stage twice")
    for stage in plan.stages:
        if len(stage.lanes) > MAX_LANES:
            yield Reason(
                code="malformed", text=f"stage {stage.stage} has more than {MAX_LANES} lanes", stage=stage.stage
            )
        if len(stage.fallback) > MAX_FALLBACKS or len(set(stage.fallback)) != len(stage.fallback):
            text = f"the fallbacks of stage {stage.stage} must be at most {MAX_FALLBACKS} different agents"
            yield Reason(code="malformed", text=text, stage=stage.stage)


def _agents(plan: Plan, p: Predictor) -> Iterator[Reason]:
    named = plan.agents() | {agent for stage in plan.stages for agent in stage.fallback}
    for name in sorted(named):
        agent = p.costs.agents.get(name)
        if agent is None:
            yield Reason(code="unknown-agent", text=f"there is no agent {name}", agent=name)
        elif agent.state != "live":
            yield Reason(code="agent-not-live", text=f"agent {name} is {agent.state}", agent=name)
        elif agent.age_ms > p.settings.stale_after_ms:
            text = f"the last report of {name} is {agent.age_ms / 1000:.1f} s old"
            yield Reason(code="stale", text=text, agent=name)


def _places(plan: Plan, p: Predictor) -> Iterator[Reason]:
    """Zones and privacy, for shards and for the whole models of fallbacks."""
    specs = {stage.name: stage for stage in p.view.spec.onnx_stages()}
    for planned in plan.stages:
        spec = specs[planned.stage]
        placed = {(shard.agent, shard.blocks.start) for lane in planned.lanes for shard in lane.shards}
        for agent, start in sorted(placed | {(agent, 0) for agent in planned.fallback}):
            if agent in p.costs.agents:
                yield from _place(p, spec, agent, Span(start, start + 1))


def _place(p: Predictor, stage: OnnxStage, name: AgentId, span: Span) -> Iterator[Reason]:
    contract, agent = p.view.contract, p.costs.agents[name]
    if contract.zones and agent.zone not in contract.zones:
        text = f"agent {name} is in zone {agent.zone}, outside of {', '.join(contract.zones)}"
        yield Reason(code="zone", text=text, agent=name, stage=stage.name)
    if agent.is_cloud and contract.privacy == "raw-stays-on-edge":
        text = f"privacy keeps stage {stage.name} out of the cloud"
        yield Reason(code="privacy", text=text, agent=name, stage=stage.name)
    elif stage.raw and span.start == 0 and not may_see_raw(agent, contract):
        text = f"the raw input of stage {stage.name} may not leave the edge, but its first block is on {name}"
        yield Reason(code="privacy", text=text, agent=name, stage=stage.name)


def _files(plan: Plan, p: Predictor) -> Iterator[Reason]:
    """Shards, and whole models of fallbacks, whose file would be larger than one may be."""
    for stage in plan.stages:
        sums = p.costs.sums(stage.model)
        spans = {(shard.agent, shard.blocks) for lane in stage.lanes for shard in lane.shards}
        for agent, blocks in sorted(spans | {(agent, sums.whole) for agent in stage.fallback}):
            if not sums.fits_one_file(blocks):
                text = (
                    f"blocks {blocks.start} to {blocks.stop} of {stage.model} have {sums.pushed(blocks) / 1e6:.4g} MB; "
                    f"one shard may have {sums.model.shard_limit_bytes / 1e6:.4g}"
                )
                yield Reason(code="shard-size", text=text, agent=agent, stage=stage.stage)


def _accuracy(plan: Plan, p: Predictor) -> Iterator[Reason]:
    floor = p.view.contract.accuracy_floor
    reached = accuracy_of(p.costs, p.view, plan)
    if floor is not None and reached < floor - 1e-9:
        yield Reason(code="accuracy", text=f"its models reach accuracy {reached:.3g}, below the floor {floor:g}")


def _links(plan: Plan, p: Predictor) -> Iterator[Reason]:
    """Links whose last measurement is old; one that was never measured is priced by a cautious guess instead."""
    hops: set[tuple[AgentId, AgentId]] = set()
    for stage in plan.stages:
        for lane in stage.lanes:
            way = [p.entry or lane.shards[0].agent, *(shard.agent for shard in lane.shards)]
            hops.update((a, b) for a, b in itertools.pairwise(way) if a != b)
    for src, dst in sorted(hops):
        age_ms = p.costs.link(src, dst).age_ms
        if p.settings.link_stale_after_ms < age_ms < math.inf:
            yield Reason(
                code="stale",
                text=f"the link from {src} to {dst} was last measured {age_ms / 1000:.0f} s ago",
                agent=dst,
            )


def _memory(prediction: Prediction, p: Predictor) -> Iterator[Reason]:
    for name, size in prediction.memory_bytes.items():
        agent = p.costs.agents[name]
        if size > usable_bytes(agent, p.settings):
            text = (
                f"agent {name} would hold {size / 1e6:.1f} MB; {usable_bytes(agent, p.settings) / 1e6:.1f} of its "
                f"{agent.memory_budget_bytes / 1e6:.1f} MB may be used"
            )
            yield Reason(code="memory", text=text, agent=name)


def _promises(prediction: Prediction, p: Predictor, best: Scored | None) -> Iterator[Reason]:
    """Latency and throughput, where a plan that keeps them is known to exist or none was offered."""
    contract = p.view.contract
    if prediction.throughput_rps < p.rate_rps and (best is None or best.prediction.throughput_rps >= p.rate_rps):
        text = (
            f"it carries {prediction.throughput_rps:.3g} of {p.rate_rps:g} requests/s ({prediction.bottleneck}); "
            f"throughput_rps {0.9 * prediction.throughput_rps:.2g} would be feasible"
        )
        yield Reason(code="throughput", text=text)
    elif prediction.p99_ms > contract.latency_p99_ms and best is None:
        text = (
            f"its p99 is predicted at {prediction.p99_ms:.0f} ms, above {contract.latency_p99_ms:g} ms; "
            f"latency_p99_ms {nearest_latency_ms(prediction):g} would be feasible"
        )
        yield Reason(code="risk", text=text)


def nearest_latency_ms(prediction: Prediction) -> float:
    """A p99 that could be promised for this plan: with a quarter to spare, in two digits."""
    wanted = 1.25 * prediction.p99_ms
    digit = 10.0 ** (math.floor(math.log10(max(wanted, 1e-3))) - 1)
    return round(math.ceil(wanted / digit) * digit, 6)


def _compared(value: float, best: Scored | None, tolerance: float) -> Iterator[Reason]:
    if best is not None and value > best.score + tolerance + 1e-9:
        yield Reason(
            code="score-worse", text=f"it scores {value:.3f}, the solver's plan {best.score:.3f} (lower is better)"
        )


def _warnings(prediction: Prediction, p: Predictor) -> Iterator[Reason]:
    """What an admitted plan still cannot keep, so that nobody is surprised."""
    if prediction.throughput_rps < p.rate_rps:
        text = f"no known plan carries {p.rate_rps:g} requests/s; this one carries {prediction.throughput_rps:.3g}"
        yield Reason(code="throughput", text=text)
    if prediction.p99_ms > p.view.contract.latency_p99_ms:
        yield Reason(code="risk", text="no known plan keeps the promised p99")
