"""The error budget: how much of what a promise counts may be bad in a window, and how much of that is left."""

from __future__ import annotations

import math

import msgspec

from sla.promises import Promise, Tally


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """One promise in one window. Zero traffic leaves the whole budget; it does not count as data."""

    promise: Promise
    tally: Tally

    @property
    def attained(self) -> float | None:
        """Share that was good; None when there was nothing to judge."""
        return 1.0 - self.tally.bad / self.tally.total if self.tally.total else None

    @property
    def allowed(self) -> float:
        """How many may be bad, given how many there were."""
        return self.promise.allowed_share * self.tally.total

    @property
    def left(self) -> float | None:
        """Share of the budget that is left: 1 nothing was bad, 0 just spent, negative overspent; None without anything to judge."""
        return None if self.tally.total == 0 else 1.0 - self.tally.bad / self.allowed

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None when there was nothing to judge."""
        return None if self.tally.total == 0 else self.tally.bad <= self.allowed + 1e-9

    @property
    def spare(self) -> int:
        """How many more may be bad before the promise is broken, if nothing else comes in."""
        return max(0, math.floor(self.allowed - self.tally.bad + 1e-9))


def burn_rate(tally: Tally, allowed_share: float) -> float | None:
    """How many times faster than allowed the budget is spent: 1 spends it exactly in the window; None without anything to judge."""
    return None if tally.total == 0 else tally.bad / tally.total / allowed_share
