"""Wishes of operators and of the LLM: they steer the solver, and never break a service."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.constraints import (
    AGAINST,
    Avoid,
    Bound,
    KeepPlan,
    KnobBound,
    Prefer,
    Rule,
    Shift,
    bias,
    faults_of,
    in_words,
    knob_within,
    shifted,
)
from policies.decide import Memory, decide
from policies.decision import Proposal
from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.score import Weights
from policies.snapshot import Snapshot
from policies.solve import candidates

READER = ServiceId("document-reader")
Demo = Callable[..., Snapshot]


def under(snapshot: Snapshot, *rules: Rule) -> Snapshot:
    view = msgspec.structs.replace(snapshot.services[READER], constraints=rules)
    return msgspec.structs.replace(snapshot, services={READER: view})


def best_of(snapshot: Snapshot) -> frozenset[AgentId]:
    plan = candidates(snapshot, READER)[0].plan
    return plan.agents() | {agent for stage in plan.stages for agent in stage.fallback}


def test_what_is_avoided_runs_nothing_not_even_as_a_fallback(demo: Demo) -> None:
    used = best_of(demo())
    for name in used:
        assert name not in best_of(under(demo(), Avoid(agent=name)))


def test_a_zone_can_be_avoided(demo: Demo, agent: Callable[..., AgentView]) -> None:
    agents = (
        agent("fast", "x86", zone="freezer"),
        agent("slow", "rk3588", zone="hall"),
        agent("cloud", "ray", zone="c"),
    )
    assert AgentId("fast") in best_of(demo(agents=agents))
    assert AgentId("fast") not in best_of(under(demo(agents=agents), Avoid(zone="freezer")))


def test_a_wish_that_leaves_no_plan_is_passed_over(demo: Demo, agent: Callable[..., AgentView]) -> None:
    agents = (agent("only", "x86"), agent("cloud", "ray"))
    strict = {"privacy": "raw-stays-on-edge"}
    assert best_of(under(demo(agents=agents, contract=strict), Avoid(agent=AgentId("only")))) == {AgentId("only")}


def test_a_preferred_agent_is_taken_where_the_score_hardly_suffers(demo: Demo, agent: Callable[..., AgentView]) -> None:
    agents = (agent("a", "rk3588"), agent("b", "rk3588"), agent("cloud", "ray"))
    free = {"contract": {"latency_p99_ms": 30_000, "throughput_rps": 0.05}, "agents": agents}
    for name in ("a", "b"):
        plan = candidates(under(demo(**free), Prefer(agent=AgentId(name))), READER)[0].plan
        assert plan.agents() == {AgentId(name)}


def test_a_stage_runs_only_the_variants_that_are_left(demo: Demo) -> None:
    rule = Bound(stage=StageName("recognise"), variants=(ModelName("rec-small"),))
    for entry in candidates(under(demo(), rule), READER):
        assert [stage.model for stage in entry.plan.stages if stage.stage == "recognise"] == ["rec-small"]


def test_of_wishes_that_contradict_each_other_the_first_one_counts(demo: Demo) -> None:
    stage = StageName("recognise")
    rules = [Bound(stage=stage, variants=(ModelName(name),)) for name in ("rec-small", "rec-base")]
    for entry in candidates(under(demo(), *rules), READER, 2):
        assert [each.model for each in entry.plan.stages if each.stage == stage] == ["rec-small"]


def test_a_running_plan_against_a_wish_is_left(demo: Demo) -> None:
    running = msgspec.structs.replace(candidates(demo(), READER)[0].plan, epoch=4)
    name = sorted(running.agents())[0]
    snapshot = under(demo(running=running), Avoid(agent=name))
    memory, decision = Memory(contract=snapshot.services[READER].contract), None
    for look in range(8):
        snapshot = msgspec.structs.replace(snapshot, now_ms=1_000_000.0 + 6_000.0 * look)
        decision, memory = decide(snapshot, READER, memory)
        if decision.plan is not None:
            break
    assert decision is not None
    assert decision.plan is not None
    assert name not in decision.plan.agents()


def test_keeping_holds_better_plans_back_but_not_the_loss_of_a_device(
    demo: Demo, agent: Callable[..., AgentView]
) -> None:
    snapshot = under(demo(), KeepPlan())
    worse = msgspec.structs.replace(candidates(demo(), READER)[-1].plan, epoch=2)
    held = msgspec.structs.replace(snapshot.services[READER], running=worse)
    snapshot = msgspec.structs.replace(snapshot, services={READER: held})
    wanted = Proposal(plan=candidates(demo(), READER)[0].plan, proposer="llm", trigger="better-plan")
    decision, _ = decide(snapshot, READER, Memory(contract=held.contract), trigger="operator", suggestion=wanted)
    assert decision.plan is None
    assert [reason.code for reason in decision.reasons] == ["pinned"]
    lost = sorted(worse.agents())[0]
    agents = dict(snapshot.fleet.agents)
    agents[lost] = msgspec.structs.replace(agents[lost], state="lost")
    snapshot = msgspec.structs.replace(snapshot, fleet=msgspec.structs.replace(snapshot.fleet, agents=agents))
    decision, _ = decide(snapshot, READER, Memory(contract=held.contract), trigger="agent-lost")
    assert decision.plan is not None


factors = st.floats(0.5, 1.5)


@given(a=factors, b=factors, c=factors, twice=st.booleans())
def test_shifted_weights_sum_to_one_and_stay_within_half(a: float, b: float, c: float, twice: bool) -> None:
    old = Weights()
    rules = [Shift(saturation=a, jitter=b, risk=c)] * (3 if twice else 1)
    new = shifted(old, rules)
    for name in ("saturation", "jitter", "risk"):
        assert 0.5 - 1e-9 <= getattr(new, name) / getattr(old, name) <= 1.5 + 1e-9
    assert new.saturation + new.jitter + new.risk == pytest.approx(1.0)


def test_of_bounds_of_a_knob_that_contradict_each_other_the_first_one_counts() -> None:
    rules = [KnobBound(knob="a.keep", low=0.5, high=0.8), KnobBound(knob="a.keep", low=0.9, high=1.0)]
    rules += [KnobBound(knob="b.keep", low=0.1, high=0.2), KnobBound(knob="a.keep", low=0.4, high=0.7)]
    assert [knob_within("a.keep", value, rules) for value in (0.1, 0.6, 1.0)] == [0.5, 0.6, 0.7]
    assert knob_within("c.keep", 0.3, rules) == 0.3


def test_without_wishes_nothing_is_added(demo: Demo) -> None:
    plan = candidates(demo(), READER)[0].plan
    agents = demo().fleet.agents
    assert bias(plan, (), agents) == 0.0
    assert shifted(Weights(), ()) == Weights()
    assert bias(plan, (Avoid(agent=sorted(plan.agents())[0]),), agents) == AGAINST


WRONG: dict[str, Rule] = {
    "nobody": Avoid(),
    "both": Prefer(agent=AgentId("rk-1"), zone="default"),
    "unknown agent": Avoid(agent=AgentId("rk-9")),
    "unknown zone": Avoid(zone="moon"),
    "unknown stage": Bound(stage=StageName("paint"), variants=(ModelName("rec-tiny"),)),
    "unknown variant": Bound(stage=StageName("recognise"), variants=(ModelName("gpt"),)),
    "no variant": Bound(stage=StageName("recognise"), variants=()),
    "too much": Shift(risk=1.6),
    "not a number": Shift(risk=float("nan")),
}


@pytest.mark.parametrize("case", WRONG)
def test_wishes_that_make_no_sense_say_why(demo: Demo, case: str) -> None:
    snapshot = demo()
    faults = faults_of(WRONG[case], snapshot.services[READER].spec, snapshot.fleet.agents)
    assert faults
    assert all(fault.endswith(".") for fault in faults)


def test_wishes_in_words() -> None:
    assert in_words(Avoid(agent=AgentId("rk-1"))) == "run nothing on rk-1"
    assert in_words(Prefer(zone="site-b")) == "prefer to run in zone site-b"
    assert in_words(Bound(stage=StageName("detect"), variants=(ModelName("x"), ModelName("y")))) == (
        "stage detect runs only x or y"
    )
    assert in_words(Shift(risk=1.5)) == "the risk of a late answer counts 1.5 times as much"
    assert in_words(KeepPlan()) == "keep the running plan unless a device is lost"
