"""What an ingress does by itself: relative to its plan, within its budget, and only where that keeps the promise better."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.hedging import Choice, Hedger, HedgeSettings
from policies.ids import AgentId
from policies.route_times import ShardTime, StageTime, WayTime

SLOW, SPARE = AgentId("slow"), AgentId("spare")
PROMISE_MS = 1000.0


def way(*agents: AgentId, run_ms: float = 100.0, link_ms: float = 10.0) -> WayTime:
    return WayTime(shards=tuple(ShardTime(agent=a, fixed_ms=0.0, per_item_ms=run_ms) for a in agents), link_ms=link_ms)


def stage(spare_ms: float = 200.0, rest_ms: float = 300.0) -> StageTime:
    return StageTime(lanes=(way(SLOW),), fallbacks={SPARE: way(SPARE, run_ms=spare_ms)}, rest_ms=rest_ms)


def choose(hedger: Hedger, stage: StageTime, *, now_ms: float = 0.0, spent_ms: float = 0.0, **more: object) -> Choice:
    return hedger.choose(now_ms, spent_ms, PROMISE_MS, stage, 0, 1.0, **more)  # type: ignore[arg-type]


def ran(hedger: Hedger, agent: AgentId, ms: float, times: int = 1, run_ms: float = 100.0) -> None:
    for _ in range(times):
        hedger.ended(hedger.sent(way(agent, run_ms=run_ms), 1.0, 0.0), [ms])


def test_a_lane_goes_where_it_is_planned_while_that_is_as_expected() -> None:
    hedger = Hedger()
    ran(hedger, SLOW, 103.0, times=20)
    choice = choose(hedger, stage())
    assert choice.first is None
    assert not choice.is_probe


def test_a_throttled_agent_is_avoided_after_a_run_or_two_and_looked_at_once_in_a_while() -> None:
    hedger = Hedger()
    ran(hedger, SLOW, 600.0, times=2)
    assert hedger.level(SLOW) > 4.0
    assert choose(hedger, stage(), now_ms=0.0) == Choice(second=SPARE, second_after_ms=0.0, is_probe=True)
    moved = choose(hedger, stage(), now_ms=10.0)
    assert (moved.first, moved.second) == (SPARE, None)
    assert moved.second_after_ms == pytest.approx(410.0), (
        "back to the plan if the spare is late: twice 200 ms, and the link"
    )
    assert choose(hedger, stage(), now_ms=900.0).first == SPARE
    assert choose(hedger, stage(), now_ms=1100.0).is_probe


def test_no_way_is_changed_for_one_that_is_hardly_quicker() -> None:
    hedger = Hedger()
    ran(hedger, SLOW, 800.0, times=5)
    assert choose(hedger, stage(spare_ms=750.0)).first is None


def test_levels_are_relative_to_the_plan() -> None:
    hedger = Hedger()
    ran(hedger, SLOW, 600.0, times=3)
    hedger.replanned()
    assert hedger.level(SLOW) == 1.0
    assert choose(hedger, stage()).first is None


def test_own_work_under_way_counts_as_waiting() -> None:
    """Six lanes of 100 ms before it: 710 ms there, 210 ms at the spare."""
    hedger = Hedger()
    for _ in range(6):
        hedger.sent(way(SLOW), 1.0, 0.0)
    assert choose(hedger, stage()).first == SPARE


def test_a_copy_starts_at_the_last_moment_at_which_it_keeps_the_promise() -> None:
    """1000 - 300 (rest) - 150 (15 % spare) - 210 (the spare's way) = 340 ms, and the run is not late before 210 ms."""
    choice = choose(Hedger(), stage())
    assert choice.second == SPARE
    assert choice.second_after_ms == pytest.approx(340.0)
    soon = choose(Hedger(), stage(), spent_ms=190.0)
    assert soon.second_after_ms == pytest.approx(210.0)


def test_an_agent_that_cannot_be_asked_is_neither_spare_nor_first() -> None:
    assert choose(Hedger(), stage(), usable=lambda agent: agent != SPARE) == Choice()
    assert choose(Hedger(), stage(), usable=lambda agent: agent != SLOW) == Choice(first=SPARE)


def test_without_fallbacks_there_is_nothing_to_choose() -> None:
    assert choose(Hedger(), StageTime(lanes=(way(SLOW),))) == Choice()


def test_copies_have_a_budget() -> None:
    """Three at once, then one per ten lanes."""
    hedger = Hedger(HedgeSettings(most_copies=3.0, copies_per_lane=0.1))
    assert [hedger.may_copy() for _ in range(5)] == [True, True, True, False, False]
    for _ in range(9):
        choose(hedger, stage())
    assert not hedger.may_copy()
    choose(hedger, stage())
    choose(hedger, stage())
    assert hedger.may_copy()


def test_a_spent_budget_stops_probes_too() -> None:
    """A probe without its copy would be a late request."""
    hedger = Hedger(HedgeSettings(most_copies=1.0, copies_per_lane=0.0))
    ran(hedger, SLOW, 900.0, times=3)
    assert choose(hedger, stage()).is_probe
    assert hedger.may_copy()
    assert choose(hedger, stage(), now_ms=5000.0).first == SPARE


def test_a_copy_that_has_no_answer_yet_says_how_slow_its_agent_is_at_least() -> None:
    hedger = Hedger()
    copy = hedger.sent(way(SLOW), 1.0, 1000.0)
    hedger.late(copy, 1050.0)
    assert hedger.level(SLOW) == 1.0
    hedger.late(copy, 1410.0)
    assert hedger.level(SLOW) == pytest.approx(1.0 + 0.6 * 3.0)


def test_waiting_behind_others_is_not_slowness() -> None:
    """Four came before it and three ended; one of its own length may be running."""
    hedger = Hedger()
    before = [hedger.sent(way(SLOW), 1.0, 0.0) for _ in range(4)]
    copy = hedger.sent(way(SLOW), 1.0, 0.0)
    for each in before[:3]:
        hedger.ended(each, [100.0])
    hedger.late(copy, 500.0)
    assert hedger.level(SLOW) == 1.0
    hedger.late(copy, 1000.0)
    assert hedger.level(SLOW) > 3.0


def test_a_copy_never_goes_where_its_lane_is() -> None:
    """A fallback that is the lane's own agent would stand in the same queue."""
    asked = StageTime(lanes=(way(SLOW), way(SPARE)), fallbacks={SLOW: way(SLOW), SPARE: way(SPARE)})
    assert [Hedger().choose(0.0, 0.0, PROMISE_MS, asked, lane, 1.0).second for lane in (0, 1)] == [SPARE, SLOW]


@pytest.mark.parametrize("ms", [math.nan, math.inf, -5.0, 1e300])
def test_a_peer_that_talks_nonsense_spoils_nothing_for_good(ms: float) -> None:
    hedger = Hedger()
    ran(hedger, SLOW, ms)
    assert 1.0 <= hedger.level(SLOW) <= 100.0
    ran(hedger, SLOW, 100.0, times=60)
    assert hedger.level(SLOW) < 1.1


def test_agents_of_older_plans_are_forgotten_once_nothing_is_under_way_there() -> None:
    hedger = Hedger()
    ran(hedger, SPARE, 300.0)
    copy = hedger.sent(way(SLOW), 1.0, 0.0)
    hedger.replanned()
    hedger.ended(copy, [400.0])
    assert (hedger.level(SPARE), hedger.level(SLOW)) == (1.0, pytest.approx(2.8))


def test_short_runs_say_less() -> None:
    short, long = Hedger(), Hedger()
    ran(short, SLOW, 4.0, run_ms=1.0)
    ran(long, SLOW, 400.0, run_ms=100.0)
    assert short.level(SLOW) < 1.2 < 2.5 < long.level(SLOW)


@given(st.lists(st.floats(0.1, 5000.0), min_size=1, max_size=50))
def test_a_level_stays_within_what_was_seen(runs: list[float]) -> None:
    hedger = Hedger()
    for ms in runs:
        ran(hedger, SLOW, ms)
    ratios = [1.0, *(ms / 100.0 for ms in runs)]
    assert min(ratios) - 1e-9 <= hedger.level(SLOW) <= max(ratios) + 1e-9


@given(
    st.floats(0, 3000),
    st.floats(0, 3000),
    st.floats(1, 2000),
    st.floats(1, 2000),
    st.floats(0, 1000),
    st.floats(0.2, 20),
)
def test_every_choice_can_be_carried_out(
    now_ms: float, spent_ms: float, run_ms: float, spare_ms: float, rest_ms: float, level: float
) -> None:
    """A lane never goes where it would take longer, and a copy never starts before its lane or where the lane is."""
    hedger = Hedger()
    ran(hedger, SLOW, 100.0 * level, times=8)
    asked = StageTime(
        lanes=(way(SLOW, run_ms=run_ms),), fallbacks={SPARE: way(SPARE, run_ms=spare_ms)}, rest_ms=rest_ms
    )
    choice = hedger.choose(now_ms, spent_ms, PROMISE_MS, asked, 0, 1.0)
    assert choice.second_after_ms >= 0.0
    assert choice.second != choice.first or math.isinf(choice.second_after_ms)
    if choice.first == SPARE:
        assert spare_ms < run_ms * hedger.level(SLOW)
