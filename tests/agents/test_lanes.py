"""Lanes that hedge: over real sockets, with devices that hang when they are told to."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from agents.driver import DriverSettings
from agents.lanes import LaneSettings
from agents.messages import Route
from policies.ids import AgentId, StageName
from policies.route_times import RouteTimes, ShardTime, StageTime, WayTime

ONE = AgentId("one")


def timed(route: Route, *, promise_ms: float, run_ms: float = 5.0) -> Route:
    """The route with expectations: every way takes `run_ms` per request."""

    def way(agent: AgentId) -> WayTime:
        return WayTime(shards=(ShardTime(agent=agent, fixed_ms=run_ms, per_item_ms=0.0),), link_ms=1.0)

    (stage,) = route.plan.stages
    lanes = tuple(WayTime(shards=tuple(way(s.agent).shards[0] for s in lane.shards)) for lane in stage.lanes)
    times = StageTime(lanes=lanes, fallbacks={agent: way(agent) for agent in stage.fallback})
    return msgspec.structs.replace(
        route, times=RouteTimes(promise_ms=promise_ms, stages={StageName(stage.stage): times})
    )


async def test_a_lane_that_would_be_late_is_answered_by_a_second_copy(fleet, items, gates, until):
    one, two = await fleet.start("one"), await fleet.start("two", open_backend=gates)
    await fleet.activate(timed(fleet.route([("two", 0, 2)], fallback=("one",)), promise_ms=150))
    gates[0].gate.clear()
    result = await one.driver.infer("tiny-service", {"x": items(3)}, 20_000)
    np.testing.assert_allclose(result.tensors["y"], fleet.tiny.expected(items(3)), rtol=1e-5)
    assert result.fell_back
    (report,), _ = one.ledger.take()
    assert (report.ok, report.failed, report.fell_back, report.copies) == (1, 0, 1, 1)
    gates[0].gate.set()
    await until(lambda: two.queue.depth == 0)


async def test_a_copy_that_lost_leaves_its_queue_and_what_ran_is_still_counted(fleet, items, gates, until):
    """Two requests hang on one device: one runs there, one waits. Both are answered elsewhere; the second one never runs."""
    one, two = await fleet.start("one"), await fleet.start("two", open_backend=gates)
    await fleet.activate(timed(fleet.route([("two", 0, 2)], fallback=("one",)), promise_ms=400))
    (backend,) = gates
    backend.gate.clear()
    backend.entered.clear()
    before = backend.runs
    first = asyncio.create_task(one.driver.infer("tiny-service", {"x": items(1)}, 20_000))
    await asyncio.to_thread(backend.entered.wait, 10)
    second = asyncio.create_task(one.driver.infer("tiny-service", {"x": items(1)}, 20_000))
    assert (await first).fell_back
    assert (await second).fell_back
    await until(lambda: two.queue.depth == 1)
    backend.gate.set()
    await until(lambda: two.queue.depth == 0)
    assert backend.runs == before + 1
    (report,), _ = two.ledger.take()
    assert [shard.count for shard in report.shards] == [1]


async def test_a_slow_agent_is_avoided_by_the_next_request_and_tried_again_later(fleet, items, gates, until):
    one, _ = await fleet.start("one"), await fleet.start("two", open_backend=gates)
    await fleet.activate(timed(fleet.route([("two", 0, 2)], fallback=("one",)), promise_ms=60, run_ms=20))
    (backend,) = gates
    backend.gate.clear()
    assert (await one.driver.infer("tiny-service", {"x": items(1)}, 20_000)).fell_back
    probed = backend.runs
    assert (await one.driver.infer("tiny-service", {"x": items(1)}, 20_000)).fell_back
    assert (await one.driver.infer("tiny-service", {"x": items(1)}, 20_000)).fell_back
    assert backend.runs <= probed + 1
    backend.gate.set()


async def test_nothing_is_hedged_while_the_promise_is_far(fleet, items, gates, until):
    one, two = await fleet.start("one"), await fleet.start("two", open_backend=gates)
    await fleet.activate(timed(fleet.route([("two", 0, 2)], fallback=("one",)), promise_ms=60_000))
    (backend,) = gates
    backend.gate.clear()
    backend.entered.clear()
    request = asyncio.create_task(one.driver.infer("tiny-service", {"x": items(1)}, 20_000))
    await asyncio.to_thread(backend.entered.wait, 10)
    await asyncio.sleep(0.2)
    assert not request.done()
    backend.gate.set()
    assert not (await request).fell_back
    assert two.ledger.take()[0][0].shards[0].count == 1


async def test_a_route_without_expectations_is_followed_as_it_is(fleet, items, gates, until):
    one, _ = await fleet.start("one"), await fleet.start("two", open_backend=gates)
    await fleet.activate(fleet.route([("two", 0, 2)], fallback=("one",)))
    result = await one.driver.infer("tiny-service", {"x": items(2)}, 20_000)
    assert not result.fell_back


async def test_hedging_can_be_turned_off(fleet, items, gates, until):
    settings = DriverSettings(lanes=LaneSettings(hedge=None))
    one, _ = await fleet.start("one", settings=settings), await fleet.start("two", open_backend=gates)
    await fleet.activate(timed(fleet.route([("two", 0, 2)], fallback=("one",)), promise_ms=100))
    (backend,) = gates
    backend.gate.clear()
    backend.entered.clear()
    request = asyncio.create_task(one.driver.infer("tiny-service", {"x": items(1)}, 20_000))
    await asyncio.to_thread(backend.entered.wait, 10)
    backend.gate.set()
    assert not (await request).fell_back


async def test_a_fallback_that_fails_leaves_the_lane_to_its_plan(fleet, items, gates, until):
    """The copy's agent is gone; the planned one is slow, but it answers."""
    one, two, three = await fleet.start("one"), await fleet.start("two", open_backend=gates), await fleet.start("three")
    await fleet.activate(timed(fleet.route([("two", 0, 2)], fallback=("three",)), promise_ms=150))
    await fleet.kill(three)
    (backend,) = gates
    backend.gate.clear()
    backend.entered.clear()
    request = asyncio.create_task(one.driver.infer("tiny-service", {"x": items(1)}, 20_000))
    await asyncio.to_thread(backend.entered.wait, 10)
    await until(lambda: one.peers.is_broken("three"))
    backend.gate.set()
    assert not (await request).fell_back
    assert two.queue.depth == 0


async def test_a_fallback_that_the_plan_lost_is_not_chosen(fleet, items, gates, until):
    """Its times are still in the route: they were made before it failed to prepare."""
    one, _ = await fleet.start("one"), await fleet.start("two", open_backend=gates)
    with_spares = timed(fleet.route([("two", 0, 2)], fallback=("one", "two")), promise_ms=60)
    (stage,) = with_spares.plan.stages
    stage = msgspec.structs.replace(stage, fallback=(ONE,))
    await fleet.activate(
        msgspec.structs.replace(with_spares, plan=msgspec.structs.replace(with_spares.plan, stages=(stage,)))
    )
    (backend,) = gates
    backend.gate.clear()
    for _ in range(3):
        assert (await one.driver.infer("tiny-service", {"x": items(1)}, 20_000)).fell_back
    backend.gate.set()
