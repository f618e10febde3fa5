from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.admit import admit
from policies.decision import Proposal
from policies.fleet import AgentView
from policies.ids import AgentId, ServiceId
from policies.limits import usable_bytes
from policies.plan import GRAIN, WHOLE_AXIS, Plan, Span, StagePlan, cover_faults, items_of, make_lane
from policies.predict import Predictor
from policies.score import Scored
from policies.service import ModelProfile, OnnxStage, ServiceSpec
from policies.snapshot import Snapshot
from policies.solve import candidates
from sla.errors import InfeasibleError

READER = ServiceId("document-reader")
Demo = Callable[..., Snapshot]
RAW = {"detect", "recognise"}


def has_block_split(plan: Plan) -> bool:
    return any(len({shard.agent for shard in lane.shards}) > 1 for stage in plan.stages for lane in stage.lanes)


def has_patch_split(plan: Plan) -> bool:
    return any(
        stage.axis == "patch" and len({lane.shards[0].agent for lane in stage.lanes}) > 1 for stage in plan.stages
    )  # fmt: skip


def check(snapshot: Snapshot, found: list[Scored]) -> None:
    """What every candidate must satisfy."""
    view, agents = snapshot.services[READER], snapshot.fleet.agents
    p = Predictor(snapshot, READER)
    for entry in found:
        assert cover_faults(entry.plan, view.spec, snapshot.models) == []
        assert 0.0 <= entry.score <= 1.0
        for agent, size in entry.prediction.memory_bytes.items():
            assert size <= usable_bytes(agents[agent], p.settings)
        proposal = Proposal(plan=entry.plan, proposer="solver", trigger="start")
        assert admit(proposal, snapshot, READER, best=entry, predictor=p).plan == entry.plan
        for stage in entry.plan.stages:
            assert len(set(stage.fallback)) == len(stage.fallback) <= 2


def test_the_demo_is_split_along_blocks_and_along_patches(demo: Demo) -> None:
    """Default settings, default weights: lower saturation is what makes both splits worth while."""
    snapshot = demo()
    found = candidates(snapshot, READER)
    check(snapshot, found)
    best = found[0].plan
    assert has_block_split(best)
    assert has_patch_split(best)
    assert found[0].prediction.accuracy >= 0.9
    assert found[0].prediction.risk < 0.01
    assert len({entry.plan.layout() for entry in found}) == len(found)


def test_raw_data_stays_at_the_edge(demo: Demo) -> None:
    for entry in candidates(demo(), READER):
        for stage in entry.plan.stages:
            firsts = {shard.agent for lane in stage.lanes for shard in lane.shards if shard.blocks.start == 0}
            if stage.stage in RAW:
                assert "cloud" not in firsts | set(stage.fallback)


def test_a_bad_link_makes_the_raw_stages_leave_the_cloud(demo: Demo) -> None:
    bad = demo(cloud={"rtt_ms": 200.0, "jitter_ms": 80.0, "bandwidth_bytes_per_s": 0.3e6})
    best = candidates(bad, READER)[0]
    assert not any(s.agent == "cloud" for s in best.plan.shards() if s.stage in RAW)
    assert best.prediction.risk < 0.05
    assert has_block_split(best.plan) or has_patch_split(best.plan)


@pytest.mark.parametrize("victim", ["rk-1", "rk-2", "ascend", "imx", "cloud"])
def test_every_agent_can_be_done_without(demo: Demo, victim: str) -> None:
    snapshot = demo()
    agents = {k: v for k, v in snapshot.fleet.agents.items() if k != victim}
    snapshot = msgspec.structs.replace(snapshot, fleet=msgspec.structs.replace(snapshot.fleet, agents=agents))
    found = candidates(snapshot, READER, 3)
    check(snapshot, found)
    assert all(victim not in entry.plan.agents() for entry in found)


def test_no_single_failure_takes_a_lane_and_all_fallbacks(demo: Demo) -> None:
    for entry in candidates(demo(), READER):
        for stage in entry.plan.stages:
            in_lanes = {shard.agent for lane in stage.lanes for shard in lane.shards}
            for lost in in_lanes:
                assert set(stage.fallback) - {lost}, (stage.stage, stage.fallback)


@pytest.mark.parametrize("state", ["suspect", "lost", "draining"])
def test_only_live_agents_with_fresh_reports_are_used(demo: Demo, state: str) -> None:
    snapshot = demo()
    agents = dict(snapshot.fleet.agents)
    agents[AgentId("rk-1")] = msgspec.structs.replace(agents[AgentId("rk-1")], state=state)
    agents[AgentId("cloud")] = msgspec.structs.replace(agents[AgentId("cloud")], age_ms=5_001.0)
    snapshot = msgspec.structs.replace(snapshot, fleet=msgspec.structs.replace(snapshot.fleet, agents=agents))
    used = {
        a
        for e in candidates(snapshot, READER)
        for a in e.plan.agents() | {f for s in e.plan.stages for f in s.fallback}
    }
    assert used <= {"rk-2", "ascend", "imx"}


@pytest.fixture
def one_stage(demo: Demo, model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage]) -> Demo:
    """A service of one stage of 10 items, 10 ms each."""
    m = model("m", 10.0, 8_000_000, 200_000, 50_000, axis="patch")
    spec = ServiceSpec(id=READER, inputs=(), outputs=(), stages=(stage("s", "m", items=10.0, axis="patch"),))
    contract = {"accuracy_floor": None, "privacy": "any", "throughput_rps": 0.5, "latency_p99_ms": 400}

    def make(*agents: AgentView, **changes: object) -> Snapshot:
        wanted = {**contract, **changes.pop("contract", {})}  # type: ignore[dict-item]
        return demo(agents=agents, models={m.name: m}, spec=spec, contract=wanted, **changes)

    return make


def test_one_device_wins_when_the_others_would_only_slow_it_down(
    one_stage: Demo, agent: Callable[..., AgentView]
) -> None:
    """exo issue 489: nodes of 40 and 20 tokens/s joined give 24."""
    snapshot = one_stage(
        agent("fast", "x86"), agent("far", "ray", slowdown=2.0),
        cloud={"rtt_ms": 150.0, "jitter_ms": 30.0, "bandwidth_bytes_per_s": 2e6}, entry=AgentId("fast"),
    )  # fmt: skip
    assert candidates(snapshot, READER)[0].plan.agents() == {"fast"}


def test_everything_in_the_cloud_wins_when_the_edge_is_weak(one_stage: Demo, agent: Callable[..., AgentView]) -> None:
    snapshot = one_stage(agent("weak", "imx93", slowdown=300.0), agent("cloud", "ray"), entry=AgentId("weak"))
    assert candidates(snapshot, READER)[0].plan.agents() == {"cloud"}


def test_the_slow_device_is_left_out(one_stage: Demo, agent: Callable[..., AgentView]) -> None:
    snapshot = one_stage(agent("a", "x86"), agent("b", "x86"), agent("slow", "imx93", slowdown=80.0))
    assert candidates(snapshot, READER)[0].plan.agents() == {"a", "b"}


def test_shares_follow_speed(one_stage: Demo, agent: Callable[..., AgentView]) -> None:
    """Throughput is bound by the slowest part, so a device of twice the speed takes about twice the items.

    Shares of 0.6 and of 0.8 are looked at: with either the busier of both devices is 64 % busy.
    """
    snapshot = one_stage(agent("a", "x86"), agent("b", "x86", slowdown=2.0), contract={"throughput_rps": 8.0})
    best = candidates(snapshot, READER)[0].plan
    taken = {"a": 0.0, "b": 0.0}
    for lane in best.stages[0].lanes:
        for shard in lane.shards:
            taken[shard.agent] += len(lane.share) / GRAIN * len(shard.blocks) / 8
    assert taken["a"] == pytest.approx(2 / 3, abs=0.14)


def test_a_plan_that_fits_by_a_hair_is_refused(one_stage: Demo, agent: Callable[..., AgentView]) -> None:
    """exo PR 2227: what fits by 130 MB of 24 GB dies at warm-up."""
    hair = one_stage(agent("a", "x86", memory_budget_bytes=8_100_000))
    with pytest.raises(InfeasibleError, match=r"Memory binds: stage s needs 8 MB"):
        candidates(hair, READER)
    assert candidates(one_stage(agent("a", "x86", memory_budget_bytes=9_600_000)), READER)
    two = one_stage(
        agent("a", "x86", memory_budget_bytes=8_100_000), agent("b", "x86", memory_budget_bytes=8_100_000)
    )  # fmt: skip
    assert all(has_block_split(entry.plan) for entry in candidates(two, READER))


def test_a_device_that_others_overdraw_does_not_hide_the_rest(
    one_stage: Demo,
    agent: Callable[..., AgentView],
    model: Callable[..., ModelProfile],
    stage: Callable[..., OnnxStage],
) -> None:
    """Another service's plan takes more of one device than there is: nothing goes there, and the others serve as ever."""
    snapshot = one_stage(agent("full", "x86", memory_budget_bytes=4 << 20), agent("free", "x86", slowdown=3.0))
    big = model("big", 5.0, 80_000_000, 1_000, 1_000)
    other = ServiceId("other")
    spec = ServiceSpec(id=other, inputs=(), outputs=(), stages=(stage("o", "big"),))
    lane = make_lane(spec.onnx_stages()[0].name, big.name, None, WHOLE_AXIS, ((AgentId("full"), Span(0, 8)),))
    running = Plan(service_id=other, epoch=1, stages=(StagePlan(stage=lane.shards[0].stage, model=big.name, axis=None, lanes=(lane,)),))  # fmt: skip
    view = msgspec.structs.replace(snapshot.services[READER], spec=spec, running=running)
    snapshot = msgspec.structs.replace(
        snapshot, services={**snapshot.services, other: view}, models={**snapshot.models, big.name: big}
    )
    for entry in candidates(snapshot, READER):
        assert entry.plan.agents() == {"free"}


def test_the_more_accurate_variant_wins_a_tie(demo: Demo) -> None:
    idle = demo(contract={"throughput_rps": 0.05})
    assert candidates(idle, READER)[0].prediction.accuracy == 1.0
    models = {stage.model for stage in candidates(demo(), READER)[0].plan.stages}
    assert not models & {"det-tiny", "rec-tiny"}


@pytest.mark.parametrize(
    ("contract", "words"),
    [
        ({"accuracy_floor": 1.0, "zones": ["mars"]}, "zones"),
        ({"privacy": "raw-stays-on-edge"}, "cloud"),
        ({"privacy": "features-may-leave"}, "raw data"),
    ],
)
def test_infeasible_names_the_limit_that_binds(
    demo: Demo, agent: Callable[..., AgentView], contract: dict[str, object], words: str
) -> None:
    with pytest.raises(InfeasibleError, match=words):
        candidates(demo(agents=(agent("cloud", "ray"),), contract=contract), READER)


def test_an_accuracy_floor_that_no_variant_reaches(demo: Demo) -> None:
    models = {k: msgspec.structs.replace(m, accuracy=0.9 * m.accuracy) for k, m in demo().models.items()}
    with pytest.raises(InfeasibleError, match="accuracy floor"):
        candidates(demo(models=models), READER)


def test_nobody_there(demo: Demo, agent: Callable[..., AgentView]) -> None:
    with pytest.raises(InfeasibleError, match="no live agent"):
        candidates(demo(agents=(agent("a", "x86", state="lost"),)), READER)
    with pytest.raises(InfeasibleError, match="within 5 s"):
        candidates(demo(agents=(agent("a", "x86", age_ms=1e9),)), READER)


def test_many_agents_are_narrowed(demo: Demo, agent: Callable[..., AgentView]) -> None:
    crowd = (*tuple(agent(f"n{i:02}", "rk3588", slowdown=2.0 + i / 10) for i in range(40)), agent("cloud", "ray"))
    found = candidates(demo(agents=crowd), READER, 2)
    assert found[0].prediction.risk < 0.01


@st.composite
def fleets(draw: st.DrawFn) -> dict[str, object]:
    kinds = draw(st.lists(st.sampled_from(["rk3588", "ascend310p", "imx93", "ray", "x86"]), min_size=1, max_size=5))
    return {
        "kinds": kinds,
        "slow": draw(st.lists(st.floats(0.5, 20.0), min_size=5, max_size=5)),
        "memory_mb": draw(st.lists(st.integers(8, 400), min_size=5, max_size=5)),
        "contract": {
            "privacy": draw(st.sampled_from(["any", "features-may-leave", "raw-stays-on-edge"])),
            "throughput_rps": draw(st.floats(0.1, 20.0)),
            "latency_p99_ms": draw(st.floats(50.0, 5000.0)),
            "accuracy_floor": draw(st.sampled_from([None, 0.5, 0.9, 1.0])),
        },
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fleet=fleets())
def test_every_candidate_is_legal_on_every_fleet(
    demo: Demo, agent: Callable[..., AgentView], fleet: dict[str, list[object]]
) -> None:
    agents = tuple(
        agent(f"n{i}", kind, slowdown=fleet["slow"][i], memory_budget_bytes=fleet["memory_mb"][i] << 20)  # type: ignore[operator]
        for i, kind in enumerate(fleet["kinds"])
    )
    snapshot = demo(agents=agents, contract=fleet["contract"])
    try:
        found = candidates(snapshot, READER, 4)
    except InfeasibleError:
        return
    check(snapshot, found)


@given(
    ends=st.lists(st.integers(1, GRAIN - 1), max_size=6, unique=True).map(sorted),
    count=st.integers(0, 10_000),
)
def test_the_shares_of_a_tiling_give_a_tiling_of_the_items(ends: list[int], count: int) -> None:
    bounds = [0, *ends, GRAIN]
    spans = [items_of(Span(a, b), count) for a, b in itertools.pairwise(bounds)]
    assert spans[0].start == 0
    assert spans[-1].stop == count
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))


def test_three_devices_when_two_cannot_hold_it(one_stage: Demo, agent: Callable[..., AgentView]) -> None:
    """8 blocks of 1 MB on devices of 3.4 MB each: no chain of two fits, one of three does."""
    three = tuple(agent(name, "x86", memory_budget_bytes=4_000_000) for name in "abc")
    best = candidates(one_stage(*three), READER)[0]
    assert best.plan.agents() == {"a", "b", "c"}
    check(one_stage(*three), [best])


def test_a_long_chain_when_nothing_else_carries_the_load(
    demo: Demo, agent: Callable[..., AgentView], model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage]
) -> None:
    """100 ms of work that may not be split by items, at 35 requests/s: three and a half devices' worth."""
    m = model("m", 100.0, 8_000_000, 2_000, 2_000, blocks=12)
    spec = ServiceSpec(id=READER, inputs=(), outputs=(), stages=(stage("s", "m"),))
    contract = {"accuracy_floor": None, "privacy": "any", "throughput_rps": 35.0}
    four = tuple(agent(name, "x86", slowdown=1.0) for name in "abcd")
    best = candidates(demo(agents=four, models={m.name: m}, spec=spec, contract=contract), READER)[0]
    assert best.plan.agents() == {"a", "b", "c", "d"}
    assert best.prediction.throughput_rps > 35.0
