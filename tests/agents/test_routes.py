"""Routes: the newest only, kept on disk, and never one that leads nowhere."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from agents.messages import Address
from agents.routes import RouteTable, fallback_hops, files_for, lane_hops, pinned_blobs
from policies.plan import Span
from policies.service import Knob
from sla.errors import ModelError, NotFoundError


@pytest.fixture
def route(fleet):
    route = fleet.route([("one", 0, 1), ("two", 1, 2)], fallback=("one",), epoch=3)
    return msgspec.structs.replace(route, addresses={"one": Address("h1", 1), "two": Address("h2", 2)})


async def test_a_route_survives_a_restart(route, tmp_path):
    table = RouteTable(tmp_path)
    table.activate(route)
    assert RouteTable(tmp_path).current("tiny-service") == route
    assert RouteTable(tmp_path).epochs() == {"tiny-service": 3}


async def test_a_damaged_file_is_no_reason_not_to_start(route, tmp_path):
    RouteTable(tmp_path).activate(route)
    (path,) = tmp_path.glob("*.route")
    path.write_bytes(path.read_bytes()[:100])
    assert RouteTable(tmp_path).all() == ()


async def test_a_route_goes_when_its_epoch_is_released(route, tmp_path):
    table = RouteTable(tmp_path)
    table.activate(route)
    table.drop("tiny-service", 3)
    assert table.all() == (route,)
    table.drop("tiny-service", 4)
    with pytest.raises(NotFoundError):
        table.current("tiny-service")
    assert list(tmp_path.iterdir()) == []


async def test_who_waits_for_a_newer_route_is_told(route, tmp_path):
    table = RouteTable(tmp_path)
    table.activate(route)
    assert await table.newer_than("tiny-service", 2, timeout_s=0) == route
    assert await table.newer_than("tiny-service", 3, timeout_s=0) is None
    waiting = asyncio.create_task(table.newer_than("tiny-service", 3, timeout_s=20))
    await asyncio.sleep(0)
    newer = msgspec.structs.replace(route, plan=msgspec.structs.replace(route.plan, epoch=4))
    table.activate(newer)
    assert await waiting == newer


async def test_routes_that_lead_nowhere_are_refused(route, tmp_path):
    table = RouteTable(tmp_path)
    for bad, words in (
        (msgspec.structs.replace(route, addresses={"one": Address("h", 1)}), "two"),
        (msgspec.structs.replace(route, files={}), r"tiny\[0:1\]"),
        (msgspec.structs.replace(route, plan=msgspec.structs.replace(route.plan, stages=())), "nowhere"),
    ):
        with pytest.raises(ModelError, match=words):
            table.activate(bad)
    assert table.all() == ()


async def test_who_holds_what(route, fleet):
    spans = {agent: {file.blocks for file in files_for(route, agent)} for agent in ("one", "two", "three")}
    assert spans == {"one": {Span(0, 1), Span(0, 2)}, "two": {Span(1, 2)}, "three": set()}
    pinned = pinned_blobs([route], "two")
    assert pinned == {fleet.tiny.file(1, 2).sha256, fleet.tiny.file(1, 2).golden_sha256}


async def test_the_last_hop_answers_what_the_stage_wants(route):
    planned = route.plan.stages[0]
    first, last = lane_hops(route, planned.lanes[0], ("y", "extra"))
    assert (first.outputs, last.outputs, last.inputs) == (("h",), ("y", "extra"), ("h", "x"))
    (whole,) = fallback_hops(route, planned, "one", ("y",))
    assert (whole.blocks, whole.agent, whole.address) == (Span(0, 2), "one", Address("h1", 1))


async def test_knobs_are_turned_under_the_same_epoch_and_survive_a_restart(route, tmp_path):
    knob = Knob(name="keep", input="keep_ratio", default=1.0, low=0.1, high=1.0)
    stage = msgspec.structs.replace(route.spec.stages[0], knobs=(knob,))
    route = msgspec.structs.replace(route, spec=msgspec.structs.replace(route.spec, stages=(stage,)), knobs_version=2)
    key = f"{stage.name}.keep"
    table = RouteTable(tmp_path)
    assert not table.tune("tiny-service", 3, 3, {key: 0.5}), "not served here"
    table.activate(route)
    assert table.tune("tiny-service", 3, 5, {key: 0.5, "no.knob": 1.0})
    assert not table.tune("tiny-service", 3, 4, {key: 0.9}), "an older order that came late"
    assert not table.tune("tiny-service", 4, 9, {key: 0.9}), "that epoch's route brings its own values"
    assert table.current("tiny-service").knobs == {key: 0.5}
    assert RouteTable(tmp_path).current("tiny-service").knobs == {key: 0.5}
    table.activate(route)  # made before the knob was turned, came after
    assert table.current("tiny-service").knobs == {key: 0.5}
    newer = msgspec.structs.replace(route, plan=msgspec.structs.replace(route.plan, epoch=4), knobs={key: 0.7})
    table.activate(newer)
    assert table.current("tiny-service").knobs == {key: 0.7}
