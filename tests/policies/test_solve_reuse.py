"""The solver's shortcuts change nothing: what it finds with less work is, bit for bit, what it finds with all of it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from benchmarks.worlds import SERVICE, random_world
from policies.decide import Memory, Policy, decide, solver_policy
from policies.decision import Decision
from policies.snapshot import Snapshot, StageMeasure, measure_key
from policies.solve import candidates
from sla.errors import InfeasibleError


def running_somewhere(snapshot: Snapshot, rng: np.random.Generator, *, measured: bool) -> Snapshot:
    """The same world with one of its plans running, and its shards slower or quicker than modelled if `measured`."""
    view = snapshot.services[SERVICE]
    found = candidates(snapshot, SERVICE)
    plan = found[int(rng.integers(len(found)))].plan
    measures = {
        measure_key(shard.stage, shard.agent, shard.blocks.start, shard.blocks.stop): StageMeasure(
            count=int(rng.integers(1, 200)), mean_ms=float(rng.uniform(1.0, 200.0)), std_ms=float(rng.uniform(0.0, 20.0)), items=1.0
        )
        for shard in plan.shards()
    }  # fmt: skip
    running = msgspec.structs.replace(view, running=plan, measures=measures if measured else {})
    return msgspec.structs.replace(snapshot, services={**snapshot.services, SERVICE: running})


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_many_is_the_same_when_it_alone_is_asked_for(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(seed)
    try:
        if seed % 4:
            world = running_somewhere(world, rng, measured=seed % 2 == 1)
        best = candidates(world, SERVICE, 8)[0]
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            candidates(world, SERVICE, 1, among=8)
        return
    assert candidates(world, SERVICE, 1, among=8) == [best]


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_that_matters_is_found_whatever_else_is_left_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(seed)
    try:
        world = running_somewhere(world, rng, measured=seed % 2 == 1)
    except InfeasibleError:
        return
    best = candidates(world, SERVICE, 8)[0]
    for worth in (best.score - 0.02, best.score - 1e-6, best.score, best.score + 1e-6, best.score + 0.02):
        found = candidates(world, SERVICE, 1, among=8, worth=worth)
        assert found == [best] if best.score <= worth else found[0].score > worth


def looks(world: Snapshot, policy: Policy, seed: int) -> tuple[list[Decision], Memory]:
    """Half a minute of looks at a world whose load and devices change; what is decided runs at once."""
    rng, memory, decisions = np.random.default_rng(seed), Memory(), []
    for step in range(12):
        agents = {
            a: msgspec.structs.replace(agent, cpu_saturation=float(rng.uniform(0.0, 0.6)) if step % 6 == 4 else agent.cpu_saturation)
            for a, agent in world.fleet.agents.items()
        }  # fmt: skip
        view = world.services[SERVICE]
        busier = msgspec.structs.replace(
            view, offered_rps=view.contract.throughput_rps * float(rng.choice([0.5, 1.0, 1.5]))
        )
        world = msgspec.structs.replace(
            world, now_ms=world.now_ms + 6_000.0, fleet=msgspec.structs.replace(world.fleet, agents=agents),
            services={**world.services, SERVICE: busier},
        )  # fmt: skip
        decision, memory = decide(world, SERVICE, memory, policy=policy)
        decisions.append(decision)
        if decision.plan is not None:
            running = msgspec.structs.replace(busier, running=decision.plan)
            world = msgspec.structs.replace(world, services={**world.services, SERVICE: running})
    return decisions, memory


@pytest.mark.parametrize("seed", range(24))
def test_decisions_are_those_that_follow_from_all_candidates(seed: int) -> None:
    """A policy of one's own is shown all candidates; the solver's needs the best, and none where no plan could gain enough."""
    world, rng = random_world(seed), np.random.default_rng(seed)
    try:
        world = running_somewhere(world, rng, measured=seed % 2 == 1)
    except InfeasibleError:
        return
    quick, quick_memory = looks(world, solver_policy, seed)
    whole, whole_memory = looks(world, lambda *seen: solver_policy(*seen), seed)
    assert quick_memory == whole_memory
    assert [(d.plan, d.trigger, d.score, d.prediction, [r.code for r in d.reasons]) for d in quick] == [
        (d.plan, d.trigger, d.score, d.prediction, [r.code for r in d.reasons]) for d in whole
    ]
