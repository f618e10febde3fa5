"""HTML of the page's parts: what it says, and that it says foreign text as text."""

from __future__ import annotations

from controller.dashboard.fragments import (
    clock,
    decision_list,
    event_list,
    freshness,
    latency_bar,
    milliseconds,
    pill,
    sla_body,
    span_text,
)
from controller.dashboard.sign_in import MAX_SESSIONS, SignIns
from controller.views import DecisionOut, EventOut, ReasonOut, SlaOut


def _sla(p99_ms: float | None, latency_met: bool | None, **more: object) -> SlaOut:
    values: dict[str, object] = {
        "service_id": "s", "version": 1, "contract": {"latency_p99_ms": 100.0, "availability_sla": 0.9995}, "state": "met", "text": "why <not>",
        "requests": 10, "failed": 1, "availability": 0.9, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": p99_ms, "offered_rps": 1.0,
        "latency_met": latency_met, "availability_met": False, "budget_left": -0.5, "fell_back": 0, "running_epoch": 1,
        "predicted_p99_ms": None,
    }  # fmt: skip
    return SlaOut.model_validate(values | more)


def test_the_bar_grows_with_p99_and_the_target_stays_visible() -> None:
    assert 'width:40.0%"' in latency_bar(_sla(50.0, True))
    assert "left:80.0%" in latency_bar(_sla(50.0, True))
    late = latency_bar(_sla(1000.0, False))
    assert "tg-fill-bad" in late
    assert "left:9.3%" in late


def test_without_a_measurement_nothing_is_claimed() -> None:
    body = sla_body(_sla(None, None, availability=None, budget_left=None))
    assert "no p99 yet" in body
    assert 'width:0.0%"' in body


def test_an_endless_prediction_is_a_word_and_leaves_the_scale_alone() -> None:
    assert milliseconds(1e12) == "endless"
    assert "left:80.0%" in latency_bar(_sla(50.0, True, predicted_p99_ms=1e12))


def test_alerts_that_fire_stand_before_the_figures() -> None:
    body = sla_body(_sla(50.0, True, firing=["page: the budget of <latency> burns 14 times too fast"]))
    assert "burns 14 times too fast" in body
    assert "<latency>" not in body
    assert body.index("burns") < body.index("Error budget left")


def test_foreign_text_is_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>"
    decision = DecisionOut(
        at_s=0, service_id=evil, trigger=evil, proposer=evil, epoch=None, score=None, risk=None, sentence=evil,
        reasons=[ReasonOut(code=f'"{evil}', text=evil)], rationale=evil,
    )  # fmt: skip
    event = EventOut(at_s=0, kind=evil, text=evil, agent=None, service=None, epoch=None)
    for html in (
        decision_list([decision]),
        event_list([event]),
        pill(evil),
        sla_body(_sla(1.0, True, text=evil)),
        freshness(evil, 1, known=True),
    ):
        assert "<img" not in html


def test_a_stale_page_says_since_when() -> None:
    assert "up to date" in freshness(None, 0.4, known=True)
    assert "last seen 12 s ago" in freshness("gone", 12.2, known=True)
    assert "not seen yet" in freshness("gone", 0, known=False)


def test_times_and_spans_read_easily() -> None:
    assert ">00:01:40<" in clock(100.0)
    assert [span_text(s) for s in (0.42, 9.96, 119, 600, 9000)] == ["0.4 s", "10 s", "119 s", "10 min", "2 h"]


def test_sign_ins_are_bounded_and_the_oldest_unused_goes_first() -> None:
    sign_ins = SignIns()
    for at in range(MAX_SESSIONS):
        sign_ins.sign_in(f"s{at}", f"k{at}")
    assert sign_ins.key_of("s0") == "k0"
    sign_ins.sign_in("new", "k")
    assert sign_ins.key_of("s1") is None
    assert sign_ins.key_of("s0") == "k0"
    sign_ins.sign_out("new")
    assert sign_ins.key_of("new") is None
