from __future__ import annotations

import numpy as np
import pytest

from benchmarks.live_arrivals import arrivals_s, waits_of
from benchmarks.live_records import smooth_p99


def test_arrivals_are_as_many_as_asked_in_order_and_the_same_again() -> None:
    times = arrivals_s(50, 100.0, seed=4)
    assert len(times) == 50
    assert (np.diff(times) > 0).all()
    assert 0.0 <= times[0] <= times[-1] < 100.0
    assert (times == arrivals_s(50, 100.0, seed=4)).all()


def test_waits_are_those_of_requests_that_queue_one_by_one() -> None:
    assert waits_of(np.array([0.0, 1.0, 1.5, 9.0]), 2.0).tolist() == pytest.approx([0.0, 1.0, 2.5, 0.0])


def test_windows_vary_less_than_poisson_ones_and_lean_to_no_side() -> None:
    """Judged by queues whose runs vary, in which the draws were not compared."""
    rng, count, run = np.random.default_rng(3), 150, 0.5

    def p99(times: np.ndarray) -> float:
        runs = rng.lognormal(np.log(run), 0.2, len(times))
        walk = np.concatenate(([0.0], np.cumsum(runs[:-1] - np.diff(times))))
        return smooth_p99(walk - np.minimum.accumulate(walk) + runs)

    endless = p99(np.cumsum(rng.exponential(1.0, 100_000)))
    chosen = [p99(arrivals_s(count, float(count), seed)) for seed in range(16)]
    plain = [p99(np.sort(rng.uniform(0.0, count, count))) for _ in range(200)]
    assert np.std(chosen) < 0.6 * np.std(plain)
    assert np.mean(chosen) == pytest.approx(endless, rel=0.1)
