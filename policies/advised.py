"""What the LLM wishes on its own: kept to while that costs next to nothing, by the judgement of the solver without those wishes.

A person's wish may cost any score, since somebody answered for it. The LLM's may not be a way around the limit on regret, whatever it
wishes and however the world changes while the wish lasts. So at every look, with everything in force that persons confirmed:

- the best plan under its wishes may score at most the tolerance behind the best plan without them;
- so may the plan that it suggests, and a favourite of its own from earlier looks;
- where the running plan is further behind than the tolerance, its wishes may not make staying look better than it is;
- what it wishes to keep is kept only while the running plan is within the tolerance.

Where one of these fails, the solver plans as if nothing had been wished. The loss of a device and the first plan wait for none of this.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import msgspec

from policies.constraints import KeepPlan, Rule, bias, in_words, shifted
from policies.costs import PredictSettings
from policies.decision import Reason
from policies.ids import ServiceId
from policies.plan import Plan
from policies.predict import Predictor
from policies.score import Weights, score
from policies.snapshot import Snapshot
from policies.solve import SolverSettings, candidates
from sla.errors import InfeasibleError

HEEDED_FOR_MS = 10_000.0
"""So long a look that moves nothing goes by what an earlier one found: it takes the solver twice to find out."""


class Heeded(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the LLM's wishes count at this look."""

    rules: tuple[Rule, ...] = ()
    too_dear: tuple[Plan, ...] = ()
    """Of the plans that were asked about, those that cost more than the tolerance while its wishes count."""
    note: Reason | None = None
    """Why its wishes do not count, if there are any."""
    wished: tuple[Rule, ...] = ()
    """All of its wishes; empty where they were not asked about."""
    at_ms: float = 0.0

    def holds(self, snapshot: Snapshot, service_id: ServiceId) -> bool:
        """Whether this may be gone by once more, since the same is wished and little time has passed."""
        view = snapshot.services.get(service_id)
        return view is not None and view.advised == self.wished and 0 <= snapshot.now_ms - self.at_ms < HEEDED_FOR_MS

    def notes(self, *, moved: bool) -> tuple[Reason, ...]:
        """What a decision has to say about the LLM's wishes."""
        if moved and self.rules:
            return (Reason(code="wished", text=f"the LLM wished: {'; '.join(in_words(rule) for rule in self.rules)}"),)
        return () if moved or self.note is None else (self.note,)


def heed(
    snapshot: Snapshot,
    service_id: ServiceId,
    plans: Sequence[Plan] = (),
    *,
    weights: Weights,
    tolerance: float,
    limit: int,
    predict_settings: PredictSettings | None = None,
    solver: SolverSettings | None = None,
) -> Heeded:
    """What counts of `ServiceView.advised`; `plans` are those that would be moved to on the LLM's word."""
    view = snapshot.services[service_id]
    if not view.advised or view.running is None or view.pinned or _is_urgent(view.running, snapshot):
        return Heeded()
    found = Heeded(wished=view.advised, at_ms=snapshot.now_ms)
    free = Predictor(snapshot, service_id, predict_settings)
    wished = copy.copy(free)
    steering = tuple(rule for rule in view.advised if not isinstance(rule, KeepPlan))
    wished.view = msgspec.structs.replace(view, constraints=(*view.constraints, *steering))
    try:
        best = candidates(snapshot, service_id, limit, predictor=free, weights=weights, settings=solver)[0]
        under = best
        if steering:
            under = candidates(snapshot, service_id, limit, predictor=wished, weights=weights, settings=solver)[0]
    except InfeasibleError:
        return found
    allowed = best.score + tolerance + 1e-9
    running, price = _worth(free, view.running, weights), _worth(free, under.plan, weights)
    if price > allowed:
        return msgspec.structs.replace(found, note=_too_dear(price - best.score, tolerance))
    if running > allowed:
        gain = _worth(wished, view.running, weights) - under.score
        if gain < running - allowed:
            return msgspec.structs.replace(found, note=_too_dear(running - best.score, tolerance))
    kept = tuple(rule for rule in view.advised if isinstance(rule, KeepPlan) and running <= allowed)
    known = [plan for plan in plans if plan.agents() <= snapshot.fleet.agents.keys()]
    dear = tuple(plan for plan in known if _worth(free, plan, weights) > allowed)
    return msgspec.structs.replace(found, rules=(*steering, *kept), too_dear=dear)


def with_rules(snapshot: Snapshot, service_id: ServiceId, rules: Sequence[Rule]) -> Snapshot:
    """The snapshot with these wishes in force too."""
    if not rules:
        return snapshot
    view = snapshot.services[service_id]
    view = msgspec.structs.replace(view, constraints=(*view.constraints, *rules))
    return msgspec.structs.replace(snapshot, services={**snapshot.services, service_id: view})


def _is_urgent(running: Plan, snapshot: Snapshot) -> bool:
    states = (snapshot.fleet.agents.get(agent) for agent in running.agents())
    return any(agent is None or agent.state in ("lost", "draining") for agent in states)


def _worth(p: Predictor, plan: Plan, weights: Weights) -> float:
    """The plan's score under the wishes that `p` knows."""
    rules = p.view.constraints
    value = score(p.predict(plan), p.view.contract, shifted(weights, rules))
    return value + bias(plan, rules, p.costs.agents)


def _too_dear(cost: float, tolerance: float) -> Reason:
    text = f"what the LLM wishes would cost {cost:.3f} of score, more than {tolerance:g}: it does not count for now"
    return Reason(code="score-worse", text=text)
