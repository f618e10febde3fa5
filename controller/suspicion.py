"""How suspicious a silence is: the accrual failure detector, vectorised over all agents.

Source: Hayashibara et al. (2004), "The phi accrual failure detector", SRDS. The chance that a report still comes after a
silence of t is estimated from the agent's own past delays, so that a link with much jitter earns patience by
itself; a fixed count of late checks would evict a live agent on such a link.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_STD_SHARE = 0.35
"""Delays that never varied would make any lateness a certainty; the deviation is at least this share of the mean."""


def phi(silence_ms: Floats, mean_ms: Floats, std_ms: Floats) -> Floats:
    """Suspicion per agent: -log10 of the chance that a report still comes. Shapes are equal; never negative.

    `silence_ms` is the time since the last report, mean and deviation are those of the delays between reports.
    The normal tail is taken from the logistic approximation that Akka and Cassandra use.
    """
    std = np.maximum(std_ms, MIN_STD_SHARE * mean_ms)
    y = np.clip((silence_ms - mean_ms) / np.maximum(std, 1e-9), -30.0, 1e3)
    exponent = y * (1.5976 + 0.070566 * y * y)
    # log10(1 + e^x) without overflow: the tail chance is 1 / (1 + e^x).
    return np.logaddexp(0.0, exponent) / math.log(10.0)


def fold_delay(mean_ms: float, var_ms2: float, delay_ms: float, *, weight: float = 0.1) -> tuple[float, float]:
    """Exponentially weighted mean and variance of the delays after one more delay.

    Source: West (1979), "Updating mean and variance estimates", CACM 22(9), exponential form.
    """
    difference = delay_ms - mean_ms
    mean = mean_ms + weight * difference
    return mean, (1 - weight) * (var_ms2 + weight * difference * difference)
