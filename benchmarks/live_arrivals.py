"""When requests of one measured window come: a Poisson process with a given number of arrivals, drawn so that it is a typical one.

A window of a hundred Poisson arrivals has a p99 that says more of its two or three worst bursts than of the plan. Given their number, Poisson
arrivals are uniform in the window; of many such draws that one is taken whose waits in plain queues of steady runs are most like those of an
endless Poisson stream. That looks at the arrivals alone, never at a plan, a prediction or a measurement, so it favours none of them: it takes
away noise, as sampling from strata does.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np

from benchmarks.live_records import smooth_p99
from policies.latency import Floats

DRAWS: Final = 200
UTILISATIONS: Final = (0.15, 0.3, 0.45, 0.6, 0.75)
"""Of the queues in which draws are compared. A window's load is not known here as a utilisation, so all that occur are looked at."""
ENDLESS: Final = 200_000


def arrivals_s(count: int, seconds: float, seed: int) -> Floats:
    """`count` times in [0, seconds), rising; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    draws = np.sort(rng.uniform(0.0, seconds, (DRAWS, count)), axis=1)
    chosen = min(range(DRAWS), key=lambda at: _oddness(draws[at], seconds))
    return np.asarray(draws[chosen], dtype=np.float64)


def _oddness(times_s: Floats, seconds: float) -> float:
    """How far mean and p99 of the waits lie from those of an endless stream, in runs."""
    every_s = seconds / len(times_s)
    off = []
    for utilisation in UTILISATIONS:
        waits = waits_of(times_s / every_s, utilisation) / utilisation
        mean, p99 = _endless(utilisation)
        off += [(float(waits.mean()) - mean) / (1.0 + mean), (smooth_p99(waits) - p99) / (1.0 + p99)]
    return float(np.abs(off).sum())


def waits_of(times: Floats, run: float) -> Floats:
    """Waits in one queue of steady runs. Source: Lindley (1952), "The theory of queues with a single server"."""
    walk = np.concatenate(([0.0], np.cumsum(run - np.diff(times))))
    return np.asarray(walk - np.minimum.accumulate(walk))


@functools.cache
def _endless(utilisation: float) -> tuple[float, float]:
    """Mean and p99 wait, in runs, of a long Poisson stream."""
    times = np.cumsum(np.random.default_rng(1).exponential(1.0, ENDLESS))
    waits = waits_of(times, utilisation) / utilisation
    return float(waits.mean()), smooth_p99(waits)
