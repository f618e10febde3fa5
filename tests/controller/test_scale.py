"""The loop where there are too many agents and services to look at all of them: same promises, neighbourhoods instead of the whole."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from agents.messages import Report, ServiceReport
from controller.replay import DecisionLog, Logged, log_bytes, log_from, replay, same_of, world_from
from controller.settings import LoopSettings, ScaleSettings
from controller.store import Store
from policies.costs import PredictSettings
from policies.ids import AgentId, ServiceId
from policies.limits import usable_bytes
from policies.neighbourhood import places_of
from sla.contract import parse_contract
from tests.controller.test_loop import World

SMALL = ScaleSettings(whole_up_to=3, near=3, clouds=1, plan_together=100, decide_at_once=2, quiet_every_ms=0.0)


class LargeWorld(World):
    """Two zones of agents, and as many services as a test wants, each with its entry in one of the zones."""

    loop_settings = LoopSettings(release_after_s=0.0, scale=SMALL)

    async def fleet_of(self, per_zone: int, **facts: Any) -> None:
        for zone in ("north", "south"):
            for number in range(per_zone):
                await self.enroll(f"{zone}-{number}", zone=zone, **facts)

    async def serve(self, count: int, spec: Any, models: Any, **contract: Any) -> list[ServiceId]:
        names = [ServiceId(f"s{number:02d}") for number in range(count)]
        for name in names:
            await self.desired.put_service(msgspec.structs.replace(spec, id=name), models)
            document = self.make_sla(service=name, **({"throughput_rps": 1} | contract))
            await self.desired.put_contract(parse_contract(document), None)
        return names

    def came_in(self, service: ServiceId, agent: str) -> None:
        """One request at this agent."""
        told = ServiceReport(service_id=service, epoch=0, ok=1, failed=0, fell_back=0, latency_buckets={})
        plain = Report(
            sequence=1, cpu_saturation=0.0, memory_free_bytes=1 << 30, queue_depth=0, loaded_bytes=0, services=(told,)
        )  # fmt: skip
        self.telemetry.fold(AgentId(agent), plain, self.clock.now_ms())

    def used(self, service: ServiceId) -> set[AgentId]:
        running = self.desired.book(service).running
        assert running is not None
        return set(places_of(running))

    def overbooked(self) -> list[AgentId]:
        views = self.fleet.view().agents
        totals = self.loop.world.bookings.totals
        return [a for a, one in totals.items() if one.held_bytes > usable_bytes(views[a], PredictSettings())]


@pytest_asyncio.fixture
async def large(
    valkey_store: Store, clock: Any, make_facts: Any, make_connection: Any, make_sla: Any
) -> AsyncIterator[LargeWorld]:
    world = LargeWorld(valkey_store, clock, make_facts, make_connection, make_sla)
    yield world
    await world.loop.close()
    assert world.loop.faults == 0, world.kinds()


async def test_on_a_small_fleet_a_decision_sees_everything(large: LargeWorld, spec: Any, models: Any) -> None:
    large.loop_settings = LoopSettings(release_after_s=0.0)
    large.build()
    await large.fleet_of(3)
    names = await large.serve(3, spec, models)
    await large.settle(looks=2)
    for name in names:
        assert large.loop.world.near(name) == large.loop.snapshot()
        assert large.loop.world.near(name, reach="fleet") == large.loop.snapshot()


async def test_a_service_is_planned_in_its_zone_and_sees_little_more(large: LargeWorld, spec: Any, models: Any) -> None:
    await large.fleet_of(8)
    north, south = await large.serve(2, spec, models)
    large.came_in(north, "north-1")
    large.came_in(south, "south-1")
    await large.settle()
    for name, zone in ((north, "north"), (south, "south")):
        assert {agent.split("-")[0] for agent in large.used(name)} == {zone}
        seen = large.loop.world.near(name)
        assert seen.services.keys() == {name}
        assert {AgentId(f"{zone}-1"), *large.used(name)} <= seen.fleet.agents.keys()
        assert len(seen.fleet.agents) <= 3 + 1 + 3, "the most promising ones, the entry, and where it runs"
    assert large.loop.world.bookings.services.keys() == {north, south}


async def test_what_others_take_is_seen_as_load(large: LargeWorld, spec: Any, models: Any) -> None:
    await large.fleet_of(2)
    names = await large.serve(4, spec, models)
    await large.settle(looks=3)
    world = large.loop.world
    for name in names:
        for agent in world.near(name).fleet.agents.values():
            others = [
                world.bookings.services[o][agent.id]
                for o in names
                if o != name and agent.id in world.bookings.services[o]
            ]
            assert agent.booked.held_bytes == sum(one.held_bytes for one in others)
            assert abs(agent.booked.busy - sum(one.busy for one in others)) < 1e-9


async def test_the_loss_of_an_agent_moves_only_its_services(large: LargeWorld, spec: Any, models: Any) -> None:
    await large.fleet_of(6)
    names = await large.serve(8, spec, models)
    await large.settle(looks=2)
    before = {name: large.desired.book(name).running for name in names}
    assert all(before.values())
    victim = sorted(large.used(names[0]))[0]
    hit = {name for name in names if (plan := before[name]) is not None and victim in plan.agents()}
    large.connections[victim].abort()
    large.clock.advance(5_000)
    await large.settle(looks=2)
    for name in names:
        running = large.desired.book(name).running
        assert running is not None
        if name in hit:
            assert victim not in running.agents()
        else:
            assert running == before[name]
    assert victim not in {a for name in hit for a in large.loop.world.bookings.services[name]}


async def test_decisions_replay_bit_for_bit_from_what_they_saw(large: LargeWorld, spec: Any, models: Any) -> None:
    large.loop_settings = LoopSettings(release_after_s=0.0, scale=dataclasses.replace(SMALL, plan_together=4, parts=2))
    large.build()
    await large.fleet_of(6)
    names = await large.serve(6, spec, models)
    for at, name in enumerate(names[:4]):
        large.came_in(name, f"{('north', 'south')[at % 2]}-{at}")
    await large.settle(looks=6)
    entries = []
    for name in names:
        for record in await large.state.tail_decisions(20, name):
            seen = await large.state.snapshot_of(name, record.id)
            assert seen is not None
            assert len(seen) < 40_000, "what is kept beside a decision does not grow with the fleet"
            entries.append(Logged(record=record, seen=seen))
    log = log_from(log_bytes(DecisionLog(entries=tuple(entries))))
    same, differ, untold = same_of(replay(log))
    assert (differ, untold) == (0, 0)
    assert same >= len(names)


async def test_many_first_plans_are_made_together_and_fit_together(large: LargeWorld, spec: Any, models: Any) -> None:
    large.loop_settings = LoopSettings(release_after_s=0.0, scale=dataclasses.replace(SMALL, plan_together=4, parts=2))
    large.build()
    await large.fleet_of(5, memory_budget_bytes=24 << 20)
    names = await large.serve(14, spec, models)
    for at, name in enumerate(names[:10]):
        large.came_in(name, f"{('north', 'south')[at % 2]}-{at % 5}")
    await large.settle(looks=4)
    planned = [name for name in names if large.desired.book(name).running is not None]
    assert len(planned) >= 12
    assert not large.overbooked()
    together = 0
    for name in planned:
        for record in await large.state.tail_decisions(20, name):
            seen = await large.state.snapshot_of(name, record.id)
            look = world_from(seen).look if seen is not None else None
            if look is not None and look.planned is not None and record.decision.plan is not None:
                assert record.decision.reasons[0].code == "first-plan"
                assert record.decision.plan.layout() == look.planned.layout()
                together += 1
    assert together >= 12


async def test_decisions_wait_their_turn_and_those_with_a_reason_go_first(
    large: LargeWorld, spec: Any, models: Any
) -> None:
    large.loop_settings = LoopSettings(release_after_s=0.0, scale=dataclasses.replace(SMALL, decide_at_once=1))
    large.build()
    await large.fleet_of(4)
    names = await large.serve(6, spec, models)
    await large.settle(looks=2)
    large.clock.advance(1000)
    large.loop.poke("operator", names[4])
    large.loop.look()
    deciding = [task.get_name() for task in large.loop._tasks if task.get_name().startswith("step-")]
    assert deciding == [f"step-{names[4]}"]
    await large.quiet()
    assert large.loop._deciding == 0
    assert not large.loop._due, "one after the other, all of them had their turn in one look"


async def test_a_plan_whose_room_was_taken_meanwhile_is_decided_again(
    large: LargeWorld, spec: Any, models: Any
) -> None:
    """Decisions that are made side by side do not know of each other: the second one to end looks again."""
    await large.fleet_of(2, memory_budget_bytes=8 << 20)
    names = await large.serve(2, spec, models)
    for _ in range(4):
        await large.settle()
        assert not large.overbooked()
    assert all(large.desired.book(name).running is not None for name in names)


async def test_a_withdrawn_contract_gives_back_what_it_took(large: LargeWorld, spec: Any, models: Any) -> None:
    await large.fleet_of(3)
    names = await large.serve(4, spec, models)
    await large.settle(looks=2)
    await large.desired.delete_contract(names[0], None)
    await large.loop.retire(names[0], names[0])
    await large.settle()
    assert large.loop.world.bookings.services.keys() == set(names[1:])


async def test_a_crowd_that_joins_at_once_makes_few_looks(
    large: LargeWorld, spec: Any, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await large.fleet_of(4)
    await large.serve(1, spec, models)
    looks, look = [], large.loop.look

    def counted() -> None:
        looks.append(large.clock.now_ms())
        look()

    monkeypatch.setattr(large.loop, "look", counted)
    running = asyncio.create_task(large.loop.run())
    for number in range(50):
        large.loop.poke_around("agent-joined", AgentId(f"north-{number % 4}"))
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(looks) == 1, "the first one is made at once, the next one only when some time has passed"


async def test_a_quiet_service_is_looked_at_now_and_then_and_one_with_a_reason_at_once(
    large: LargeWorld, spec: Any, models: Any
) -> None:
    large.loop_settings = LoopSettings(release_after_s=0.0, scale=dataclasses.replace(SMALL, quiet_every_ms=5_000.0))
    large.build()
    await large.fleet_of(4)
    names = await large.serve(3, spec, models)
    await large.settle(looks=12)
    large.clock.advance(1_000)
    large.loop.poke("operator", names[1])
    due = [name for name in names if large.loop._is_due(name)]
    assert names[1] in due
    quiet = [name for name in names if name not in due]
    large.clock.advance(5_000)
    assert all(large.loop._is_due(name) for name in quiet)
    assert quiet
