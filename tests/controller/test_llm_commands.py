"""What the options of `tidegate intent add` and the report's lines say."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from controller.cli import build_parser
from controller.llm_commands import report_lines, rules_of
from controller.llm_views import IntentIn, LlmReport
from sla.errors import InvalidInputError


def options(*said: str) -> argparse.Namespace:
    return build_parser().parse_args(["intent", "add", "captions", *said])


def test_options_become_rules_that_the_api_takes() -> None:
    found = rules_of(
        options(
            "--avoid", "cam-1", "--prefer", "zone:hall", "--only", "read=a,b", "--knob", "decode.keep=0.7..1", "--weigh", "risk=1.5",
            "--weigh", "jitter=0.5", "--keep",
        )
    )  # fmt: skip
    assert found == [
        {"kind": "avoid", "agent": "cam-1"},
        {"kind": "prefer", "zone": "hall"},
        {"kind": "bound", "stage": "read", "models": ["a", "b"]},
        {"kind": "bound", "knob": "decode.keep", "low": 0.7, "high": 1.0},
        {"kind": "shift", "risk": 1.5, "jitter": 0.5},
        {"kind": "keep"},
    ]
    IntentIn.model_validate({"service_id": "captions", "rules": found})


@pytest.mark.parametrize(
    "said",
    [
        [], ["--only", "read"], ["--knob", "decode.keep=1"], ["--knob", "decode.keep=a..b"], ["--weigh", "cost=1"],
        ["--weigh", "risk=much"], ["keep latency low", "--keep"],
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_sentence(said: list[str]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        rules_of(options(*said))
    assert str(caught.value).count(".") >= 1


def test_the_report_says_what_choices_brought() -> None:
    values: dict[str, Any] = {
        "mode": "shadow", "model": "m", "policy": "solver", "response_format": "json_schema", "asked": 4, "won": 1, "agreed": 2,
        "refused": {"memory": 1}, "fallback": {}, "acted": 0, "win_rate": 0.25, "mean_behind": 0.0, "mean_regret": 0.0,
        "worst_regret": 0.0, "prompt_tokens": 100, "cached_tokens": 60, "output_tokens": 9, "cost": 0.0, "tokens_this_hour": 109,
        "tokens_per_hour": 1000, "mean_seconds": 1.0, "comparisons": [],
    }  # fmt: skip
    nothing_yet = "\n".join(report_lines(LlmReport.model_validate(values).model_dump()))
    assert "100 in (60 of them cached)" in nothing_yet
    assert "nothing was measured yet" in nothing_yet
    measured = LlmReport.model_validate({**values, "settled": 3, "mean_effect_behind_ms": -12.4})
    assert "over 3 choices: the LLM's p99 is 12 ms quicker" in "\n".join(report_lines(measured.model_dump()))
