"""Many services share a fleet: nobody is overdrawn, and a loss moves only those it hits."""

from __future__ import annotations

import pytest

from benchmarks.synthetic import fleet_snapshot
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
