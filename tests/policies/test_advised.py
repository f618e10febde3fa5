"""What the LLM wishes on its own counts only while it costs next to nothing; whatever it wishes."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from policies.admit import SCORE_TOLERANCE
from policies.advised import Heeded, heed, with_rules
from policies.constraints import Avoid, Bound, KeepPlan, Prefer, Rule, Shift
from policies.decide import DecideSettings, Memory, decide
from policies.decision import Decision, Proposal, Reason
from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.predict import Predictor
from policies.score import Weights, score
from policies.snapshot import Snapshot
from policies.solve import candidates

READER = ServiceId("document-reader")
Demo = Callable[..., Snapshot]


def advised(snapshot: Snapshot, *rules: Rule) -> Snapshot:
    view = msgspec.structs.replace(snapshot.services[READER], advised=rules)
    return msgspec.structs.replace(snapshot, services={READER: view})


def heeded(snapshot: Snapshot) -> Heeded:
    s = DecideSettings()
    return heed(snapshot, READER, weights=s.weights, tolerance=s.score_tolerance, limit=s.candidates)


def decided(snapshot: Snapshot, looks: int = 8) -> Decision:
    """The first move within some looks, or the last hold."""
    memory = Memory(contract=snapshot.services[READER].contract)
    for look in range(looks):
        snapshot = msgspec.structs.replace(snapshot, now_ms=1_000_000.0 + 6_000.0 * look)
        decision, memory = decide(snapshot, READER, memory, trigger="better-plan")
        if decision.plan is not None:
            break
    return decision


@pytest.fixture
def twins(agent: Callable[..., AgentView]) -> tuple[AgentView, ...]:
    """Two devices that are alike: to avoid one of them costs nothing."""
    return (agent("left", "x86"), agent("right", "x86"))


def test_a_wish_that_costs_nothing_is_kept_to(demo: Demo, twins: tuple[AgentView, ...]) -> None:
    easy = {"agents": twins, "contract": {"latency_p99_ms": 30_000, "throughput_rps": 0.05}}
    running = msgspec.structs.replace(candidates(demo(**easy), READER)[0].plan, epoch=3)
    there = sorted(running.agents())[0]
    snapshot = advised(demo(**easy, running=running), Avoid(agent=there))
    assert heeded(snapshot).rules == (Avoid(agent=there),)
    decision = decided(snapshot)
    assert decision.plan is not None
    assert there not in decision.plan.agents()
    assert decision.reasons[-1] == Reason(code="wished", text=f"the LLM wished: run nothing on {there}")


@pytest.fixture
def uneven(agent: Callable[..., AgentView]) -> dict[str, object]:
    """One device that everything needs, and one that alone would miss the contract."""
    return {
        "agents": (agent("fast", "x86"), agent("slow", "rk3588", slowdown=6.0)),
        "contract": {"latency_p99_ms": 1500},
    }


def test_a_wish_that_costs_more_than_the_tolerance_does_not_count(demo: Demo, uneven: dict[str, object]) -> None:
    running = msgspec.structs.replace(candidates(demo(**uneven), READER)[0].plan, epoch=3)
    snapshot = advised(demo(**uneven, running=running), Avoid(agent=AgentId("fast")))
    assert heeded(snapshot).rules == ()
    decision = decided(snapshot, looks=2)
    assert decision.plan is None
    assert [reason.code for reason in decision.reasons][-1] == "score-worse"
    assert "does not count" in decision.reasons[-1].text


def test_keeping_counts_while_the_running_plan_is_about_as_good(demo: Demo, uneven: dict[str, object]) -> None:
    near = msgspec.structs.replace(candidates(demo(**uneven), READER)[0].plan, epoch=3)
    assert heeded(advised(demo(**uneven, running=near), KeepPlan())).rules == (KeepPlan(),)
    worse = candidates(demo(**uneven, constraints=(Avoid(agent=AgentId("fast")),)), READER)[0].plan
    snapshot = advised(demo(**uneven, running=msgspec.structs.replace(worse, epoch=3)), KeepPlan())
    assert heeded(snapshot).rules == ()
    assert decided(snapshot).plan is not None


def test_staying_on_a_bad_plan_cannot_be_made_to_look_good(demo: Demo, uneven: dict[str, object]) -> None:
    worse = candidates(demo(**uneven, constraints=(Avoid(agent=AgentId("fast")),)), READER)[0].plan
    running = msgspec.structs.replace(worse, epoch=3)
    flattering = [Prefer(agent=AgentId("slow"))] * 8
    assert decided(advised(demo(**uneven, running=running), *flattering)).plan is not None


def test_what_was_found_holds_for_a_while_where_nothing_moves(demo: Demo, uneven: dict[str, object]) -> None:
    running = msgspec.structs.replace(candidates(demo(**uneven), READER)[0].plan, epoch=3)
    snapshot = advised(demo(**uneven, running=running), KeepPlan())
    memory = Memory(contract=snapshot.services[READER].contract)
    found = []
    for at_ms in (0.0, 4_000.0, 20_000.0):
        decision, memory = decide(msgspec.structs.replace(snapshot, now_ms=at_ms), READER, memory)
        assert decision.plan is None
        assert memory.heeded is not None
        found.append(memory.heeded.at_ms)
    assert found == [0.0, 0.0, 20_000.0]
    assert not memory.heeded.holds(advised(snapshot, Shift(risk=1.5)), READER)


def test_nothing_urgent_waits_for_wishes(demo: Demo) -> None:
    running = msgspec.structs.replace(candidates(demo(), READER)[0].plan, epoch=3)
    there = sorted(running.agents())[0]
    snapshot = advised(demo(running=running), Prefer(agent=there))
    agents = dict(snapshot.fleet.agents)
    agents[there] = msgspec.structs.replace(agents[there], state="lost")
    lost = msgspec.structs.replace(snapshot, fleet=msgspec.structs.replace(snapshot.fleet, agents=agents))
    assert heeded(lost) == Heeded()
    assert heeded(advised(demo(), Prefer(agent=there))) == Heeded()
    assert decided(lost, looks=1).plan is not None


def free_score(snapshot: Snapshot, plan: object) -> float:
    p = Predictor(advised(snapshot), READER)
    return score(p.predict(plan), p.view.contract, Weights())  # type: ignore[arg-type]


def hostile(chance: random.Random, agents: list[AgentId]) -> Rule:
    match chance.randrange(5):
        case 0:
            return Avoid(agent=chance.choice(agents))
        case 1:
            return Prefer(agent=chance.choice(agents))
        case 2:
            return Bound(stage=StageName("recognise"), variants=(ModelName(chance.choice(("rec-base", "rec-small"))),))
        case 3:
            return Shift(**{name: chance.choice((0.5, 1.0, 1.5)) for name in ("risk", "jitter", "saturation")})
        case _:
            return KeepPlan()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_it_wishes_a_move_costs_at_most_the_tolerance(
    demo: Demo, agent: Callable[..., AgentView], uneven: dict[str, object], seed: int
) -> None:
    chance = random.Random(seed)
    found = candidates(demo(**uneven), READER)
    running = msgspec.structs.replace(chance.choice(found).plan, epoch=3)
    plain = demo(**uneven, running=running)
    free = candidates(plain, READER)[0].score
    wishes = tuple(hostile(chance, sorted(plain.fleet.agents)) for _ in range(chance.randint(1, 6)))
    wanted = Proposal(plan=chance.choice(found).plan, proposer="llm", trigger="better-plan")
    memory = Memory(contract=plain.services[READER].contract, favourite=wanted.plan, looks=9, favourite_of="llm")
    decision, _ = decide(advised(plain, *wishes), READER, memory, suggestion=wanted, trigger="operator")
    if decision.plan is not None:
        assert free_score(plain, decision.plan) <= free + SCORE_TOLERANCE + 1e-6


def test_rules_are_added_to_what_persons_confirmed(demo: Demo) -> None:
    snapshot = demo(constraints=(KeepPlan(),))
    assert with_rules(snapshot, READER, ()) is snapshot
    assert with_rules(snapshot, READER, (Shift(risk=1.5),)).services[READER].constraints == (
        KeepPlan(),
        Shift(risk=1.5),
    )
