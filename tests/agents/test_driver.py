"""Requests that meet trouble: what fails is the hop, never the request while there is another way."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from agents.driver import DriverSettings
from agents.lanes import LaneSettings
from sla.errors import (
    ConflictError,
    DeadlineExceededError,
    InvalidInputError,
    ModelError,
    NotFoundError,
    OverloadedError,
    RetryableError,
)


async def test_a_peer_that_dies_in_the_middle_of_a_request_costs_nobody_the_answer(fleet, items, gates):
    one, two = await fleet.start("one"), await fleet.start("two", open_backend=gates)
    await fleet.activate(fleet.route([("one", 0, 1), ("two", 1, 2)], fallback=("one",)))
    for backend in gates:
        backend.gate.clear()
        backend.entered.clear()
    request = asyncio.create_task(one.driver.infer("tiny-service", {"x": items(3)}, 20_000))
    await asyncio.to_thread(gates[0].entered.wait, 10)
    await fleet.kill(two)
    result = await request
    np.testing.assert_allclose(result.tensors["y"], fleet.tiny.expected(items(3)), rtol=1e-5)
    assert result.fell_back
    assert one.peers.is_broken("two")
    (report,), _ = one.ledger.take()
    assert (report.ok, report.failed, report.fell_back) == (1, 0, 1)


async def test_a_broken_peer_is_not_tried_first(fleet, items):
    one, two = await fleet.start("one"), await fleet.start("two")
    await fleet.activate(fleet.route([("two", 0, 2)], fallback=("one",)))
    await one.driver.infer("tiny-service", {"x": items(1)}, 5000)
    await fleet.kill(two)
    await one.driver.infer("tiny-service", {"x": items(1)}, 5000)
    assert one.peers.is_broken("two")
    result = await one.driver.infer("tiny-service", {"x": items(1)}, 5000)
    assert result.fell_back


async def test_a_hop_that_hangs_leaves_time_for_the_fallback(fleet, items, gates):
    settings = DriverSettings(lanes=LaneSettings(patience_floor_s=0.05))
    one, _ = await fleet.start("one", settings=settings), await fleet.start("two", open_backend=gates)
    await fleet.activate(fleet.route([("two", 0, 2)], fallback=("one",)))
    await one.driver.infer("tiny-service", {"x": items(1)}, 30_000)
    gates[0].gate.clear()
    result = await one.driver.infer("tiny-service", {"x": items(1)}, 30_000)
    assert result.fell_back


async def test_only_the_items_of_the_lane_that_failed_are_run_again(fleet, items, gates):
    one, _ = await fleet.start("one"), await fleet.start("two", open_backend=gates)
    await fleet.activate(
        fleet.route([("one", 0, 2)], [("two", 0, 2)], shares=[(0, 500), (500, 1000)], fallback=("one",))
    )
    gates[0].fail_with = RetryableError("the device had a fault")
    result = await one.driver.infer("tiny-service", {"x": items(4)}, 5000)
    np.testing.assert_allclose(result.tensors["y"], fleet.tiny.expected(items(4)), rtol=1e-5)
    (report,), _ = one.ledger.take()
    assert report.shards[0].items == 4
    assert report.shards[0].count == 2


async def test_a_request_that_lost_everything_goes_on_under_a_newer_route(fleet, items, gates):
    one, two = await fleet.start("one"), await fleet.start("two", open_backend=gates)
    await fleet.activate(fleet.route([("two", 0, 2)]))
    gates[0].gate.clear()
    gates[0].entered.clear()
    request = asyncio.create_task(one.driver.infer("tiny-service", {"x": items(2)}, 20_000))
    await asyncio.to_thread(gates[0].entered.wait, 10)
    await fleet.kill(two)
    del fleet.devices["two"]
    await fleet.activate(fleet.route([("one", 0, 2)], epoch=2))
    result = await request
    assert (result.epoch, result.fell_back) == (2, True)
    np.testing.assert_allclose(result.tensors["y"], fleet.tiny.expected(items(2)), rtol=1e-5)


async def test_a_failure_everywhere_is_that_requests_failure_and_no_more(fleet, items, gates):
    one = await fleet.start("one", open_backend=gates)
    await fleet.activate(fleet.route([("one", 0, 2)]))
    gates[0].fail_with = RetryableError("the device had a fault")
    with pytest.raises(RetryableError, match="the device had a fault"):
        await one.driver.infer("tiny-service", {"x": items(1)}, 300)
    gates[0].fail_with = None
    assert (await one.driver.infer("tiny-service", {"x": items(1)}, 5000)).fell_back is False
    (report,), _ = one.ledger.take()
    assert (report.ok, report.failed) == (1, 1)


async def test_a_deadline_that_passes_says_so(fleet, items, gates):
    one = await fleet.start("one", open_backend=gates)
    await fleet.activate(fleet.route([("one", 0, 2)]))
    gates[0].gate.clear()
    with pytest.raises(DeadlineExceededError):
        await one.driver.infer("tiny-service", {"x": items(1)}, 100)


async def test_more_requests_than_the_bound_are_shed(fleet, items, gates):
    one = await fleet.start("one", open_backend=gates, settings=DriverSettings(max_in_flight=1))
    await fleet.activate(fleet.route([("one", 0, 2)]))
    gates[0].gate.clear()
    running = asyncio.create_task(one.driver.infer("tiny-service", {"x": items(1)}, 20_000))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await one.driver.infer("tiny-service", {"x": items(1)}, 20_000)
    gates[0].gate.set()
    await running


async def test_an_older_epoch_is_refused(fleet):
    one = await fleet.start("one")
    one.routes.activate(fleet.route([("one", 0, 2)], epoch=5))
    one.routes.activate(fleet.route([("one", 0, 2)], epoch=5))
    with pytest.raises(ConflictError, match="older than epoch 5") as caught:
        one.routes.activate(fleet.route([("one", 0, 1), ("one", 1, 2)], epoch=4))
    assert caught.value.current_version == 5
    assert one.routes.current("tiny-service").plan.epoch == 5


async def test_bad_requests_spend_no_error_budget(fleet, items):
    one = await fleet.start("one")
    with pytest.raises(NotFoundError, match="none yet"):
        await one.driver.infer("tiny-service", {}, 1000)
    await fleet.activate(fleet.route([("one", 0, 2)]))
    with pytest.raises(InvalidInputError, match="lacks the input 'x'"):
        await one.driver.infer("tiny-service", {"z": items(1)}, 1000)
    with pytest.raises(InvalidInputError, match="refused its inputs"):
        await one.driver.infer("tiny-service", {"x": items(1).astype(np.float64)}, 1000)
    assert one.ledger.take()[0] == ()


async def test_no_items_is_a_fault_of_the_pipeline(fleet, items):
    one = await fleet.start("one")
    await fleet.activate(fleet.route([("one", 0, 2)]))
    with pytest.raises(ModelError, match="at least 1"):
        await one.driver.infer("tiny-service", {"x": items(1)[:0]}, 1000)
