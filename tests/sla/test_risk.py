from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla.contract import contract_from
from sla.promises import Promise, Tally
from sla.risk import _more_than, late_share, risk_of, risk_soon
from sla.sketch import LatencySketch
from sla.window import BLOCK_S, ServiceWindow

NOW_S = 1_800_000_000.0
PROMISE = Promise(name="availability", counts="requests", share=0.99)
History = list[tuple[float, Tally]]


def past(*bad: int, total: int = 1000) -> History:
    return [
        (NOW_S - BLOCK_S * (len(bad) - at), Tally(total=total, bad=count)) for at, count in enumerate(bad)
    ]  # fmt: skip


def test_a_calm_service_with_budget_is_safe_and_an_overspent_one_is_not() -> None:
    calm = past(*[1] * 50)
    assert risk_of(PROMISE, Tally(total=50_000, bad=50), calm, NOW_S) < 0.001
    assert risk_of(PROMISE, Tally(total=50_000, bad=5_000), calm, NOW_S) > 0.999


def test_the_same_spell_is_a_risk_only_where_little_budget_is_left() -> None:
    spell = past(*[5] * 40, 30, 40, 40)
    plenty, little = Tally(total=50_000, bad=300), Tally(total=50_000, bad=480)
    assert risk_of(PROMISE, plenty, spell, NOW_S) < 0.05
    assert risk_of(PROMISE, little, spell, NOW_S) > 0.25


def test_what_followed_on_such_times_counts() -> None:
    """Every time the bad share rose to 2 % it exploded next; or it was over at once."""
    explodes = past(*[1, 1, 1, 20, 200] * 12, 1, 1, 1, 20)
    fades = past(*[1, 1, 1, 20, 0] * 12, 1, 1, 1, 20)
    staying = Tally(total=60_000, bad=500)
    assert risk_of(PROMISE, staying, explodes, NOW_S) > 0.6
    assert risk_of(PROMISE, staying, fades, NOW_S) < 0.1


def test_a_plan_that_is_predicted_to_be_late_adds_risk() -> None:
    history, staying = past(1, 1), Tally(total=2_000, bad=10)
    without = risk_of(PROMISE, staying, history, NOW_S)
    assert risk_of(PROMISE, staying, history, NOW_S, predicted_bad=0.3) > without + 0.2
    assert risk_of(PROMISE, staying, history, NOW_S, predicted_bad=1e-6) <= without + 0.01


def test_without_traffic_nothing_changes() -> None:
    assert risk_of(PROMISE, Tally(total=0, bad=0), [], NOW_S) == 0.0
    assert risk_of(PROMISE, Tally(total=100, bad=50), [], NOW_S) == 1.0
    assert risk_of(PROMISE, Tally(total=100, bad=1), past(1)[:0], NOW_S) == 0.0
    old = [(NOW_S - 20 * BLOCK_S, Tally(total=10, bad=10))]
    assert risk_of(PROMISE, Tally(total=100, bad=1), old, NOW_S) == 0.0


@given(
    bad=st.lists(st.integers(0, 1000), min_size=1, max_size=60), staying=st.integers(0, 10_000), steps=st.integers(1, 6),
    share=st.sampled_from([0.5, 0.95, 0.99, 0.9995]),
)  # fmt: skip
def test_it_is_a_probability_and_spent_budget_never_lowers_it(
    bad: list[int], staying: int, steps: int, share: float
) -> None:
    promise = Promise(name="x", counts="requests", share=share)
    risks = [
        risk_of(promise, Tally(total=10_000, bad=min(10_000, staying + more)), past(*bad), NOW_S, steps=steps)
        for more in (0, 10, 100)
    ]
    assert all(0.0 <= risk <= 1.0 for risk in risks)
    assert risks == sorted(risks)


@given(mean=st.floats(0.01, 200), spread=st.floats(1.05, 3), limit=st.integers(0, 300))
def test_counts_have_the_tail_that_sampling_shows(mean: float, spread: float, limit: int) -> None:
    size = mean / (spread - 1)
    drawn = np.random.default_rng(1).negative_binomial(size, 1 / spread, 4_000)
    found = float(_more_than(np.array([float(limit)]), np.array([mean]), np.array([spread]))[0])
    assert found == pytest.approx(float((drawn > limit).mean()), abs=0.05)


def test_a_whole_contract_from_a_window() -> None:
    contract = contract_from({"service_id": "a", "latency_p99_ms": 100, "throughput_rps": 1, "availability_sla": "99%"})
    window = ServiceWindow()
    sketch = LatencySketch()
    sketch.add(50.0, 97)
    sketch.add(500.0, 3)
    for minute in range(120):
        window.fold(NOW_S - 7200 + 60 * minute, 100, 0, sketch.to_buckets())
    guess = risk_soon(window, contract, NOW_S)
    assert guess.promises["latency-p99"] > 0.99  # Three of a hundred are late already.
    assert guess.promises["availability"] < 0.05
    assert guess.contract >= max(guess.promises.values())
    assert guess.horizon_s == BLOCK_S


def test_the_share_of_late_answers_follows_from_two_quantiles() -> None:
    assert late_share(100.0, 300.0, 300.0) == pytest.approx(0.01, rel=0.01)
    assert late_share(100.0, 300.0, 100.0) == pytest.approx(0.5)
    assert late_share(100.0, 100.0, 101.0) < 1e-6
    assert late_share(0.0, float("inf"), 10.0) == 1.0
