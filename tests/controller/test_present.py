"""What the API shows: states in words, and numbers that JSON can carry."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from controller.present import admission_out, decision_out, plan_out, shards_out, sla_out
from controller.records import DecisionRecord, PlanRecord, StoredContract
from policies.decision import Decision, Prediction, Reason
from policies.ids import ServiceId
from policies.plan import Plan
from sla.contract import parse_contract
from sla.window import WindowStatus

READER = ServiceId("reader")
WORST = Prediction(
    p50_ms=math.inf, p95_ms=math.inf, p99_ms=math.inf, mean_ms=math.inf, throughput_rps=0.0, saturation=1.0, jitter_ms=math.nan,
    risk=1.0, availability=0.9, accuracy=1.0, energy_j=math.inf, memory_bytes={}, move_bytes=0, move_ms=math.inf, bottleneck="b",
)  # fmt: skip


def decided(plan: Plan | None, **changed: Any) -> Decision:
    plain: dict[str, Any] = {
        "service_id": READER, "trigger": "contract", "proposer": "solver", "plan": plan, "prediction": WORST, "score": 0.5,
        "reasons": (Reason(code="first-plan", text="nothing runs yet"),),
    }  # fmt: skip
    return Decision(**(plain | changed))


def strict(view: Any) -> Any:
    """As a browser would read it: JSON has neither infinity nor NaN."""
    return json.loads(json.dumps(view.model_dump(), allow_nan=False))


def status(
    make_sla: Any, window: WindowStatus, *, bound: bool = True, running: PlanRecord | None = None, **more: Any
) -> Any:
    stored = StoredContract(contract=parse_contract(make_sla()), version=3)
    return sla_out(
        stored,
        window,
        bound=bound,
        infeasible=more.get("infeasible"),
        running=running,
        pinned=False,
        offered_rps=0.0,
        fell_back=0,
    )


NOTHING = WindowStatus(requests=0, ok=0, availability=None, p50_ms=None, p95_ms=None, p99_ms=None)
GOOD = WindowStatus(requests=1000, ok=999, availability=0.999, p50_ms=50, p95_ms=90, p99_ms=200)


def test_each_state_of_a_contract_says_why(make_sla: Any, make_plan: Any) -> None:
    running = PlanRecord(plan=make_plan(4, "a"), at_s=0.0, decision=decided(make_plan(4, "a")))
    infeasible = "there is no agent"
    slow = WindowStatus(requests=10, ok=10, availability=1.0, p50_ms=50, p95_ms=90, p99_ms=900)
    broken = WindowStatus(requests=100, ok=90, availability=0.9, p50_ms=50, p95_ms=90, p99_ms=100)
    all_failed = WindowStatus(requests=5, ok=0, availability=0.0, p50_ms=None, p95_ms=None, p99_ms=None)
    cases = [
        (status(make_sla, NOTHING, bound=False), "unbound", "no service 'reader'"),
        (status(make_sla, NOTHING), "starting", "first plan"),
        (status(make_sla, NOTHING, infeasible=infeasible), "infeasible", "no agent"),
        (status(make_sla, NOTHING, running=running, infeasible=infeasible), "no-traffic", "Plan 4 is ready"),
        (status(make_sla, GOOD, running=running), "met", "200 of 400 ms"),
        (status(make_sla, slow, running=running), "violated", "p99 is 900 ms"),
        (status(make_sla, broken, running=running), "violated", "90.0000% of requests"),
        (status(make_sla, all_failed, running=running), "violated", "0.0000% of requests"),
    ]
    for view, state, words in cases:
        assert view.state == state
        assert words in view.text
        strict(view)


def test_the_error_budget_is_what_is_left_of_the_failures_that_are_allowed(make_sla: Any) -> None:
    assert status(make_sla, GOOD).budget_left == pytest.approx(1 - 1 / 5)
    assert status(make_sla, NOTHING).budget_left is None
    assert status(make_sla, NOTHING).latency_met is None, "no data is neither kept nor broken"


def test_predictions_without_end_are_numbers_that_json_can_carry(make_plan: Any, models: Any) -> None:
    record = PlanRecord(
        plan=make_plan(4, "a", "b", fallback=("c",)), at_s=1.0, decision=decided(make_plan(4, "a", "b"))
    )
    shown = strict(plan_out(record, running=True, active_at_s=None, measured_p99_ms=None, requests=0, models=models))
    assert shown["predicted_p99_ms"] == 1e12
    assert shown["sentence"] == "reader: move to plan 4 (contract, proposed by solver): nothing runs yet."
    assert [(s["agent"], s["blocks"], s["role"]) for s in shown["shards"]] == [
        ("a", [0, 1], "serving"), ("b", [1, 3], "serving"), ("c", [0, 3], "fallback"),
    ]  # fmt: skip
    assert strict(admission_out(decided(make_plan(1, "a")), models))["verdict"] == "admissible"
    assert strict(admission_out(decided(None), models))["text"] == "infeasible: nothing runs yet"


def test_decisions_are_shown_with_reasons_and_outcome(make_plan: Any) -> None:
    held = strict(decision_out(DecisionRecord(at_s=1.0, decision=decided(None, prediction=None, score=None))))
    assert (held["epoch"], held["risk"], held["reasons"]) == (
        None,
        None,
        [{"code": "first-plan", "text": "nothing runs yet"}],
    )
    moved = decision_out(DecisionRecord(at_s=1.0, decision=decided(make_plan(9, "a")), outcome="p99 120 ms"))
    assert (moved.epoch, moved.risk) == (9, 1.0)
    assert moved.sentence.endswith("Outcome: p99 120 ms.")
    strict(decision_out(DecisionRecord(at_s=1.0, decision=decided(make_plan(9, "a"), score=math.inf))))


def test_a_plan_whose_model_is_gone_is_still_shown(make_plan: Any) -> None:
    assert [shard.block_count for shard in shards_out(make_plan(1, "a", fallback=("b",)), {})] == [3, 3]
