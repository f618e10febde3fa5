"""What is learned over time: a model's error is told apart from an agent's, and a device that is throttled now is no model's error."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.learning import Learner
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.predict import predict
from policies.service import BlockTime, DeviceProfile, ModelProfile, OnnxStage, ServiceSpec
from policies.snapshot import Learned, Snapshot, StageMeasure, measure_key

READER = ServiceId("document-reader")
MODELS = {"a": 40.0, "b": 20.0}
AGENTS = ("x", "y")


@pytest.fixture
def two(demo: Callable[..., Snapshot], model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage], agent: Callable[..., AgentView]) -> Snapshot:  # fmt: skip
    """Two stages of one model each, on two agents of the same speed."""
    models = [model(name, ms, 1_000_000, 1000, 1000) for name, ms in MODELS.items()]
    spec = ServiceSpec(id=READER, inputs=(), outputs=(), stages=tuple(stage(f"s{m.name}", m.name) for m in models))
    contract = {"accuracy_floor": None, "privacy": "any", "throughput_rps": 0.1, "latency_p99_ms": 1000}
    agents = tuple(agent(name, "x86") for name in AGENTS)
    return demo(agents=agents, models={m.name: m for m in models}, spec=spec, contract=contract, entry=AgentId("x"))


def _plan(places: dict[str, str]) -> Plan:
    stages = tuple(
        StagePlan(
            stage=StageName(f"s{name}"), model=ModelName(name), axis=None,
            lanes=(make_lane(StageName(f"s{name}"), ModelName(name), None, WHOLE_AXIS, ((AgentId(at), Span(0, 8)),)),),
        )
        for name, at in places.items()
    )  # fmt: skip
    return Plan(service_id=READER, epoch=1, stages=stages)


def _running(snapshot: Snapshot, places: dict[str, str], off: Callable[[str, str], float], count: int = 60) -> Snapshot:
    """The snapshot while a plan runs whose runs take `off(model, agent)` times the profile."""
    measures = {
        measure_key(f"s{name}", at, 0, 8): StageMeasure(
            count=count, mean_ms=MODELS[name] * off(name, at), std_ms=0.05 * MODELS[name] * off(name, at), items=1.0
        )
        for name, at in places.items()
    }
    view = msgspec.structs.replace(snapshot.services[READER], running=_plan(places), measures=measures)
    return msgspec.structs.replace(snapshot, services={READER: view})


def _taught(snapshot: Snapshot, off: Callable[[str, str], float], *plans: dict[str, str]) -> Learned:
    learner = Learner()
    for places in plans:
        for _ in range(20):
            seen = msgspec.structs.replace(_running(snapshot, places, off), learned=learner.learned())
            learner.see(seen, 5.0)
    return learner.learned()


def test_what_was_learned_over_one_profile_is_not_added_to_a_better_one(two: Snapshot) -> None:
    """The roofline was off by 1.6; then the type of device is profiled, and the profile is right."""
    device = msgspec.structs.replace(two.fleet.agents[AgentId("x")], device_type="x86-1")
    fleet = msgspec.structs.replace(two.fleet, agents={**two.fleet.agents, device.id: device})
    two = msgspec.structs.replace(two, fleet=fleet)
    learner = Learner()
    for _ in range(60):
        seen = msgspec.structs.replace(_running(two, {"a": "x", "b": "y"}, lambda *_: 1.6), learned=learner.learned())
        learner.see(seen, 5.0)
    assert learner.learned().models[ModelName("a")] > 0.2
    blocks = tuple(
        BlockTime(fixed_ms=1.6 * b.fixed_ms, per_item_ms=1.6 * b.per_item_ms) for b in two.models[ModelName("a")].blocks
    )
    profile = DeviceProfile(
        device_type="x86-1", blocks=blocks, provider="CPU", agent="x", measured_at_s=0.0, runs=3, spread=0.0
    )
    seen = _running(two, {"a": "x", "b": "y"}, lambda *_: 1.6)
    seen = msgspec.structs.replace(
        seen, device_profiles={ModelName("a"): {"x86-1": profile}}, learned=learner.learned()
    )
    learner.see(seen, 5.0)
    assert abs(learner.learned().models[ModelName("a")]) < 0.02


ROUND = ({"a": "x", "b": "y"}, {"a": "y", "b": "x"})


def test_a_profile_that_is_off_is_corrected_on_agents_where_the_model_never_ran(two: Snapshot) -> None:
    def off(name: str, _: str) -> float:
        return 1.5 if name == "a" else 0.8

    learned = _taught(two, off, {"a": "x", "b": "x"})
    assert learned.models[ModelName("a")] > 0.1 > -0.1 > learned.models[ModelName("b")] - 0.2
    elsewhere = predict(_plan({"a": "y", "b": "y"}), msgspec.structs.replace(two, learned=learned))
    blind = predict(_plan({"a": "y", "b": "y"}), two)
    truth = 1.5 * MODELS["a"] + 0.8 * MODELS["b"]
    assert abs(elsewhere.mean_ms - blind.mean_ms - (truth - sum(MODELS.values()))) < abs(truth - sum(MODELS.values()))


def test_models_and_agents_are_told_apart_once_both_ran_everywhere(two: Snapshot) -> None:
    def off(name: str, at: str) -> float:
        return (1.5 if name == "a" else 1.0) * (1.3 if at == "y" else 1.0)

    learned = _taught(two, off, *ROUND)
    apart = learned.models[ModelName("a")] - learned.models[ModelName("b")]
    assert apart == pytest.approx(math.log(1.5), abs=0.05)


def test_a_device_that_throttles_is_hardly_taken_for_a_models_error(two: Snapshot) -> None:
    learner = Learner()
    for looks, slow in ((100, 1.0), (6, 2.0)):
        for at in range(looks):
            places = ROUND[at % 2]
            seen = _running(two, places, lambda _, agent, slow=slow: slow if agent == "y" else 1.0)  # type: ignore[misc]
            learner.see(msgspec.structs.replace(seen, learned=learner.learned()), 5.0)
    assert all(abs(ratio) < 0.05 for ratio in learner.learned().models.values())


def test_the_variation_of_runs_is_learned_and_few_runs_teach_nothing(two: Snapshot) -> None:
    learner = Learner()
    learner.see(_running(two, ROUND[0], lambda _, __: 3.0, count=2), 5.0)
    assert learner.learned() == Learned()
    learned = _taught(two, lambda _, __: 1.0, *ROUND)
    assert learned.run_variation == pytest.approx(0.05, abs=0.02)
    steady = predict(_plan(ROUND[0]), msgspec.structs.replace(two, learned=learned))
    assert steady.p99_ms < predict(_plan(ROUND[0]), two).p99_ms
