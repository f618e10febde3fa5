"""A near snapshot with the others booked says the same as the snapshot of everything."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import fleet_snapshot
from policies.bookings import Bookings, takes_of
from policies.costs import CostModel
from policies.fleet import NOTHING, Booked, Fleet
from policies.ids import AgentId, ServiceId, StageName
from policies.many import Ledger
from policies.predict import Predictor
from policies.snapshot import ServiceView, Snapshot, StageMeasure, measure_key


def _running_world() -> Snapshot:
    """Ten services that run on twelve agents, some of them measured."""
    snapshot = fleet_snapshot(devices=12, blocks=6, services=10)
    named = {s: _with_own_stage(v) for s, v in snapshot.services.items()}
    snapshot = msgspec.structs.replace(snapshot, services=named)
    ledger = Ledger(snapshot)
    ledger.plan()
    views = {}
    for number, (service, view) in enumerate(snapshot.services.items()):
        plan = ledger.booked[service].scored.plan
        shard = plan.shards()[0]
        key = measure_key(shard.stage, shard.agent, shard.blocks.start, shard.blocks.stop)
        measure = StageMeasure(count=50, mean_ms=20.0 + 5 * number, std_ms=4.0, items=1.0)
        views[service] = msgspec.structs.replace(
            view, running=plan, offered_rps=1.0 + number, measures={key: measure} if number % 2 else {}
        )
    return msgspec.structs.replace(snapshot, services=views)


def _with_own_stage(view: ServiceView) -> ServiceView:
    """Measures are told apart by their stage's name."""
    stage = msgspec.structs.replace(view.spec.onnx_stages()[0], name=StageName(f"stage-{view.spec.id}"))
    return msgspec.structs.replace(view, spec=msgspec.structs.replace(view.spec, stages=(stage,)))


def _near(world: Snapshot, service: ServiceId) -> Snapshot:
    """The service alone among all agents, everybody else booked."""
    books = Bookings()
    for other, view in world.services.items():
        assert view.running is not None
        books.book(other, takes_of(CostModel(world), view, view.running))
    agents = {
        a: msgspec.structs.replace(agent, booked=books.others(service, a)) for a, agent in world.fleet.agents.items()
    }
    fleet = Fleet(agents=agents, links=world.fleet.links, elsewhere=books.elsewhere(service))
    return msgspec.structs.replace(world, fleet=fleet, services={service: world.services[service]})


def test_load_memory_and_calibration_are_those_of_the_whole() -> None:
    world = _running_world()
    for service, view in world.services.items():
        whole, near = Predictor(world, service), Predictor(_near(world, service), service)
        for agent, load in whole.background.items():
            assert near.background[agent].busy == pytest.approx(load.busy, abs=1e-9)
            assert near.background[agent].second_ms == pytest.approx(load.second_ms, abs=1e-9)
        assert {a: b for a, b in near.foreign_memory.items() if b} == {
            a: b for a, b in whole.foreign_memory.items() if b
        }
        assert near.costs.calibration.fleet == pytest.approx(whole.costs.calibration.fleet)
        for agent, ratio in whole.costs.calibration.agents.items():
            assert near.costs.calibration.agents[agent] == pytest.approx(ratio)
        assert view.running is not None
        assert near.predict(view.running).p99_ms == pytest.approx(whole.predict(view.running).p99_ms, rel=1e-6)
        assert near.predict(view.running).risk == pytest.approx(whole.predict(view.running).risk, abs=1e-6)


amounts = st.builds(Booked, busy=st.floats(0, 1), second_ms=st.floats(0, 100), held_bytes=st.integers(0, 10**9))
takes = st.dictionaries(st.sampled_from([AgentId(a) for a in "abcd"]), amounts, max_size=4)
acts = st.lists(st.tuples(st.sampled_from([ServiceId(s) for s in "xyz"]), st.none() | takes), max_size=20)


@settings(max_examples=150, deadline=None)
@given(acts)
def test_totals_are_the_sum_of_what_is_booked(steps: list[tuple[ServiceId, dict[AgentId, Booked] | None]]) -> None:
    books = Bookings()
    for service, wanted in steps:
        if wanted is None:
            books.release(service)
        else:
            books.book(service, wanted)
    for agent in (AgentId(a) for a in "abcd"):
        there = [b[agent] for b in books.services.values() if agent in b]
        total = books.totals.get(agent, NOTHING)
        assert total.held_bytes == sum(one.held_bytes for one in there)
        assert total.busy == pytest.approx(sum(one.busy for one in there), abs=1e-9)
        for service in books.services:
            others = sum(b[agent].held_bytes for s, b in books.services.items() if s != service and agent in b)
            assert books.others(service, agent).held_bytes == others
