"""The demo's report: stable keys, and promises that break when they should."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.local.load import Outcome
from controller.local.report import Trouble, build_report, promises


def outcome(**changed: Any) -> Outcome:
    plain: dict[str, Any] = {
        "due_s": 100.0, "latency_ms": 80.0, "ok": True, "correct": True, "epoch": 1, "fell_back": False, "error": "",
    }  # fmt: skip
    return Outcome(**(plain | changed))


def shard(
    agent: str, blocks: tuple[int, int], patch: tuple[int, int] = (0, 1000), role: str = "serving"
) -> dict[str, Any]:
    return {
        "stage": "recognise", "model": "rec", "agent": agent, "patch": list(patch), "token": [0, 1000], "blocks": list(blocks),
        "block_count": 4, "role": role,
    }  # fmt: skip


def plan(epoch: int, *shards: dict[str, Any]) -> dict[str, Any]:
    return {
        "epoch": epoch, "trigger": "contract", "proposer": "solver", "score": 0.2, "predicted_p99_ms": 90.0,
        "measured_p99_ms": 95.0, "requests": 10, "shards": list(shards),
    }  # fmt: skip


BLOCK_SPLIT = plan(1, shard("a", (0, 2)), shard("b", (2, 4)), shard("c", (0, 4), role="fallback"))
PATCH_SPLIT = plan(2, shard("a", (0, 4), (0, 500)), shard("b", (0, 4), (500, 1000)))
WHOLE = plan(3, shard("a", (0, 4)))
TROUBLE = Trouble(
    degraded_link="a -> b",
    degraded_at_s=90.0,
    left_link_at_s=94.0,
    killed_agent="b",
    killed_at_s=100.0,
    detected_at_s=100.4,
    replanned_at_s=101.5,
)


def report(
    outcomes: list[Outcome], sent: int, plans: list[dict[str, Any]], trouble: Trouble = TROUBLE, **sla: Any
) -> dict[str, Any]:
    contract = {"latency_p99_ms": 400, "accuracy_floor": 0.8, "availability_sla": 0.995}
    found = {
        "service_id": "document-reader",
        "contract": contract,
        "state": "met",
        "availability": 1.0,
        "p99_ms": 90.0,
    } | sla
    agents = [
        {"id": "a", "platform": "rk3588", "evidence": "emulated", "enrolled_in_ms": 12.0, "state": "live", "zone": "x"}
    ]
    return build_report(outcomes=outcomes, sent=sent, sla=found, agents=agents, plans=plans, trouble=trouble)


def broken(found: dict[str, Any]) -> list[str]:
    return [text for text, held in promises(found) if not held]


def test_a_good_run_keeps_every_promise_and_has_the_stable_keys() -> None:
    found = report([outcome()] * 20, 20, [BLOCK_SPLIT, PATCH_SPLIT])
    assert broken(found) == []
    assert set(found) == {
        "requests", "latency_ms", "sla", "agents", "plans", "recovery", "shards_distinct_agents", "versions",
    }  # fmt: skip
    assert found["requests"].items() >= {"sent": 20, "ok": 20, "failed": 0, "correct": 20}.items()
    assert found["latency_ms"] == {"p50": 80.0, "p95": 80.0, "p99": 80.0}
    assert found["sla"]["met"]
    assert (
        found["recovery"].items()
        >= {"killed_agent": "b", "detected_ms": 400.0, "replanned_ms": 1500.0, "failed_requests": 0}.items()
    )
    assert found["shards_distinct_agents"] == 2, "fallbacks are not counted"
    assert [s["agent"] for s in found["plans"][0]["fallbacks"]] == ["c"]
    assert found["versions"]["onnxruntime"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("found", "promise"),
    [
        (report([outcome()] * 19, 20, [BLOCK_SPLIT, PATCH_SPLIT]), "every request was answered"),
        (report([], 0, [BLOCK_SPLIT, PATCH_SPLIT]), "every request was answered"),
        (report([outcome()], 1, [BLOCK_SPLIT, PATCH_SPLIT], state="violated"), "p99 within 400 ms"),
        (report([outcome()], 1, [BLOCK_SPLIT, PATCH_SPLIT], availability=None), "available"),
        (report([outcome(correct=False)], 1, [BLOCK_SPLIT, PATCH_SPLIT]), "answers right"),
        (report([outcome()], 1, [PATCH_SPLIT, WHOLE]), "block axis"),
        (report([outcome()], 1, [BLOCK_SPLIT, WHOLE]), "patch axis"),
        (report([outcome()], 1, [BLOCK_SPLIT, PATCH_SPLIT], Trouble(killed_agent="b", killed_at_s=1.0)), "noticed"),
    ],
)
def test_a_promise_that_did_not_hold_is_named(found: dict[str, Any], promise: str) -> None:
    assert any(promise in text for text in broken(found))
    json.dumps(found, allow_nan=False)


def test_a_request_that_never_came_back_has_failed() -> None:
    lost = [outcome()] * 3 + [outcome(ok=False, error="no ingress answered")]
    found = report(lost, 5, [BLOCK_SPLIT])
    assert found["requests"]["failed"] == 2
    assert found["requests"]["errors"] == ["no ingress answered"]
    assert found["recovery"]["failed_requests"] == 1
