"""The knobs of running services: what operators set, what follows the memory bandwidth, and what ingresses were told.

Durable before it is told. A value never goes beyond what the contract's accuracy floor leaves under the running plan; the wish is kept, so
that it counts again when a plan of more accurate variants runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agents.messages import Tune
from controller.clock import Clock
from controller.desired import Desired
from controller.events import EventLog
from controller.fleet import FleetRegistry
from controller.records import DecisionRecord, KnobBook, KnobSetting
from controller.state import State
from controller.telemetry import Telemetry
from controller.views import KnobOut
from policies.constraints import Rule, knob_within
from policies.decision import Decision, Reason, Trigger
from policies.ids import AgentId, ServiceId
from policies.knobs import bounded, follow_bandwidth, knobs_of, limit_of, within
from policies.plan import Plan
from policies.service import Knob, ServiceSpec
from sla.errors import InvalidInputError, TidegateError

log = logging.getLogger(__name__)

FRESH_MS = 5_000.0
"""Older reports do not turn a knob."""
NOTEWORTHY = 0.005
"""Smaller steps of `auto` are not taken."""
Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class _Use:
    """The busiest memory among the agents that run a stage."""

    share: float = math.nan
    agent: AgentId | None = None


class Knobs:
    """Turns knobs. Owned by the event loop; `run` follows the bandwidth."""

    def __init__(
        self, *, desired: Desired, state: State, fleet: FleetRegistry, telemetry: Telemetry, events: EventLog, clock: Clock,
        tell_own_ingress: Callable[[Tune], object], look_every_ms: float,
        wishes: Callable[[ServiceId], tuple[Rule, ...]] = lambda _: (),
    ) -> None:  # fmt: skip
        """`wishes` tells the rules that persons put in force for a contract; see `policies.constraints.KnobBound`."""
        self._desired = desired
        self._state = state
        self._fleet = fleet
        self._telemetry = telemetry
        self._events = events
        self._clock = clock
        self._tell_own_ingress = tell_own_ingress
        self._look_every_ms = look_every_ms
        self._rules = wishes
        self._books: dict[ServiceId, KnobBook] = {}
        self._told: dict[ServiceId, tuple[int, Values]] = {}
        """Epoch and values that every connected ingress was told; unknown after a restart."""
        self._turning = asyncio.Lock()
        self.faults = 0

    async def load(self) -> None:
        """Read what was set from the store."""
        self._books = await self._state.knob_books()

    # --- what holds

    def values(self, spec: ServiceSpec, plan: Plan | None) -> tuple[Values, int]:
        """The values that ingresses shall feed under a plan, and their version."""
        book = self._book(spec.id)
        floor, values = self._floor(spec.id), self._wishes(spec, book)
        for key, _, knob in knobs_of(spec):
            limit = limit_of(spec, plan, self._desired.models, floor, key, values)
            values[key] = within(knob, values[key], limit)
        return values, book.version

    def out(self, spec: ServiceSpec) -> list[KnobOut]:
        """The knobs of a service for people."""
        plan, book, floor = self._running(spec.id), self._book(spec.id), self._floor(spec.id)
        values, _ = self.values(spec, plan)
        found = []
        for key, stage, knob in knobs_of(spec):
            use = self._use(plan, stage.name)
            found.append(
                KnobOut(
                    key=key, value=values[key], auto=key in book.settings and book.settings[key].auto, default=knob.default,
                    low=knob.low, high=knob.high, better=knob.better,
                    limit=limit_of(spec, plan, self._desired.models, floor, key, values),
                    bandwidth_use=None if math.isnan(use.share) else use.share,
                )
            )  # fmt: skip
        return found

    # --- turning

    async def tune(self, service: str, wanted: Mapping[str, float | str]) -> None:
        """Set knobs to values, or to `auto`. Durable when it returns, and told to the ingresses that are connected.

        Raises NotFoundError for an unknown service, InvalidInputError for an unknown knob, a value out of bounds, or one that the
        accuracy floor forbids; nothing changes then.
        """
        spec = self._desired.spec(service)
        async with self._turning:
            plan, book, floor = self._running(spec.id), self._book(spec.id), self._floor(spec.id)
            values, _ = self.values(spec, plan)
            knobs = {key: knob for key, _, knob in knobs_of(spec)}
            settings = dict(book.settings)
            for key, value in wanted.items():
                limit = limit_of(spec, plan, self._desired.models, floor, key, values)
                settings[key] = _setting(key, knobs[key], value, limit, values[key])
                values[key] = settings[key].value
            said = ", ".join(
                f"{key}={'auto' if settings[key].auto else format(settings[key].value, 'g')}" for key in wanted
            )
            await self._put(spec.id, settings)
            await self._note(spec.id, f"an operator set {said}", "operator")
            await self._tell(spec, plan)

    async def run(self) -> None:
        """Forever. The one catch-all is here: it counts and logs."""
        while True:
            await asyncio.sleep(self._look_every_ms / 1000)
            try:
                await self.look()
            except Exception as error:
                self.faults += 1
                log.exception("the knobs stumbled")
                self._events.add("loop-fault", f"The knobs stumbled: {error}")

    async def look(self) -> None:
        """One round: `auto` knobs follow the bandwidth, and ingresses hear what they do not know yet."""
        async with self._turning:
            for service in [name for name in self._books if name not in self._desired.specs]:
                # The service was removed; one that gets its name later begins with its defaults.
                await self._state.delete_knobs(service)
                del self._books[service]
                self._told.pop(service, None)
        for spec in list(self._desired.specs.values()):
            if not any(stage.knobs for stage in spec.onnx_stages()):
                continue
            async with self._turning:
                plan = self._running(spec.id)
                if plan is not None:
                    await self._follow(spec, plan)
                    await self._tell(spec, plan)

    async def _follow(self, spec: ServiceSpec, plan: Plan) -> None:
        book, floor = self._book(spec.id), self._floor(spec.id)
        values, _ = self.values(spec, plan)
        settings, said = dict(book.settings), []
        for key, stage, knob in knobs_of(spec):
            held = settings.get(key)
            if held is None or not held.auto:
                continue
            use = self._use(plan, stage.name)
            limit = limit_of(spec, plan, self._desired.models, floor, key, values)
            turned = knob_within(key, follow_bandwidth(knob, values[key], limit, use.share), self._rules_of(spec.id))
            turned = within(knob, turned, limit)
            if abs(turned - held.value) >= NOTEWORTHY:
                said.append(
                    f"{key} {held.value:.3g} -> {turned:.3g}: {use.agent} uses {100 * use.share:.0f} % of its memory bandwidth "
                    f"(estimated), and the accuracy floor allows {limit:.3g}"
                )
                values[key] = turned
                settings[key] = KnobSetting(value=turned, auto=True)
        if said:
            await self._put(spec.id, settings)
            await self._note(spec.id, "; ".join(said), "bandwidth")

    async def _tell(self, spec: ServiceSpec, plan: Plan | None) -> None:
        """Send the values to every ingress unless all of them have them; those that are away get them with their route."""
        if plan is None:
            return
        values, _ = self.values(spec, plan)
        if self._told.get(spec.id) == (plan.epoch, values):
            return
        # A version of its own: the same settings may mean other values under another plan or contract.
        version = await self._put(spec.id, self._book(spec.id).settings)
        message = Tune(service_id=spec.id, epoch=plan.epoch, version=version, knobs=values)
        self._tell_own_ingress(message)
        heard = await asyncio.gather(*(self._tell_agent(agent, message) for agent in self._ingresses()))
        if all(heard):
            self._told[spec.id] = (plan.epoch, values)

    async def _tell_agent(self, agent: AgentId, message: Tune) -> bool:
        connection = self._fleet.connection(agent)
        if connection is None:
            return True
        try:
            await connection.call(message, timeout_s=5.0)
        except TidegateError as error:
            log.warning("%s was not told the knobs of %s: %s", agent, message.service_id, error)
            return False
        return True

    # --- what it rests on

    async def _put(self, service: ServiceId, settings: Mapping[str, KnobSetting]) -> int:
        """Keep settings under the next version, which is returned."""
        book = KnobBook(version=self._book(service).version + 1, settings=dict(settings))
        await self._state.put_knobs(service, book)
        self._books[service] = book
        return book.version

    async def _note(self, service: ServiceId, text: str, trigger: Trigger) -> None:
        """An event, and an entry in the log of decisions of the contract."""
        self._events.add("knob", f"{service}: {text}.", service=service)
        contract = self._contract_of(service)
        if contract is None:
            return
        reason = Reason(code="knob", text=text)
        decision = Decision(service_id=contract, trigger=trigger, proposer="knobs", plan=None, reasons=(reason,))
        await self._state.append_decision(DecisionRecord(at_s=self._clock.wall_s(), decision=decision))

    def _book(self, service: ServiceId) -> KnobBook:
        return self._books.get(service) or KnobBook()

    def _wishes(self, spec: ServiceSpec, book: KnobBook) -> Values:
        """What is wanted of each knob: as set, within what intents in force leave it."""
        rules = self._rules_of(spec.id)
        return {
            key: bounded(
                knob, knob_within(key, book.settings[key].value if key in book.settings else knob.default, rules)
            )
            for key, _, knob in knobs_of(spec)
        }

    def _rules_of(self, service: ServiceId) -> tuple[Rule, ...]:
        contract = self._contract_of(service)
        return () if contract is None else self._rules(contract)

    def _contract_of(self, service: ServiceId) -> ServiceId | None:
        contracts = self._desired.contracts.items()
        return next((name for name, stored in contracts if stored.contract.service_name == service), None)

    def _floor(self, service: ServiceId) -> float | None:
        contract = self._contract_of(service)
        return None if contract is None else self._desired.contract(contract).contract.accuracy_floor

    def _running(self, service: ServiceId) -> Plan | None:
        contract = self._contract_of(service)
        return None if contract is None else self._desired.book(contract).running

    def _ingresses(self) -> list[AgentId]:
        members = self._fleet.members.items()
        return sorted(
            agent for agent, member in members if member.connection is not None and member.facts.ingress_port > 0
        )

    def _use(self, plan: Plan | None, stage: str) -> _Use:
        """Of the agents that run the stage, by what they reported just now."""
        found = _Use()
        for agent in sorted({shard.agent for shard in plan.shards() if shard.stage == stage} if plan else ()):
            if agent not in self._telemetry.agents:
                continue
            age_ms = self._clock.now_ms() - self._telemetry.agents.get(agent, "seen_ms")
            share = self._telemetry.agents.get(agent, "bandwidth_use")
            if age_ms <= FRESH_MS and not math.isnan(share) and not share <= found.share:
                found = _Use(share, agent)
        return found


def _setting(key: str, knob: Knob, value: float | str, limit: float, now: float) -> KnobSetting:
    """What an operator wants of a knob. Raises InvalidInputError."""
    if value == "auto":
        if not knob.prunes:
            raise InvalidInputError(f"{key} is no share, so it cannot follow the memory bandwidth.", found="auto")
        return KnobSetting(value=now, auto=True)
    low, high = (limit, knob.high) if knob.better == "high" else (knob.low, limit)
    if not isinstance(value, float | int) or not math.isfinite(value) or not low - 1e-9 <= value <= high + 1e-9:
        beyond = isinstance(value, float | int) and knob.low <= value <= knob.high
        why = (
            f"the accuracy floor allows {low:.3g} to {high:.3g}"
            if beyond
            else f"it goes from {knob.low:g} to {knob.high:g}"
        )
        accepted = f"{low:.3g} to {high:.3g}, or auto"
        raise InvalidInputError(f"{key} cannot be {value}: {why}.", found=str(value)[:80], accepted=accepted)
    return KnobSetting(value=float(value), auto=False)
