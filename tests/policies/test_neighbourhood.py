"""Which agents a service is planned among."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from policies.fleet import AgentView
from policies.ids import AgentId
from policies.neighbourhood import NearSettings, Neighbourhoods
from policies.snapshot import ServiceView, Snapshot
from sla.contract import contract_from
from tests.policies.conftest import CONTRACT, READER

MakeAgent = Callable[..., AgentView]


def _fleet(agent: MakeAgent) -> Neighbourhoods:
    """Two zones of 20 boards and 30 clouds."""
    edge = [agent(f"{zone}{n:02d}", "rk3588", zone=zone, slowdown=2.0 + n / 10) for zone in "pq" for n in range(20)]
    clouds = [agent(f"cloud{n:02d}", "ray", zone="dc") for n in range(30)]
    return Neighbourhoods([*edge, *clouds], NearSettings(near=4, clouds=2))


def _view(demo: Callable[..., Snapshot], **changes: object) -> ServiceView:
    return msgspec.structs.replace(demo().services[READER], **changes)


def test_the_quickest_free_ones_of_the_entrys_zone(demo: Callable[..., Snapshot], agent: MakeAgent) -> None:
    places = _fleet(agent)
    view = _view(demo, entry=AgentId("p15"))
    assert [a for a in places.near(view) if a[0] in "pq"] == ["p00", "p01", "p02", "p03", "p15"]
    places.see(AgentId("p01"), booked=0.9)
    places.see(AgentId("p02"), usable=False)
    assert [a for a in places.near(view) if a[0] in "pq"] == ["p00", "p03", "p04", "p05", "p15"]
    assert [a for a in places.near(view, reach="fleet") if a[0] in "pq"] == ["p00", "p15", "q00", "q01", "q02"]


def test_a_contracts_zones_count_more_than_the_entrys(demo: Callable[..., Snapshot], agent: MakeAgent) -> None:
    contract = contract_from({**CONTRACT, "zones": ["q", "dc"]})
    near = _fleet(agent).near(_view(demo, entry=AgentId("p15"), contract=contract))
    assert [a for a in near if a[0] in "pq"] == ["p15", "q00", "q01", "q02", "q03"]
    assert sum(a.startswith("cloud") for a in near) == 2
    only_edge = contract_from({**CONTRACT, "zones": ["q"]})
    assert not any(a.startswith("cloud") for a in _fleet(agent).near(_view(demo, contract=only_edge)))


def test_zones_start_at_different_clouds(demo: Callable[..., Snapshot], agent: MakeAgent) -> None:
    places = _fleet(agent)
    seen = [set(places.clouds_of([zone])) for zone in places.zones]
    assert seen[0].isdisjoint(seen[1])
    assert seen[0] | seen[1] == set(places.clouds_of(None))
    for zone, clouds in zip(places.zones, seen, strict=True):
        near = places.near(_view(demo, entry=AgentId(f"{zone}03")))
        assert {a for a in near if a.startswith("cloud")} <= clouds


def test_what_runs_stays_in_sight(demo: Callable[..., Snapshot], agent: MakeAgent) -> None:
    places = _fleet(agent)
    near = places.near(_view(demo, entry=AgentId("p00")), keep=[AgentId("q19"), AgentId("nobody")])
    assert "q19" in near
    assert "nobody" not in near


def test_a_fleet_of_clouds_is_a_fleet(demo: Callable[..., Snapshot], agent: MakeAgent) -> None:
    places = Neighbourhoods([agent(f"cloud{n:02d}", "ray") for n in range(20)], NearSettings(near=4, clouds=2))
    assert places.near(_view(demo)) == ["cloud00", "cloud01"]
    assert places.near(_view(demo, entry=AgentId("cloud07"))) == ["cloud00", "cloud01", "cloud07"]
