"""From what a model said, in short names, to wishes and plans. What names something that its prompt did not is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from policies.constraints import Avoid, Bound, KeepPlan, KnobBound, Prefer, Rule, Shift, faults_of
from policies.fallbacks import with_fallbacks
from policies.llm_names import Named
from policies.llm_reply import MAX_MINUTES, Answer, Malformed, SaidLane, SaidRule, SaidStage
from policies.plan import GRAIN, Lane, Plan, Span, StagePlan, cover_faults, make_lane
from policies.predict import Predictor
from policies.snapshot import ServiceView, Snapshot
from policies.solve import usable_agents

_Id = TypeVar("_Id", bound=str)
DEFAULT_MINUTES = 60.0


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A rule with its time, seconds from when it was said."""

    rule: Rule
    starts_in_s: float = 0.0
    ends_in_s: float = DEFAULT_MINUTES * 60
    """At most 24 hours after it was said."""


def wishes_of(
    answer: Answer, named: Named, view: ServiceView, snapshot: Snapshot, minute_of_day: float
) -> tuple[Wish, ...]:
    """The rules of a `constrain` answer; `minute_of_day` is the operator's clock when it was asked. Raises Malformed."""
    wishes = []
    for said in answer.rules:
        rule = _rule(said, named)
        if faults_of(rule, view.spec, snapshot.fleet.agents):
            raise Malformed(f"a rule of kind {said.kind} makes no sense here: its target or its models do not fit.")
        start_s, end_s = _times(said, minute_of_day)
        wishes.append(Wish(rule=rule, starts_in_s=start_s, ends_in_s=end_s))
    return tuple(wishes)


def plan_of(answer: Answer, named: Named, p: Predictor, base: Plan) -> Plan:
    """The plan of a `place` answer; stages that it does not name are those of `base`, fallbacks are chosen anew.

    Raises Malformed for what cannot be a plan at all; everything else is for the gate. Raises InfeasibleError when no agent
    is usable.
    """
    said = {_look_up(named.stages, each.stage, "stage"): each for each in answer.stages}
    known = {stage.stage: stage for stage in base.stages}
    stages = []
    for spec in p.view.spec.onnx_stages():
        if spec.name in said:
            stages.append(_stage(said[spec.name], named, p, known.get(spec.name)))
        elif spec.name in known:
            stages.append(known[spec.name])
    plan = Plan(service_id=base.service_id, epoch=0, stages=tuple(stages))
    if plan.agents() - p.costs.agents.keys():
        raise Malformed("it names an agent that is gone.")
    if cover_faults(plan, p.view.spec, p.costs.snapshot.models):
        return plan  # The gate refuses it, and says why.
    return with_fallbacks(p, plan, usable_agents(p))


def _stage(said: SaidStage, named: Named, p: Predictor, before: StagePlan | None) -> StagePlan:
    name = _look_up(named.stages, said.stage, "stage")
    spec = next(stage for stage in p.view.spec.onnx_stages() if stage.name == name)
    model = _look_up(named.models, said.model, "model") if said.model or before is None else before.model
    if model not in spec.variants:
        raise Malformed(f"{said.stage} cannot run that model.")
    blocks = len(p.costs.sums(model).model.blocks)
    axis = spec.axis if len(said.lanes) > 1 else None
    lanes, at, total = [], 0, sum(lane.percent for lane in said.lanes)
    for number, lane in enumerate(said.lanes):
        is_last = number == len(said.lanes) - 1
        end = GRAIN if is_last and abs(total - 100.0) < 0.5 else at + round(lane.percent * GRAIN / 100)
        lanes.append(_lane(lane, name, model, axis, Span(at, end), blocks, named))
        at = end
    return StagePlan(stage=name, model=model, axis=axis, lanes=tuple(lanes))


def _lane(said: SaidLane, stage: str, model: str, axis: str | None, share: Span, blocks: int, named: Named) -> Lane:
    hops = tuple(
        (_look_up(named.agents, shard.agent, "agent"), Span(shard.start, blocks if shard.stop is None else shard.stop))
        for shard in said.shards
    )
    return make_lane(stage, model, axis, share, hops)  # type: ignore[arg-type]


def _rule(said: SaidRule, named: Named) -> Rule:
    match said.kind:
        case "avoid" | "prefer":
            kind = Avoid if said.kind == "avoid" else Prefer
            if said.target.startswith("Z"):
                return kind(zone=_look_up(named.zones, said.target, "zone"))
            return kind(agent=_look_up(named.agents, said.target, "agent"))
        case "bound" if said.target.startswith("K"):
            knob = _look_up(named.knobs, said.target, "knob")
            if said.low is None or said.high is None:
                raise Malformed("to bound a knob it must give 'low' and 'high'.")
            return KnobBound(knob=knob, low=said.low, high=said.high)
        case "bound":
            stage = _look_up(named.stages, said.target, "stage")
            return Bound(stage=stage, variants=tuple(_look_up(named.models, model, "model") for model in said.models))
        case "shift":
            return Shift(saturation=said.saturation, jitter=said.jitter, risk=said.risk)
        case "keep":
            return KeepPlan()


def _times(said: SaidRule, minute_of_day: float) -> tuple[float, float]:
    """Seconds until it begins and until it ends; a time of day means the next one."""
    start = _minutes_until(said.start, minute_of_day) if said.start else 0.0
    if said.until:
        end = _minutes_until(said.until, (minute_of_day + start) % MAX_MINUTES) + start
    else:
        end = start + (said.minutes if said.minutes is not None else DEFAULT_MINUTES)
    if end <= start:
        raise Malformed("a rule must last some time.")
    if end > MAX_MINUTES:
        raise Malformed("a rule must end within 24 hours.")
    return 60.0 * start, 60.0 * end


def _minutes_until(clock: str, minute_of_day: float) -> float:
    hours, minutes = clock.split(":")
    return (int(hours) * 60 + int(minutes) - minute_of_day) % MAX_MINUTES


def _look_up(known: Mapping[str, _Id], name: str, kind: str) -> _Id:
    found = known.get(name)
    if found is None:
        raise Malformed(
            f"it names {'no ' + kind if not name else 'the ' + kind + ' ' + name}; the prompt names {_some(known)}."
        )
    return found


def _some(known: Mapping[str, str]) -> str:
    return ", ".join(list(known)[:24])
