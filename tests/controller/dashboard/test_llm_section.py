"""What the LLM's part of the page says; everything that a model or an operator wrote is escaped."""

from __future__ import annotations

from controller.dashboard.llm_section import llm_comparisons, llm_counts
from controller.llm_views import ComparisonOut, LlmReport, SideOut


def comparison(**changed: object) -> ComparisonOut:
    values: dict[str, object] = {
        "at_s": 1_790_000_120.0, "service_id": "reader", "epoch": 7, "mode": "control", "verdict": "won", "reason": "",
        "solver": SideOut(what="C2", predicted_p99_ms=100.0, score=0.2, effect_p99_ms=95.0, effect_how="estimated"),
        "llm": SideOut(what="C1", predicted_p99_ms=101.0, score=0.2, effect_p99_ms=110.0, effect_how="measured"), "behind": None, "regret": 0.0, "acted": True,
        "rationale": "<script>alert(1)</script>", "measured_p99_ms": 120.4, "effect_behind_ms": 15.0, "prompt_tokens": 1,
        "output_tokens": 1, "cost": 0.0,
        "seconds": 2.5,
    }  # fmt: skip
    return ComparisonOut.model_validate({**values, **changed})


def test_both_sides_stand_next_to_each_other_and_nothing_is_raw() -> None:
    html = llm_comparisons([comparison(), comparison(verdict="fallback", reason="timeout", acted=False)])
    assert "<script" not in html
    assert "C2 (100 ms)" in html
    assert "won, acted" in html
    assert "fallback (timeout)" in html
    assert "110 ms (measured)" in html
    assert "95 ms (estimated)" in html
    assert llm_comparisons([]) == ""


def test_the_counts_in_one_line() -> None:
    report = LlmReport(
        mode="shadow", model="m", policy="solver, with llm <m> in its shadow", response_format="plain", asked=4, won=1, agreed=1,
        refused={"score-worse": 1}, fallback={"timeout": 1}, acted=0, win_rate=1 / 3, mean_behind=None, mean_regret=None,
        worst_regret=None, prompt_tokens=1, output_tokens=1, cost=0.0, tokens_this_hour=2, tokens_per_hour=10, mean_seconds=None,
        comparisons=[],
    )  # fmt: skip
    html = llm_counts(report)
    assert "llm &lt;m&gt;" in html
    assert (
        "Asked 4: own choice admitted 1 (33%), same as the solver 1, refused 1, no usable answer 1. 2 of 10 tokens"
        in html
    )
