"""Contracts while they run: what is admitted, what is attained, which alerts fire, what a month was like."""

from __future__ import annotations

import asyncio
import logging

from controller.clock import Clock
from controller.desired import Desired
from controller.events import EventLog
from controller.loop import ControlLoop
from controller.present import admission_out, sla_out
from controller.sla_present import infeasible, status_out, with_answer
from controller.sla_reports import build_report, month_bounds
from controller.sla_views import SlaReport, SlaStatusOut
from controller.slis import Slis
from controller.state import State
from controller.telemetry import Telemetry
from controller.views import Admission, SlaOut
from policies.admit import admit
from policies.decision import Prediction, Proposal
from policies.ids import ServiceId
from policies.many import REACHES
from policies.nearest import examine
from policies.snapshot import ServiceView
from sla.assess import Assessment
from sla.burn import Alert
from sla.contract import Contract
from sla.risk import late_share, risk_soon
from sla.window import WindowStatus

log = logging.getLogger(__name__)

DECISIONS_READ = 500
"""How far back a report looks for what was done."""


class Contracts:
    """Everything the API says about contracts. Owned by the event loop."""

    def __init__(
        self, *, desired: Desired, loop: ControlLoop, slis: Slis, telemetry: Telemetry, state: State, events: EventLog,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._desired = desired
        self._loop = loop
        self._slis = slis
        self._telemetry = telemetry
        self._state = state
        self._events = events
        self._clock = clock
        self._firing: dict[tuple[str, str, str], Alert] = {}
        """(contract, promise, rule) -> the alert as it was when it began."""

    # --- admission

    async def admission(self, contract: Contract) -> Admission:
        """Could it be kept now? Changes nothing."""
        spec = self._desired.spec_of(contract)
        if spec is None:
            return Admission(
                verdict="unbound",
                text=f"accepted; there is no service {contract.service_name!r} yet, so nothing is placed until one is registered",
            )
        service = ServiceId(contract.service_id)
        known = self._loop.world.view(service)
        view = ServiceView(
            spec=spec, contract=contract, running=known.running if known else None, entry=known.entry if known else None,
            measures=known.measures if known else {},
        )  # fmt: skip
        for reach in REACHES:
            snapshot = self._loop.world.around(service, view, reach=reach)
            answer = await asyncio.to_thread(examine, snapshot, service)
            if answer.feasible or self._loop.world.is_small:
                break
        if answer.best is None or not answer.feasible:
            return infeasible(answer)
        proposal = Proposal(plan=answer.best.plan, proposer="solver", trigger="contract")
        return with_answer(admission_out(admit(proposal, snapshot, service), self._desired.models), answer)

    # --- what is attained

    def sla(self, service: str) -> SlaOut:
        """One contract with what was attained. Raises NotFoundError."""
        return self._sla(service, self._slis.assess(self._desired.contract(service).contract))

    def status(self, service: str) -> SlaStatusOut:
        """The same with budgets, burn rates, alerts and risk. Raises NotFoundError."""
        contract = self._desired.contract(service).contract
        found = self._slis.assess(contract)
        window = self._slis.window(ServiceId(contract.service_name))
        predicted = self._predicted_bad(service, contract)
        guess = risk_soon(window, contract, self._clock.wall_s(), predicted_bad=predicted)
        return status_out(self._sla(service, found), found, guess)

    async def report(self, service: str, month: str) -> SlaReport:
        """One month. Raises NotFoundError, InvalidInputError."""
        stored = self._desired.contract(service)
        bounds = month_bounds(month)
        decisions = await self._state.tail_decisions(DECISIONS_READ, service)
        window = self._slis.window(ServiceId(stored.contract.service_name))
        return build_report(stored, window, bounds, decisions, self._clock.wall_s())

    def tick(self) -> None:
        """Note promises and observed minutes, and which alerts began or ended. Call it every few seconds."""
        stored = dict(self._desired.contracts)
        self._slis.tick(each.contract for each in stored.values())
        firing: dict[tuple[str, str, str], Alert] = {}
        for service, each in stored.items():
            for alert in self._slis.assess(each.contract).firing:
                firing[service, alert.promise, alert.rule] = alert
        for key in firing.keys() - self._firing.keys():
            alert = firing[key]
            self._events.add("sla-alert", f"{key[0]} ({alert.severity}): {alert.sentence}", service=key[0])
        for key in self._firing.keys() - firing.keys():
            self._events.add("sla-alert", f"{key[0]}: {key[1]} is calm again ({key[2]}).", service=key[0])
        self._firing = firing

    def _sla(self, service: str, found: Assessment) -> SlaOut:
        stored = self._desired.contract(service)
        book = self._desired.book(service)
        name = ServiceId(stored.contract.service_name)
        return sla_out(
            stored,
            window_status(found),
            bound=self._desired.spec_of(stored.contract) is not None,
            infeasible=self._loop.infeasible(ServiceId(service)),
            running=book.record(book.running_epoch),
            pinned=book.pinned,
            offered_rps=self._telemetry.offered_rps(name, self._clock.now_ms()),
            fell_back=self._telemetry.fell_back(name),
            budgets=found.budgets,
            firing=[f"{alert.severity}: {alert.sentence}" for alert in found.firing],
        )

    def _predicted_bad(self, service: str, contract: Contract) -> dict[str, float] | None:
        """What the running plan was predicted to do to each promise, None without a plan."""
        book = self._desired.book(service)
        record = book.record(book.running_epoch)
        if record is None or record.decision is None or record.decision.prediction is None:
            return None
        return predicted_bad(record.decision.prediction, contract)


def window_status(found: Assessment) -> WindowStatus:
    """The contract's own window, as `sla_out` takes it."""
    own = found.window
    return WindowStatus(
        requests=own.requests, ok=own.requests - own.failed, availability=own.availability, p50_ms=own.p50_ms,
        p95_ms=own.p95_ms, p99_ms=own.p99_ms,
    )  # fmt: skip


def predicted_bad(prediction: Prediction, contract: Contract) -> dict[str, float]:
    """Promise -> share of bad requests that a plan is predicted to give."""
    late = {
        o.name: late_share(prediction.p50_ms, prediction.p99_ms, o.at_most_ms)
        for o in contract.latency_objectives()
        if o.metric != "inter-token"
    }
    return {"availability": 1.0 - prediction.availability, **late}
