"""Plans for one plain objective, the least latency or the largest throughput, over chains of any number of agents.

The bridge between a snapshot and `policies.partition`: every ONNX stage is one work, with the most accurate variants that fit.
The solver asks here when layouts of one and two agents are not enough: nothing fits, or nothing carries the load.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from policies.costs import ProfileSums
from policies.fleet import AgentView
from policies.ids import ModelName
from policies.layouts import Terrain
from policies.limits import may_hold
from policies.partition import MAX_DEVICES, Objective, Route, Work
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.predict import Predictor
from policies.service import OnnxStage
from policies.sharing import best_routes


def plan_for(p: Predictor, agents: Sequence[AgentView], objective: Objective) -> Plan | None:
    """One lane per stage, without fallbacks and with epoch 0; None when no variants fit. At most `MAX_DEVICES` agents."""
    agents = agents[:MAX_DEVICES]
    terrain = Terrain.of(p.costs, agents, p.entry)
    free = np.array([float(p.room_bytes(a)) for a in agents])
    base = np.array([p.background[a.id].busy for a in agents])
    for models in _choices(p):
        works = [
            work_of(p, stage, model, terrain) for stage, model in zip(p.view.spec.onnx_stages(), models, strict=True)
        ]
        # In a hurry for throughput: something serves already, and this is asked at every look while the load is too high.
        routes = best_routes(works, free, objective, base, quick=objective == "throughput")
        if routes is not None:
            return _plan(p, models, routes, agents)
    return None


def work_of(p: Predictor, stage: OnnxStage, model: ModelName, terrain: Terrain) -> Work:
    """One stage as a chain to place, under the load that the service must carry."""
    sums, agents = p.costs.sums(model), terrain.agents
    items, overhead, count = p.costs.items(p.view, stage), p.settings.hop_overhead_ms, len(terrain.agents)
    cut, convert = items * sums.cut_bytes(stage.activations), items * sums.convert_times(stage.activations)
    cut[:-1] += cut[-1]  # answers come back along the chain
    fixed, per_item = terrain.times(sums)
    head = np.array([may_hold(a, p.view.contract, stage, sums.whole) for a in agents])
    tail = np.array([may_hold(a, p.view.contract, stage, Span(1, sums.whole.stop)) for a in agents])
    enter_busy = terrain.ms_per_byte[count] * cut[0]
    hop_busy = terrain.ms_per_byte[:count, :, None] * cut
    return Work(
        run=fixed + items * per_item,
        params=_params(sums),
        active=sums.model.activation_bytes * max(1.0, items),
        enter=np.where(head, terrain.rtt[count] + enter_busy + overhead, np.inf),
        hop=np.where(tail[None, :, None], terrain.rtt[:count, :, None] + hop_busy + convert + overhead, np.inf),
        enter_busy=enter_busy,
        hop_busy=hop_busy,
        rate=p.rate_rps / 1000.0,
    )


def _params(sums: ProfileSums) -> np.ndarray:
    return np.asarray(sums.param_bytes, dtype=np.float64)


def _choices(p: Predictor) -> list[tuple[ModelName, ...]]:
    """Variants of all stages: the most accurate, then the smallest that keep the accuracy floor together."""
    stages = p.view.spec.onnx_stages()

    def reached(stage: OnnxStage, model: ModelName) -> float:
        return stage.accuracy(p.costs.sums(model).model)

    accurate = [max(s.variants, key=functools.partial(reached, s)) for s in stages]
    floor = p.view.contract.accuracy_floor or 0.0
    small = list(accurate)
    for at, stage in enumerate(stages):
        others = float(np.prod([reached(s, m) for i, (s, m) in enumerate(zip(stages, small, strict=True)) if i != at]))
        enough = [m for m in stage.variants if reached(stage, m) * others >= floor - 1e-9]
        small[at] = min(enough or [small[at]], key=lambda m: float(p.costs.sums(m).param_bytes[-1]))
    kept = [
        c for c in (accurate, small) if np.prod([reached(s, m) for s, m in zip(stages, c, strict=True)]) >= floor - 1e-9
    ]
    return list(dict.fromkeys(tuple(choice) for choice in kept))


def _plan(p: Predictor, models: Sequence[ModelName], routes: Sequence[Route], agents: Sequence[AgentView]) -> Plan:
    stages = []
    for stage, model, route in zip(p.view.spec.onnx_stages(), models, routes, strict=True):
        hops = tuple((agents[d].id, Span(start, stop)) for d, start, stop in route)
        lane = make_lane(stage.name, model, None, WHOLE_AXIS, hops)
        stages.append(StagePlan(stage=stage.name, model=model, axis=None, lanes=(lane,)))
    return Plan(service_id=p.view.spec.id, epoch=0, stages=tuple(stages))
