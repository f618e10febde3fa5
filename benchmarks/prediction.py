"""Predicted against simulated p99: the convolution of `policies.predict` against requests that queue one by one.

Plans are the solver's candidates and the baselines on a fleet whose speeds are known, at three loads. What is judged is the
mathematics of prediction (queues, maxima, links), not the profile of a model or a device: those are exact here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from benchmarks.common import Row, at_most
from controller.simulate_cli import load_scenario
from policies.baselines import BASELINES
from policies.decide import Memory
from policies.plan import Plan
from policies.predict import Predictor
from policies.scenario import Link, Load, Scenario, World, world_of
from policies.simulate import Choice, Simulation, SimulationSettings, simulate
from policies.snapshot import Snapshot
from policies.solve import candidates

LOADS: Final = (0.3, 0.9, 1.6)
PLANS: Final = 34
SECONDS: Final = 3600.0
MEDIAN_GOAL, P90_GOAL = 0.10, 0.25
MAX_BUSY: Final = 0.9
"""A plan that is busier than this has no steady state to compare with."""


def run(quick: bool) -> list[Row]:
    """Errors of all plans: before anything was measured, and with the times of their shards measured."""
    seconds = 900.0 if quick else SECONDS
    before: list[float] = []
    after: list[float] = []
    for load in LOADS:
        world = world_of(_calm(load, seconds), seed=3)
        snapshot = _as_seen(world)
        predictor = Predictor(snapshot, world.spec.id)
        for plan in _plans(snapshot, predictor, 12 if quick else PLANS):
            prediction = predictor.predict(plan)
            if prediction.saturation > MAX_BUSY:
                continue
            fixed = _Fixed(plan)
            result = simulate(world, fixed, 5, SimulationSettings(hedges=False))
            before.append(abs(prediction.p99_ms / result.p99_ms - 1.0))
            measured = fixed.measured(snapshot)
            after.append(abs(Predictor(measured, world.spec.id).predict(plan).p99_ms / result.p99_ms - 1.0))
    return [*_rows("nothing measured", before), *_rows("shards measured", after)]


def _rows(when: str, errors: list[float]) -> list[Row]:
    return [
        at_most(f"p99, relative error, {when}, median", float(np.median(errors)), "ratio", MEDIAN_GOAL, runs=len(errors)),
        at_most(f"p99, relative error, {when}, p90", float(np.quantile(errors, 0.9)), "ratio", P90_GOAL, runs=len(errors)),
    ]  # fmt: skip


@dataclass(slots=True)
class _Fixed:
    """One plan for ever; keeps what was seen last."""

    plan: Plan
    last: Snapshot | None = None

    def __call__(self, snapshot: Snapshot, world: World) -> Choice:
        self.last = snapshot
        return Choice() if snapshot.services[world.spec.id].running is not None else Choice(plan=self.plan)

    def measured(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with the running plan and the times of its shards, but not with the p99 that is to be predicted."""
        assert self.last is not None
        service, seen = next(iter(self.last.services.items()))
        view = msgspec.structs.replace(snapshot.services[service], running=seen.running, measures=seen.measures)
        return msgspec.structs.replace(snapshot, services={service: view})


def _calm(rps: float, seconds: float) -> Scenario:
    base = load_scenario("flash-crowd")
    uplink = Link(rtt_ms=30.0, jitter_ms=4.0, mbit_per_s=80.0)
    return msgspec.structs.replace(base, seconds=seconds, load=Load(rps=rps), uplink=uplink, troubles=())


def _as_seen(world: World) -> Snapshot:
    """A snapshot in the middle of the world, at the load that it really has."""
    seen = Simulation(world, lambda _s, _w: Choice(), 0).snapshot(500.0 * world.seconds)
    view = msgspec.structs.replace(seen.services[world.spec.id], offered_rps=len(world.arrivals_ms) / world.seconds)
    # The contract's rate counts where it is more than what is offered; here only what is offered is played.
    contract = view.contract.model_copy(update={"throughput_rps": view.offered_rps})
    return msgspec.structs.replace(seen, services={world.spec.id: msgspec.structs.replace(view, contract=contract)})


def _plans(snapshot: Snapshot, predictor: Predictor, wanted: int) -> list[Plan]:
    service = predictor.view.spec.id
    found = [entry.plan for entry in candidates(snapshot, service, 12, predictor=predictor)]
    for policy in BASELINES.values():
        proposal, _ = policy(snapshot, service, [], Memory())
        if proposal is not None:
            found.append(proposal.plan)
    for agent in snapshot.fleet.agents:
        agents = {a: v for a, v in snapshot.fleet.agents.items() if a != agent}
        less = msgspec.structs.replace(snapshot, fleet=msgspec.structs.replace(snapshot.fleet, agents=agents))
        found += [entry.plan for entry in candidates(less, service, 8)]
    return list({plan.layout(): plan for plan in found}.values())[:wanted]
