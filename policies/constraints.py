"""What operators and the LLM may ask of the solver beyond the contract: wishes as values, and what they do to plans and scores.

A wish steers, it never breaks: where keeping to it leaves no legal plan, the solver plans without it. What is in force is part of
the snapshot (`ServiceView.constraints`); when a wish begins and ends is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, StageName
from policies.knobs import knobs_of
from policies.plan import Plan
from policies.score import Weights
from policies.service import OnnxStage, ServiceSpec

MAX_SHIFT = 0.5
"""A weight may become this share larger or smaller."""
MAX_RULES = 8
AGAINST = 0.30
"""What serving against a wish adds to a score: enough to move away from it, whatever else is better ..."""
AGAINST_FALLBACK = 0.05
"""... and a fallback that is against it."""
PREFERENCE = 0.05
"""What a plan pays that has no shard where one is preferred; in proportion where some are."""


class Avoid(msgspec.Struct, frozen=True, kw_only=True, tag="avoid"):
    """Nothing runs on an agent, or in a zone. Exactly one of them is named."""

    agent: AgentId | None = None
    zone: str | None = None


class Prefer(msgspec.Struct, frozen=True, kw_only=True, tag="prefer"):
    """Rather there than elsewhere, as far as the score hardly suffers."""

    agent: AgentId | None = None
    zone: str | None = None


class Bound(msgspec.Struct, frozen=True, kw_only=True, tag="bound"):
    """A stage runs only these of its variants."""

    stage: StageName
    variants: tuple[ModelName, ...]


class KnobBound(msgspec.Struct, frozen=True, kw_only=True, tag="knob"):
    """A knob stays between these, as far as its own bounds and the accuracy floor let it; see `policies.knobs`."""

    knob: str
    """By `knob_key`: STAGE.KNOB."""
    low: float
    high: float


class Shift(msgspec.Struct, frozen=True, kw_only=True, tag="shift"):
    """Each part of the score counts this many times what it counts otherwise; see `shifted`."""

    saturation: float = 1.0
    jitter: float = 1.0
    risk: float = 1.0


class KeepPlan(msgspec.Struct, frozen=True, kw_only=True, tag="keep"):
    """The running plan stays; only the loss of a device moves it, or a contract that it breaks in privacy, zone or accuracy."""


Rule = Avoid | Prefer | Bound | KnobBound | Shift | KeepPlan


def faults_of(rule: Rule, spec: ServiceSpec, agents: Mapping[AgentId, AgentView]) -> list[str]:
    """Why a wish makes no sense for this service on this fleet, in sentences; empty when it does."""
    if isinstance(rule, (Avoid, Prefer)):
        if (rule.agent is None) == (rule.zone is None):
            return ["Name either an agent or a zone."]
        if rule.agent is not None and rule.agent not in agents:
            return [f"There is no agent {rule.agent}."]
        if rule.zone is not None and rule.zone not in {agent.zone for agent in agents.values()}:
            return [f"There is no agent in a zone {rule.zone}."]
    if isinstance(rule, Bound):
        stage = next((s for s in spec.onnx_stages() if s.name == rule.stage), None)
        if stage is None:
            return [f"{spec.id} has no stage {rule.stage}."]
        if not rule.variants or not set(rule.variants) <= set(stage.variants):
            return [f"Stage {rule.stage} has the variants {', '.join(stage.variants)}."]
    if isinstance(rule, KnobBound):
        return _knob_faults(rule, spec)
    if isinstance(rule, Shift):
        low, high = 1.0 - MAX_SHIFT, 1.0 + MAX_SHIFT
        if not all(low <= factor <= high for factor in (rule.saturation, rule.jitter, rule.risk)):
            return [f"A weight may become {low:g} to {high:g} times what it is."]
    return []


def _knob_faults(rule: KnobBound, spec: ServiceSpec) -> list[str]:
    knobs = {key: knob for key, _, knob in knobs_of(spec)}
    knob = knobs.get(rule.knob)
    if knob is None:
        return [f"{spec.id} has no knob {rule.knob}; it has {', '.join(knobs) or 'none'}."]
    if not rule.low <= rule.high or rule.high < knob.low or rule.low > knob.high:
        return [f"Knob {rule.knob} goes from {knob.low:g} to {knob.high:g}; give a lower and an upper end within."]
    return []


def in_words(rule: Rule) -> str:
    """What a wish does, for an operator who is asked to confirm it."""
    match rule:
        case Avoid():
            return f"run nothing {_where(rule)}"
        case Prefer():
            return f"prefer to run {_where(rule)}"
        case Bound():
            return f"stage {rule.stage} runs only {' or '.join(rule.variants)}"
        case KnobBound():
            return (
                f"knob {rule.knob} stays between {rule.low:g} and {rule.high:g}, as far as the accuracy floor lets it"
            )
        case Shift():
            parts = (("CPU load", rule.saturation), ("jitter", rule.jitter), ("the risk of a late answer", rule.risk))
            said = [f"{name} counts {factor:g} times as much" for name, factor in parts if factor != 1.0]
            return " and ".join(said) or "all weights stay as they are"
        case KeepPlan():
            return "keep the running plan unless a device is lost"


def shifted(weights: Weights, rules: Iterable[Rule]) -> Weights:
    """The weights under the wishes: they still sum to one, and none has changed by more than `MAX_SHIFT` of itself."""
    factors = [1.0, 1.0, 1.0]
    for rule in rules:
        if isinstance(rule, Shift):
            factors = [f * g for f, g in zip(factors, (rule.saturation, rule.jitter, rule.risk), strict=True)]
    old = (weights.saturation, weights.jitter, weights.risk)
    raw = [w * max(0.0, f) for w, f in zip(old, factors, strict=True)]
    total = sum(raw)
    if total <= 0 or factors == [1.0, 1.0, 1.0]:
        return weights
    change = [r / total - w for r, w in zip(raw, old, strict=True)]
    # On the way from the old weights to the wanted ones, as far as the bound lets all three go.
    way = min([1.0, *(MAX_SHIFT * w / abs(c) for w, c in zip(old, change, strict=True) if abs(c) > 1e-12)])
    saturation, jitter, risk = (w + way * c for w, c in zip(old, change, strict=True))
    return msgspec.structs.replace(weights, saturation=saturation, jitter=jitter, risk=risk)


def bias(plan: Plan, rules: Sequence[Rule], agents: Mapping[AgentId, AgentView]) -> float:
    """What the wishes add to a plan's score; 0 for a plan that keeps to all of them."""
    if not rules:
        return 0.0
    serving = [shard.agent for shard in plan.shards()]
    spare = [agent for stage in plan.stages for agent in stage.fallback]
    added = 0.0
    for rule in rules:
        if isinstance(rule, Avoid):
            if any(_is_at(agents.get(agent), rule) for agent in serving):
                added += AGAINST
            elif any(_is_at(agents.get(agent), rule) for agent in spare):
                added += AGAINST_FALLBACK
        elif isinstance(rule, Prefer):
            elsewhere = sum(not _is_at(agents.get(agent), rule) for agent in serving)
            added += PREFERENCE * elsewhere / max(1, len(serving))
        elif isinstance(rule, Bound) and any(
            stage.stage == rule.stage and stage.model not in rule.variants for stage in plan.stages
        ):
            added += AGAINST
    return added


def grounds(agents: Sequence[AgentView], rules: Sequence[Rule]) -> list[list[AgentView]]:
    """The sets of agents to look for plans in: without the avoided ones, and also with nothing but the preferred ones."""
    allowed = [a for a in agents if not any(isinstance(rule, Avoid) and _is_at(a, rule) for rule in rules)]
    wanted = [a for a in allowed if any(isinstance(rule, Prefer) and _is_at(a, rule) for rule in rules)]
    return [found for found in (allowed, wanted if len(wanted) < len(allowed) else []) if found]


def bounded(stage: OnnxStage, rules: Sequence[Rule]) -> OnnxStage:
    """The stage with only the variants that the wishes let it run; of wishes that contradict each other the first one counts."""
    kept = stage.variants
    for rule in rules:
        if isinstance(rule, Bound) and rule.stage == stage.name:
            kept = tuple(model for model in kept if model in rule.variants) or kept
    return stage if kept == stage.variants else msgspec.structs.replace(stage, variants=kept)


def knob_within(key: str, value: float, rules: Iterable[Rule]) -> float:
    """A knob's value as the wishes let it stand; of wishes that contradict each other the first one counts."""
    low, high = -math.inf, math.inf
    for rule in rules:
        if isinstance(rule, KnobBound) and rule.knob == key and rule.low <= high and rule.high >= low:
            low, high = max(low, rule.low), min(high, rule.high)
    return min(high, max(low, value))


def _is_at(agent: AgentView | None, rule: Avoid | Prefer) -> bool:
    if agent is None:
        return False
    return agent.id == rule.agent if rule.agent is not None else agent.zone == rule.zone


def _where(rule: Avoid | Prefer) -> str:
    return f"on {rule.agent}" if rule.agent is not None else f"in zone {rule.zone}"
