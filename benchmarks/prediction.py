"""Predicted against simulated p99: the convolution of `policies.predict` against requests that queue one by one.

Plans are the solver's candidates and the baselines on a fleet whose speeds are known, at three loads. What is judged is the
mathematics of prediction (queues, maxima, links), not the profile of a model or a device: those are exact here.
"""

from __future__ import annotations

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
from policies.simulate import Choice, Simulation, simulate
from policies.snapshot import Snapshot
from policies.solve import candidates

LOADS: Final = (0.3, 0.9, 1.6)
PLANS: Final = 34
SECONDS: Final = 3600.0
MEDIAN_GOAL, P90_GOAL = 0.10, 0.25
MAX_BUSY: Final = 0.9
"""A plan that is busier than this has no steady state to compare with."""


def run(quick: bool) -> list[Row]:
    """Errors of all plans, and by load."""
    seconds = 900.0 if quick else SECONDS
    errors: dict[float, list[float]] = {}
    for load in LOADS:
        world = world_of(_calm(load, seconds), seed=3)
        snapshot = _as_seen(world)
        predictor = Predictor(snapshot, world.spec.id)
        for plan in _plans(snapshot, predictor, 12 if quick else PLANS):
            prediction = predictor.predict(plan)
            if prediction.saturation > MAX_BUSY:
                continue
            result = simulate(world, lambda seen, _, plan=plan: _always(seen, plan), seed=5)  # type: ignore[misc]
            errors.setdefault(load, []).append(abs(prediction.p99_ms / result.p99_ms - 1.0))
    every = [e for found in errors.values() for e in found]
    rows = [
        at_most("p99, relative error, median", float(np.median(every)), "ratio", MEDIAN_GOAL, runs=len(every)),
        at_most("p99, relative error, p90", float(np.quantile(every, 0.9)), "ratio", P90_GOAL, runs=len(every)),
    ]
    rows += [
        Row(name=f"p99, relative error, median at {load:g} requests/s", value=float(np.median(found)), unit="ratio", runs=len(found))
        for load, found in errors.items()
    ]  # fmt: skip
    return rows


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


def _always(snapshot: Snapshot, plan: Plan) -> Choice:
    running = next(iter(snapshot.services.values())).running
    return Choice() if running is not None else Choice(plan=plan)
