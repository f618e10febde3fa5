"""The control loop: look, decide, carry out, note. The shell around `policies.decide`, which does the thinking.

It reacts to levels, not edges: a trigger only says "look again now", so a lost or doubled trigger is harmless.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
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
from controller.thinking import Thought, think
from controller.together import RunParts, Together, run_here
from controller.world import KnownProfiles, World
from policies.constraints import Rule
from policies.decide import Keep, Memory
from policies.decision import Decision, Reason, Trigger
from policies.ids import AgentId, ServiceId
from policies.many import REACHES
from policies.neighbourhood import places_of
from policies.plan import Plan
from policies.service import ServiceSpec
from policies.snapshot import Snapshot
from sla.errors import NotFoundError, TidegateError

log = logging.getLogger(__name__)

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
    looked_ms: float = -math.inf
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
        advised: Callable[[ServiceId], tuple[Rule, ...]] = lambda _: (), run_parts: RunParts | None = None,
        device_profiles: KnownProfiles = dict,
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
        self.world = World(
            desired=desired, fleet=fleet, telemetry=telemetry, clock=clock, settings=settings.scale, wishes=wishes,
            advised=advised,
            device_profiles=device_profiles,
        )  # fmt: skip
        self._together = Together(run_parts or run_here, settings.scale)
        self._due: deque[ServiceId] = deque()
        self._deciding = 0
        self._looked_ms = -math.inf
        self._moves = asyncio.Semaphore(settings.scale.move_at_once)
        self._services: dict[ServiceId, _Service] = {}
        self._wake = asyncio.Event()
        self._thinker = ThreadPoolExecutor(1, thread_name_prefix="decide")
        """One: deciding is Python, of which one thread runs at a time; several would only take turns, at half as much again of processor time."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.faults = 0

    # --- triggers

    def poke(self, trigger: Trigger, service: ServiceId | None = None) -> None:
        """Look again now, because of this."""
        for name in [service] if service else list(self._desired.contracts):
            self._service(name).trigger = trigger
        self._wake.set()

    def poke_around(self, trigger: Trigger, agent: AgentId) -> None:
        """Look again at all services that this agent may matter to now: where there are many, those that it serves or that have no plan.

        The others see it when it is their turn.
        """
        if self.world.is_small:
            self.poke(trigger)
            return
        bare = [service for service in self._desired.contracts if self._desired.book(service).running is None]
        for service in (*self.world.bookings.on([agent]), *bare):
            self.poke(trigger, service)

    def said_hello(self, agent: AgentId, hello: Hello) -> None:
        """An agent (re)connected: bring it up to the running plans, and see whether it makes better ones possible."""
        self._spawn(self._catch_up(agent), f"catch-up-{agent}")
        self.poke_around("agent-joined", agent)

    def active_at_s(self, service: ServiceId, epoch: int) -> float | None:
        """When a plan reached the ingresses, if it did since this controller started."""
        return self._service(service).active_at_s.get(epoch)

    def is_anything_moving(self) -> bool:
        """Whether some plan is being carried out."""
        return any(state.moving.locked() for state in self._services.values())

    def infeasible(self, service: ServiceId) -> str | None:
        """Why no plan keeps the contract on this fleet, None if one does."""
        return self._service(service).infeasible

    # --- the loop

    async def run(self) -> None:
        """Forever. The one catch-all is here: it counts and logs."""
        apart_ms = self._settings.scale.look_apart_ms
        while True:
            try:
                # Not `wait_for`, which in Python 3.11 swallows a cancellation that comes with the wake-up.
                async with asyncio.timeout(self._settings.look_every_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                pass
            if not self.world.is_small and (early_ms := self._looked_ms + apart_ms - self._clock.now_ms()) > 0:
                await asyncio.sleep(early_ms / 1000)  # What happens meanwhile is seen by the same look.
            self._wake.clear()
            self._looked_ms = self._clock.now_ms()
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
        self._thinker.shutdown(wait=False, cancel_futures=True)

    async def idle(self) -> None:
        """Returns when nothing that a look started is under way any more."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

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
        self.world.look()
        due = [service for service in self._desired.contracts if self._is_due(service)]
        if not self.world.is_small:
            fresh = [service for service in due if self._desired.book(service).running is None]
            if together := self._together.begins(fresh, self.world.places.usable, self._clock.now_ms()):
                self._spawn(self._plan_together(together), "plan-together")
            due = [service for service in due if not self._together.is_planning(service)]
        # Those with a reason first, then those that waited longest.
        self._due = deque(sorted(due, key=lambda s: (self._service(s).trigger is None, self._service(s).looked_ms)))
        self._take_turns()

    def _is_due(self, service: ServiceId) -> bool:
        if self._desired.spec_of(self._desired.contracts[service].contract) is None:
            return False
        state, now_ms = self._service(service), self._clock.now_ms()
        if (state.task is not None and not state.task.done()) or now_ms < state.retry_ms:
            return False
        is_quiet = state.trigger is None and not state.memory.is_risky and state.memory.favourite is None
        waits_ms = self._settings.scale.quiet_every_ms if is_quiet and not self.world.is_small else 0.0
        return now_ms - state.looked_ms >= waits_ms

    def snapshot(self) -> Snapshot:
        """The whole world as it is now."""
        return self.world.snapshot()

    def _take_turns(self) -> None:
        """Start decisions while fewer than `decide_at_once` are being made."""
        while self._due and self._deciding < self._settings.scale.decide_at_once:
            service = self._due.popleft()
            state = self._service(service)
            if state.task is None or state.task.done():
                self._deciding += 1
                state.looked_ms = self._clock.now_ms()
                state.task = self._spawn(self._step(service), f"step-{service}")

    async def _step(self, service: ServiceId) -> None:
        """Decide once about one service, and carry it out."""
        state, book = self._service(service), self._desired.book(service)
        trigger, state.trigger = state.trigger, None
        try:
            thought = await self._think(service, state, trigger)
        finally:
            self._deciding -= 1
            self._take_turns()
        if thought is None:
            return
        decision, snapshot, look = thought.decision, thought.snapshot, thought.look
        lacking = [reason.text for reason in decision.reasons if reason.code == "no-candidate"]
        state.infeasible = lacking[0] if lacking and decision.plan is None else None
        if decision.plan is None:
            self.world.book(service, thought.takes)
            await self._note(service, decision, snapshot, look)
            state.memory = thought.memory
            await self._judge(service, snapshot)
            self._advisor.consider(service, snapshot, thought.memory)
            return
        if not self.world.fits(service, thought.takes):
            state.trigger = state.trigger or trigger
            return  # Others took the room while this was decided: look again.
        self.world.book(service, thought.meanwhile)
        try:
            async with state.moving, self._room_to_move(decision):
                if self._desired.book(service) != book:
                    return  # An operator moved it meanwhile: look again.
                await self._move(service, decision, snapshot, look)
            state.memory, state.failures = thought.memory, 0  # A move that failed was none: its memory is dropped.
        except TidegateError as error:
            state.failures += 1
            state.retry_ms = self._clock.now_ms() + min(30_000.0, 500.0 * 2**state.failures)
            log.warning("rollout of %s failed: %s", service, error)
            self._events.add("rollout-failed", f"{service}: {error}", service=service)
            state.trigger = state.trigger or trigger
        finally:
            self.world.settle(service)

    async def _think(self, service: ServiceId, state: _Service, trigger: Trigger | None) -> Thought | None:
        """What to do about one service; where nothing in its zone would do, all zones are looked at. None if it is not there."""
        if trigger is not None:
            self.world.choose_again(service)
        planned, running = self._together.take(service), self._desired.book(service).running
        suggestion = self._advisor.take(service, running.epoch if running else 0)
        look = Look(
            memory=state.memory, trigger=trigger, proposal=None if isinstance(suggestion, Keep) else suggestion,
            keep=suggestion if isinstance(suggestion, Keep) else None, planned=None if running else planned,
        )  # fmt: skip
        for reach in REACHES:
            snapshot = self.world.near(service, () if planned is None else places_of(planned), reach)
            if service not in snapshot.services:
                return None
            work = functools.partial(think, snapshot, service, look, with_takes=not self.world.is_small)
            thought = await asyncio.get_running_loop().run_in_executor(self._thinker, work)
            if self.world.is_small or not thought.found_nothing:
                break
        return thought

    def _room_to_move(self, decision: Decision) -> AbstractAsyncContextManager[None]:
        """A bounded number of plans is rolled out side by side; the loss of a device waits for none of them."""
        return nullcontext() if decision.trigger == "agent-lost" else self._moves

    async def _plan_together(self, services: list[ServiceId]) -> None:
        """Plan services that have no plan, all at once; each of them is then judged, and rolled out, when it is its turn."""
        for service, takes in (await self._together.plan(self.world, services)).items():
            if self._desired.book(service).running is None and service in self._desired.contracts:
                self.world.book(service, takes)
        self._wake.set()

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
            among = self.world.reach(service, plan)
            staged = await self._rollout.stage(
                spec, plan, running_epoch=running_epoch, among=among, times=self.world.times(service, plan)
            )
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
            await self._move(
                service, decision, self.world.near(service, places_of(decision.plan) if decision.plan else ())
            )
        self.world.settle(service)
        epoch = self._desired.book(service).running_epoch
        assert epoch is not None
        return epoch

    async def retire(self, service: ServiceId, served: ServiceId) -> None:
        """A contract was withdrawn: agents unload its shards and ingresses no longer serve it."""
        self._services.pop(service, None)
        self.world.forget(service)
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
            if not self._matters(agent, running):
                continue
            before = self._service(service).route
            # What a plan should take is what was expected when it was made; only a controller that restarted looks again.
            is_known = before is not None and before.plan.epoch == running.epoch
            times = before.times if before is not None and is_known else self.world.times(service, running)
            try:
                route = await asyncio.to_thread(
                    self._rollout.route, spec, running, self.world.reach(service, running), times
                )
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

    def _matters(self, agent: AgentId, running: Plan) -> bool:
        """Whether a plan's route is of use to the agent, or its address to others: on a small fleet everybody measures everybody."""
        return self.world.is_small or agent in places_of(running) or agent in self._rollout.ingresses()

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
