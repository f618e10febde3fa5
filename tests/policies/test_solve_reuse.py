"""The solver's shortcuts change nothing: what it finds with less work is, bit for bit, what it finds with all of it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from benchmarks.worlds import SERVICE, random_world
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
