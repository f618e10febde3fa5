from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla.assess import assess
from sla.budget import Budget, burn_rate
from sla.burn import RULES, WINDOWS_S, Alert, duration, judge
from sla.contract import contract_from
from sla.promises import Promise, Tally, promises_of
from sla.sketch import LatencySketch
from sla.window import ServiceWindow

HOUR_S = 3_600.0
NOW_S = 1_800_000_000.0 // 86_400 * 86_400 + 12 * HOUR_S
AVAILABILITY = Promise(name="availability", counts="requests", share=0.999)
CONTRACT = contract_from(
    {"service_id": "a", "latency_p99_ms": 150, "throughput_rps": 2, "availability_sla": "99.9%", "window_days": 30,
     "objectives": [{"percentile": "p50", "at_most_ms": 60}, {"percentile": "p95", "at_most_ms": 9, "metric": "inter-token"}]}
)  # fmt: skip
FULL = dict.fromkeys(WINDOWS_S, 1.0)


def buckets(ms: float, count: int) -> dict[int, int]:
    sketch = LatencySketch()
    sketch.add(ms, count)
    return sketch.to_buckets()


@pytest.mark.parametrize(
    ("days", "factors", "severities"),
    [
        # share x days x 24 h / long window; by hand.
        (30, (14.4, 6.0, 3.0, 1.0), ("page", "page", "ticket", "ticket")),
        (28, (13.44, 5.6, 2.8, 14 / 15), ("page", "page", "ticket", "note")),
        (7, (3.36, 1.4, 0.7, 7 / 30), ("page", "page", "note", "note")),
        (1, (0.48, 0.2, 0.1, 1 / 30), ("note", "note", "note", "note")),
    ],
)
def test_factors_follow_from_the_window(days: int, factors: tuple[float, ...], severities: tuple[str, ...]) -> None:
    assert [rule.factor(days) for rule in RULES] == pytest.approx(factors)
    calm = dict.fromkeys(WINDOWS_S, Tally(total=10, bad=0))
    assert tuple(alert.severity for alert in judge(AVAILABILITY, days, calm, FULL)) == severities
    assert [rule.name for rule in RULES] == ["1h/5m", "6h/30m", "1d/2h", "3d/6h"]


def fired(bad_in: dict[str, int], blind: tuple[str, ...] = (), total: int = 10_000) -> list[str]:
    tallies = {s: Tally(total=total, bad=bad_in.get(duration(s), 0)) for s in WINDOWS_S}
    coverage = {s: 0.1 if duration(s) in blind else 1.0 for s in WINDOWS_S}
    return [alert.rule for alert in judge(AVAILABILITY, 30, tallies, coverage) if alert.state == "firing"]


def test_both_windows_must_burn() -> None:
    # 0.1 % of 10,000 are 10 at the allowed rate; 14.4 times that is 144.
    assert fired({"1h": 144, "5m": 144}) == ["1h/5m"]
    assert fired({"1h": 144}) == []
    assert fired({"5m": 10_000}) == []
    assert fired({"1h": 143, "5m": 10_000}) == []
    assert fired({"6h": 60, "30m": 60, "1d": 30, "2h": 30, "3d": 10}) == ["6h/30m", "1d/2h", "3d/6h"]


def test_silence_ends_no_alert_and_starts_none() -> None:
    assert fired({"1h": 144}, blind=("5m",)) == ["1h/5m"]
    assert fired({}, blind=("5m",)) == []
    tallies = dict.fromkeys(WINDOWS_S, Tally(total=0, bad=0))
    assert {a.state for a in judge(AVAILABILITY, 30, tallies, dict.fromkeys(WINDOWS_S, 0.0))} == {"no-data"}
    assert {a.state for a in judge(AVAILABILITY, 30, tallies, FULL)} == {"ok"}  # Nobody asked for anything: calm.


def test_sentences_say_what_was_seen() -> None:
    alert = judge(AVAILABILITY, 30, dict.fromkeys(WINDOWS_S, Tally(total=1000, bad=20)), FULL)[0]
    assert alert.sentence == (
        "availability burns its budget: 20 times the allowed rate over 1h, 20 times the allowed rate over 5m; "
        "the limit is 14.4 times the allowed rate."
    )


@given(total=st.integers(0, 10**6), bad=st.integers(0, 10**6), share=st.floats(0.5, 0.99999))
def test_budget_and_burn_agree(total: int, bad: int, share: float) -> None:
    tally = Tally(total=total, bad=min(bad, total))
    budget = Budget(promise=Promise(name="x", counts="requests", share=share), tally=tally)
    rate = burn_rate(tally, 1 - share)
    if total == 0:
        assert (budget.left, budget.attained, budget.met, rate) == (None, None, None, None)
        return
    assert rate is not None
    assert budget.left == pytest.approx(1 - rate)
    if budget.met:
        assert budget.left is not None
        assert budget.left >= -1e-6
        assert Budget(promise=budget.promise, tally=Tally(total=total, bad=tally.bad + budget.spare)).met
    else:
        assert budget.spare == 0


def day(
    window: ServiceWindow, *, until_s: float, hours: float, per_minute: int = 60, failed: int = 0, ms: float = 50
) -> None:
    """Traffic that ends at `until_s`, with everybody heard of."""
    for minute in range(round(hours * 60), 0, -1):
        at = until_s - 60 * minute + 30
        window.fold(at, per_minute - failed, failed, buckets(ms, per_minute - failed))
        window.observe(at)


def by_rule(alerts: tuple[Alert, ...], promise: str) -> dict[str, str]:
    return {alert.rule: alert.state for alert in alerts if alert.promise == promise}


def test_an_outage_pages_and_stops_paging_when_it_is_over() -> None:
    window = ServiceWindow()
    day(window, until_s=NOW_S, hours=20)
    assert assess(window, CONTRACT, NOW_S).firing == ()
    day(window, until_s=NOW_S + 600, hours=1 / 6, failed=30)
    during = assess(window, CONTRACT, NOW_S + 600)
    # 300 of 3,600 in the hour are 83 times the allowed rate; 50 % in the last minutes are 500 times.
    assert by_rule(during.alerts, "availability")["1h/5m"] == "firing"
    assert during.firing[0].severity == "page"
    assert during.state == "violated"  # 300 of 72,600 failed; 72 were allowed.
    day(window, until_s=NOW_S + 1_500, hours=0.25)
    after = assess(window, CONTRACT, NOW_S + 1_500)
    assert by_rule(after.alerts, "availability")["1h/5m"] == "ok"
    assert by_rule(after.alerts, "availability")["6h/30m"] == "firing"


def test_latency_has_a_budget_of_its_own() -> None:
    window = ServiceWindow()
    day(window, until_s=NOW_S, hours=1, per_minute=99)
    window.fold(NOW_S - 1, 60, 0, buckets(400, 60))
    found = assess(window, CONTRACT, NOW_S)
    left = {budget.promise.name: budget.left for budget in found.budgets}
    assert left["latency-p99"] == pytest.approx(0.0)  # 60 of 6,000 are slower than 150 ms: all of the one percent.
    assert left["latency-p50"] == pytest.approx(1 - 0.01 / 0.5)
    assert left["inter-token-p95"] is None
    assert left["availability"] == 1.0
    assert found.state == "met"
    window.fold(NOW_S - 1, 1, 0, buckets(151.6, 1))
    assert assess(window, CONTRACT, NOW_S).state == "violated"


def test_a_minute_is_bad_only_when_load_was_there_and_was_not_served() -> None:
    # Promised are 2 requests/s, 120 a minute.
    def slices(ok: int, failed: int) -> tuple[int, int]:
        window = ServiceWindow()
        window.promise(CONTRACT.throughput_rps, CONTRACT.latency_p99_ms)
        window.fold(NOW_S - 90, ok, failed, {})
        window.observe(NOW_S - 90)
        span = assess(window, CONTRACT, NOW_S).window
        return span.slices, span.bad_slices

    assert slices(0, 0) == (0, 0)
    assert slices(3, 0) == (1, 0)  # Little was offered, and it was served.
    assert slices(114, 6) == (1, 0)  # 95 % of what was offered.
    assert slices(113, 7) == (1, 1)
    assert slices(120, 480) == (1, 0)  # Five times the promise was offered; the promise was served.
    assert slices(100, 500) == (1, 1)


def test_quiet_is_not_blind() -> None:
    quiet, blind = ServiceWindow(), ServiceWindow()
    for window in (quiet, blind):
        window.observe(NOW_S - 7_200)
    for minute in range(120, 0, -1):
        quiet.observe(NOW_S - 60 * minute)
    assert assess(quiet, CONTRACT, NOW_S).state == "no-traffic"
    found = assess(blind, CONTRACT, NOW_S)
    assert found.state == "no-data"
    assert found.spans["1h"].coverage == 0.0
    assert set(by_rule(found.alerts, "availability").values()) >= {"no-data"}


def test_promises_of_a_contract() -> None:
    names = [promise.name for promise in promises_of(CONTRACT)]
    assert names == ["availability", "throughput", "latency-p99", "latency-p50", "inter-token-p95"]
