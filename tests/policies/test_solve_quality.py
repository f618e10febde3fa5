"""The solver against all plans there are: on spaces small enough to predict every one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.worlds import SERVICE, random_world
from policies.fallbacks import Spares
from policies.fleet import AgentView
from policies.limits import accuracy_of, held_by, may_hold, memory_of, usable_bytes
from policies.plan import GRAIN, WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.predict import Predictor
from policies.score import score
from policies.service import ModelProfile, OnnxStage
from policies.snapshot import Snapshot
from policies.solve import candidates, usable_agents
from sla.errors import InfeasibleError

TIE = 0.01
"""Of two plans whose scores differ by less the solver takes the more accurate one."""


def ways(stage: OnnxStage, model: ModelProfile, agents: Sequence[AgentView], p: Predictor) -> Iterator[StagePlan]:
    """Every agent alone, every pair at every cut, and every split of the items over two agents."""
    contract, end = p.view.contract, len(model.blocks)
    whole, rest = Span(0, end), Span(1, end)
    heads = [a.id for a in agents if may_hold(a, contract, stage, whole)]
    tails = [a.id for a in agents if may_hold(a, contract, stage, rest)]
    chains = [((a, whole),) for a in heads]
    cuts = [((a, Span(0, c)), (b, Span(c, end))) for a in heads for b in tails if a != b for c in range(1, end)]
    for hops in [*chains, *cuts]:
        lane = make_lane(stage.name, model.name, None, WHOLE_AXIS, hops)
        yield StagePlan(stage=stage.name, model=model.name, axis=None, lanes=(lane,))
    items = round(stage.items)
    if stage.axis is None or model.split_axis is None:
        return
    for one, two in itertools.combinations(chains, 2):
        for count in range(1, items):
            at = -(-count * GRAIN // items)
            lanes = (
                make_lane(stage.name, model.name, stage.axis, Span(0, at), one),
                make_lane(stage.name, model.name, stage.axis, Span(at, GRAIN), two),
            )
            yield StagePlan(stage=stage.name, model=model.name, axis=stage.axis, lanes=lanes)


def legal(plan: Plan, p: Predictor, agents: Sequence[AgentView]) -> bool:
    if accuracy_of(p.costs, p.view, plan) < (p.view.contract.accuracy_floor or 0.0) - 1e-9:
        return False
    held = memory_of(held_by(p.costs, p.view, plan))
    room = {a.id: usable_bytes(a, p.settings) - p.foreign_memory.get(a.id, 0) for a in agents}
    return all(size <= room[agent] for agent, size in held.items())


def best_score(snapshot: Snapshot) -> float | None:
    """The lowest score of any legal plan, by predicting all of them."""
    p = Predictor(snapshot, SERVICE)
    try:
        agents = usable_agents(p)
    except InfeasibleError:
        return None
    per_stage = [
        [way for name in stage.variants for way in ways(stage, snapshot.models[name], agents, p)]
        for stage in p.view.spec.onnx_stages()
    ]
    spares = Spares(p, agents)
    plans = [Plan(service_id=SERVICE, epoch=0, stages=stages) for stages in itertools.product(*per_stage)]
    plans = [spares.complete(plan) for plan in plans if legal(plan, p, agents)]
    scores = [score(prediction, p.view.contract) for prediction in p.predict_all(plans)]
    return min(scores, default=None)


def small_worlds() -> Iterator[Snapshot]:
    """Nothing runs yet, so every legal plan can be loaded."""
    for seed in range(220):
        yield random_world(seed, devices=(1, 4), stages=(1, 1), blocks=(1, 6), runs=False)
    for seed in range(100):
        yield random_world(1_000 + seed, devices=(1, 3), stages=(2, 2), blocks=(1, 3), runs=False, variants=1, items=3)


def test_hardly_any_plan_is_better_than_what_the_solver_finds() -> None:
    gaps = []
    for snapshot in small_worlds():
        optimum = best_score(snapshot)
        try:
            found = candidates(snapshot, SERVICE, 1)[0].score
        except InfeasibleError:
            assert optimum is None
            continue
        if optimum is not None:  # Else only a chain of three fits, or three lanes.
            gaps.append(found - optimum)
    assert len(gaps) > 200
    assert float(np.quantile(gaps, 0.95)) <= TIE
    assert max(gaps) <= 2 * TIE
    assert float(np.mean(gaps)) <= 0.002
