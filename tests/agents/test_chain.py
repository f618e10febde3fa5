"""Chains over real devices: what two devices compute together is what one computes alone."""

from __future__ import annotations

import numpy as np
import pytest

from agents.messages import RunChain
from agents.routes import lane_hops
from sla.errors import AgentLostError, InvalidInputError, RetryableError


async def test_a_chain_over_two_devices_equals_the_whole(fleet, items):
    first, _ = await fleet.start("one"), await fleet.start("two")
    x = items(5)
    await fleet.activate(fleet.route([("one", 0, 1), ("two", 1, 2)]))
    split = await first.driver.infer("tiny-service", {"x": x}, 5000)
    await fleet.activate(fleet.route([("one", 0, 2)], epoch=2))
    whole = await first.driver.infer("tiny-service", {"x": x}, 5000)
    np.testing.assert_array_equal(split.tensors["y"], whole.tensors["y"])
    np.testing.assert_allclose(split.tensors["y"], fleet.tiny.expected(x), rtol=1e-5)
    assert (split.epoch, whole.epoch, split.fell_back) == (1, 2, False)


async def test_the_first_hop_may_be_elsewhere(fleet, items):
    for name in ("door", "one", "two"):
        await fleet.start(name)
    await fleet.activate(fleet.route([("one", 0, 1), ("two", 1, 2)]))
    result = await fleet.devices["door"].driver.infer("tiny-service", {"x": items(2)}, 5000)
    np.testing.assert_allclose(result.tensors["y"], fleet.tiny.expected(items(2)), rtol=1e-5)
    assert fleet.devices["door"].ledger.take()[0][0].shards == ()
    (two,), _ = fleet.devices["two"].ledger.take()
    assert [(shard.blocks.start, shard.count, shard.items) for shard in two.shards] == [(1, 1, 2)]


@pytest.mark.parametrize("there", ["one", "two"])
async def test_a_model_too_large_for_one_file_runs_as_several_shards_of_one_device(fleet, items, there):
    """What `policies.fallbacks.in_files` makes of a long run of blocks, on the device that is asked and on another."""
    first, _ = await fleet.start("one"), await fleet.start("two")
    await fleet.activate(fleet.route([(there, 0, 1), (there, 1, 2)]))
    result = await first.driver.infer("tiny-service", {"x": items(3)}, 5000)
    np.testing.assert_allclose(result.tensors["y"], fleet.tiny.expected(items(3)), rtol=1e-5)
    shards = fleet.devices[there].ledger.take()[0][0].shards
    assert [(shard.blocks.start, shard.count) for shard in shards] == [(0, 1), (1, 1)]


@pytest.mark.parametrize("count", [1, 2, 7])
async def test_lanes_split_the_items_and_keep_their_order(fleet, items, count):
    first, _ = await fleet.start("one"), await fleet.start("two")
    await fleet.activate(fleet.route([("one", 0, 2)], [("two", 0, 2)], shares=[(0, 300), (300, 1000)]))
    result = await first.driver.infer("tiny-service", {"x": items(count)}, 5000)
    np.testing.assert_allclose(result.tensors["y"], fleet.tiny.expected(items(count)), rtol=1e-5)


async def test_a_shard_that_is_not_loaded_is_worth_a_retry(fleet, items):
    one = await fleet.start("one")
    route = fleet.route([("one", 0, 2)])
    message = RunChain(
        service_id="tiny-service", epoch=1, request_id="r", remaining_ms=1000, hops=lane_hops(route, route.plan.stages[0].lanes[0], ("y",)),
    )  # fmt: skip
    with pytest.raises(RetryableError, match="not loaded"):
        await one.chain.serve(message, {"x": items(1)})


async def test_a_chain_for_somebody_else_is_refused(fleet, items):
    one, _ = await fleet.start("one"), await fleet.start("two")
    route = fleet.route([("two", 0, 2)])
    hops = lane_hops(route, route.plan.stages[0].lanes[0], ("y",))
    message = RunChain(service_id="tiny-service", epoch=1, request_id="r", remaining_ms=1000, hops=hops)
    with pytest.raises(InvalidInputError, match="must start there"):
        await one.chain.serve(message, {"x": items(1)})


async def test_a_device_that_drains_sends_peers_away_at_once(fleet, items):
    one, two = await fleet.start("one"), await fleet.start("two")
    await fleet.activate(fleet.route([("two", 0, 2)], fallback=("one",)))
    two.chain.drain()
    result = await one.driver.infer("tiny-service", {"x": items(2)}, 5000)
    assert result.fell_back
    route = fleet.route([("two", 0, 2)])
    hops = lane_hops(route, route.plan.stages[0].lanes[0], ("y",))
    with pytest.raises(AgentLostError, match="leaving"):
        await two.chain.serve(
            RunChain(service_id="tiny-service", epoch=1, request_id="r", remaining_ms=1000, hops=hops), {"x": items(1)}
        )
