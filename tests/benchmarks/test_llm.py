"""The goals that must hold with any model, in a size for every run of the tests."""

from __future__ import annotations

from benchmarks.llm import _fuzz
from benchmarks.llm_scenarios import KINDS, scenarios
from policies.llm import ask


def test_hostile_replies_never_make_an_inadmissible_plan_active() -> None:
    assert _fuzz(1_500) == 0


def test_scenarios_are_of_all_kinds_and_their_best_plan_stands_everywhere() -> None:
    made = list(scenarios(20))
    assert {scenario.kind for scenario in made} == set(KINDS)
    positions = set()
    for scenario in made:
        question = ask(scenario.snapshot, scenario.service, seed=scenario.seed)
        assert question is not None
        best = question.best.plan.layout()
        positions.add(next(at for at, entry in enumerate(question.options.values()) if entry.plan.layout() == best))
    assert positions >= {0, 1, 2}


def test_the_same_scenarios_at_every_call() -> None:
    assert list(scenarios(3)) == list(scenarios(3))
