from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from policies.beliefs import CautionSettings
from policies.decide import DecideSettings, Keep, Memory, StabilitySettings, decide, propose
from policies.decision import Decision, Proposal
from policies.fleet import AgentView
from policies.ids import AgentId, ServiceId
from policies.plan import Plan
from policies.snapshot import Snapshot
from policies.solve import candidates
from policies.stability import budget_price, calm_dwell_ms, saw_risk
from sla.contract import contract_from
from sla.errors import SettingsError

READER = ServiceId("document-reader")
Demo = Callable[..., Snapshot]
LOOK_MS = 1_000.0
DEGRADED = {"rtt_ms": 200.0, "jitter_ms": 80.0, "bandwidth_bytes_per_s": 0.3e6}


class World:
    """Steps one service through looks; time is advanced, plans take effect at once."""

    def __init__(self, snapshot: Snapshot, settings: DecideSettings | None = None) -> None:
        self.snapshot = snapshot
        self.memory = Memory()
        self.settings = settings or DecideSettings()
        self.moves: list[Decision] = []

    @property
    def running(self) -> Plan | None:
        return self.snapshot.services[READER].running

    def look(self, **options: object) -> Decision:
        decision, self.memory = decide(self.snapshot, READER, self.memory, settings=self.settings, **options)  # type: ignore[arg-type]
        if decision.plan is not None:
            self.moves.append(decision)
            self.change_view(running=decision.plan)
        self.snapshot = msgspec.structs.replace(self.snapshot, now_ms=self.snapshot.now_ms + LOOK_MS)
        return decision

    def wait(self, ms: float) -> None:
        self.snapshot = msgspec.structs.replace(self.snapshot, now_ms=self.snapshot.now_ms + ms)

    def looks(self, count: int) -> list[Decision]:
        return [self.look() for _ in range(count)]

    def change_view(self, **changes: object) -> None:
        view = msgspec.structs.replace(self.snapshot.services[READER], **changes)
        self.snapshot = msgspec.structs.replace(self.snapshot, services={READER: view})

    def change_agent(self, name: str, **changes: object) -> None:
        agents = dict(self.snapshot.fleet.agents)
        agents[AgentId(name)] = msgspec.structs.replace(agents[AgentId(name)], **changes)
        fleet = msgspec.structs.replace(self.snapshot.fleet, agents=agents)
        self.snapshot = msgspec.structs.replace(self.snapshot, fleet=fleet)

    def change_cloud_links(self, demo: Demo, **cloud: float) -> None:
        fleet = msgspec.structs.replace(self.snapshot.fleet, links=demo(cloud=cloud).fleet.links)
        self.snapshot = msgspec.structs.replace(self.snapshot, fleet=fleet)


@pytest.fixture
def world(demo: Demo) -> World:
    """The demo with its first plan running for a minute."""
    world = World(demo())
    world.looks(2)
    world.wait(60_000.0)
    world.looks(2)
    return world


def codes(decision: Decision) -> set[str]:
    return {reason.code for reason in decision.reasons}


def test_the_first_plan_goes_at_once_and_then_nothing_moves(world: World) -> None:
    assert len(world.moves) == 1
    first = world.moves[0]
    assert first.trigger == "contract"
    assert first.plan is not None
    assert first.plan.epoch == 1
    assert "first-plan" in codes(first)
    assert "predicted p99" in first.sentence()


def test_losing_an_agent_replans_in_the_same_look(world: World) -> None:
    assert world.running is not None
    victim = sorted(world.running.agents())[0]
    world.change_agent(victim, state="lost")
    decision = world.look()
    assert decision.plan is not None
    assert decision.trigger == "agent-lost"
    assert victim not in decision.plan.agents()
    assert all(victim not in stage.fallback for stage in decision.plan.stages)
    assert decision.plan.epoch == 2


def test_the_loss_of_a_device_is_bound_neither_by_pins_nor_by_dwell_nor_by_budget(demo: Demo) -> None:
    settings = DecideSettings(stability=StabilitySettings(moves_per_hour=1, dwell_ms=3_600_000.0))
    world = World(demo(), settings)
    world.look()
    world.change_view(pinned=True)
    for _ in range(2):
        assert world.running is not None
        victim = sorted(a for a in world.running.agents() if a != "cloud")[0]
        world.change_agent(victim, state="lost")
        assert world.look().trigger == "agent-lost"
    assert len(world.moves) == 3


def test_a_degraded_link_moves_the_raw_stages_off_the_cloud_after_a_few_looks(world: World, demo: Demo) -> None:
    assert world.running is not None
    assert "cloud" in world.running.agents()
    world.change_cloud_links(demo, **DEGRADED)
    seen = world.looks(5)
    assert seen[0].plan is None
    assert "not-agreed" in codes(seen[0])
    moves = [d for d in seen if d.plan is not None]
    assert len(moves) == 1
    assert moves[0].trigger == "link"
    raw = {"detect", "recognise"}
    assert moves[0].plan is not None
    assert not any(s.agent == "cloud" for s in moves[0].plan.shards() if s.stage in raw)


def test_one_noisy_look_moves_nothing(world: World, demo: Demo) -> None:
    before = world.running
    world.change_cloud_links(demo, **DEGRADED)
    world.look()
    world.change_cloud_links(demo)
    world.looks(60)
    assert world.running == before


def test_a_link_that_is_bad_again_and_again_is_left_once_and_not_taken_back_between(world: World, demo: Demo) -> None:
    before = len(world.moves)
    for _ in range(20):
        world.change_cloud_links(demo, **DEGRADED)
        world.looks(2)
        world.change_cloud_links(demo)
        world.looks(10)
    assert len(world.moves) == before + 1
    world.wait(400_000.0)
    world.looks(60)
    assert len(world.moves) == before + 2, "after five good minutes it is trusted again"


def test_stale_numbers_never_justify_a_move(world: World, demo: Demo) -> None:
    world.change_cloud_links(demo, **DEGRADED)
    world.change_agent("cloud", age_ms=6_000.0)
    for decision in world.looks(10):
        assert decision.plan is None
        assert codes(decision) == {"stale"}


def test_moving_is_bounded_by_the_flap_budget(demo: Demo) -> None:
    eager = StabilitySettings(moves_per_hour=3, budget_price=0.0, min_gain=0.012, min_gain_share=0.1)
    world = World(demo(), DecideSettings(stability=eager, caution=CautionSettings(window_ms=0.0)))
    world.look()
    for turn in range(8):
        world.change_cloud_links(demo, **(DEGRADED if turn % 2 == 0 else {}))
        world.wait(60_000.0)
        world.looks(5)
    assert len(world.moves) == 1 + 3
    assert "flap-budget" in codes(world.look())


def test_a_better_plan_waits_for_agreement_and_dwell(demo: Demo, agent: Callable[..., AgentView]) -> None:
    edge = tuple(a for a in demo().fleet.agents.values() if not a.is_cloud)
    world = World(demo(agents=edge))
    world.look()
    joined = demo()
    world.snapshot = msgspec.structs.replace(world.snapshot, fleet=joined.fleet)
    seen = world.looks(28)
    at = next(i for i, decision in enumerate(seen) if decision.plan is not None)
    assert at * LOOK_MS >= StabilitySettings().dwell_ms
    assert seen[at].trigger == "better-plan"
    assert "dwell" in set().union(*(codes(decision) for decision in seen[:at]))
    assert sum(decision.plan is not None for decision in seen) == 1


def test_a_pinned_plan_stays(world: World, demo: Demo) -> None:
    world.change_view(pinned=True)
    world.change_cloud_links(demo, **DEGRADED)
    assert all(codes(decision) == {"pinned"} for decision in world.looks(5))


def test_a_changed_contract_moves_at_once_if_that_helps(world: World) -> None:
    view = world.snapshot.services[READER]
    same = contract_from({**view.contract.model_dump(), "latency_p99_ms": 3900})
    world.change_view(contract=same)
    assert world.look().plan is None
    strict = contract_from({**view.contract.model_dump(), "privacy": "raw-stays-on-edge"})
    world.change_view(contract=strict)
    decision = world.look()
    assert decision.trigger == "contract"
    assert decision.plan is not None
    assert "cloud" not in decision.plan.agents()


def test_lost_fallbacks_are_replaced_and_the_lanes_stay(world: World) -> None:
    assert world.running is not None
    lanes = {stage.stage: stage.lanes for stage in world.running.stages}
    spare = AgentId("spare")
    only = [msgspec.structs.replace(s, fallback=(spare,)) for s in world.running.stages]
    world.change_view(running=msgspec.structs.replace(world.running, stages=tuple(only)))
    decision = world.look()
    assert decision.trigger == "agent-lost"
    assert decision.plan is not None
    assert {stage.stage: stage.lanes for stage in decision.plan.stages} == lanes
    assert all(stage.fallback and spare not in stage.fallback for stage in decision.plan.stages)


def test_with_no_agent_left_it_holds_and_says_why(world: World) -> None:
    for name in list(world.snapshot.fleet.agents):
        world.change_agent(name, state="lost")
    decision = world.look()
    assert decision.plan is None
    assert codes(decision) >= {"agent-lost", "no-candidate"}


def test_an_advice_to_keep_holds_back_merely_better_plans_only(world: World, demo: Demo) -> None:
    edge = tuple(a for a in demo().fleet.agents.values() if not a.is_cloud)
    calm = World(demo(agents=edge))
    calm.look()
    calm.snapshot = msgspec.structs.replace(calm.snapshot, fleet=demo().fleet)
    calm.look(suggestion=Keep(rationale="shift change"))
    assert all(decision.plan is None for decision in calm.looks(30))
    calm.wait(30_000.0)
    assert any(decision.plan is not None for decision in calm.looks(5))
    world.look(suggestion=Keep())
    world.change_cloud_links(demo, **DEGRADED)
    assert any(decision.plan is not None for decision in world.looks(5))


def test_a_refused_suggestion_is_noted_and_the_solver_goes_on(world: World, demo: Demo) -> None:
    ghost = propose(world.snapshot, READER)
    stages = tuple(msgspec.structs.replace(s, fallback=(AgentId("A99"),)) for s in ghost.plan.stages)
    bad = Proposal(plan=msgspec.structs.replace(ghost.plan, stages=stages), proposer="llm", trigger="better-plan")
    world.change_cloud_links(demo, **DEGRADED)
    decision = world.look(suggestion=bad)
    assert "unknown-agent" in codes(decision)
    assert any(d.proposer == "solver" and d.plan is not None for d in world.looks(5))


def test_an_admitted_suggestion_becomes_the_favourite(world: World, demo: Demo) -> None:
    world.change_cloud_links(demo, **DEGRADED)
    options = candidates(world.snapshot, READER)
    second = next(o for o in options[1:] if o.score <= options[0].score + 0.01)
    advice = Proposal(plan=second.plan, proposer="llm", trigger="better-plan", rationale="spreads the load")
    world.look(suggestion=advice)
    moves = [d for d in world.looks(5) if d.plan is not None]
    assert [m.proposer for m in moves] == ["llm"]
    assert moves[0].plan is not None
    assert moves[0].plan.layout() == second.plan.layout()


@pytest.mark.parametrize(
    "wrong", [{"risk_leave": 0.4}, {"looks": 0}, {"min_gain": 0.001}, {"pay_back_ms": 0.0}, {"dwell_ms": -1.0}]
)
def test_settings_that_must_oscillate_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        StabilitySettings(**wrong)  # type: ignore[arg-type]


def test_a_plan_whose_score_rises_is_at_risk_until_half_of_the_rise_is_gone() -> None:
    settings = StabilitySettings(worsened=0.05)
    memory = saw_risk(Memory(), risk=0.0, score=0.10, settings=settings)
    assert not memory.is_risky
    memory = saw_risk(memory, risk=0.0, score=0.08, settings=settings)
    assert not saw_risk(memory, risk=0.0, score=0.12, settings=settings).is_risky
    memory = saw_risk(memory, risk=0.0, score=0.14, settings=settings)
    assert memory.is_risky
    memory = saw_risk(memory, risk=0.0, score=0.11, settings=settings)
    assert memory.is_risky, "the threshold to leave is lower than the one to enter"
    assert not saw_risk(memory, risk=0.0, score=0.10, settings=settings).is_risky


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"risky_looks": 5}, "held longer"),
        ({"risky_dwell_ms": 30_000.0}, "held longer"),
        ({"worsened": 0.005}, "noise"),
        ({"min_gain": 0.001}, "replace each other"),
        ({"risk_leave": 0.4}, "changes its mind"),
    ],
)
def test_settings_that_must_oscillate_are_refused_with_the_reason(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        StabilitySettings(**wrong)  # type: ignore[arg-type]


def test_a_look_back_longer_than_the_delay_is_refused() -> None:
    with pytest.raises(SettingsError, match="one before"):
        DecideSettings(stability=StabilitySettings(risky_dwell_ms=1_000.0))


def test_where_the_world_goes_back_and_forth_going_back_waits_longer_each_time() -> None:
    settings = StabilitySettings(dwell_ms=20_000.0, free_moves=2, max_dwell_ms=300_000.0)
    waits = [calm_dwell_ms(Memory(moves_ms=(0.0,) * n), 1_000.0, settings) for n in range(8)]
    assert waits == [20_000.0, 20_000.0, 20_000.0, 40_000.0, 80_000.0, 160_000.0, 300_000.0, 300_000.0]
    assert calm_dwell_ms(Memory(moves_ms=(0.0,) * 8), 3_700_000.0, settings) == 20_000.0


def test_every_move_makes_the_next_one_of_the_hour_dearer_and_an_hour_later_it_is_free_again() -> None:
    settings = StabilitySettings(moves_per_hour=4, budget_price=0.08)
    prices = [budget_price(Memory(moves_ms=(0.0,) * n), 1_000.0, settings) for n in range(5)]
    assert prices == pytest.approx([0.0, 0.005, 0.02, 0.045, 0.08])
    assert budget_price(Memory(moves_ms=(0.0,) * 4), 3_700_000.0, settings) == 0.0


def test_moves_to_merely_better_plans_leave_the_rest_of_the_budget_to_plans_at_risk(demo: Demo) -> None:
    calm = StabilitySettings(calm_moves_per_hour=0)
    edge = tuple(a for a in demo().fleet.agents.values() if not a.is_cloud)
    world = World(demo(agents=edge), DecideSettings(stability=calm))
    world.look()
    world.snapshot = msgspec.structs.replace(world.snapshot, fleet=demo().fleet)
    seen = world.looks(40)
    assert all(decision.plan is None for decision in seen)
    assert "flap-budget" in codes(seen[-1])


@hypothesis_settings(max_examples=5, deadline=None)
@given(bad=st.lists(st.booleans(), min_size=12, max_size=24), budget=st.integers(1, 6))
def test_whatever_the_link_does_the_hour_sees_no_more_moves_than_allowed(
    demo: Demo, bad: list[bool], budget: int
) -> None:
    world = World(demo(), DecideSettings(stability=StabilitySettings(moves_per_hour=budget)))
    world.look()
    for is_bad in bad:
        world.change_cloud_links(demo, **(DEGRADED if is_bad else {}))
        world.wait(9_000.0)
        world.looks(3)
    assert len(world.moves) - 1 <= budget


def test_a_memory_that_was_logged_before_beliefs_existed_is_read() -> None:
    old = msgspec.json.decode(msgspec.json.encode(Memory(looks=2)))
    del old["beliefs"]
    assert msgspec.convert(old, Memory) == Memory(looks=2)
