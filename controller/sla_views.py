"""What the API answers about contracts beyond `SlaOut`: promises with their budgets, burn rates, alerts, risk, reports."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from controller.views import SlaOut


class PromiseOut(BaseModel):
    """One promise of a contract and its error budget in some window."""

    name: str
    """`availability`, `throughput`, or METRIC-PERCENTILE such as `latency-p99`."""
    counts: Literal["requests", "answers", "minutes", "nothing"]
    share: float
    """Share of what is counted that must be good."""
    limit: float | None
    """Milliseconds, or requests per second for the throughput."""
    total: int
    bad: int
    attained: float | None
    """Share that was good; None when there was nothing to judge."""
    allowed: float
    """How many may be bad, given how many there were."""
    left: float | None
    """Share of the budget that is left; negative when overspent."""
    met: bool | None


class AlertOut(BaseModel):
    """A multi-window burn-rate rule."""

    promise: str
    rule: str
    """Long window/short window, e.g. `1h/5m`."""
    severity: Literal["page", "ticket", "note"]
    factor: float
    """The burn rate from which on it fires."""
    state: Literal["firing", "ok", "no-data"]
    long_burn: float | None
    short_burn: float | None
    sentence: str


class SpanOut(BaseModel):
    """What was attained in one window."""

    window_s: float
    requests: int
    failed: int
    availability: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    slices: int
    """Minutes in which requests were offered."""
    bad_slices: int
    """Minutes in which less was served than was offered and promised."""
    coverage: float
    """Share of the minutes in which the service's ingresses were heard of."""


class RiskOut(BaseModel):
    """Probabilities that promises are broken at the end of the horizon."""

    horizon_s: float
    contract: float
    promises: dict[str, float]


class SlaStatusOut(SlaOut):
    """Everything about one contract now."""

    coverage: float
    promises: list[PromiseOut]
    spans: dict[str, SpanOut]
    """By name: `1h`, `6h`, `7d`, `28d`, `30d`."""
    burns: dict[str, dict[str, float | None]]
    """Promise -> window -> burn rate; 1 spends the budget exactly within the contract's window."""
    alerts: list[AlertOut]
    risk: RiskOut


class HourOut(BaseModel):
    """One of the worst hours of a month."""

    start_s: float
    requests: int
    failed: int
    slow: int
    p99_ms: float | None
    bad_minutes: int
    budget_spent: float
    """Share of the month's tightest budget that this hour spent."""
    actions: list[str]
    """What Tidegate decided in and around it."""


class DayOut(BaseModel):
    """One day of a month."""

    day: int
    requests: int
    failed: int
    slow: int
    bad_minutes: int
    budget_spent: float


class SlaReport(BaseModel):
    """One contract in one month (UTC)."""

    service_id: str
    month: str
    """YYYY-MM."""
    contract: dict[str, Any]
    version: int
    from_s: float
    until_s: float
    """The end of the month, or when the report was made if that was earlier."""
    made_at_s: float
    complete: bool
    """False while the month is still running."""
    state: Literal["met", "violated", "no-traffic"]
    requests: int
    failed: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    coverage: float
    promises: list[PromiseOut]
    days: list[DayOut]
    worst_hours: list[HourOut]
    moves: int
    """Plans that were decided in the month."""
    actions: list[str]
    """The newest of them, with their reasons."""
