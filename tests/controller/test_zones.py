"""Zones are planned side by side, and the parts go together: wherever they run, with nothing overbooked."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import fleet_snapshot
from controller.cloud import Cloud
from controller.part_runners import PartRunner
from controller.settings import CloudSettings
from controller.together import run_here
from controller.zones import Part, PartPlans, Placed, bundled, by_urgency, homes, merged, part_bytes, plans_from
from policies.bookings import Bookings
from policies.costs import PredictSettings
from policies.fleet import Booked, Fleet
from policies.ids import AgentId, ServiceId
from policies.limits import usable_bytes
from policies.many import Ledger
from policies.neighbourhood import Neighbourhoods
from policies.plan import Plan
from policies.snapshot import Snapshot


def _world(devices: int = 200, services: int = 40) -> Snapshot:
    return fleet_snapshot(devices=devices, blocks=6, services=services)


def _parts(world: Snapshot, count: int) -> list[bytes]:
    """Parts of the world, as the controller makes them of its own."""
    places = Neighbourhoods(world.fleet.agents.values())
    parts = []
    for zones, services in bundled(homes(world.services, places), count):
        windows = {zone: tuple(places.clouds_of([zone])) for zone in zones}
        names = {*places.in_zones(zones), *(cloud for window in windows.values() for cloud in window)}
        fleet = Fleet(agents={a: world.fleet.agents[a] for a in sorted(names)}, links=world.fleet.links)
        here = msgspec.structs.replace(world, fleet=fleet, services={s: world.services[s] for s in services})
        parts.append(part_bytes(Part(snapshot=here, windows=windows)))
    return parts


def test_every_service_has_one_home_and_parts_are_even() -> None:
    world = _world(400, 60)
    places = Neighbourhoods(world.fleet.agents.values())
    found = homes(world.services, places)
    for service, zone in found.items():
        entry = world.services[service].entry
        assert entry is not None
        assert zone == world.fleet.agents[entry].zone
    parts = bundled(found, 4)
    assert sorted(s for _, services in parts for s in services) == sorted(world.services)
    assert len({zone for zones, _ in parts for zone in zones}) == sum(len(zones) for zones, _ in parts)
    sizes = [len(services) for _, services in parts]
    assert max(sizes) - min(sizes) <= 8


def test_services_that_nobody_asked_yet_are_dealt_out_by_size() -> None:
    world = _world(150, 30)
    agents = {a: v for a, v in world.fleet.agents.items() if v.zone != "z2" or a < "a00110"}
    unseen = {s: msgspec.structs.replace(v, entry=None) for s, v in world.services.items()}
    found = homes(unseen, Neighbourhoods(agents.values()))
    counts = {zone: list(found.values()).count(zone) for zone in ("z0", "z1", "z2")}
    assert sum(counts.values()) == 30
    assert counts["z2"] < counts["z0"] == counts["z1"]


async def test_parts_say_the_same_as_the_whole_where_zones_do_not_meet() -> None:
    world = _world()
    whole = Ledger(world)
    whole.plan()
    for count in (1, 2, 4):
        found = [plans_from(answer) for answer in await run_here(_parts(world, count))]
        placed = {service: one.plan for part in found for service, one in part.placed.items()}
        assert placed == {service: booked.scored.plan for service, booked in whole.booked.items()}


@pytest_asyncio.fixture
async def ray_cloud() -> AsyncIterator[Cloud]:
    """A local Ray without a cloud agent."""
    cloud = Cloud(CloudSettings(ray="local", agents=0))
    await cloud.start([])
    assert cloud.is_up, cloud.state
    yield cloud
    await cloud.stop()


async def test_ray_tasks_say_what_a_thread_says(ray_cloud: Cloud) -> None:
    parts = _parts(_world(), 3)
    runner = PartRunner(ray_cloud, worth_bytes=0)
    assert await runner(parts) == await run_here(parts)
    assert runner.last == "ray"


async def test_without_its_ray_a_controller_plans_in_processes() -> None:
    cloud = Cloud(CloudSettings(ray="local", agents=0))
    cloud.is_up = True  # As after the loss of the cluster.
    parts = _parts(_world(100, 12), 2)
    runner = PartRunner(cloud, worth_bytes=0)
    assert await runner(parts) == await run_here(parts)
    assert runner.last == "processes"


async def test_little_is_planned_where_it_is() -> None:
    runner = PartRunner(Cloud(CloudSettings(ray="none")))
    parts = _parts(_world(50, 2), 2)
    assert await runner(parts) == await run_here(parts)
    assert runner.last == "here"


NAMES = [ServiceId(f"s{n}") for n in range(8)]
takes = st.dictionaries(
    st.sampled_from([AgentId(a) for a in ("cloud", "edge", "other")]),
    st.builds(Booked, busy=st.floats(0, 0.6), held_bytes=st.integers(0, 60)),
    min_size=1,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), takes), min_size=1, max_size=3))
def test_a_merge_overbooks_nobody_and_each_round_gets_further(
    found: list[dict[ServiceId, dict[AgentId, Booked]]],
) -> None:
    room = {AgentId(a): 100 for a in ("cloud", "edge", "other")}
    books, left = Bookings(), [*NAMES]
    for _ in range(len(NAMES) + 1):
        parts = [
            PartPlans(placed={s: Placed(plan=_plan(s), takes=t) for s, t in part.items() if s in left})
            for part in found
        ]
        placed, conflicts = merged(books, parts, NAMES, room)
        for agent, total in books.totals.items():
            assert total.held_bytes <= room[agent]
        assert placed.keys().isdisjoint(conflicts)
        wanted = {s for part in parts for s in part.placed}
        assert placed.keys() | set(conflicts) == wanted
        if not placed:
            break
        left = conflicts
    else:
        raise AssertionError("a round that placed something left as much to do as before")


def _plan(service: ServiceId) -> Plan:
    return Plan(service_id=service, epoch=0, stages=())


async def test_conflicts_in_a_shared_cloud_are_planned_again_until_all_have_room() -> None:
    """One cloud and two zones of boards without memory: both parts want all of the cloud."""
    world = _world(64, 24)
    only = min(a for a, v in world.fleet.agents.items() if v.is_cloud)
    agents = {
        a: msgspec.structs.replace(v, memory_budget_bytes=(90 << 20) if v.is_cloud else (12 << 20))
        for a, v in world.fleet.agents.items()
        if not v.is_cloud or a == only
    }
    world = msgspec.structs.replace(world, fleet=Fleet(agents=agents, links=world.fleet.links))
    books, left = Bookings(), world.services
    rounds = 0
    while left and rounds < 8:
        rounds += 1
        fleet = books.burdened(world.fleet)
        now = msgspec.structs.replace(world, fleet=fleet, services=left)
        found = [plans_from(answer) for answer in await run_here(_parts(now, 2))]
        room = {a: usable_bytes(v, PredictSettings()) for a, v in agents.items()}
        placed, conflicts = merged(books, found, by_urgency(left), room)
        assert all(total.held_bytes <= room[a] for a, total in books.totals.items())
        if not placed:
            break
        left = {s: left[s] for s in conflicts}
    assert rounds > 1, "both parts were to want the same cloud"
    assert not left
