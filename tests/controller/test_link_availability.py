"""How often a link works is measured apart from how often its ends do."""

from __future__ import annotations

import pytest

from agents.messages import PeerReport, Report
from controller.telemetry import Telemetry
from policies.ids import AgentId

A, B = AgentId("a"), AgentId("b")


def told(*, broken: bool) -> Report:
    peer = PeerReport(peer=B, rtt_ms=2.0, jitter_ms=0.5, bandwidth_bytes_per_s=1e7, broken=broken)
    return Report(
        sequence=1, cpu_saturation=0.5, memory_free_bytes=1 << 30, queue_depth=2, loaded_bytes=0, peers=(peer,)
    )


def alone() -> Report:
    return Report(sequence=1, cpu_saturation=0.5, memory_free_bytes=1 << 30, queue_depth=2, loaded_bytes=0)


def availability(*, reports: int, broken_every: int, peer_reports: bool) -> float:
    telemetry, now_ms = Telemetry(), 0.0
    for number in range(reports):
        now_ms += 500.0
        if peer_reports:
            telemetry.fold(B, alone(), now_ms)
        telemetry.fold(A, told(broken=number % broken_every == broken_every - 1), now_ms)
    return telemetry.link_views(now_ms)["a>b"].availability


def test_a_link_that_breaks_between_live_agents_is_less_available() -> None:
    assert availability(reports=10, broken_every=10**9, peer_reports=True) == pytest.approx(0.9999, abs=1e-5)
    flaky = availability(reports=4_000, broken_every=4, peer_reports=True)
    assert flaky == pytest.approx((12_000 - 1.2 + 3_000) / 16_000)


def test_a_peer_that_is_gone_is_not_the_links_fault() -> None:
    assert availability(reports=4_000, broken_every=4, peer_reports=False) > 0.9999
