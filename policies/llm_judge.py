"""What an answer comes to: the plan that it stands for, what the gate says of it, and how it compares with the solver's.

Whatever the model asks for, only this can follow: a plan that `admit` let through and that scores no more than the tolerance behind
the solver's, or the running plan if that is as good, or nothing. Constraints choose one plan at once, which passes the same gate. To
last, a person confirms them, or in mode `control` they act as far as `policies.advised` lets them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from policies.admit import admit
from policies.constraints import AGAINST, KeepPlan, Rule, bias
from policies.decide import DecideSettings, Keep
from policies.decision import Prediction, Proposal, Reason
from policies.llm import Question
from policies.llm_reply import Action, Answer, Malformed
from policies.llm_resolve import Wish, plan_of, wishes_of
from policies.plan import Plan
from policies.predict import Predictor
from policies.snapshot import Snapshot
from policies.solve import candidates
from sla.errors import InfeasibleError


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """An answer after the gate."""

    action: Action
    suggestion: Proposal | Keep | None
    """What `policies.decide.decide` may be told; None when the gate refused."""
    reasons: tuple[Reason, ...] = ()
    """Why it was refused."""
    plan: Plan | None = None
    """What it would run: for `keep` the running plan."""
    prediction: Prediction | None = None
    score: float | None = None
    behind: float | None = None
    """Score of what it wanted minus that of the solver's plan, before the gate; None if there was nothing to score."""
    agrees: bool = False
    """It wants what the solver wants."""
    wishes: tuple[Wish, ...] = ()

    @property
    def regret(self) -> float:
        """What following it costs after the gate, by prediction: nothing where it was refused, since the solver's plan stands."""
        return 0.0 if self.suggestion is None or self.behind is None else max(0.0, self.behind)


def judge(
    answer: Answer, question: Question, snapshot: Snapshot, minute_of_day: float = 0.0, settings: DecideSettings | None = None
) -> Judged:  # fmt: skip
    """Raises Malformed where the answer names what its prompt did not."""
    s = settings or DecideSettings()
    wishes: tuple[Wish, ...] = ()
    if answer.action == "keep":
        return _kept(answer, question, s)
    if answer.action == "constrain":
        view = snapshot.services[question.service_id]
        wishes = wishes_of(answer, question.named, view, snapshot, minute_of_day)
        now = tuple(wish.rule for wish in wishes if wish.starts_in_s == 0)
        if not now or any(isinstance(rule, KeepPlan) for rule in now):
            return msgspec.structs.replace(_kept(answer, question, s), wishes=wishes)
        plan = _solved_under(now, question, snapshot, s)
    elif answer.action == "place":
        base = question.running or question.best
        try:
            plan = plan_of(answer, question.named, Predictor(snapshot, question.service_id, s.predict), base.plan)
        except InfeasibleError as error:
            return Judged(action="place", suggestion=None, reasons=(Reason(code="no-candidate", text=str(error)),))
    else:
        plan = question.options[answer.candidate].plan
    return msgspec.structs.replace(_through_the_gate(answer, plan, question, snapshot, s), wishes=wishes)


def _kept(answer: Answer, question: Question, s: DecideSettings) -> Judged:
    """Keeping is admissible where the running plan is about as good as the solver's."""
    running, best = question.running, question.best
    if running is None:
        reason = Reason(code="no-candidate", text="nothing runs that could be kept")
        return Judged(action=answer.action, suggestion=None, reasons=(reason,))
    behind = running.score - best.score
    judged = Judged(
        action=answer.action, suggestion=Keep(rationale=answer.rationale), plan=running.plan, prediction=running.prediction,
        score=running.score, behind=behind, agrees=running.plan.layout() == best.plan.layout() or behind <= 0,
    )  # fmt: skip
    if behind <= s.score_tolerance + 1e-9:
        return judged
    text = f"the running plan scores {running.score:.3f}, the solver's {best.score:.3f} (lower is better)"
    return msgspec.structs.replace(judged, suggestion=None, reasons=(Reason(code="score-worse", text=text),))


def _through_the_gate(answer: Answer, plan: Plan, question: Question, snapshot: Snapshot, s: DecideSettings) -> Judged:
    proposal = Proposal(plan=plan, proposer="llm", trigger="better-plan", rationale=answer.rationale)
    decision = admit(
        proposal, snapshot, question.service_id, best=question.best, weights=s.weights, settings=s.predict,
        tolerance=s.score_tolerance,
    )  # fmt: skip
    refused = decision.plan is None
    return Judged(
        action=answer.action,
        suggestion=None if refused else proposal,
        reasons=decision.reasons if refused else (),
        plan=plan,
        prediction=decision.prediction,
        score=decision.score,
        behind=None if decision.score is None else decision.score - question.best.score,
        agrees=plan.layout() == question.best.plan.layout(),
    )


def _solved_under(rules: Sequence[Rule], question: Question, snapshot: Snapshot, s: DecideSettings) -> Plan:
    """The solver's plan with these rules beside those in force. Raises Malformed where no plan keeps to them."""
    view = snapshot.services[question.service_id]
    wished = msgspec.structs.replace(view, constraints=(*view.constraints, *rules))
    services = {**snapshot.services, question.service_id: wished}
    try:
        found = candidates(
            msgspec.structs.replace(snapshot, services=services), question.service_id, 1,
            weights=s.weights, predict_settings=s.predict, settings=s.solver,
        )  # fmt: skip
    except InfeasibleError:
        raise Malformed("nothing can run under these rules.") from None
    if bias(found[0].plan, rules, snapshot.fleet.agents) >= AGAINST:
        raise Malformed("nothing can run under these rules.")
    return found[0].plan
