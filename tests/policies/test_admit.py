from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from policies.admit import admit
from policies.decision import Decision, Proposal
from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, ServiceId
from policies.plan import Plan, Span, StagePlan, make_lane
from policies.snapshot import Snapshot
from policies.solve import candidates
from sla.errors import NotFoundError

READER = ServiceId("document-reader")
Demo = Callable[..., Snapshot]


@pytest.fixture(scope="module")
def good_plans() -> dict[str, Plan]:
    return {}


@pytest.fixture
def good(demo: Demo, good_plans: dict[str, Plan]) -> Plan:
    if "demo" not in good_plans:
        good_plans["demo"] = candidates(demo(), READER)[0].plan
    return good_plans["demo"]


def judged(plan: Plan, snapshot: Snapshot, **options: object) -> Decision:
    proposal = Proposal(plan=plan, proposer="llm", trigger="better-plan", rationale="because")
    return admit(proposal, snapshot, READER, **options)  # type: ignore[arg-type]


def codes(decision: Decision) -> set[str]:
    assert decision.plan is None
    return {reason.code for reason in decision.reasons}


def with_stage(plan: Plan, name: str, **changes: object) -> Plan:
    stages = tuple(msgspec.structs.replace(s, **changes) if s.stage == name else s for s in plan.stages)
    return msgspec.structs.replace(plan, stages=stages)


def on(stage: StagePlan, agent: str, blocks: int = 8) -> dict[str, object]:
    lane = make_lane(stage.stage, stage.model, None, Span(0, 1000), ((AgentId(agent), Span(0, blocks)),))
    return {"axis": None, "lanes": (lane,)}


def stage_of(plan: Plan, name: str) -> StagePlan:
    return next(stage for stage in plan.stages if stage.stage == name)


def change_agent(snapshot: Snapshot, name: str, **changes: object) -> Snapshot:
    agents = dict(snapshot.fleet.agents)
    agents[AgentId(name)] = msgspec.structs.replace(agents[AgentId(name)], **changes)
    return msgspec.structs.replace(snapshot, fleet=msgspec.structs.replace(snapshot.fleet, agents=agents))


def test_a_good_plan_is_admitted_with_prediction_score_and_reason(demo: Demo, good: Plan) -> None:
    decision = judged(good, demo())
    assert decision.plan == good
    assert decision.prediction is not None
    assert decision.score is not None
    assert decision.rationale == "because"
    assert decision.reasons[0].code == "better"


def test_holes_and_overlaps_are_refused(demo: Demo, good: Plan) -> None:
    recognise = stage_of(good, "recognise")
    assert codes(judged(msgspec.structs.replace(good, stages=good.stages[:-1]), demo())) == {"cover"}
    assert codes(judged(with_stage(good, "recognise", **on(recognise, "ascend", 7)), demo())) == {"cover"}
    assert codes(judged(with_stage(good, "recognise", lanes=recognise.lanes * 2), demo())) == {"cover"}
    assert codes(judged(with_stage(good, "recognise", model=ModelName("det-small")), demo())) == {"cover"}


def test_what_does_not_exist_is_refused(demo: Demo, good: Plan) -> None:
    detect = stage_of(good, "detect")
    assert codes(judged(with_stage(good, "detect", **on(detect, "A99")), demo())) == {"unknown-agent"}
    assert codes(judged(with_stage(good, "detect", fallback=(AgentId("A99"),)), demo())) == {"unknown-agent"}
    with pytest.raises(NotFoundError):
        admit(Proposal(plan=good, proposer="llm", trigger="risk"), demo(), ServiceId("nobody"))


def test_malformed_plans_are_refused(demo: Demo, good: Plan) -> None:
    elsewhere = msgspec.structs.replace(good, service_id=ServiceId("other"))
    doubled = msgspec.structs.replace(good, stages=(*good.stages, good.stages[0]))
    crowded = with_stage(good, "detect", fallback=tuple(AgentId(f"a{i}") for i in range(9)))
    for plan in (elsewhere, doubled, crowded):
        assert codes(judged(plan, demo())) == {"malformed"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"state": "lost"}, "agent-not-live"), ({"state": "suspect"}, "agent-not-live"), ({"age_ms": 9e3}, "stale")],
)
def test_dead_and_silent_agents_are_refused(demo: Demo, good: Plan, changes: dict[str, object], code: str) -> None:
    name = sorted(good.agents())[0]
    assert codes(judged(good, change_agent(demo(), name, **changes))) == {code}


def test_stale_links_justify_no_move_but_do_not_block_an_emergency(demo: Demo, good: Plan) -> None:
    old = demo(cloud={"age_ms": 60_000.0})
    assert codes(judged(good, old)) == {"stale"}
    urgent = Proposal(plan=good, proposer="solver", trigger="agent-lost")
    assert admit(urgent, old, READER).plan == good


def test_privacy_is_law_for_shards_and_for_fallbacks(demo: Demo, good: Plan) -> None:
    detect = stage_of(good, "detect")
    assert codes(judged(with_stage(good, "detect", **on(detect, "cloud")), demo())) == {"privacy"}
    assert codes(judged(with_stage(good, "detect", fallback=(AgentId("cloud"),)), demo())) == {"privacy"}
    assert codes(judged(good, demo(contract={"privacy": "raw-stays-on-edge"}))) == {"privacy"}
    open_to_all = demo(contract={"privacy": "any"})
    assert judged(with_stage(good, "detect", **on(detect, "cloud")), open_to_all).plan is not None


def test_zones_are_law(demo: Demo, good: Plan) -> None:
    assert codes(judged(good, demo(contract={"zones": ["elsewhere"]}))) == {"zone"}


def test_the_accuracy_floor_is_law(demo: Demo, good: Plan) -> None:
    tiny = with_stage(good, "detect", model=ModelName("det-tiny"), axis=None)
    lanes = make_lane(
        stage_of(good, "detect").stage, ModelName("det-tiny"), None, Span(0, 1000), ((AgentId("ascend"), Span(0, 8)),)
    )
    tiny = with_stage(tiny, "detect", lanes=(lanes,))
    assert codes(judged(tiny, demo())) == {"accuracy"}


def test_memory_keeps_its_headroom(demo: Demo, good: Plan) -> None:
    name = sorted(good.agents())[0]
    needed = judged(good, demo()).prediction
    assert needed is not None
    exact = needed.memory_bytes[AgentId(name)]
    assert codes(judged(good, change_agent(demo(), name, memory_budget_bytes=int(exact * 1.05)))) == {"memory"}
    assert judged(good, change_agent(demo(), name, memory_budget_bytes=int(exact * 1.2))).plan == good


def test_promises_that_cannot_be_kept_are_refused_with_what_could_be(demo: Demo, good: Plan) -> None:
    heavy = judged(good, demo(contract={"throughput_rps": 50.0}))
    assert codes(heavy) == {"throughput"}
    assert "would be feasible" in heavy.reasons[0].text
    hasty = judged(good, demo(contract={"latency_p99_ms": 100.0}))
    assert codes(hasty) == {"risk"}
    assert "would be feasible" in hasty.reasons[0].text


def test_the_best_plan_runs_even_if_it_falls_short_and_says_so(demo: Demo) -> None:
    overloaded = demo(contract={"throughput_rps": 50.0})
    best = candidates(overloaded, READER)[0]
    decision = judged(best.plan, overloaded, best=best)
    assert decision.plan == best.plan
    assert {"throughput"} <= {reason.code for reason in decision.reasons}


def test_a_proposal_may_not_be_much_worse_than_the_solver(demo: Demo, good: Plan) -> None:
    best = candidates(demo(), READER)[0]
    worse = good
    for name in ("orientation", "detect", "recognise", "embed"):
        model = demo().models[stage_of(good, name).model]
        worse = with_stage(worse, name, **on(stage_of(good, name), "rk-1", len(model.blocks)))
    relaxed = demo(contract={"latency_p99_ms": 60_000.0, "throughput_rps": 0.6})
    assert codes(judged(worse, relaxed, best=best)) == {"score-worse"}
    assert judged(worse, relaxed).plan == worse


def test_reasons_are_bounded(demo: Demo, good: Plan, agent: Callable[..., AgentView]) -> None:
    far = with_stage(good, "detect", fallback=tuple(AgentId(f"x{i}") for i in range(4)))
    for stage in good.stages:
        far = with_stage(far, stage.stage, fallback=tuple(AgentId(f"{stage.stage}{i}") for i in range(4)))
    assert len(judged(far, demo()).reasons) <= 8
