"""The loop over real policies, a real store and agents that obey: what it moves, when it holds, and how it goes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from agents.messages import Activate, Address, Hello, Prepare, Release, Report, Route, ServiceReport, ShardFile
from benchmarks.llm_server import Answer, LlmServer
from controller.desired import Desired
from controller.events import EventLog
from controller.fleet import FleetRegistry
from controller.llm import LlmAdvisor
from controller.loop import ControlLoop
from controller.records import AgentRecord
from controller.replay import DecisionLog, Logged, log_bytes, log_from, replay, same_of
from controller.rollout import Rollout, RolloutError
from controller.settings import LlmSettings, LoopSettings, SuspicionSettings
from controller.slis import Slis
from controller.state import State
from controller.store import Store
from controller.telemetry import Telemetry
from policies.ids import AgentId, BlobHash, ModelName, ServiceId
from policies.plan import Plan, Span
from sla.contract import parse_contract
from sla.errors import AgentLostError, RefusedError, TidegateError
from sla.sketch import LatencySketch

READER = ServiceId("reader")


class Files:
    def shard_file(self, name: ModelName, blocks: Span) -> ShardFile:
        return ShardFile(
            model=name, blocks=blocks, sha256=BlobHash(f"{name}-{blocks.start}-{blocks.stop}"), size_bytes=100,
            inputs=("x",), outputs=("y",),
        )  # fmt: skip


class Canary:
    error: TidegateError | None = None
    hangs = False

    async def check(self, route: Route, deadline_ms: float) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error


class World:
    """One controller's inside. `restart` builds it anew over the same store, as after kill -9."""

    loop_settings = LoopSettings(release_after_s=0.0)

    def __init__(self, store: Store, clock: Any, make_facts: Any, make_connection: Any, make_sla: Any) -> None:
        self.store, self.clock = store, clock
        self.make_facts, self.make_connection, self.make_sla = make_facts, make_connection, make_sla
        self.canary = Canary()
        self.routes: list[Route] = []
        self.connections: dict[AgentId, Any] = {}
        self.build()

    def build(self) -> None:
        self.state = State(self.store)
        self.events = EventLog(self.clock)
        self.telemetry = Telemetry()
        self.fleet = FleetRegistry(self.telemetry, self.clock, self.events, SuspicionSettings())
        self.desired = Desired(self.state)
        self.rollout = Rollout(self.fleet, Files(), self.canary, LoopSettings())
        self.loop = ControlLoop(
            desired=self.desired, fleet=self.fleet, telemetry=self.telemetry, slis=Slis(self.state, self.clock),
            rollout=self.rollout, state=self.state, advisor=LlmAdvisor(LlmSettings(), self.events, self.clock),
            events=self.events, clock=self.clock, settings=self.loop_settings, on_route=self.routes.append,
        )  # fmt: skip

    async def restart(self) -> None:
        await self.loop.close()
        self.build()
        await self.desired.load()
        self.fleet.restore(await self.state.agents())

    async def enroll(self, name: str, **facts: Any) -> AgentId:
        agent = AgentId(name)
        facts = {"slowdown": 1.0, "hostname": name, "fingerprint": name} | facts
        record = AgentRecord(id=agent, facts=self.make_facts(**facts), public_key_fingerprint=name, enrolled_at_s=0.0)
        self.fleet.admit(await self.state.put_agent(record))
        self.hello(agent)
        return agent

    def hello(self, agent: AgentId) -> Any:
        connection = self.make_connection()
        facts = self.fleet.members[agent].facts
        self.connections[agent] = connection
        self.fleet.connected(agent, connection, facts, Address("10.0.0.1", 9000))
        connection.on_close(lambda: self.fleet.disconnected(agent, connection))
        self.report(agent)
        self.loop.said_hello(agent, Hello(protocol=1, facts=facts))
        return connection

    def report(self, agent: AgentId, *services: ServiceReport) -> None:
        plain = Report(
            sequence=1, cpu_saturation=0.0, memory_free_bytes=1 << 30, queue_depth=0, loaded_bytes=0, services=services
        )
        self.telemetry.fold(agent, plain, self.clock.now_ms())

    def served(self, agent: AgentId, *latencies_ms: float) -> None:
        sketch = LatencySketch()
        for ms in latencies_ms:
            sketch.add(ms)
        epoch = self.running.epoch
        self.report(
            agent,
            ServiceReport(
                service_id=READER,
                epoch=epoch,
                ok=len(latencies_ms),
                failed=0,
                fell_back=0,
                latency_buckets=sketch.to_buckets(),
            ),
        )

    async def promise(self, **changed: Any) -> None:
        await self.desired.put_contract(parse_contract(self.make_sla(**changed)), None)
        self.loop.poke("contract", READER)

    async def settle(self, looks: int = 1, every_ms: float = 1000.0) -> None:
        """Looks, each carried out to its end, while connected agents report."""
        for _ in range(looks):
            self.clock.advance(every_ms)
            for agent, member in self.fleet.members.items():
                if member.connection is not None:
                    self.report(agent)
            self.loop.look()
            await self.quiet()

    async def quiet(self) -> None:
        while self.loop._tasks:
            await asyncio.wait(set(self.loop._tasks), timeout=10)

    @property
    def running(self) -> Plan:
        plan = self.desired.book(READER).running
        assert plan is not None
        return plan

    def epoch_at(self, agent: AgentId) -> int | None:
        """The newest plan that an ingress was told."""
        told = self.connections[agent].asked(Activate)
        return told[-1].route.plan.epoch if told else None

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.tail()]


@pytest_asyncio.fixture
async def world(
    valkey_store: Store, clock: Any, make_facts: Any, make_connection: Any, make_sla: Any, spec: Any, models: Any
) -> AsyncIterator[World]:
    world = World(valkey_store, clock, make_facts, make_connection, make_sla)
    await world.desired.put_service(msgspec.structs.replace(spec, sample=BlobHash("5" * 64)), models)
    yield world
    await world.loop.close()
    assert world.loop.faults == 0, world.kinds()


async def test_a_contract_gets_a_plan_that_is_durable_before_it_serves(world: World) -> None:
    a = await world.enroll("a")
    await world.promise()
    await world.settle()
    assert world.running.agents() == {a}
    assert world.epoch_at(a) == world.running.epoch
    stored = await world.state.running(READER)
    assert stored == world.running
    assert world.loop.active_at_s(READER, world.running.epoch) == world.clock.wall_s()
    assert [route.plan.epoch for route in world.routes] == [world.running.epoch]
    (decision,) = await world.state.tail_decisions(10, READER)
    assert decision.decision.plan == world.running, "the log names the epoch that really ran"
    assert await world.state.snapshot_of(READER, decision.id)
    kinds = [kind for kind in world.kinds() if kind in ("decision", "rollout", "plan-active")]
    assert kinds == ["decision", "rollout", "plan-active"]


async def test_without_agents_nothing_is_placed_and_the_reason_is_kept_once(world: World) -> None:
    await world.promise()
    await world.settle(looks=5)
    assert world.desired.book(READER).running is None
    holds = await world.state.tail_decisions(10, READER)
    assert len(holds) == 1, "the log tells a story and not the time"
    assert holds[0].decision.plan is None
    assert holds[0].decision.reasons


async def test_a_quiet_fleet_is_left_alone(world: World) -> None:
    a, _ = await world.enroll("a"), await world.enroll("b")
    await world.promise()
    await world.settle()
    before = world.running
    for _ in range(10):
        world.served(a, *[30.0] * 5)
        await world.settle()
    assert world.running == before
    assert len(world.connections[a].asked(Activate)) == 1


async def test_when_an_agent_of_the_plan_is_lost_another_one_takes_over_at_the_next_look(world: World) -> None:
    a, b = await world.enroll("a"), await world.enroll("b", slowdown=2.0)
    await world.promise()
    await world.settle()
    assert world.running.agents() == {a}
    world.connections[a].abort()
    await world.settle()
    assert world.running.agents() == {b}
    record = (await world.state.tail_decisions(1, READER))[0].decision
    assert record.trigger == "agent-lost"
    assert world.epoch_at(b) == world.running.epoch


@pytest.mark.parametrize("answer", [None, Answer(delay_s=60.0)], ids=["dead", "silent"])
async def test_the_loss_of_a_device_does_not_wait_for_the_llm(world: World, answer: Answer | None) -> None:
    async with LlmServer(lambda _: answer or Answer()) as server:
        url = server.url if answer is not None else "http://127.0.0.1:9/v1"
        settings = LlmSettings(base_url=url, model="m", mode="control", deadline_s=60.0)
        advisor = world.loop._advisor = LlmAdvisor(settings, world.events, world.clock)
        a, b = await world.enroll("a"), await world.enroll("b", slowdown=2.0)
        await world.promise()
        await world.settle(3)
        if answer is not None:
            async with asyncio.timeout(20):
                await server.first.wait()
        world.connections[a].abort()
        await world.settle()
        assert world.running.agents() == {b}
        record = (await world.state.tail_decisions(1, READER))[0]
        assert record.at_s == world.clock.wall_s()  # Decided at the look that noticed the loss: no time went by.
        await advisor.close()


async def test_the_loss_of_a_device_does_not_wait_for_a_plan_that_is_still_being_proven(world: World) -> None:
    for name in "abc":
        await world.enroll(name)
    await world.promise()
    await world.settle()
    first = world.running
    world.canary.hangs = True
    restoring = asyncio.create_task(world.loop.restore(READER, first))
    await asyncio.sleep(0.05)
    victim = sorted(first.agents())[0]
    world.connections[victim].abort()
    world.clock.advance(5_000)
    await world.settle(looks=3)
    with pytest.raises(RolloutError, match="given up"):
        await restoring
    assert victim not in world.running.agents()
    assert world.running.epoch > first.epoch


async def test_a_plan_that_cannot_be_proven_changes_nothing_and_is_tried_again_later(world: World) -> None:
    a = await world.enroll("a")
    world.canary.error = RefusedError("another answer")
    await world.promise()
    await world.settle()
    assert world.desired.book(READER).running is None
    assert world.epoch_at(a) is None
    assert "rollout-failed" in world.kinds()
    tries = len(world.connections[a].asked(Prepare))
    await world.settle(every_ms=100)
    assert len(world.connections[a].asked(Prepare)) == tries, "not at once"
    world.canary.error = None
    await world.settle(looks=3)
    assert world.running.agents() == {a}
    assert world.epoch_at(a) == world.running.epoch


async def test_a_restart_moves_nothing_while_the_agents_come_back(world: World) -> None:
    """ai-dynamo/dynamo PR 14575: with no data, nothing moves."""
    a, b = await world.enroll("a"), await world.enroll("b", slowdown=1.5)
    await world.promise()
    await world.settle()
    before = world.running
    await world.restart()
    assert world.running == before
    await world.settle(looks=3)
    world.hello(b)
    await world.settle(looks=3)
    assert world.running == before, "that one agent is back first is no reason to move to it"
    assert world.epoch_at(b) is None, "an ingress keeps its whole route until this controller knows all addresses"
    world.hello(a)
    await world.settle(looks=2)
    assert world.running == before
    assert (world.epoch_at(a), world.epoch_at(b)) == (before.epoch, before.epoch)
    assert [route.plan.epoch for route in world.routes][-1] == before.epoch


async def test_agents_that_stay_away_after_a_restart_are_replaced(world: World) -> None:
    await world.enroll("a")
    b = await world.enroll("b", slowdown=1.5)
    await world.promise()
    await world.settle()
    before = world.running.epoch
    await world.restart()
    world.hello(b)
    await world.settle(looks=30)
    assert world.running.agents() == {b}
    assert world.running.epoch > before


async def test_epochs_only_grow_also_over_a_crash_between_deciding_and_switching(world: World) -> None:
    await world.enroll("a")
    await world.promise()
    await world.settle()
    first = world.running.epoch
    epoch = await world.state.next_epoch(READER)
    orphan = msgspec.structs.replace(world.running, epoch=epoch)
    await world.state.put_plan(READER, orphan, None, at_s=0.0)  # Killed here: decided, stored, never switched to.
    await world.restart()
    assert world.running.epoch == first
    world.hello(AgentId("a"))
    await world.settle(looks=2)
    assert await world.loop.restore(READER, world.running) > epoch
    await world.quiet()


async def test_the_last_good_plan_is_restored_as_a_new_epoch_and_recorded(world: World) -> None:
    a, b = await world.enroll("a"), await world.enroll("b", slowdown=3.0)
    await world.promise()
    await world.settle()
    good = world.running
    world.served(a, *[20.0] * 30)
    worse = await world.loop.restore(READER, _on(good, b))
    await world.quiet()
    assert world.running.agents() == {b}
    assert world.desired.book(READER).last_good == good
    back = await world.loop.restore(READER, good)
    await world.quiet()
    assert world.running.agents() == {a}
    assert back > worse > good.epoch
    assert world.epoch_at(a) == world.epoch_at(b) == back
    newest = (await world.state.tail_decisions(1, READER))[0].decision
    assert (newest.proposer, newest.plan) == ("operator", world.running)
    assert f"plan {good.epoch}" in newest.sentence()
    assert world.connections[a].asked(Release)[-1].below_epoch == back


async def test_a_plan_that_served_nobody_is_not_a_good_one(world: World) -> None:
    a, b = await world.enroll("a"), await world.enroll("b", slowdown=3.0)
    await world.promise()
    await world.settle()
    await world.loop.restore(READER, _on(world.running, b))
    assert world.running.agents() == {b}
    assert a in world.fleet.members
    assert world.desired.book(READER).last_good is None


async def test_what_cannot_be_restored_leaves_the_running_plan(world: World) -> None:
    a, b = await world.enroll("a"), await world.enroll("b")
    await world.promise()
    await world.settle()
    before = world.running
    other = b if before.agents() == {a} else a
    world.connections[other].script = lambda message: AgentLostError("gone")
    with pytest.raises(TidegateError, match="could not prepare"):
        await world.loop.restore(READER, _on(before, other))
    assert world.running == before
    ingress = next(iter(before.agents()))
    assert world.epoch_at(ingress) == before.epoch


async def test_a_pinned_plan_is_left_only_when_its_device_is_lost(world: World) -> None:
    await world.enroll("a", slowdown=6.0)
    await world.promise()
    await world.settle()
    await world.desired.set_pinned(READER, True)
    b = await world.enroll("b", slowdown=0.5)
    before = world.running
    await world.settle(looks=30)
    assert world.running == before
    world.connections[AgentId("a")].abort()
    await world.settle(looks=2)
    assert world.running.agents() == {b}


async def test_a_fault_of_ours_in_one_look_does_not_end_the_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def broken() -> list[AgentId]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise ValueError("a bug")
        if looks == 3:
            done.set()
        return []

    done = asyncio.Event()
    monkeypatch.setattr(world.fleet, "look", broken)
    task = asyncio.create_task(world.loop.run())
    for _ in range(3):
        world.loop.poke("operator")
        for _ in range(3):
            await asyncio.sleep(0)
    await asyncio.wait_for(done.wait(), 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert (world.loop.faults, world.kinds().count("loop-fault")) == (1, 1)
    world.loop.faults = 0


def _on(plan: Plan, agent: AgentId) -> Plan:
    """The same plan with all its shards on one agent."""
    stages = tuple(
        msgspec.structs.replace(
            stage,
            fallback=(),
            lanes=tuple(
                msgspec.structs.replace(
                    lane, shards=tuple(msgspec.structs.replace(shard, agent=agent) for shard in lane.shards)
                )
                for lane in stage.lanes
            ),
        )
        for stage in plan.stages
    )
    return msgspec.structs.replace(plan, stages=stages)


async def test_what_a_plan_brought_is_noted_once_beside_what_was_predicted(world: World) -> None:
    a = await world.enroll("a")
    await world.promise()
    await world.settle()
    world.served(a, *([50.0] * 120))
    await world.settle(looks=3)
    (move,) = [r for r in await world.state.tail_decisions(20, READER) if r.decision.plan is not None]
    assert move.outcome.startswith("its p99 was 50 ms over 120 requests, predicted were")


async def test_the_loops_own_log_replays_bit_for_bit(world: World) -> None:
    a = await world.enroll("a")
    await world.promise()
    await world.settle()
    await world.enroll("b")
    await world.settle(looks=3)
    world.fleet.disconnected(a, world.connections[a])
    world.clock.advance(60_000.0)
    await world.settle(looks=3)
    records = await world.state.tail_decisions(20, READER)
    entries = [Logged(record=r, seen=await world.state.snapshot_of(READER, r.id)) for r in records]
    log = log_from(log_bytes(DecisionLog(entries=tuple(entries))))
    same, different, untried = same_of(replay(log))
    assert (different, untried) == (0, 0)
    assert same == len(records) >= 2


async def test_a_changed_service_is_rolled_out_again_with_the_same_plan(world: World) -> None:
    await world.enroll("a")
    await world.promise()
    await world.settle()
    before = world.running
    spec = world.desired.specs[READER]
    stage = msgspec.structs.replace(spec.onnx_stages()[0], activations="fp16")
    await world.desired.put_service(msgspec.structs.replace(spec, stages=(stage,)), {})
    world.loop.renew(READER, "activations travel as fp16")
    await world.quiet()
    assert world.running.epoch > before.epoch
    assert world.running.layout() == before.layout()
    assert [s.activations for s in world.routes[-1].spec.onnx_stages()] == ["fp16"]
    newest = (await world.state.tail_decisions(1, READER))[0].decision
    assert "activations travel as fp16" in newest.sentence()
    world.canary.error = RolloutError("wrong answer")
    world.loop.renew(READER, "it changed again")
    await world.quiet()
    assert "rollout-failed" in world.kinds()


async def test_a_variant_serves_while_it_is_needed_and_the_floor_allows_it(world: World) -> None:
    """With 4 items the model takes 27 ms on this device, its variant a fifth of that; the contract asks for 25 ms."""
    await world.enroll("a", slowdown=1.0)
    spec, det = world.desired.specs[READER], world.desired.models[ModelName("det")]
    quick = tuple(
        msgspec.structs.replace(b, fixed_ms=b.fixed_ms / 5, per_item_ms=b.per_item_ms / 5) for b in det.blocks
    )
    variant = msgspec.structs.replace(det, name=ModelName("det.int8"), blocks=quick, accuracy=0.97)
    stage = msgspec.structs.replace(spec.onnx_stages()[0], variants=(det.name, variant.name))
    await world.desired.put_service(msgspec.structs.replace(spec, stages=(stage,)), {variant.name: variant})
    await world.promise(accuracy_floor=0.9, latency_p99_ms=25)
    await world.settle()
    assert [planned.model for planned in world.running.stages] == ["det.int8"]
    await world.promise(accuracy_floor=0.98, latency_p99_ms=25)
    await world.settle()
    assert [planned.model for planned in world.running.stages] == ["det"]
    newest = (await world.state.tail_decisions(1, READER))[0].decision
    assert "0.97, below the floor 0.98" in newest.sentence()
