"""The control loop: look, decide, carry out, note. The shell around `policies.decide`, which does the thinking.

It reacts to levels, not edges: a trigger only says "look again now", so a lost or doubled trigger is harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agents.messages import Hello, Route
from controller.clock import Clock
from controller.desired import Desired
from controller.events import EventLog
from controller.fleet import FleetRegistry
from controller.llm import LlmAdvisor
from controller.records import DecisionRecord
from controller.replay import Look, look_bytes
from controller.rollout import RolledOut, Rollout, RolloutError
from controller.settings import LoopSettings
from controller.slis import Slis
from controller.snapshots import snapshot_bytes
from controller.state import State
from controller.telemetry import Telemetry
from policies.constraints import Rule
from policies.decide import Keep, Memory, decide
from policies.decision import Decision, Reason, Trigger
from policies.ids import AgentId, ServiceId
from policies.plan import Plan
from policies.service import ServiceSpec
from policies.snapshot import ServiceView, Snapshot
from sla.errors import NotFoundError, TidegateError

log = logging.getLogger(__name__)

MIN_REQUESTS_FOR_P99 = 20
REQUESTS_TO_JUDGE = 100
"""So many requests tell whether a plan brought what was predicted."""


@dataclass(slots=True)
class _Service:
    """What the loop keeps per service; all of it may be lost without harm."""

    memory: Memory = field(default_factory=Memory)
    route: Route | None = None
    trigger: Trigger | None = None
    task: asyncio.Task[None] | None = None
    failures: int = 0
    retry_ms: float = 0.0
    last_hold: tuple[str, ...] = ()
    infeasible: str | None = None
    unjudged: tuple[int, str, Decision] | None = None
    """Epoch, entry of the log and decision of the last move, until it is known what it brought."""
    active_at_s: dict[int, float] = field(default_factory=dict)
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One plan at a time is carried out: what an operator restores waits for the step under way."""
    staging: asyncio.Task[RolledOut] | None = None
    """A plan that is being prepared and proven; nothing depends on it yet."""


class ControlLoop:
    """Keeps every contract's plan right. Owned by the event loop; one step per service runs at a time."""

    def __init__(
        self, *, desired: Desired, fleet: FleetRegistry, telemetry: Telemetry, slis: Slis, rollout: Rollout, state: State,
        advisor: LlmAdvisor, events: EventLog, clock: Clock, settings: LoopSettings, on_route: Callable[[Route], None],
        wishes: Callable[[ServiceId], tuple[Rule, ...]] = lambda _: (),
    ) -> None:  # fmt: skip
        self._desired = desired
        self._fleet = fleet
        self._telemetry = telemetry
        self._slis = slis
        self._rollout = rollout
        self._state = state
        self._advisor = advisor
        self._events = events
        self._clock = clock
        self._settings = settings
        self._on_route = on_route
        self._wishes = wishes
        self._services: dict[ServiceId, _Service] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.faults = 0

    # --- triggers

    def poke(self, trigger: Trigger, service: ServiceId | None = None) -> None:
        """Look again now, because of this."""
        for name in [service] if service else list(self._desired.contracts):
            self._service(name).trigger = trigger
        self._wake.set()

    def said_hello(self, agent: AgentId, hello: Hello) -> None:
        """An agent (re)connected: bring it up to the running plans, and see whether it makes better ones possible."""
        self._spawn(self._catch_up(agent), f"catch-up-{agent}")
        self.poke("agent-joined")

    def active_at_s(self, service: ServiceId, epoch: int) -> float | None:
        """When a plan reached the ingresses, if it did since this controller started."""
        return self._service(service).active_at_s.get(epoch)

    def infeasible(self, service: ServiceId) -> str | None:
        """Why no plan keeps the contract on this fleet, None if one does."""
        return self._service(service).infeasible

    # --- the loop

    async def run(self) -> None:
        """Forever. The one catch-all is here: it counts and logs."""
        while True:
            try:
                # Not `wait_for`, which in Python 3.11 swallows a cancellation that comes with the wake-up.
                async with asyncio.timeout(self._settings.look_every_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                self.look()
            except Exception as error:
                self.faults += 1
                log.exception("the loop stumbled")
                self._events.add("loop-fault", f"The loop stumbled: {error}")

    async def close(self) -> None:
        """Stop what is under way; each step may be stopped anywhere."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self) -> None:
        """One round: update the fleet, then start a step for every service that has none under way."""
        if lost := self._fleet.look():
            log.warning("lost: %s", ", ".join(lost))
            for service, contract in self._desired.contracts.items():
                running = self._desired.book(service).running
                if running is not None and contract is not None and running.agents() & set(lost):
                    state = self._service(service)
                    state.trigger = "agent-lost"
                    state.retry_ms = 0.0
                    if state.staging is not None:
                        state.staging.cancel()  # The loss of a device waits for no plan that is merely better.
        for service, stored in self._desired.contracts.items():
            if self._desired.spec_of(stored.contract) is None:
                continue
            state = self._service(service)
            if (state.task is None or state.task.done()) and self._clock.now_ms() >= state.retry_ms:
                state.task = self._spawn(self._step(service), f"step-{service}")

    def snapshot(self) -> Snapshot:
        """The world as it is now."""
        now_ms = self._clock.now_ms()
        services = {}
        for service, stored in self._desired.contracts.items():
            spec = self._desired.spec_of(stored.contract)
            if spec is not None:
                services[service] = self._view(service, now_ms)
        return Snapshot(now_ms=now_ms, fleet=self._fleet.view(), models=self._desired.models, services=services)

    def _view(self, service: ServiceId, now_ms: float) -> ServiceView:
        stored = self._desired.contracts[service]
        spec = self._desired.spec_of(stored.contract)
        assert spec is not None
        book = self._desired.book(service)
        running = book.running
        sketch = self._telemetry.epoch_sketch(spec.id, running.epoch) if running else None
        enough = sketch is not None and sketch.count >= MIN_REQUESTS_FOR_P99
        return ServiceView(
            spec=spec,
            contract=stored.contract,
            running=running,
            entry=self._telemetry.entry(spec.id, now_ms),
            offered_rps=self._telemetry.offered_rps(spec.id, now_ms),
            measures=self._telemetry.measures(spec.id, now_ms),
            measured_p99_ms=sketch.quantile(0.99) if sketch is not None and enough else None,
            pinned=book.pinned,
            constraints=self._wishes(service),
        )

    async def _step(self, service: ServiceId) -> None:
        """Decide once about one service, and carry it out."""
        state = self._service(service)
        trigger, state.trigger = state.trigger, None
        snapshot, book = self.snapshot(), self._desired.book(service)
        if service not in snapshot.services:
            return
        running = snapshot.services[service].running
        suggestion = self._advisor.take(service, running.epoch if running else 0)
        decision, memory = await asyncio.to_thread(
            decide, snapshot, service, state.memory, trigger=trigger, suggestion=suggestion
        )
        look = Look(
            memory=state.memory, trigger=trigger, proposal=None if isinstance(suggestion, Keep) else suggestion,
            keep=suggestion if isinstance(suggestion, Keep) else None,
        )  # fmt: skip
        lacking = [reason.text for reason in decision.reasons if reason.code == "no-candidate"]
        state.infeasible = lacking[0] if lacking and decision.plan is None else None
        if decision.plan is None:
            await self._note(service, decision, snapshot, look)
            state.memory = memory
            await self._judge(service, snapshot)
            self._advisor.consider(service, snapshot, memory)
            return
        try:
            async with state.moving:
                if self._desired.book(service) != book:
                    return  # An operator moved it meanwhile: look again.
                await self._move(service, decision, snapshot, look)
            state.memory, state.failures = memory, 0  # A move that failed was none: its memory is dropped.
        except TidegateError as error:
            state.failures += 1
            state.retry_ms = self._clock.now_ms() + min(30_000.0, 500.0 * 2**state.failures)
            log.warning("rollout of %s failed: %s", service, error)
            self._events.add("rollout-failed", f"{service}: {error}", service=service)
            state.trigger = state.trigger or trigger

    async def _move(
        self, service: ServiceId, decision: Decision, snapshot: Snapshot, look: Look | None = None
    ) -> None:  # fmt: skip
        """Give a decided plan its epoch, record it, carry it out. Raises TidegateError while nothing has changed yet."""
        assert decision.plan is not None
        spec = self._desired.spec_of(self._desired.contract(service).contract)
        if spec is None:
            raise NotFoundError(f"The service of {service} is not registered any more.")
        epoch = await self._state.next_epoch(spec.id)
        plan = msgspec.structs.replace(decision.plan, epoch=epoch, service_id=spec.id)
        decision = msgspec.structs.replace(decision, plan=plan)
        noted = await self._note(service, decision, snapshot, look)
        await self._carry_out(service, spec, plan, decision)
        self._service(service).unjudged = (epoch, noted, decision) if noted is not None else None

    async def _judge(self, service: ServiceId, snapshot: Snapshot) -> None:
        """Once a plan has served enough requests, note beside its decision what it brought."""
        state = self._service(service)
        view = snapshot.services[service]
        if state.unjudged is None or view.running is None or view.measured_p99_ms is None:
            return
        epoch, noted, decision = state.unjudged
        sketch = self._telemetry.epoch_sketch(view.spec.id, epoch)
        if epoch != view.running.epoch or sketch is None or sketch.count < REQUESTS_TO_JUDGE:
            return
        state.unjudged = None
        await self._state.note_outcome(service, noted, outcome_of(decision, view.measured_p99_ms, int(sketch.count)))

    async def _note(
        self, service: ServiceId, decision: Decision, snapshot: Snapshot, look: Look | None = None
    ) -> str | None:  # fmt: skip
        """Record a decision; a hold only when its reasons are new, so that the log tells a story and not the time."""
        reasons = tuple(reason.code for reason in decision.reasons)
        state = self._service(service)
        if decision.plan is None:
            if reasons == state.last_hold:
                return None
            state.last_hold = reasons
        else:
            state.last_hold = ()
            self._events.add("decision", decision.sentence(), service=service)
        record = DecisionRecord(at_s=self._clock.wall_s(), decision=decision)
        seen = snapshot_bytes(snapshot) if look is None else look_bytes(snapshot, look)
        return await self._state.append_decision(record, seen)

    # --- carrying out

    async def _carry_out(self, service: ServiceId, spec: ServiceSpec, plan: Plan, decision: Decision) -> None:
        """Stage, prove, make durable, switch, clean up later. Raises TidegateError while nothing has changed yet."""
        epoch = plan.epoch
        self._events.add("rollout", f"{service}: plan {epoch} is being prepared.", service=service, epoch=epoch)
        staged = await self._staged(service, spec, plan, is_urgent=decision.trigger == "agent-lost")
        plan = staged.route.plan
        await self._desired.add_plan(service, plan, msgspec.structs.replace(decision, plan=plan), self._clock.wall_s())
        await self._switch(service, staged.route)

    async def _staged(self, service: ServiceId, spec: ServiceSpec, plan: Plan, *, is_urgent: bool) -> RolledOut:
        """The plan prepared everywhere and, unless it is urgent, proven end to end. Raises TidegateError, also when it was given up."""
        state, running_epoch = self._service(service), self._desired.book(service).running_epoch or 0

        async def work() -> RolledOut:
            staged = await self._rollout.stage(spec, plan, running_epoch=running_epoch)
            if not is_urgent:
                await self._rollout.prove(staged.route)
            return staged

        task = asyncio.create_task(work(), name=f"stage-{service}-{plan.epoch}")
        state.staging = None if is_urgent else task
        try:
            return await task
        except TidegateError:
            await self._rollout.abandon(spec.id, plan.epoch)
            raise
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # The loop itself is being stopped.
            await self._rollout.abandon(spec.id, plan.epoch)
            raise RolloutError("it was given up: a device of the running plan was lost meanwhile") from None
        finally:
            state.staging = None

    async def _switch(self, service: ServiceId, route: Route) -> None:
        state = self._service(service)
        epoch = route.plan.epoch
        await self._desired.set_running(service, epoch, previous_was_good=self._ran_well(service))
        state.route = route
        self._on_route(route)
        missed = await self._rollout.activate(route)
        state.active_at_s[epoch] = self._clock.wall_s()
        told = f" ({len(missed)} ingresses catch up later)" if missed else ""
        self._events.add("plan-active", f"{service}: plan {epoch} is active{told}.", service=service, epoch=epoch)
        self._spawn(self._release_later(route.spec.id, epoch), f"release-{service}-{epoch}")

    def is_moving(self, service: ServiceId) -> bool:
        """Whether a plan of this contract is being carried out now."""
        return self._service(service).moving.locked()

    def renew(self, service: ServiceId, why: str) -> None:
        """Carry out the running plan again, because what it runs has changed under it; in the background."""
        running = self._desired.book(service).running
        if running is not None:
            self._spawn(self._renew(service, running, why), f"renew-{service}")

    async def _renew(self, service: ServiceId, plan: Plan, why: str) -> None:
        try:
            await self.restore(service, plan, reason=why)
        except TidegateError as error:
            self._events.add("rollout-failed", f"{service}: {error}", service=service)
            self.poke("operator", service)

    async def restore(
        self, service: ServiceId, plan: Plan, trigger: Trigger = "operator", *, reason: str | None = None
    ) -> int:
        """Run an earlier plan again, as a new epoch. Raises TidegateError while nothing has changed."""
        reason = reason or f"an operator went back to plan {plan.epoch}"
        decision = Decision(
            service_id=service,
            trigger=trigger,
            proposer="operator",
            plan=plan,
            reasons=(Reason(code="operator", text=reason),),
        )
        return await self.carry(service, decision)

    async def carry(self, service: ServiceId, decision: Decision) -> int:
        """Carry out what an operator decided, after the step under way; its epoch. Raises TidegateError while nothing has changed."""
        async with self._service(service).moving:
            await self._move(service, decision, self.snapshot())
        epoch = self._desired.book(service).running_epoch
        assert epoch is not None
        return epoch

    async def retire(self, service: ServiceId, served: ServiceId) -> None:
        """A contract was withdrawn: agents unload its shards and ingresses no longer serve it."""
        self._services.pop(service, None)
        await self._rollout.release(served, await self._state.next_epoch(served))

    def _ran_well(self, service: ServiceId) -> bool:
        """True if the plan that is being replaced served requests and all its agents are still there."""
        running = self._desired.book(service).running
        if running is None:
            return False
        sketch = self._telemetry.epoch_sketch(running.service_id, running.epoch)
        lost = {agent for agent, member in self._fleet.members.items() if member.state == "lost"}
        return sketch is not None and sketch.count > 0 and not (running.agents() & lost)

    async def _release_later(self, service: ServiceId, epoch: int) -> None:
        await asyncio.sleep(self._settings.release_after_s)
        await self._rollout.release(service, epoch)

    async def _catch_up(self, agent: AgentId) -> None:
        """Give a (re)connected agent what the running plans want of it; tell everybody if its address changed."""
        for service, stored in list(self._desired.contracts.items()):
            spec = self._desired.spec_of(stored.contract)
            running = self._desired.book(service).running
            if spec is None or running is None:
                continue
            before = self._service(service).route
            try:
                route = await asyncio.to_thread(self._rollout.route, spec, running)
                await self._rollout.prepare_on(agent, route)
                if self._desired.book(service).running_epoch != running.epoch:
                    continue  # A newer plan was switched to meanwhile, and told everybody.
                if not running.agents() <= route.addresses.keys():
                    continue  # After a restart: ingresses hold a whole route, and keep it until ours is whole.
                if before is not None and before.addresses.get(agent) == route.addresses.get(agent):
                    if agent in self._rollout.ingresses():
                        await self._rollout.activate_on(agent, route)
                else:
                    await self._rollout.activate(route)
            except TidegateError as error:
                log.warning("%s did not catch up with %s: %s", agent, service, error)
                continue
            self._service(service).route = route
            self._on_route(route)

    def _service(self, service: ServiceId) -> _Service:
        return self._services.setdefault(service, _Service())

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.faults += 1
            log.exception("a task of the loop failed")
            self._events.add("loop-fault", f"A task of the loop failed: {error}")


def outcome_of(decision: Decision, measured_p99_ms: float, requests: int) -> str:
    """What a plan brought, beside what was predicted, in words."""
    if decision.prediction is None:
        return f"its p99 was {measured_p99_ms:.0f} ms over {requests} requests"
    predicted = decision.prediction.p99_ms
    off = 100.0 * (measured_p99_ms / max(predicted, 1e-3) - 1.0)
    return f"its p99 was {measured_p99_ms:.0f} ms over {requests} requests, predicted were {predicted:.0f} ms ({off:+.0f} %)"
