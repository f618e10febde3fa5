"""What the SLA engine says as the views of the API. Pure."""

from __future__ import annotations

import math

import msgspec

from controller.sla_views import AlertOut, PromiseOut, RiskOut, SlaStatusOut, SpanOut
from controller.views import Admission, BindingOut, NearestOut, SlaOut
from policies.nearest import Answer, Nearest
from sla.assess import Assessment, Span
from sla.budget import Budget
from sla.burn import Alert
from sla.contract import Objective
from sla.risk import Guess


def promise_out(budget: Budget) -> PromiseOut:
    promise = budget.promise
    return PromiseOut(
        name=promise.name, counts=promise.counts, share=promise.share, limit=promise.limit, total=budget.tally.total,
        bad=budget.tally.bad, attained=budget.attained, allowed=budget.allowed, left=budget.left, met=budget.met,
    )  # fmt: skip


def alert_out(alert: Alert) -> AlertOut:
    return AlertOut(**msgspec.structs.asdict(alert), sentence=alert.sentence)


def span_out(span: Span) -> SpanOut:
    return SpanOut(**msgspec.structs.asdict(span))


def status_out(sla: SlaOut, found: Assessment, guess: Guess) -> SlaStatusOut:
    """`sla` with everything that is known about its contract."""
    return SlaStatusOut(
        **sla.model_dump(),
        coverage=found.window.coverage,
        promises=[promise_out(budget) for budget in found.budgets],
        spans={name: span_out(span) for name, span in found.spans.items()},
        burns=found.burns,
        alerts=[alert_out(alert) for alert in found.alerts],
        risk=RiskOut(horizon_s=guess.horizon_s, contract=guess.contract, promises=guess.promises),
    )


def with_answer(admission: Admission, answer: Answer) -> Admission:
    """The admission with what was found out about the contract."""
    return admission.model_copy(
        update={
            "p99_low_ms": _finite(answer.p99_low_ms),
            "p99_high_ms": _finite(answer.p99_high_ms),
            "cost_per_1k_requests": _finite(answer.cost_per_1k),
            "agents": sorted(answer.best.plan.agents()) if answer.best is not None else [],
            "binding": [
                BindingOut(
                    dimension=binding.dimension, text=binding.text, asked=_finite(binding.asked),
                    reached=_finite(binding.reached), stage=binding.stage, device=binding.device, link=binding.link,
                )
                for binding in answer.bindings
            ],
            "nearest": [nearest_out(each) for each in answer.nearest],
            "together": None if answer.together is None else nearest_out(answer.together),
        }
    )  # fmt: skip


def infeasible(answer: Answer) -> Admission:
    """The refusal of a contract, as one sentence and in parts."""
    offers = [each.text for each in (*answer.nearest, *([answer.together] if answer.together else [])) if each.possible]
    hint = f"; {', or '.join(offers)}" if offers else ""
    why = "; ".join(binding.text.rstrip(".") for binding in answer.bindings)
    return with_answer(Admission(verdict="infeasible", text=f"infeasible: {why}{hint}"), answer)


def nearest_out(nearest: Nearest) -> NearestOut:
    changes = {
        name: [o.model_dump() if isinstance(o, Objective) else o for o in value] if isinstance(value, tuple) else value
        for name, value in nearest.changes.items()
    }
    return NearestOut(
        dimension=nearest.dimension, possible=nearest.possible, changes=changes, text=nearest.text
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else math.copysign(1e12, value)
