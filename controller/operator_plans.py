"""Plans that an operator wrote: what they would do, and making one run. The gate judges them like anybody's."""

from __future__ import annotations

import asyncio

from controller.desired import Desired
from controller.loop import ControlLoop
from controller.plan_documents import PlanAnswer, PlanIn, PlanQuestion, PlanStarted, plan_from
from controller.present import prediction_out
from controller.views import ReasonOut
from policies.admit import admit
from policies.decision import Decision, Proposal
from policies.ids import ServiceId
from policies.neighbourhood import places_of
from policies.plan import Plan
from policies.predict import Predictor
from policies.snapshot import Snapshot
from policies.solve import candidates
from sla.errors import InfeasibleError, NotFoundError, TidegateError

_OF_THE_LOAD = frozenset({"throughput", "risk"})
"""Refusals that a contract which no plan can keep would bring upon every plan."""


class OperatorPlans:
    """Owned by the event loop."""

    def __init__(self, *, desired: Desired, loop: ControlLoop) -> None:
        self._desired = desired
        self._loop = loop

    async def preview(self, service: str, wanted: PlanQuestion) -> PlanAnswer:
        """What the plan would do, and whether it may run. Raises NotFoundError, InvalidInputError."""
        snapshot, plan = self._read(service, wanted)
        decision = await asyncio.to_thread(judged, snapshot, ServiceId(service), plan, wanted.rps)
        prediction = decision.prediction
        return PlanAnswer(
            admissible=decision.plan is not None,
            text=_sentence(decision),
            reasons=[ReasonOut(code=reason.code, text=reason.text) for reason in decision.reasons],
            score=decision.score,
            prediction=prediction_out(prediction) if prediction is not None else None,
            move_bytes=prediction.move_bytes if prediction is not None else None,
            move_ms=prediction.move_ms if prediction is not None else None,
        )

    async def run(self, service: str, wanted: PlanIn) -> PlanStarted:
        """Make the plan run, proven like every other one, and pin it.

        Raises NotFoundError, InvalidInputError, InfeasibleError (the gate refuses it), RolloutError (what ran before still runs).
        """
        snapshot, plan = self._read(service, wanted)
        decision = await asyncio.to_thread(judged, snapshot, ServiceId(service), plan)
        if decision.plan is None:
            raise InfeasibleError(_sentence(decision))
        was_pinned = self._desired.book(service).pinned
        await self._desired.set_pinned(service, True)  # First, so that the loop leaves it alone.
        try:
            epoch = await self._loop.carry(ServiceId(service), decision)
        except TidegateError:
            await self._desired.set_pinned(service, was_pinned)
            raise
        prediction = decision.prediction
        return PlanStarted(
            service_id=service, epoch=epoch, text=_sentence(decision),
            prediction=prediction_out(prediction) if prediction is not None else None,
        )  # fmt: skip

    def _read(self, service: str, wanted: PlanIn) -> tuple[Snapshot, Plan]:
        contract = self._desired.contract(service).contract
        spec = self._desired.spec_of(contract)
        if spec is None:
            raise NotFoundError(f"The service {contract.service_name!r} of this SLA is not registered yet.")
        plan = plan_from(wanted, spec)
        return self._loop.world.near(ServiceId(service), places_of(plan)), plan


def judged(snapshot: Snapshot, service: ServiceId, plan: Plan, rps: float | None = None) -> Decision:
    """What the gate says of an operator's plan, if asked at that load. Pure.

    Where no plan keeps the contract's promises about load, a plan may break them too: something must run, and the operator
    may choose what.
    """
    predictor = Predictor(snapshot, service, rate_rps=rps)
    proposal = Proposal(plan=plan, proposer="operator", trigger="operator")
    decision = admit(proposal, snapshot, service, predictor=predictor)
    if decision.plan is not None or not {reason.code for reason in decision.reasons} <= _OF_THE_LOAD:
        return decision
    try:
        best = candidates(snapshot, service, 1, predictor=predictor)[0]
    except InfeasibleError:
        return decision
    view = predictor.view
    if best.prediction.throughput_rps >= predictor.rate_rps and best.prediction.p99_ms <= view.contract.latency_p99_ms:
        return decision
    return admit(proposal, snapshot, service, predictor=predictor, best=best, tolerance=float("inf"))


def _sentence(decision: Decision) -> str:
    why = "; ".join(reason.text for reason in decision.reasons)
    return f"admissible: {why}." if decision.plan is not None else f"This plan is refused: {why}."
