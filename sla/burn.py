"""Multi-window, multi-burn-rate alerts after the SRE workbook ("Alerting on SLOs", ch. 5).

A rule fires when its share of the whole window's budget would be spent within its long window at the rate seen there, and the
short window (a twelfth of it) still burns as fast: the long one makes sure that it matters, the short one that it still goes on.
The burn rate at which that happens follows from the contract's window:

    factor = share of the budget x window / long window        e.g. 0.02 x 720 h / 1 h = 14.4 for 30 days

In a short contract window the slow rules get factors below 1: such a rate never spends the whole budget, so these are notes and
not tickets. Missing data is not good data: a rule whose short window was not observed neither fires by itself nor ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from sla.budget import burn_rate
from sla.promises import Promise, Tally

DAY_S = 86_400.0

Severity = Literal["page", "ticket", "note"]
AlertState = Literal["firing", "ok", "no-data"]

MIN_COVERAGE = 0.5
"""A window of which less was observed says nothing by its silence."""


class BurnRule(msgspec.Struct, frozen=True, kw_only=True):
    """One pair of windows."""

    budget_share: float
    long_s: float
    short_s: float
    severity: Severity

    @property
    def name(self) -> str:
        """For example `1h/5m`."""
        return f"{duration(self.long_s)}/{duration(self.short_s)}"

    def factor(self, window_days: float) -> float:
        """The burn rate from which on it fires, for a contract with this window."""
        return self.budget_share * window_days * DAY_S / self.long_s


RULES: tuple[BurnRule, ...] = (
    BurnRule(budget_share=0.02, long_s=3_600.0, short_s=300.0, severity="page"),
    BurnRule(budget_share=0.05, long_s=21_600.0, short_s=1_800.0, severity="page"),
    BurnRule(budget_share=0.10, long_s=86_400.0, short_s=7_200.0, severity="ticket"),
    BurnRule(budget_share=0.10, long_s=259_200.0, short_s=21_600.0, severity="ticket"),
)
WINDOWS_S: tuple[float, ...] = tuple(sorted({s for rule in RULES for s in (rule.long_s, rule.short_s)}))


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One rule for one promise, now."""

    promise: str
    rule: str
    severity: Severity
    factor: float
    state: AlertState
    long_burn: float | None
    short_burn: float | None

    @property
    def sentence(self) -> str:
        """For an operator."""
        long_name, _, short_name = self.rule.partition("/")
        seen = f"{_rate(self.long_burn)} over {long_name}, {_rate(self.short_burn)} over {short_name}"
        if self.state == "no-data":
            return f"{self.promise}: too little was heard of the last {short_name} to tell ({seen})."
        verb = "burns its budget" if self.state == "firing" else "is calm"
        return f"{self.promise} {verb}: {seen}; the limit is {self.factor:.3g} times the allowed rate."


def judge(
    promise: Promise, window_days: float, tallies: Mapping[float, Tally], coverage: Mapping[float, float]
) -> list[Alert]:
    """All rules for one promise, from what it counted in, and which share was observed of, each window of `WINDOWS_S`."""
    alerts = []
    for rule in RULES:
        factor = rule.factor(window_days)
        long_burn = burn_rate(tallies[rule.long_s], promise.allowed_share)
        short_burn = burn_rate(tallies[rule.short_s], promise.allowed_share)
        blind = coverage[rule.short_s] < MIN_COVERAGE
        limit = factor * (1.0 - 1e-9)  # 144 of 10,000 are 14.4 times 0.1 %, whatever the last bit says.
        long_fires = long_burn is not None and long_burn >= limit
        short_fires = short_burn is not None and short_burn >= limit
        state: AlertState = "no-data" if blind else "ok"
        if long_fires and (short_fires or blind):
            state = "firing"
        alerts.append(
            Alert(
                promise=promise.name, rule=rule.name, severity=rule.severity if factor >= 1.0 else "note", factor=factor,
                state=state, long_burn=long_burn, short_burn=short_burn,
            )
        )  # fmt: skip
    return alerts


def duration(seconds: float) -> str:
    """`5m`, `6h`, `3d`."""
    for size, letter in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds / size:.0f}{letter}"
    return f"{seconds:g}s"


def _rate(burn: float | None) -> str:
    return "nothing to judge" if burn is None else f"{burn:.3g} times the allowed rate"
