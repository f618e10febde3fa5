"""The parts of the live prediction benchmark that need no processes: its plans, its statistics, its judgement of a record."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import live_records
from benchmarks.live_plans import plans
from benchmarks.live_records import Load, Trial, measured, smooth_p99
from benchmarks.live_world import simulated
from benchmarks.prediction_live import judge
from controller.simulate_cli import load_scenario
from controller.snapshots import snapshot_bytes
from policies.ids import AgentId, ServiceId
from policies.plan import cover_faults
from policies.scenario import Load as Arrivals
from policies.scenario import World, world_of
from policies.simulate import Choice, Simulation
from policies.snapshot import Snapshot
from sla.errors import InvalidInputError

SERVICE = ServiceId("simulated")


@pytest.fixture(scope="module")
def world() -> World:
    scenario = load_scenario("flash-crowd")
    return world_of(msgspec.structs.replace(scenario, seconds=400.0, load=Arrivals(rps=0.5), troubles=()), seed=2)


@pytest.fixture(scope="module")
def seen(world: World) -> Snapshot:
    return Simulation(world, lambda _s, _w: Choice(), 0).snapshot(100_000.0)


def _devices(seen: Snapshot) -> tuple[AgentId, ...]:
    return tuple(sorted(seen.fleet.agents))


def test_the_plans_are_legal_different_and_of_all_kinds(seen: Snapshot) -> None:
    spec = seen.services[SERVICE].spec
    made = plans(seen, SERVICE, _devices(seen), 60, seed=4)
    assert made == plans(seen, SERVICE, _devices(seen), 60, seed=4)
    assert len({plan.layout() for plan in made}) == 60
    assert [fault for plan in made for fault in cover_faults(plan, spec, seen.models)] == []
    assert {len(stage.lanes) for plan in made for stage in plan.stages} == {1, 2, 3}
    assert {len(lane.shards) for plan in made for stage in plan.stages for lane in stage.lanes} == {1, 2}
    assert {len(plan.agents()) for plan in made} >= {1, 2, 3}


def test_the_smoothed_p99_is_that_of_an_exponential_tail_and_says_how_sure_it_is() -> None:
    rng = np.random.default_rng(3)
    truth = 100.0 + 50.0 * np.log(100.0)
    smooth, plain = [], []
    for _ in range(200):
        sample = 100.0 + rng.exponential(50.0, 150)
        smooth.append(smooth_p99(sample))
        plain.append(float(np.quantile(sample, 0.99)))
    assert np.mean(smooth) == pytest.approx(truth, rel=0.03)
    assert np.std(smooth) < 0.9 * np.std(plain)
    load = Load(
        share=0.5, seconds=100.0, due_ms=tuple(range(150)), latency_ms=tuple(100.0 + rng.exponential(50.0, 150))
    )
    assert measured(load).p99_error == pytest.approx(float(np.std(smooth)) / truth, rel=0.6)
    assert load.rate_rps == 1.5


def test_a_record_is_judged_again_as_it_was(world: World, seen: Snapshot, tmp_path: Path) -> None:
    trials = []
    for plan in plans(seen, SERVICE, _devices(seen), 3, seed=1):
        sim = Simulation(world, lambda _s, _w, plan=plan: Choice(plan=plan), 5)  # type: ignore[misc]
        sim.settings = msgspec.structs.replace(sim.settings, look_every_s=1e9)
        sim.run()
        done = [(at, ms) for at, ms in sorted(sim.tally.done) if np.isfinite(ms)]
        load = Load(
            share=0.25, seconds=400.0, due_ms=tuple(at for at, _ in done), latency_ms=tuple(ms for _, ms in done)
        )
        snapshot = snapshot_bytes(seen)
        trials.append(Trial(fleet="f", service=SERVICE, plan=plan, before=snapshot, after=snapshot, loads=(load,)))
        again = simulated(trials[-1], load)
        assert len(again) == len(done)
        assert np.median(again) == pytest.approx(np.median(load.latency_ms), rel=0.25)
    file = tmp_path / "trials.msgpack"
    live_records.save(trials, file)
    read = live_records.load(file)
    assert read == trials
    rows = judge(read)
    assert [row for row in rows if row.goal] == [row for row in judge(trials) if row.goal]
    assert {row.goal for row in rows} == {None, "<= 0.1", "<= 0.25", "<= 0.2"}
    file.write_bytes(b"junk")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        live_records.load(file)
