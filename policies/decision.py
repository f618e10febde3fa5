"""What a policy wants, what the gate let through, and the typed reasons for both."""

from __future__ import annotations

from typing import Literal

import msgspec

from policies.ids import AgentId, ServiceId
from policies.plan import Plan

Trigger = Literal[
    "contract", "agent-lost", "agent-joined", "risk", "better-plan", "operator", "link", "start", "bandwidth"
]
ReasonCode = Literal[
    "cover", "unknown-agent", "agent-not-live", "memory", "shard-size", "privacy", "accuracy", "zone", "stale", "throughput",
    "score-worse", "flap-budget", "dwell", "gain-too-small", "not-agreed", "pinned", "no-candidate", "malformed",
    "llm-unavailable", "llm-late", "risk", "agent-lost", "better", "first-plan", "operator", "knob", "wished",
]  # fmt: skip


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One typed reason; `text` is a sentence for an operator."""

    code: ReasonCode
    text: str
    agent: AgentId | None = None
    stage: str | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is expected to do under a snapshot's load."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    mean_ms: float
    throughput_rps: float
    """What the bottleneck can carry."""
    saturation: float
    """Utilisation of the busiest agent at the contract's load, [0, 1]."""
    jitter_ms: float
    """Standard deviation that links add to a request."""
    risk: float
    """Probability that the contract is violated over the next horizon, [0, 1]."""
    availability: float
    accuracy: float
    energy_j: float
    """Per request."""
    memory_bytes: dict[AgentId, int]
    move_bytes: int
    """Bytes that going there from the running plan would push over the network."""
    move_ms: float
    """Time to push, load and warm up."""
    bottleneck: str
    """The stage, link or agent that binds, in words."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that a policy wants, and why."""

    plan: Plan
    proposer: str
    """`solver`, `llm`, or the name of a baseline."""
    trigger: Trigger
    rationale: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The gate's answer: `plan` is what should run now; None means hold what is running."""

    service_id: ServiceId
    trigger: Trigger
    proposer: str
    plan: Plan | None
    reasons: tuple[Reason, ...]
    prediction: Prediction | None = None
    score: float | None = None
    rationale: str = ""

    def sentence(self) -> str:
        """One paragraph for an operator."""
        what = f"move to plan {self.plan.epoch}" if self.plan is not None else "hold"
        why = "; ".join(reason.text for reason in self.reasons) or "nothing to do"
        return f"{self.service_id}: {what} ({self.trigger}, proposed by {self.proposer}): {why}."
