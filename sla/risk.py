"""The probability that a promise is broken at the end of the next horizon, from budget left, load and how things have gone lately.

The next ten minutes will be like the ten minutes that followed, in the last 30 hours, on a time like now ("analogs"; Lorenz
1969): each pair of neighbouring blocks is a guess of what comes next, weighed by how alike its first block is to the newest
one and by its age. What the plan is predicted to do is one more guess, and so is "about as now, give or take". Each guess gives a share of
bad requests, and so a distribution of how many more there will be; the promise is broken if they are more than the budget
of the window, as it will be by then, has left.

How well this is calibrated on replayed traces is measured by `python -m benchmarks sla`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from sla.burn import DAY_S
from sla.contract import Contract
from sla.promises import Promise, Tally, promises_of, tally
from sla.window import BLOCK_S, ServiceWindow

Floats = npt.NDArray[np.float64]

FEW = 40
"""Up to so many events are counted exactly."""
_ERF = np.vectorize(math.erf, otypes=[np.float64])


class RiskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the past is weighed; shares of bad requests are compared as log-odds."""

    likeness: float = 1.0
    """Standard deviation, in log-odds, within which two times are alike."""
    half_life_blocks: float = 60.0
    """A pair that is this old counts half ..."""
    floor: float = 0.2
    """... of what is above this."""
    steady_weight: float = 1.0
    """Weight of "about as now"; a fresh and perfectly alike pair weighs 1.2."""
    steady_spread: float = 1.1
    """Its standard deviation in log-odds."""
    predicted_weight: float = 1.0
    """Weight of what the plan is predicted to do."""
    predicted_spread: float = 1.1
    smoothing: float = 20.0
    """Every block is seen as if so many more requests had been in it that were bad to just the allowed share."""


class Guess(msgspec.Struct, frozen=True, kw_only=True):
    """How likely each promise, and the whole contract, is broken at the end of the horizon."""

    horizon_s: float
    promises: dict[str, float]
    contract: float
    """That at least one of them is; they are taken as independent."""


def risk_soon(
    window: ServiceWindow,
    contract: Contract,
    now_s: float,
    *,
    horizon_s: float = BLOCK_S,
    window_s: float | None = None,
    predicted_bad: Mapping[str, float] | None = None,
    settings: RiskSettings | None = None,
) -> Guess:
    """The risk of each promise over the next `horizon_s` (a multiple of ten minutes).

    `window_s` replaces the contract's window; `predicted_bad`: promise -> share of bad requests that the running plan is
    predicted to give.
    """
    steps = max(1, round(horizon_s / BLOCK_S))
    length_s = contract.window_days * DAY_S if window_s is None else window_s
    staying = window.sums(now_s, (max(0.0, length_s - steps * BLOCK_S),))[0]
    blocks = window.blocks(now_s)
    found = {}
    for promise in promises_of(contract):
        history = [(start_s, tally(promise, sums)) for start_s, sums in blocks]
        share = (predicted_bad or {}).get(promise.name)
        found[promise.name] = risk_of(
            promise, tally(promise, staying), history, now_s, steps=steps, predicted_bad=share, settings=settings
        )
    return Guess(
        horizon_s=steps * BLOCK_S, promises=found, contract=1.0 - math.prod(1.0 - risk for risk in found.values())
    )


def risk_of(
    promise: Promise,
    staying: Tally,
    history: Sequence[tuple[float, Tally]],
    now_s: float,
    *,
    steps: int = 1,
    predicted_bad: float | None = None,
    settings: RiskSettings | None = None,
) -> float:
    """The probability that `promise` is broken in `steps` blocks from now.

    `staying` is what of today's window will still be in the window then; `history` are blocks (start, tally), oldest first.
    """
    s = settings or RiskSettings()
    allowed = promise.allowed_share
    total = np.array([entry.total for _, entry in history], dtype=np.float64)
    bad = np.array([entry.bad for _, entry in history], dtype=np.float64)
    start_s = np.array([start for start, _ in history], dtype=np.float64)
    recent = len(total) > 0 and now_s - start_s[-1] < 3.0 * BLOCK_S
    expected = float(total[-1]) * steps if recent else 0.0
    if expected <= 0.0:
        return 1.0 if staying.bad > allowed * staying.total + 1e-9 else 0.0  # Nobody asks: nothing changes.
    state = _log_odds((bad + s.smoothing * allowed) / (total + s.smoothing))
    shares, weights, samples, loads = _analogs(state, total, bad, start_s, steps, s, allowed)
    for centre, spread, weight in (
        (float(state[-1]), s.steady_spread, s.steady_weight),
        (float(_log_odds(np.array(predicted_bad or 0.0))), s.predicted_spread, s.predicted_weight if predicted_bad is not None else 0.0),
    ):  # fmt: skip
        around = centre + spread * np.array([-1.4, -0.5, 0.5, 1.4])
        shares = np.concatenate([shares, 1.0 / (1.0 + np.exp(-around))])
        weights = np.concatenate([weights, np.full(4, weight / 4.0)])
        samples = np.concatenate([samples, np.full(4, expected)])
        loads = np.concatenate([loads, np.ones(4)])
    coming = expected * loads
    limit = allowed * (staying.total + coming) - staying.bad
    broken = _more_than(np.floor(limit + 1e-9), coming * shares, 1.0 + coming / np.maximum(samples, 1.0))
    return float(min(1.0, max(0.0, (weights * broken).sum() / weights.sum())))


def _analogs(
    state: Floats, total: Floats, bad: Floats, start_s: Floats, steps: int, s: RiskSettings, allowed: float
) -> tuple[Floats, Floats, Floats, Floats]:
    """What followed earlier blocks: share of bad, weight, how many requests that rests on, load over the load before."""
    count = len(total) - steps
    if count <= 0:
        return np.empty(0), np.empty(0), np.empty(0), np.empty(0)
    first = np.arange(count)
    follows = start_s[first + steps] - start_s[first] == steps * BLOCK_S  # No gap in between.
    sums, bads = np.concatenate([[0.0], np.cumsum(total)]), np.concatenate([[0.0], np.cumsum(bad)])
    after = sums[first + steps + 1] - sums[first + 1]
    after_bad = bads[first + steps + 1] - bads[first + 1]
    shares = (after_bad + s.smoothing * allowed) / (after + s.smoothing)
    age = len(total) - 1 - (first + steps)
    alike = np.exp(-0.5 * ((state[first] - state[-1]) / s.likeness) ** 2)
    weights = np.where(follows, alike * (np.power(0.5, age / s.half_life_blocks) + s.floor), 0.0)
    loads = np.clip(after / steps / np.maximum(total[first], 1.0), 0.5, 2.0)
    return shares, weights, after, loads


def _more_than(limit: Floats, mean: Floats, spread: Floats) -> Floats:
    """Probability of more than `limit` (whole numbers) events when `mean` are expected with variance `spread` times that.

    Few events are negative-binomial, many are normal.
    """
    many = 0.5 * (1.0 + _ERF((mean - limit - 0.5) / np.sqrt(2.0 * np.maximum(mean * spread, 1e-12))))
    size = mean / (spread - 1.0)
    chance = np.power(spread, -size)
    reached = np.zeros_like(mean)
    for events in range(FEW + 1):
        reached += np.where(limit >= events, chance, 0.0)
        chance = chance * (size + events) / (events + 1.0) * (1.0 - 1.0 / spread)
    few = np.clip(1.0 - reached, 0.0, 1.0)
    return np.where(limit < 0, 1.0, np.where((limit <= FEW) & (mean <= FEW), few, many))


def _log_odds(share: Floats) -> Floats:
    bounded = np.clip(share, 1e-7, 1.0 - 1e-7)
    return np.asarray(np.log(bounded / (1.0 - bounded)), dtype=np.float64)


def late_share(p50_ms: float, p99_ms: float, limit_ms: float) -> float:
    """Share of requests slower than `limit_ms` when latencies are log-normal with these quantiles."""
    if not 0.0 < p50_ms <= p99_ms < math.inf:
        return 1.0
    sigma = max(math.log(p99_ms / p50_ms) / 2.3263, 1e-3)
    return 0.5 * math.erfc(math.log(limit_ms / p50_ms) / sigma / math.sqrt(2.0))
