"""The simulator's world for a plan that really ran: the same devices, links, arrivals, and times as they were measured."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from benchmarks.live_records import Load, Trial
from policies.costs import CostModel
from policies.fleet import AgentView
from policies.ids import AgentId, ModelName
from policies.latency import Floats
from policies.plan import GRAIN, StagePlan
from policies.scenario import Link, Scenario, World
from policies.scenario import Load as ScenarioLoad
from policies.service import BlockProfile, ModelProfile, OnnxStage, PythonStage
from policies.simulate import Choice, Simulation, SimulationSettings
from policies.snapshot import ServiceView, Snapshot


def simulated(trial: Trial, load: Load, seed: int = 3) -> Floats:
    """Latencies (ms) of the same requests in the simulator."""
    snapshot = trial.seen_after()
    view = snapshot.services[trial.service]
    entry = CostModel(snapshot).entry(view)
    assert entry is not None
    settings = SimulationSettings(look_every_s=1e9, entry=entry)
    world = _world(trial, load, snapshot, view, entry, seed)
    sim = Simulation(world, lambda _s, _w: Choice(plan=trial.plan), seed, settings)
    sim.run()
    return np.array([ms for _, ms in sorted(sim.tally.done)])


def _world(trial: Trial, load: Load, snapshot: Snapshot, view: ServiceView, entry: AgentId, seed: int) -> World:
    rng, costs, agents = np.random.default_rng(seed), CostModel(snapshot), snapshot.fleet.agents
    seconds = math.ceil(load.seconds) + 60
    far = next((a for a in agents.values() if a.is_cloud), None)
    lan = _lan(snapshot)
    up = lan if far is None else _link(snapshot, entry, far.id)
    stages = tuple(
        msgspec.structs.replace(stage, typical_ms=costs.python_ms(view, stage, entry) / agents[entry].slowdown)
        if isinstance(stage, PythonStage)
        else stage
        for stage in view.spec.stages
    )
    scenario = Scenario(
        name="live", seconds=seconds, devices=(), stages=(), contract={}, load=ScenarioLoad(rps=1.0), lan=lan, uplink=up
    )
    zeros = {agent: np.zeros(seconds) for agent in agents}
    return World(
        scenario=scenario, spec=msgspec.structs.replace(view.spec, stages=stages), contract=view.contract,
        models={**snapshot.models, **_as_measured(trial, costs, view)}, agents=agents,
        arrivals_ms=np.array(load.due_ms),
        rtt_ms=np.maximum(0.1, rng.normal(up.rtt_ms, up.jitter_ms, seconds)),
        bytes_per_s=np.full(seconds, up.mbit_per_s * 125e3), down=np.zeros(seconds, dtype=np.bool_),
        slow={agent: np.ones(seconds) for agent in agents}, busy=zeros,
        lost={agent: np.zeros(seconds, dtype=np.bool_) for agent in agents},
    )  # fmt: skip


def _as_measured(trial: Trial, costs: CostModel, view: ServiceView) -> dict[ModelName, ModelProfile]:
    """The plan's models with their blocks' times scaled to what their shards took."""
    specs = {stage.name: stage for stage in view.spec.onnx_stages()}
    return {
        planned.model: _scaled(costs.sums(planned.model).model, _factor(planned, specs[planned.stage], costs, view))
        for planned in trial.plan.stages
    }


def _factor(planned: StagePlan, stage: OnnxStage, costs: CostModel, view: ServiceView) -> float:
    sums, items = costs.sums(planned.model), costs.items(view, stage)
    took = nominal = 0.0
    for lane in planned.lanes:
        share = items * len(lane.share) / GRAIN
        for shard in lane.shards:
            took += costs.run_ms(planned.stage, planned.model, shard.agent, shard.blocks, share)
            nominal += sums.run_ms(shard.blocks, share) * _slowdown(costs.agents, shard.agent)
    return took / max(nominal, 1e-9)


def _slowdown(agents: dict[AgentId, AgentView], agent: AgentId) -> float:
    return agents[agent].slowdown


def _scaled(model: ModelProfile, factor: float) -> ModelProfile:
    def slower(block: BlockProfile) -> BlockProfile:
        return msgspec.structs.replace(
            block, fixed_ms=factor * block.fixed_ms, per_item_ms=factor * block.per_item_ms
        )  # fmt: skip

    return msgspec.structs.replace(model, blocks=tuple(slower(block) for block in model.blocks))


def _lan(snapshot: Snapshot) -> Link:
    near = [a.id for a in snapshot.fleet.agents.values() if not a.is_cloud]
    links = [snapshot.fleet.link(a, b) for a in near for b in near if a != b]
    return Link(
        rtt_ms=float(np.mean([link.rtt_ms for link in links])),
        jitter_ms=float(np.mean([link.jitter_ms for link in links])),
        mbit_per_s=float(np.mean([link.bandwidth_bytes_per_s for link in links])) / 125e3,
    )


def _link(snapshot: Snapshot, src: AgentId, dst: AgentId) -> Link:
    link = snapshot.fleet.link(src, dst)
    return Link(rtt_ms=link.rtt_ms, jitter_ms=link.jitter_ms, mbit_per_s=link.bandwidth_bytes_per_s / 125e3)
