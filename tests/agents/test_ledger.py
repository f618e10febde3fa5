"""The ledger: all that happened since the last report, once."""

from __future__ import annotations

import pytest

from agents.ledger import MAX_ENTRIES, MAX_FAULTS, Ledger
from policies.plan import Span


def test_a_report_sums_up_and_empties():
    ledger = Ledger()
    for ms in (10.0, 30.0):
        ledger.request_ended("s", 1, ms=ms, ok=True, fell_back=ms > 20)
        ledger.shard_ran("s", 1, stage="detect", blocks=Span(0, 2), ms=ms, items=3, provider="p")
        ledger.step_ran("s", 1, stage="crops", ms=ms / 10)
    ledger.request_ended("s", 1, ms=99.0, ok=False, fell_back=False)
    ledger.request_ended("s", 2, ms=5.0, ok=True, fell_back=False)
    services, _ = ledger.take()
    first, second = services
    assert (first.epoch, first.ok, first.failed, first.fell_back, sum(first.latency_buckets.values())) == (
        1,
        2,
        1,
        1,
        2,
    )
    (shard,), (step,) = first.shards, first.steps
    assert (shard.count, shard.sum_ms, shard.sum_sq_ms, shard.items, shard.provider) == (2, 40.0, 1000.0, 6, "p")
    assert (step.stage, step.count, step.sum_ms) == ("crops", 2, pytest.approx(4.0))
    assert (second.epoch, second.ok) == (2, 1)
    assert ledger.take() == ((), ())


def test_it_is_bounded_while_nobody_asks():
    ledger = Ledger()
    for n in range(2 * MAX_ENTRIES):
        ledger.request_ended("s", n, ms=1.0, ok=True, fell_back=False)
        ledger.shard_ran("t", 0, stage=str(n), blocks=Span(0, 1), ms=1.0, items=1, provider="p")
        ledger.fault(f"fault {n}" * 100)
        ledger.fault("the same")
    services, faults = ledger.take()
    assert len(services) <= MAX_ENTRIES
    assert max(len(service.shards) for service in services) <= MAX_ENTRIES
    assert len(faults) <= MAX_FAULTS
    assert all(len(fault) <= 400 for fault in faults)
    assert faults.count("the same") == 1
