from __future__ import annotations

import pytest

from sla.attendance import REMEMBERED_S, Attendance

END_S = 1_800_000_000.0


def test_before_any_traffic_anybody_will_do() -> None:
    assert Attendance().observed(END_S, {}) == 0.0
    assert Attendance().observed(END_S, {"a": END_S - 61}) == 0.0
    assert Attendance().observed(END_S, {"a": END_S - 59}) == 1.0


def test_who_carried_requests_is_missed_to_that_share() -> None:
    attendance = Attendance()
    attendance.carried("a", END_S - 100, 75)
    attendance.carried("b", END_S - 100, 25)
    assert attendance.observed(END_S, {"a": END_S - 1, "b": END_S - 1}) == 1.0
    assert attendance.observed(END_S, {"a": END_S - 90, "b": END_S - 1, "c": END_S}) == pytest.approx(0.25)
    later = END_S + REMEMBERED_S + 60
    assert attendance.observed(later, {"b": later}) == 1.0


def test_an_old_ingress_weighs_less() -> None:
    attendance = Attendance()
    attendance.carried("a", END_S - 3 * REMEMBERED_S, 1000)
    attendance.carried("a", END_S - 10, 1)
    attendance.carried("b", END_S - 10, 126)
    assert attendance.observed(END_S, {"b": END_S}) == pytest.approx(0.5, abs=0.01)
