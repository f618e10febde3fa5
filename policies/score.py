"""One number per plan, lower is better: 0.30 CPU saturation + 0.25 round-trip jitter + 0.45 risk, each in [0, 1].

- saturation: utilisation of the busiest agent, as predicted; 1 from full utilisation on.
- jitter: j / (j + r), where r is `jitter_reference` times the contract's p99: 0 without jitter, 1/2 where the links'
  standard deviation is that share of the promise, toward 1 beyond. A millisecond of jitter weighs more where 150 ms are
  promised than where 4 s are.
- risk: the predicted probability of violating the contract, as it is.

Each normalisation is monotone, so a plan that is worse in one respect and equal in the others never scores better.
"""

from __future__ import annotations

import math

import msgspec

from policies.decision import Prediction
from policies.plan import Plan
from sla.contract import Contract
from sla.errors import SettingsError


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """How much each part counts; they must sum to one."""

    saturation: float = 0.30
    jitter: float = 0.25
    risk: float = 0.45
    jitter_reference: float = 0.02
    """Share of the promised p99 at which jitter scores 1/2."""

    def __post_init__(self) -> None:
        parts = (self.saturation, self.jitter, self.risk)
        if min(parts) < 0 or not math.isclose(sum(parts), 1.0, abs_tol=1e-6):
            raise SettingsError(f"The score's weights must be positive and sum to 1, not {parts}.")
        if not self.jitter_reference > 0:
            raise SettingsError(f"jitter_reference must be above 0, not {self.jitter_reference}.")


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with what it is expected to do and how good that is."""

    plan: Plan
    prediction: Prediction
    score: float


def normalised_jitter(jitter_ms: float, contract: Contract, weights: Weights) -> float:
    """Jitter on [0, 1), see the module."""
    reference_ms = weights.jitter_reference * contract.latency_p99_ms
    return jitter_ms / (jitter_ms + reference_ms) if jitter_ms > 0 else 0.0


def score(prediction: Prediction, contract: Contract, weights: Weights | None = None) -> float:
    """The plan's score in [0, 1], lower is better."""
    w = weights or Weights()
    return _summed(prediction.saturation, prediction.jitter_ms, prediction.risk, contract, w)


def least_score(saturation: float, jitter_ms: float, contract: Contract, weights: Weights) -> float:
    """What no plan with this saturation and jitter scores below: its score if it were without risk."""
    return _summed(saturation, jitter_ms, 0.0, contract, weights)


def _summed(saturation: float, jitter_ms: float, risk: float, contract: Contract, w: Weights) -> float:
    jitter = normalised_jitter(jitter_ms, contract, w)
    return w.saturation * min(max(saturation, 0.0), 1.0) + w.jitter * jitter + w.risk * min(max(risk, 0.0), 1.0)
