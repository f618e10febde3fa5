"""What agents reported, in columns with ages."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.messages import PeerReport, Report, ServiceReport, ShardReport, StepReport
from controller.records import PlanBook, PlanRecord
from controller.telemetry import EPOCHS_KEPT, MEASURE_WINDOW_MS, Table, Telemetry
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.snapshot import measure_key
from sla.sketch import LatencySketch

A, B, READER = AgentId("a"), AgentId("b"), ServiceId("reader")


def report(**changed: Any) -> Report:
    plain = Report(sequence=1, cpu_saturation=0.5, memory_free_bytes=1 << 30, queue_depth=2, loaded_bytes=5 << 20)
    return msgspec.structs.replace(plain, **changed)


def service(*latencies_ms: float, **changed: Any) -> ServiceReport:
    sketch = LatencySketch()
    for ms in latencies_ms:
        sketch.add(ms)
    plain = ServiceReport(
        service_id=READER, epoch=1, ok=len(latencies_ms), failed=0, fell_back=0, latency_buckets=sketch.to_buckets()
    )
    return msgspec.structs.replace(plain, **changed)


def shard(**changed: Any) -> ShardReport:
    plain = ShardReport(
        stage="detect", blocks=Span(0, 3), count=4, sum_ms=40.0, sum_sq_ms=408.0, items=8, provider="CPU"
    )
    return msgspec.structs.replace(plain, **changed)


def peer(name: AgentId = B, **changed: Any) -> PeerReport:
    plain = PeerReport(peer=name, rtt_ms=2.0, jitter_ms=0.5, bandwidth_bytes_per_s=1e7)
    return msgspec.structs.replace(plain, **changed)


# --- the table


@given(st.lists(st.tuples(st.sampled_from(["put", "remove"]), st.integers(0, 90), st.floats(0, 9)), max_size=300))
@settings(max_examples=60)
def test_a_table_is_a_dictionary_with_columns(steps: list[tuple[str, int, float]]) -> None:
    table, plain = Table(("value", "other")), dict[str, float]()
    for action, number, value in steps:
        key = f"k{number}"
        if action == "put":
            table.put(key, value=value)
            plain[key] = value
        else:
            table.remove(key)
            plain.pop(key, None)
    assert sorted(table.rows()) == sorted(plain)
    assert {key: table.get(key, "value") for key in plain} == plain
    assert dict(zip(table.rows(), table.column("value"), strict=True)) == plain
    assert np.isnan(table.column("other")).all(), "a row that takes the place of another one keeps nothing of it"


# --- agents and links


def test_each_number_has_the_age_of_its_report_by_our_clock() -> None:
    telemetry = Telemetry()
    telemetry.fold(A, report(peers=(peer(),)), 1000.0)
    telemetry.fold(B, report(), 1500.0)
    assert telemetry.link_views(4000.0)["a>b"].age_ms == 3000.0
    assert telemetry.agents.get(A, "seen_ms") == 1000.0
    assert telemetry.agents.get(A, "cpu") == 0.5


@pytest.mark.parametrize(
    ("column", "changed"),
    [
        ("cpu", {"cpu_saturation": 4294967.36}),
        ("cpu", {"cpu_saturation": math.nan}),
        ("cpu", {"cpu_saturation": -0.1}),
        ("queue_depth", {"queue_depth": -1}),
        ("memory_free_bytes", {"memory_free_bytes": -5}),
        ("loaded_bytes", {"loaded_bytes": 10**18}),
        ("temperature_c", {"temperature_c": 3e5}),
        ("temperature_c", {"temperature_c": math.inf}),
    ],
)
def test_a_number_out_of_bounds_is_dropped_and_counted_and_the_others_are_taken(
    column: str, changed: dict[str, Any]
) -> None:
    telemetry = Telemetry()
    telemetry.fold(A, report(**changed), 0.0)
    assert telemetry.dropped == 1
    assert math.isnan(telemetry.agents.get(A, column))
    others = {"cpu", "queue_depth", "memory_free_bytes", "loaded_bytes"} - {column}
    assert not any(math.isnan(telemetry.agents.get(A, name)) for name in others)


def test_a_link_number_out_of_bounds_is_dropped_and_the_last_good_one_is_not_kept_as_new() -> None:
    telemetry = Telemetry()
    telemetry.fold(A, report(peers=(peer(rtt_ms=-3.0),)), 0.0)
    assert telemetry.dropped == 1
    assert telemetry.link_views(0.0) == {}, "a round trip that was never measured makes no link"


def test_a_peer_that_calls_itself_like_two_is_dropped() -> None:
    telemetry = Telemetry()
    telemetry.fold(A, report(peers=(peer(AgentId("b>c")),)), 0.0)
    assert telemetry.link_views(0.0) == {}
    assert telemetry.dropped == 1


def test_a_peer_that_cannot_be_reached_confirms_a_loss_for_some_seconds_only() -> None:
    telemetry = Telemetry()
    telemetry.fold(A, report(peers=(peer(broken=True),)), 1000.0)
    assert telemetry.broken_towards(B, 2000.0)
    assert not telemetry.broken_towards(A, 2000.0)
    assert not telemetry.broken_towards(B, 7000.0)


def test_forgetting_an_agent_forgets_its_links_in_both_directions() -> None:
    telemetry = Telemetry()
    telemetry.fold(A, report(peers=(peer(B),)), 0.0)
    telemetry.fold(B, report(peers=(peer(A), peer(AgentId("c")))), 0.0)
    telemetry.forget(A)
    assert set(telemetry.link_views(0.0)) == {"b>c"}
    assert A not in telemetry.agents


# --- shards and requests


def test_shard_runs_are_summed_over_the_newest_window_only() -> None:
    telemetry, key = Telemetry(), measure_key("detect", A, 0, 3)
    telemetry.fold(A, report(services=(service(shards=(shard(sum_ms=4000.0, sum_sq_ms=4e6),)),)), 0.0)
    telemetry.fold(A, report(services=(service(shards=(shard(),)),)), MEASURE_WINDOW_MS)
    found = telemetry.measures(READER, MEASURE_WINDOW_MS + 1000)[key]
    assert (found.count, found.mean_ms, found.items, found.age_ms) == (4, 10.0, 2.0, 1000.0)
    assert found.std_ms == pytest.approx(math.sqrt(2.0))
    assert telemetry.provider(READER, key) == "CPU"
    assert telemetry.measures(READER, 3 * MEASURE_WINDOW_MS) == {}, "old times say nothing about now"


def test_runs_under_an_earlier_plan_count_where_it_had_the_stage_alike() -> None:
    """The same blocks on the same agent may have been another model, or another share of the items."""
    telemetry, key = Telemetry(), measure_key("detect", A, 0, 3)

    def plan(epoch: int, model: str, fallback: tuple[AgentId, ...] = ()) -> Plan:
        stage, name = StageName("detect"), ModelName(model)
        lane = make_lane(stage, name, None, WHOLE_AXIS, ((A, Span(0, 3)),))
        planned = StagePlan(stage=stage, model=name, axis=None, lanes=(lane,), fallback=fallback)
        return Plan(service_id=READER, epoch=epoch, stages=(planned,))

    def ran(epoch: int, each_ms: float) -> None:
        services = (service(epoch=epoch, shards=(shard(sum_ms=4 * each_ms, sum_sq_ms=4 * each_ms**2),)),)
        telemetry.fold(A, report(services=services), 0.0)

    def seen_ms(running: Plan, *before: Plan) -> float:
        history = tuple(PlanRecord(plan=each, at_s=0.0) for each in (*before, running))
        return telemetry.measures(READER, 0.0, PlanBook(history=history, running_epoch=running.epoch).alike())[
            key
        ].mean_ms

    first, second, third = plan(1, "small"), plan(2, "tiny"), plan(3, "tiny", (B,))
    ran(1, 100.0)
    assert seen_ms(first) == 100.0
    ran(2, 10.0)
    assert seen_ms(first) == 100.0, "the next plan's canary"
    assert seen_ms(second, first) == 10.0
    ran(3, 20.0)
    assert seen_ms(third, first, second) == 15.0, "only the fallback is new"


def test_python_steps_are_measured_too() -> None:
    telemetry = Telemetry()
    telemetry.fold(A, report(services=(service(steps=(StepReport(stage="crops", count=2, sum_ms=6.0),)),)), 0.0)
    assert telemetry.measures(READER, 0.0)[measure_key("crops", A, 0, 0)].mean_ms == 3.0


def test_load_and_entry_come_from_the_newest_window() -> None:
    telemetry = Telemetry()
    telemetry.fold(A, report(services=(service(*[5.0] * 90),)), 0.0)
    telemetry.fold(B, report(services=(service(*[5.0] * 30, failed=15),)), 20_000.0)
    assert telemetry.offered_rps(READER, 20_000.0) == 3.0, "failed requests were offered too"
    assert telemetry.entry(READER, 20_000.0) == A
    assert telemetry.entry(READER, 40_000.0) == B
    assert telemetry.offered_rps(READER, 99_000.0) == 0.0


def test_latencies_are_kept_per_plan_and_the_oldest_plans_fall_out() -> None:
    telemetry = Telemetry()
    for epoch in range(1, EPOCHS_KEPT + 3):
        telemetry.fold(A, report(services=(service(float(epoch), epoch=epoch),)), 0.0)
    assert telemetry.epoch_sketch(READER, 1) is None
    newest = telemetry.epoch_sketch(READER, EPOCHS_KEPT + 2)
    assert newest is not None
    assert newest.quantile(0.5) == pytest.approx(EPOCHS_KEPT + 2, rel=0.02)


@pytest.mark.parametrize(
    "bad",
    [
        {"ok": -1},
        {"failed": 10**15},
        {"latency_buckets": {10**9: 1}},
        {"latency_buckets": {3: -1}},
        {"shards": (shard(sum_ms=math.nan),)},
        {"shards": (shard(count=-4),)},
        {"shards": (shard(items=10**18),)},
        {"steps": (StepReport(stage="crops", count=1, sum_ms=math.inf),)},
    ],
)
def test_a_service_report_with_an_impossible_number_is_dropped_as_a_whole_and_counted(bad: dict[str, Any]) -> None:
    telemetry = Telemetry()
    taken = telemetry.fold(A, report(services=(service(5.0, **bad), service(7.0, epoch=2))), 0.0)
    assert [s.epoch for s in taken] == [2]
    assert telemetry.dropped == 1
    assert telemetry.epoch_sketch(READER, 1) is None
    assert telemetry.measures(READER, 0.0) == {}
    assert telemetry.offered_rps(READER, 0.0) == pytest.approx(1 / 15)


def test_the_load_of_a_plan_is_over_the_time_since_its_first_request() -> None:
    telemetry, service = Telemetry(), ServiceId("reader")
    assert telemetry.epoch_rps(service, 3, 0.0) == 0.0
    for now_ms in (1_000.0, 6_000.0, 11_000.0):
        sketch = LatencySketch()
        for _ in range(10):
            sketch.add(30.0)
        report = ServiceReport(
            service_id=service, epoch=3, ok=10, failed=0, fell_back=0, latency_buckets=sketch.to_buckets()
        )
        plain = Report(
            sequence=1, cpu_saturation=0, memory_free_bytes=1, queue_depth=0, loaded_bytes=0, services=(report,)
        )
        telemetry.fold(AgentId("a"), plain, now_ms)
    assert telemetry.epoch_rps(service, 3, 16_000.0) == 2.0
    assert telemetry.epoch_rps(service, 4, 16_000.0) == 0.0
