"""Domain values as the views of the API. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from controller.events import Event
from controller.fleet import Member
from controller.records import DecisionRecord, PlanRecord, StoredContract
from controller.telemetry import Telemetry
from controller.views import (
    Admission,
    AgentOut,
    BlockOut,
    CalibrationOut,
    DecisionOut,
    DeviceProfileOut,
    EventOut,
    KnobOut,
    LinkOut,
    ModelOut,
    PlanOut,
    PredictionOut,
    ReasonOut,
    ServiceOut,
    ShardOut,
    SlaOut,
    SlaState,
)
from policies.decision import Decision, Prediction
from policies.fleet import AgentView, LinkView
from policies.ids import ModelName
from policies.plan import WHOLE_AXIS, Plan
from policies.roofline import DeviceCalibration
from policies.service import DeviceProfile, ModelProfile, ServiceSpec
from sla.budget import Budget
from sla.window import WindowStatus


def shards_out(plan: Plan, models: dict[ModelName, ModelProfile]) -> list[ShardOut]:
    """Serving shards in pipeline order, then the fallbacks."""

    def blocks_of(name: ModelName, default: int) -> int:
        return len(models[name].blocks) if name in models else default

    serving = [
        ShardOut(
            stage=shard.stage,
            model=shard.model,
            agent=shard.agent,
            patch=(shard.patch.start, shard.patch.stop),
            token=(shard.token.start, shard.token.stop),
            blocks=(shard.blocks.start, shard.blocks.stop),
            block_count=blocks_of(shard.model, shard.blocks.stop),
        )
        for shard in plan.shards()
    ]
    whole = (WHOLE_AXIS.start, WHOLE_AXIS.stop)
    spare = []
    for stage in plan.stages:
        count = blocks_of(stage.model, stage.lanes[0].shards[-1].blocks.stop)
        spare += [
            ShardOut(
                stage=stage.stage, model=stage.model, agent=agent, patch=whole, token=whole, blocks=(0, count),
                block_count=count, role="fallback",
            )
            for agent in stage.fallback
        ]  # fmt: skip
    return serving + spare


def prediction_out(prediction: Prediction) -> PredictionOut:
    return PredictionOut(
        p50_ms=_finite(prediction.p50_ms),
        p95_ms=_finite(prediction.p95_ms),
        p99_ms=_finite(prediction.p99_ms),
        throughput_rps=_finite(prediction.throughput_rps),
        saturation=prediction.saturation,
        jitter_ms=_finite(prediction.jitter_ms),
        risk=prediction.risk,
        availability=prediction.availability,
        accuracy=prediction.accuracy,
        energy_j=_finite(prediction.energy_j),
        bottleneck=prediction.bottleneck,
    )


def admission_out(decision: Decision, models: dict[ModelName, ModelProfile]) -> Admission:
    """An admitted plan as the answer to a contract."""
    prediction = decision.prediction
    if decision.plan is None or prediction is None:
        return Admission(verdict="infeasible", text=f"infeasible: {'; '.join(r.text for r in decision.reasons)}")
    text = (
        f"admissible: predicted p99 {prediction.p99_ms:.0f} ms, {prediction.throughput_rps:.1f} rps, availability "
        f"{prediction.availability:.4%}, accuracy {prediction.accuracy:.2f}, risk {prediction.risk:.3f}, on {len(decision.plan.agents())} agents"
    )
    return Admission(
        verdict="admissible",
        text=text,
        score=decision.score,
        prediction=prediction_out(prediction),
        shards=shards_out(decision.plan, models),
    )


def agent_out(member: Member, view: AgentView, telemetry: Telemetry, links: list[LinkView]) -> AgentOut:
    table, agent = telemetry.agents, view.id
    known = agent in table

    def number(column: str) -> float | None:
        value = table.get(agent, column) if known else math.nan
        return None if math.isnan(value) else value

    ingress = f"http://{view.host}:{view.ingress_port}" if view.ingress_port and view.host else None
    return AgentOut(
        id=agent,
        platform=view.platform,
        evidence=view.evidence,
        state=view.state,
        zone=view.zone,
        is_cloud=view.is_cloud,
        age_ms=view.age_ms if math.isfinite(view.age_ms) else None,
        cpu_saturation=number("cpu"),
        memory_budget_bytes=view.memory_budget_bytes,
        loaded_bytes=number("loaded_bytes"),
        queue_depth=number("queue_depth"),
        temperature_c=number("temperature_c"),
        slowdown=view.slowdown,
        device_type=member.facts.device_type,
        calibration=calibration_out(member.facts.calibration),
        peer_address=f"{view.host}:{view.port}",
        seen_host=member.record.seen_host,
        claimed_host=member.facts.claimed_host,
        ingress_url=ingress,
        enrolled_at_s=member.record.enrolled_at_s,
        enrolled_in_ms=member.record.enrolled_in_ms,
        versions=dict(member.facts.versions),
        providers=list(member.facts.providers),
        links=[
            LinkOut(
                peer=link.dst,
                rtt_ms=link.rtt_ms,
                jitter_ms=link.jitter_ms,
                bandwidth_mbps=link.bandwidth_bytes_per_s * 8 / 1e6,
                age_ms=link.age_ms,
            )
            for link in links
        ],
        faults=list(member.faults),
    )


def calibration_out(calibration: DeviceCalibration | None) -> CalibrationOut | None:
    if calibration is None:
        return None
    return CalibrationOut(
        matmul_gflops=calibration.matmul_flops_per_s / 1e9, conv_gflops=calibration.conv_flops_per_s / 1e9,
        copy_gb_per_s=calibration.copy_bytes_per_s / 1e9, launch_ms=calibration.launch_ms, spread=calibration.spread,
        provider=calibration.provider,
    )  # fmt: skip


def plan_out(
    record: PlanRecord, *, running: bool, active_at_s: float | None, measured_p99_ms: float | None, requests: int,
    models: dict[ModelName, ModelProfile],
) -> PlanOut:  # fmt: skip
    decision = record.decision
    prediction = decision.prediction if decision else None
    return PlanOut(
        service_id=record.plan.service_id,
        epoch=record.plan.epoch,
        running=running,
        trigger=decision.trigger if decision else "operator",
        proposer=decision.proposer if decision else "operator",
        score=decision.score if decision else None,
        predicted_p99_ms=_finite(prediction.p99_ms) if prediction else None,
        measured_p99_ms=measured_p99_ms,
        requests=requests,
        decided_at_s=record.at_s,
        active_at_s=active_at_s,
        sentence=decision.sentence() if decision else "",
        shards=shards_out(record.plan, models),
    )


def decision_out(record: DecisionRecord) -> DecisionOut:
    decision = record.decision
    return DecisionOut(
        at_s=record.at_s,
        service_id=decision.service_id,
        trigger=decision.trigger,
        proposer=decision.proposer,
        epoch=decision.plan.epoch if decision.plan else None,
        score=_finite(decision.score) if decision.score is not None else None,
        risk=_finite(decision.prediction.risk) if decision.prediction else None,
        sentence=decision.sentence() + (f" Outcome: {record.outcome}." if record.outcome else ""),
        reasons=[ReasonOut(code=reason.code, text=reason.text) for reason in decision.reasons],
        rationale=decision.rationale,
    )


def event_out(event: Event) -> EventOut:
    return EventOut(**msgspec.structs.asdict(event))


def model_out(profile: ModelProfile, devices: Mapping[str, DeviceProfile]) -> ModelOut:
    return ModelOut(
        name=profile.name,
        sha256=profile.sha256,
        blocks=[BlockOut(**msgspec.structs.asdict(block)) for block in profile.blocks],
        split_axis=profile.split_axis,
        split_until=profile.split_until,
        accuracy=profile.accuracy,
        atomic_reason=profile.atomic_reason,
        devices=[DeviceProfileOut.model_validate(msgspec.to_builtins(device)) for _, device in sorted(devices.items())],
    )


def service_out(spec: ServiceSpec, knobs: Sequence[KnobOut] = ()) -> ServiceOut:
    data = msgspec.to_builtins(spec)
    return ServiceOut(
        id=spec.id, stages=data["stages"], inputs=data["inputs"], outputs=data["outputs"], knobs=list(knobs)
    )  # fmt: skip


def sla_out(
    stored: StoredContract, window: WindowStatus, *, bound: bool, infeasible: str | None, running: PlanRecord | None,
    pinned: bool, offered_rps: float, fell_back: int, budgets: Sequence[Budget] = (), firing: Sequence[str] = (),
) -> SlaOut:  # fmt: skip
    """A contract beside what was attained. `bound`: there is a service of that name."""
    contract = stored.contract
    latency_met = None if window.p99_ms is None else window.p99_ms <= contract.latency_p99_ms
    availability_met = None if window.availability is None else window.availability >= contract.availability_sla
    allowed = window.requests * (1 - contract.availability_sla)
    left = [budget.left for budget in budgets if budget.left is not None]
    if not budgets and allowed > 0:
        left = [1 - (window.requests - window.ok) / allowed]
    state, text = _sla_state(stored, window, bound, infeasible, running, latency_met, availability_met)
    broken = [budget for budget in budgets if budget.met is False]
    if state == "met" and broken:
        state, text = "violated", _broken(broken[0])
    prediction = running.decision.prediction if running and running.decision else None
    return SlaOut(
        service_id=contract.service_id,
        version=stored.version,
        contract=contract.model_dump(mode="json"),
        state=state,
        text=text,
        requests=window.requests,
        failed=window.requests - window.ok,
        availability=window.availability,
        p50_ms=window.p50_ms,
        p95_ms=window.p95_ms,
        p99_ms=window.p99_ms,
        offered_rps=offered_rps,
        latency_met=latency_met,
        availability_met=availability_met,
        budget_left=min(left, default=None),
        fell_back=fell_back,
        running_epoch=running.plan.epoch if running else None,
        predicted_p99_ms=_finite(prediction.p99_ms) if prediction else None,
        pinned=pinned,
        firing=list(firing),
    )


def _broken(budget: Budget) -> str:
    """Why a promise does not hold, in words."""
    counted, promise = budget.tally, budget.promise
    if promise.counts == "minutes":
        return f"In {counted.bad} of {counted.total} minutes less was served than was offered and promised; {promise.share:.4%} must be served."
    if promise.counts == "answers":
        return f"{counted.bad} of {counted.total} answers took longer than {promise.limit:g} ms; {promise.share:.4%} must be quicker."
    return f"{counted.bad} of {counted.total} requests were not answered; {promise.share:.4%} must be."


def _sla_state(
    stored: StoredContract, window: WindowStatus, bound: bool, infeasible: str | None, running: PlanRecord | None,
    latency_met: bool | None, availability_met: bool | None,
) -> tuple[SlaState, str]:  # fmt: skip
    contract = stored.contract
    if not bound:
        return (
            "unbound",
            f"There is no service {contract.service_name!r} yet; add a model of that name, or name one in `model`.",
        )
    if running is None:
        if infeasible is not None:
            return "infeasible", infeasible
        return "starting", "The first plan is being decided and rolled out."
    if window.requests == 0:
        return "no-traffic", f"Plan {running.plan.epoch} is ready; no request came in yet."
    if latency_met is False:
        return "violated", f"p99 is {window.p99_ms:.0f} ms; promised are {contract.latency_p99_ms:.0f} ms."
    if availability_met is False:
        return (
            "violated",
            f"{window.availability:.4%} of requests were answered; promised are {contract.availability_sla:.4%}.",
        )
    return (
        "met",
        f"p99 {window.p99_ms:.0f} of {contract.latency_p99_ms:.0f} ms, {window.requests} requests, {window.requests - window.ok} failed.",
    )


def _finite(value: float) -> float:
    """JSON has no infinity; 1e12 ms or rps reads as what it is."""
    return value if math.isfinite(value) else math.copysign(1e12, value)
