"""Many services share a fleet: nobody is overdrawn, and a loss moves only those it hits."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import fleet_snapshot
from policies.fleet import Fleet
from policies.limits import usable_bytes
from policies.many import Ledger


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    made = Ledger(fleet_snapshot(devices=40, blocks=8, services=24))
    made.plan()
    return made


def test_all_are_planned_and_no_agent_is_overdrawn(ledger: Ledger) -> None:
    assert len(ledger.booked) == 24
    assert not ledger.infeasible
    agents = ledger.snapshot.fleet.agents
    for agent, size in ledger.bytes_held.items():
        assert size <= usable_bytes(agents[agent], ledger.settings.predict) + 1
    assert max(ledger.busy.values()) < 0.9
    assert sum(b.scored.prediction.risk > 0.3 for b in ledger.booked.values()) == 0


def test_load_is_spread(ledger: Ledger) -> None:
    used = {agent for booked in ledger.booked.values() for agent in booked.busy}
    assert len(used) > 8


def test_a_loss_moves_only_those_it_hits(ledger: Ledger) -> None:
    victim = max(ledger.busy, key=lambda a: ledger.busy[a])
    before = {s: b.scored.plan for s, b in ledger.booked.items()}
    hit = ledger.lose(victim)
    assert hit
    assert len(ledger.booked) == 24
    assert all(victim not in b.bytes_held for b in ledger.booked.values())
    assert all(ledger.booked[s].scored.plan == plan for s, plan in before.items() if s not in hit)


def test_a_zone_that_has_no_room_is_left(ledger: Ledger) -> None:
    snapshot = ledger.snapshot
    agents = {
        a: msgspec.structs.replace(v, memory_budget_bytes=1 << 20) if v.zone == "z0" and not v.is_cloud else v
        for a, v in fleet_snapshot(devices=100, blocks=8, services=1).fleet.agents.items()
        if not v.is_cloud
    }
    fleet = Fleet(agents=agents)
    ledger = Ledger(msgspec.structs.replace(snapshot, fleet=fleet))
    service = next(iter(snapshot.services))
    ledger.plan([service])
    assert {agents[a].zone for a in ledger.booked[service].bytes_held} == {"z1"}


@settings(max_examples=12, deadline=None)
@given(memory_mb=st.integers(4, 64), services=st.integers(4, 14), devices=st.integers(4, 10), data=st.data())
def test_memory_is_never_overbooked(memory_mb: int, services: int, devices: int, data: st.DataObject) -> None:
    world = fleet_snapshot(devices=devices, blocks=4, services=services)
    agents = {a: msgspec.structs.replace(v, memory_budget_bytes=memory_mb << 20) for a, v in world.fleet.agents.items()}
    ledger = Ledger(msgspec.structs.replace(world, fleet=Fleet(agents=agents, links=world.fleet.links)))
    ledger.plan()
    for _ in range(2):
        for agent, size in ledger.bytes_held.items():
            assert size <= usable_bytes(agents[agent], ledger.settings.predict)
        assert ledger.booked.keys() | ledger.infeasible.keys() == world.services.keys()
        victim = data.draw(st.sampled_from(sorted(agents)))
        before = {s: b.scored.plan for s, b in ledger.booked.items()}
        hit = ledger.lose(victim)
        assert victim not in ledger.bytes_held
        assert all(ledger.booked[s].scored.plan == plan for s, plan in before.items() if s not in hit)
