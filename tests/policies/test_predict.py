from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, file_key, items_of, make_lane, mean_items
from policies.predict import Predictor, availability_of, predict
from policies.service import ModelProfile, OnnxStage, ServiceSpec
from policies.snapshot import Snapshot, StageMeasure, measure_key
from policies.solve import candidates

READER = ServiceId("document-reader")
Demo = Callable[..., Snapshot]
Hops = tuple[tuple[str, int, int], ...]


def stage_plan(name: str, model: str, *lanes: Hops, axis: str | None = None, ends: tuple[int, ...] = (), fallback: tuple[str, ...] = ()) -> StagePlan:  # fmt: skip
    bounds = [0, *ends, 1000]
    shares = [Span(a, b) for a, b in itertools.pairwise(bounds)]
    made = tuple(
        make_lane(StageName(name), ModelName(model), axis, share if axis else WHOLE_AXIS,  # type: ignore[arg-type]
                  tuple((AgentId(a), Span(start, stop)) for a, start, stop in hops))
        for share, hops in zip(shares, lanes, strict=True)
    )  # fmt: skip
    return StagePlan(stage=StageName(name), model=ModelName(model), axis=axis, lanes=made,  # type: ignore[arg-type]
                     fallback=tuple(AgentId(a) for a in fallback))  # fmt: skip


@pytest.fixture
def tiny(demo: Demo, model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage], agent: Callable[..., AgentView]) -> Snapshot:  # fmt: skip
    """One stage of 10 items, 10 ms each, on two alike agents and a slow one."""
    m = model("m", 10.0, 8_000_000, 10_000, 50_000, axis="patch")
    spec = ServiceSpec(id=READER, inputs=(), outputs=(), stages=(stage("s", "m", items=10.0, axis="patch"),))
    agents = (agent("a", "x86"), agent("b", "x86"), agent("slow", "x86", slowdown=5.0))
    contract = {"accuracy_floor": None, "privacy": "any", "throughput_rps": 1.0, "latency_p99_ms": 1000}
    return demo(agents=agents, models={m.name: m}, spec=spec, contract=contract, entry=AgentId("a"))


def plan_of(*stages: StagePlan) -> Plan:
    return Plan(service_id=READER, epoch=1, stages=stages)


ALL_ON_A = plan_of(stage_plan("s", "m", (("a", 0, 8),)))
SPLIT = plan_of(stage_plan("s", "m", (("a", 0, 8),), (("b", 0, 8),), axis="patch", ends=(500,)))
CHAIN = plan_of(stage_plan("s", "m", (("a", 0, 4), ("b", 4, 8))))


def test_one_device_costs_its_run_time(tiny: Snapshot) -> None:
    p = predict(ALL_ON_A, tiny)
    assert p.mean_ms == pytest.approx(101.0 + 5.9, rel=0.03)  # run, overhead, wait at 10 %
    assert p.saturation == pytest.approx(0.1, rel=0.01)
    assert p.throughput_rps == pytest.approx(10.0, rel=0.01)
    assert p.jitter_ms == 0.0
    assert p.p50_ms < p.p95_ms < p.p99_ms
    assert p.bottleneck == "s on a: 10 % busy"


def test_lanes_run_side_by_side_and_chains_one_after_the_other(tiny: Snapshot) -> None:
    whole, split, chain = (predict(plan, tiny) for plan in (ALL_ON_A, SPLIT, CHAIN))
    assert split.mean_ms < 0.75 * whole.mean_ms
    assert split.throughput_rps == pytest.approx(2 * whole.throughput_rps, rel=0.01)
    assert chain.throughput_rps == pytest.approx(2 * whole.throughput_rps, rel=0.01)
    assert chain.mean_ms > whole.mean_ms - 5.0
    assert chain.jitter_ms > 0.0


def test_load_makes_queues_and_risk(tiny: Snapshot) -> None:
    view = tiny.services[READER]
    before = predict(ALL_ON_A, tiny)
    for rps in (3.0, 6.0, 9.0, 12.0):
        busy = msgspec.structs.replace(tiny, services={READER: msgspec.structs.replace(view, offered_rps=rps)})
        now = predict(ALL_ON_A, busy)
        assert now.p99_ms > before.p99_ms
        assert now.risk >= before.risk
        assert now.saturation >= before.saturation
        before = now
    assert before.risk > 0.8
    assert before.saturation == 1.0


def test_services_share_devices(tiny: Snapshot) -> None:
    other = msgspec.structs.replace(tiny.services[READER], running=ALL_ON_A, offered_rps=5.0)
    shared = msgspec.structs.replace(tiny, services={**tiny.services, ServiceId("other"): other})
    alone, beside = predict(ALL_ON_A, tiny), predict(ALL_ON_A, shared)
    assert beside.saturation == pytest.approx(alone.saturation + 0.5, rel=0.01)
    assert beside.p99_ms > alone.p99_ms
    assert beside.memory_bytes[AgentId("a")] == 2 * alone.memory_bytes[AgentId("a")]


def test_memory_counts_fallbacks_and_each_file_once(tiny: Snapshot) -> None:
    backed = plan_of(stage_plan("s", "m", (("a", 0, 8),), fallback=("b",)))
    p = predict(backed, tiny)
    assert p.memory_bytes == {AgentId("a"): 8_000_000, AgentId("b"): 8_000_000}
    assert p.move_bytes == 16_000_000
    view = msgspec.structs.replace(tiny.services[READER], running=ALL_ON_A)
    moved = predict(backed, msgspec.structs.replace(tiny, services={READER: view}))
    assert moved.move_bytes == 8_000_000


def test_what_an_agent_has_on_disk_is_only_loaded(tiny: Snapshot) -> None:
    cold = predict(ALL_ON_A, tiny)
    on_disk = msgspec.structs.replace(
        tiny.fleet.agents[AgentId("a")], warmed=frozenset({file_key(ModelName("m"), Span(0, 8))})
    )
    fleet = msgspec.structs.replace(tiny.fleet, agents={**tiny.fleet.agents, on_disk.id: on_disk})
    warm = predict(ALL_ON_A, msgspec.structs.replace(tiny, fleet=fleet))
    assert (cold.move_bytes, warm.move_bytes) == (8_000_000, 0)
    assert 0.0 < warm.move_ms < cold.move_ms


def measured(snapshot: Snapshot, plan: Plan, mean_ms: float, count: int, agent: str = "a", **view: object) -> Snapshot:
    measure = StageMeasure(count=count, mean_ms=mean_ms, std_ms=0.05 * mean_ms, items=10.0)
    changed = msgspec.structs.replace(
        snapshot.services[READER], running=plan, measures={measure_key("s", agent, 0, 8): measure}, **view
    )
    return msgspec.structs.replace(snapshot, services={READER: changed})


def test_measurements_win_as_samples_grow(tiny: Snapshot) -> None:
    guesses = [predict(ALL_ON_A, measured(tiny, ALL_ON_A, 200.0, count)).saturation for count in (1, 10, 100, 1000)]
    assert guesses == sorted(guesses)
    assert guesses[0] < 0.12
    assert guesses[-1] == pytest.approx(0.2, rel=0.1)


def test_an_agent_that_nobody_measured_does_not_look_better_for_it(tiny: Snapshot) -> None:
    slow_everywhere = measured(tiny, ALL_ON_A, 200.0, 500)
    on_b = plan_of(stage_plan("s", "m", (("b", 0, 8),)))
    here, there = predict(ALL_ON_A, slow_everywhere), predict(on_b, slow_everywhere)
    assert there.saturation > 0.85 * here.saturation


def test_old_measurements_fade(tiny: Snapshot) -> None:
    fresh = measured(tiny, ALL_ON_A, 200.0, 50)
    view = fresh.services[READER]
    aged = {key: msgspec.structs.replace(m, age_ms=1e6) for key, m in view.measures.items()}
    old = msgspec.structs.replace(fresh, services={READER: msgspec.structs.replace(view, measures=aged)})
    assert predict(ALL_ON_A, old).saturation == pytest.approx(predict(ALL_ON_A, tiny).saturation, rel=0.02)


def test_a_measured_p99_corrects_the_running_plan_most(tiny: Snapshot) -> None:
    seen = measured(tiny, ALL_ON_A, 100.0, 50, measured_p99_ms=400.0)
    plain = measured(tiny, ALL_ON_A, 100.0, 50)
    up_here = predict(ALL_ON_A, seen).p99_ms / predict(ALL_ON_A, plain).p99_ms
    up_there = predict(SPLIT, seen).p99_ms / predict(SPLIT, plain).p99_ms
    assert up_here > up_there > 1.1


def test_fallbacks_raise_availability(demo: Demo) -> None:
    agents = {a: msgspec.structs.replace(v, availability=0.9) for a, v in demo().fleet.agents.items()}
    bare = plan_of(stage_plan("s", "m", (("rk-1", 0, 8),)))
    backed = plan_of(stage_plan("s", "m", (("rk-1", 0, 8),), fallback=("rk-2",)))
    twice = plan_of(
        stage_plan("s", "m", (("rk-1", 0, 8),), fallback=("rk-2",)), stage_plan("t", "m", (("rk-1", 0, 8),), fallback=("rk-2",))
    )  # fmt: skip
    assert availability_of(bare, agents) == pytest.approx(0.9)
    assert availability_of(backed, agents) == pytest.approx(0.99)
    # The stages share their agents: they fail together, not independently (which would give 0.98).
    assert availability_of(twice, agents) == pytest.approx(0.99)


def test_a_plan_cut_over_a_slow_link_is_bound_by_it(demo: Demo) -> None:
    snapshot = demo(cloud={"bandwidth_bytes_per_s": 0.3e6})
    best = candidates(demo(), READER)[0].plan
    p = Predictor(snapshot, READER).predict(best)
    assert p.bottleneck.startswith("link ")
    assert p.throughput_rps < 0.8
    assert p.risk > 0.9


def test_the_running_plan_is_compared_at_the_load_at_which_it_was_measured(tiny: Snapshot) -> None:
    """A plan measured as the model says at a light load teaches no bias, whatever load is asked about."""
    view = msgspec.structs.replace(tiny.services[READER], running=ALL_ON_A, offered_rps=6.0)
    light = Predictor(tiny, READER, rate_rps=2.0).predict(ALL_ON_A)
    measured = msgspec.structs.replace(
        view, measured_p99_ms=light.p99_ms, measured_p50_ms=light.p50_ms, measured_requests=500, measured_rps=2.0
    )
    told = msgspec.structs.replace(tiny, services={READER: measured})
    plain = msgspec.structs.replace(tiny, services={READER: view})
    for plan in (ALL_ON_A, SPLIT):
        assert predict(plan, told).p99_ms == pytest.approx(predict(plan, plain).p99_ms, rel=0.01)


def test_a_slow_tail_of_the_running_plan_says_nothing_of_its_median(tiny: Snapshot) -> None:
    view = msgspec.structs.replace(tiny.services[READER], running=ALL_ON_A, offered_rps=2.0)
    now = Predictor(tiny, READER, rate_rps=2.0).predict(ALL_ON_A)
    seen = msgspec.structs.replace(
        view, measured_p99_ms=2.0 * now.p99_ms, measured_p50_ms=now.p50_ms, measured_requests=500
    )
    told = predict(ALL_ON_A, msgspec.structs.replace(tiny, services={READER: seen}))
    assert told.p50_ms == pytest.approx(now.p50_ms, rel=0.01)
    assert now.p95_ms < told.p95_ms < told.p99_ms
    assert told.p99_ms / now.p99_ms > told.p95_ms / now.p95_ms


def test_other_plans_inherit_what_is_off_at_the_median_and_few_requests_teach_little(tiny: Snapshot) -> None:
    view = msgspec.structs.replace(tiny.services[READER], running=ALL_ON_A, offered_rps=2.0)

    def p99(plan: Plan, requests: int) -> float:
        now = Predictor(tiny, READER, rate_rps=2.0).predict(ALL_ON_A)
        seen = msgspec.structs.replace(
            view, measured_p99_ms=2.0 * now.p99_ms, measured_p50_ms=now.p50_ms, measured_requests=requests
        )
        return predict(plan, msgspec.structs.replace(tiny, services={READER: seen})).p99_ms

    plain = msgspec.structs.replace(tiny, services={READER: view})
    assert p99(SPLIT, 500) == pytest.approx(predict(SPLIT, plain).p99_ms, rel=0.01)
    alone = predict(ALL_ON_A, plain).p99_ms
    assert alone < p99(ALL_ON_A, 10) < p99(ALL_ON_A, 500) < 2.0 * alone


def test_what_stages_send_over_one_link_waits_for_each_other(
    demo: Demo, model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage], agent: Callable[..., AgentView]
) -> None:
    """Pictures of 100 ms at 5 requests/s: whatever goes the same way waits 5 x 0.1^2 / (2 (1 - 0.5)) s for them, what comes back does not."""
    big, small = model("big", 0.1, 8_000, 10, 10_000_000), model("small", 0.1, 8_000, 10, 10)
    spec = ServiceSpec(id=READER, inputs=(), outputs=(), stages=(stage("s", "big"), stage("t", "small")))
    contract = {"accuracy_floor": None, "privacy": "any", "throughput_rps": 1.0, "latency_p99_ms": 1000}
    snapshot = demo(
        agents=(agent("a", "x86"), agent("b", "x86")), models={m.name: m for m in (big, small)}, spec=spec,
        contract=contract, entry=AgentId("a"),
    )  # fmt: skip
    both = plan_of(stage_plan("s", "big", (("b", 0, 8),)), stage_plan("t", "small", (("b", 0, 8),)))
    alone = plan_of(stage_plan("s", "big", (("b", 0, 8),)), stage_plan("t", "small", (("a", 0, 8),)))

    def waits_ms(plan: Plan) -> float:
        still, busy = (Predictor(snapshot, READER, rate_rps=rate).predict(plan) for rate in (0.001, 5.0))
        return busy.mean_ms - still.mean_ms

    assert waits_ms(alone) == pytest.approx(50.0, rel=0.05)
    assert waits_ms(both) == pytest.approx(100.0, rel=0.05)
    assert Predictor(snapshot, READER).predict(both).throughput_rps == pytest.approx(10.0, rel=0.01)


@given(ends=st.lists(st.integers(1, 999), max_size=4, unique=True), mean=st.floats(0.0, 60.0))
def test_items_of_a_share_are_whole_and_those_of_a_tiling_are_all(ends: list[int], mean: float) -> None:
    shares = [Span(a, b) for a, b in itertools.pairwise([0, *sorted(ends), 1000])]
    assert sum(mean_items(share, mean) for share in shares) == pytest.approx(mean, abs=1e-6)
    for share in shares:
        assert mean_items(share, float(round(mean))) == len(items_of(share, round(mean)))


def test_a_lane_is_predicted_for_the_whole_items_it_gets(tiny: Snapshot) -> None:
    """Of ten items a share of 0.48 holds four, as a share of 0.4 does."""
    uneven, even = (
        plan_of(stage_plan("s", "m", (("a", 0, 8),), (("b", 0, 8),), axis="patch", ends=(end,))) for end in (480, 400)
    )
    assert predict(uneven, tiny).mean_ms == pytest.approx(predict(even, tiny).mean_ms)
