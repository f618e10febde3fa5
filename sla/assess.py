"""Everything that can be said about a contract now: windows, budgets, burn rates, alerts, and the risk of breaking it soon."""

from __future__ import annotations

from typing import Literal

import msgspec

from sla.budget import Budget
from sla.burn import DAY_S, WINDOWS_S, Alert, judge
from sla.contract import Contract
from sla.promises import promises_of, tally
from sla.window import SLICE_S, ServiceWindow, Sums

REPORTED_S: dict[str, float] = {"1h": 3_600.0, "6h": 21_600.0, "7d": 7 * DAY_S, "28d": 28 * DAY_S, "30d": 30 * DAY_S}
"""Windows that are shown beside the contract's own."""

State = Literal["met", "violated", "no-traffic", "no-data"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """What was attained in one window."""

    window_s: float
    requests: int
    failed: int
    availability: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    slices: int
    bad_slices: int
    coverage: float
    """Share of the window's minutes (since the service is known) in which its ingresses were heard of."""


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """One contract, now."""

    state: State
    window: Span
    """The contract's own."""
    spans: dict[str, Span]
    budgets: tuple[Budget, ...]
    """Over the contract's window."""
    burns: dict[str, dict[str, float | None]]
    """Promise -> window -> burn rate."""
    alerts: tuple[Alert, ...]

    @property
    def firing(self) -> tuple[Alert, ...]:
        """The alerts that fire, the most urgent first; notes call nobody and stay in `alerts`."""
        calling = [a for a in self.alerts if a.state == "firing" and a.severity != "note"]
        return tuple(sorted(calling, key=lambda a: a.severity != "page"))


def assess(window: ServiceWindow, contract: Contract, now_s: float) -> Assessment:
    """Judge what was counted by a contract. Pure; costs about a millisecond."""
    own_s = contract.window_days * DAY_S
    lengths = tuple(sorted({own_s, *WINDOWS_S, *REPORTED_S.values()}))
    sums = dict(zip(lengths, window.sums(now_s, lengths), strict=True))
    coverage = {length: coverage_of(window, sums[length], now_s, length) for length in lengths}
    budgets, alerts = [], []
    burns: dict[str, dict[str, float | None]] = {}
    for promise in promises_of(contract):
        tallies = {length: tally(promise, sums[length]) for length in lengths}
        budgets.append(Budget(promise=promise, tally=tallies[own_s]))
        judged = judge(promise, contract.window_days, tallies, coverage)
        alerts += judged
        burns[promise.name] = {}
        for alert in judged:
            long_name, _, short_name = alert.rule.partition("/")
            burns[promise.name] |= {short_name: alert.short_burn, long_name: alert.long_burn}
    return Assessment(
        state=_state(budgets, coverage[3_600.0]),
        window=_span(sums[own_s], own_s, coverage[own_s]),
        spans={name: _span(sums[length], length, coverage[length]) for name, length in REPORTED_S.items()},
        budgets=tuple(budgets),
        burns=burns,
        alerts=tuple(alerts),
    )


def coverage_of(window: ServiceWindow, sums: Sums, now_s: float, window_s: float) -> float:
    """Share of the window's whole minutes, since the service is known, that were observed. 1 before the first has ended."""
    born_s = now_s if window.born_s is None else window.born_s
    minutes = (now_s - max(born_s, now_s - window_s)) / SLICE_S - 2.0  # The first and the last may be cut short.
    return 1.0 if minutes < 1.0 else min(1.0, sums.observed / minutes)


def _state(budgets: list[Budget], coverage_1h: float) -> State:
    if any(budget.met is False for budget in budgets):
        return "violated"
    if all(budget.met is None for budget in budgets):
        return "no-data" if coverage_1h < 0.5 else "no-traffic"
    return "met"


def _span(sums: Sums, window_s: float, coverage: float) -> Span:
    return Span(
        window_s=window_s,
        requests=sums.requests,
        failed=sums.failed,
        availability=sums.ok / sums.requests if sums.requests else None,
        p50_ms=sums.latency.quantile(0.5),
        p95_ms=sums.latency.quantile(0.95),
        p99_ms=sums.latency.quantile(0.99),
        slices=sums.slices,
        bad_slices=sums.bad_slices,
        coverage=coverage,
    )
