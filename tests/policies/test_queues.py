"""The wait in a queue against what is known of it, and against requests that queue one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.costs import Load, mean_wait_ms, queue_of
from policies.latency import Grid, waiting

runs = st.lists(st.tuples(st.floats(0.0001, 0.01), st.floats(0.1, 400.0), st.floats(0.0, 2.0)), min_size=1, max_size=5)


def _load(parts: list[tuple[float, float, float]]) -> Load:
    load = Load()
    for rate_per_ms, mean_ms, variation in parts:
        load.add(rate_per_ms, mean_ms, variation * mean_ms)
    return load


@given(parts=runs)
def test_the_wait_has_the_first_two_moments_of_the_queue(parts: list[tuple[float, float, float]]) -> None:
    load = _load(parts)
    if load.busy > 0.97:
        return
    chance, mean = queue_of(load)
    assert 0.0 < chance <= 1.0
    assert mean == mean_wait_ms(load)
    second = 2.0 * mean**2 / chance  # of chance x exponential with mean / chance
    assert second == pytest.approx(2.0 * mean**2 + load.third_ms2 / (3.0 * (1.0 - load.busy)))


def test_runs_of_exponential_length_make_an_exponential_wait() -> None:
    """M/M/1: the wait exceeds t with probability busy x exp(-(1 - busy) t / run)."""
    busy, run_ms = 0.6, 50.0
    load = Load(busy, busy / run_ms * 2 * run_ms**2, busy / run_ms * 6 * run_ms**3)
    chance, mean = queue_of(load)
    assert chance == pytest.approx(busy)
    assert mean / chance == pytest.approx(run_ms / (1.0 - busy))


@given(a=runs, b=runs)
def test_loads_add_up(a: list[tuple[float, float, float]], b: list[tuple[float, float, float]]) -> None:
    one, other, both = _load(a), _load(b), _load(a + b)
    assert both.second_ms == pytest.approx(one.second_ms + other.second_ms)
    assert both.third_ms2 == pytest.approx(one.third_ms2 + other.third_ms2)


@pytest.mark.parametrize("busy", [0.2, 0.45, 0.65, 0.8])
@pytest.mark.parametrize("runs_ms", [(100.0,), (20.0, 180.0), (5.0, 50.0, 300.0)])
def test_the_tail_of_steady_runs_is_that_of_requests_that_queue(busy: float, runs_ms: tuple[float, ...]) -> None:
    rng = np.random.default_rng(5)
    count = 400_000
    rate_per_ms = busy / float(np.mean(runs_ms))
    gaps, work = rng.exponential(1.0 / rate_per_ms, count), rng.choice(runs_ms, count)
    # Lindley: a wait is the walk of work less gaps above its lowest point so far.
    walk = np.concatenate(([0.0], np.cumsum(work[:-1] - gaps[1:])))
    waits = walk - np.minimum.accumulate(walk)
    load = _load([(rate_per_ms / len(runs_ms), run_ms, 0.0) for run_ms in runs_ms])
    chance, mean = queue_of(load)
    predicted = waiting(Grid.up_to(40.0 * mean), chance, mean)
    assert predicted.mean_ms() == pytest.approx(float(waits.mean()), rel=0.08)
    assert predicted.quantile_ms(0.99) == pytest.approx(float(np.quantile(waits, 0.99)), rel=0.12)


def test_an_idle_agent_lets_nobody_wait() -> None:
    assert queue_of(Load(0.3)) == (0.3, 0.0)
    assert math.isclose(mean_wait_ms(Load()), 0.0)
