"""What went wrong in planners of peers, as they reported it, put before ours: from a snapshot to the decision.

The linear core's own cases are in `test_partition`, those about one device, slow devices and memory by a hair in `test_solve`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from policies.costs import PredictSettings
from policies.decide import Memory, decide
from policies.fleet import AgentView
from policies.ids import AgentId, ServiceId
from policies.limits import usable_bytes
from policies.objectives import plan_for
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.predict import Predictor
from policies.service import BlockProfile, ModelProfile, OnnxStage, ServiceSpec
from policies.snapshot import Snapshot
from policies.solve import candidates

READER = ServiceId("document-reader")
Demo = Callable[..., Snapshot]
Maker = Callable[..., AgentView]
FREE = {"accuracy_floor": None, "privacy": "any"}


def one_model(stage: Callable[..., OnnxStage], model: ModelProfile) -> dict[str, object]:
    return {
        "models": {model.name: model},
        "spec": ServiceSpec(id=READER, inputs=(), outputs=(), stages=(stage("s", model.name),)),
    }


def on(agent: str, model: ModelProfile, *, epoch: int = 3) -> Plan:
    """All of the only stage on one agent."""
    lane = make_lane("s", model.name, None, WHOLE_AXIS, ((AgentId(agent), Span(0, len(model.blocks))),))  # type: ignore[arg-type]
    return Plan(
        service_id=READER, epoch=epoch, stages=(StagePlan(stage="s", model=model.name, axis=None, lanes=(lane,)),)  # type: ignore[arg-type]
    )  # fmt: skip


def test_five_machines_and_forty_layers(
    demo: Demo, agent: Maker, model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage]
) -> None:
    """exo issue 957: split by free memory the slowest of five machines takes 34.88 ms; by measured speed 29.07 ms."""
    layers = model("m", 40.0, 40, 0, 0, blocks=40)
    slow, room = [3.6993, 2.907, 3.3, 2.8, 5.807], [7, 12, 8, 10, 6]
    machines = tuple(
        agent(f"m{at}", "x86", slowdown=each, memory_budget_bytes=layers_held)
        for at, (each, layers_held) in enumerate(zip(slow, room, strict=True))
    )
    snapshot = demo(agents=machines, contract={**FREE, "throughput_rps": 1.0}, **one_model(stage, layers))
    links = {
        key: msgspec.structs.replace(link, rtt_ms=0.0, bandwidth_bytes_per_s=1e15)
        for key, link in snapshot.fleet.links.items()
    }
    snapshot = msgspec.structs.replace(snapshot, fleet=msgspec.structs.replace(snapshot.fleet, links=links))
    p = Predictor(snapshot, READER, PredictSettings(memory_headroom=0.0, hop_overhead_ms=0.0))

    def stages_ms(plan: Plan | None) -> list[float]:
        assert plan is not None
        return [slow[int(s.agent[1:])] * len(s.blocks) for s in plan.shards()]

    throughput = stages_ms(plan_for(p, machines, "throughput"))
    latency = stages_ms(plan_for(p, machines, "latency"))
    assert max(throughput) == pytest.approx(29.07, abs=0.005)
    assert sum(throughput) == pytest.approx(138.4, abs=0.05)
    assert max(latency) == pytest.approx(34.88, abs=0.005)
    assert sum(latency) == pytest.approx(132.6, abs=0.05)


def test_nodes_that_are_gone_block_nobody(demo: Demo, agent: Maker) -> None:
    """exo issue 2194: gone nodes kept blocking placement for ten minutes."""
    gone = tuple(agent(f"gone{i:02}", "x86", state="lost", slowdown=0.1) for i in range(30))
    snapshot = demo(agents=(*gone, agent("here", "x86"), agent("there", "rk3588")))
    running = candidates(demo(agents=(agent("gone00", "x86"), agent("here", "x86"))), READER)[0].plan
    view = msgspec.structs.replace(snapshot.services[READER], running=msgspec.structs.replace(running, epoch=4))
    snapshot = msgspec.structs.replace(snapshot, services={READER: view})
    decision, _ = decide(snapshot, READER, Memory())
    assert decision.plan is not None
    assert decision.plan.agents() <= {"here", "there"}


def test_silent_numbers_move_nothing_and_floors_hold(demo: Demo) -> None:
    """ai-dynamo/dynamo PR 14575 and llm-d-autoscaling PR 385: with no data the minimum was skipped, or stale data drove scaling."""
    running = msgspec.structs.replace(candidates(demo(), READER)[0].plan, epoch=4)
    silent = demo(running=running)
    agents = {k: msgspec.structs.replace(a, age_ms=1e6, cpu_saturation=1.0) for k, a in silent.fleet.agents.items()}
    silent = msgspec.structs.replace(silent, fleet=msgspec.structs.replace(silent.fleet, agents=agents))
    memory = Memory()
    for _ in range(20):
        decision, memory = decide(silent, READER, memory)
        assert decision.plan is None
        silent = msgspec.structs.replace(silent, now_ms=silent.now_ms + 5_000.0)


def test_the_price_of_a_move_is_what_must_be_pushed_and_loaded(
    demo: Demo, agent: Maker, model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage]
) -> None:
    """ggml-org/llama.cpp issue 25890: loading takes minutes, from the cache none of it crosses the network."""
    big = model("m", 10.0, 535_000_000, 1_000, 1_000)
    pair = tuple(agent(name, "x86") for name in "ab")
    made = one_model(stage, big)
    snapshot = demo(agents=pair, contract=FREE, running=on("a", big), **made)
    p = Predictor(snapshot, READER)
    stay, go = p.predict(on("a", big, epoch=4)), p.predict(on("b", big, epoch=4))
    assert (stay.move_bytes, stay.move_ms) == (0, 0.0)
    assert go.move_bytes == sum(block.param_bytes for block in big.blocks)
    assert go.move_ms > 20_000.0


def test_a_plan_that_cannot_be_loaded_beside_the_running_one_gives_way_to_one_that_can(
    demo: Demo, agent: Maker, model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage]
) -> None:
    """ai-dynamo/dynamo issue 12428: a rebalance exceeded the budget half way and was then stuck."""
    m = model("m", 20.0, 8_000_000, 1_000, 1_000)
    three = tuple(agent(name, "x86", memory_budget_bytes=11_000_000) for name in "abc")
    snapshot = demo(agents=three, contract={**FREE, "throughput_rps": 30.0}, running=on("a", m), **one_model(stage, m))
    p = Predictor(snapshot, READER)
    for entry in candidates(snapshot, READER):
        wanted = p.moving_memory(entry.plan)
        assert all(wanted[a.id] <= usable_bytes(a, p.settings) for a in three if a.id in entry.prediction.memory_bytes)


def test_a_device_whose_accelerator_is_not_used_is_priced_as_what_it_is(
    demo: Demo, agent: Maker, model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage]
) -> None:
    """microsoft/onnxruntime issue 22229: the provider is asked for, all runs on the CPU. The slowdown is what was measured."""
    m = model("m", 100.0, 8_000_000, 1_000, 1_000)
    asked = (agent("fell-back", "ascend310p", slowdown=30.0), agent("plain", "x86"))
    assert candidates(demo(agents=asked, contract=FREE, **one_model(stage, m)), READER)[0].plan.agents() == {"plain"}


def test_memory_decides_between_fast_and_roomy_devices(
    demo: Demo, agent: Maker, stage: Callable[..., OnnxStage]
) -> None:
    """Forty quick devices that can hold next to nothing do not crowd out the few that can hold the model."""
    rng = np.random.default_rng(7)
    blocks = tuple(
        BlockProfile(name=f"b{at}", fixed_ms=float(rng.uniform(0.5, 2.0)), per_item_ms=0.0, param_bytes=4_000_000, cut_bytes_per_item=50_000)
        for at in range(12)
    )  # fmt: skip
    m = ModelProfile(name="m", sha256="0" * 64, input_bytes_per_item=100_000, blocks=blocks)  # type: ignore[arg-type]
    quick = tuple(agent(f"quick{i:02}", "x86", memory_budget_bytes=2_000_000) for i in range(40))
    roomy = tuple(agent(f"roomy{i}", "rk3588", slowdown=4.0) for i in range(3))
    found = candidates(demo(agents=(*quick, *roomy), contract=FREE, **one_model(stage, m)), READER)
    assert len(found) > 1
    assert all(name.startswith("roomy") for entry in found for name in entry.plan.agents())
    assert all(stage.fallback for entry in found for stage in entry.plan.stages)
