"""The controller as a whole: what a start leaves open, what a stop saves."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from agents.messages import Report, ServiceReport
from controller.core import Controller
from controller.settings import CloudSettings, ControllerSettings, DoorSettings
from policies.ids import AgentId, ServiceId
from sla.errors import ConflictError, SettingsError
from sla.sketch import LatencySketch


def embedded(directory: Path, agent_port: int = 0) -> Controller:
    settings = ControllerSettings(
        directory=directory,
        cache=directory / "cache",
        door=DoorSettings(agent_port=agent_port),
        cloud=CloudSettings(ray="none"),
    )
    return Controller(settings)


async def test_a_start_that_stops_half_way_leaves_nothing_open(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        controller = embedded(tmp_path, port)
        with pytest.raises(SettingsError, match=f"{port}.*free port"):
            await controller.start()
        assert controller._embedded is not None
        assert controller._embedded.pid is None, "the embedded store was stopped again"
    again = embedded(tmp_path, port)
    await again.start()
    assert await again.ready()
    await again.stop()


async def test_what_was_acknowledged_is_there_after_a_restart(tmp_path: Path, make_sla: Any, tiny_onnx: bytes) -> None:
    before = embedded(tmp_path)
    await before.start()
    fingerprint = before.ca.fingerprint
    model = await before.model_service.add_bytes("tiny", tiny_onnx)
    version = (await before.apply_contract(make_sla("tiny"), None)).version
    await before.stop()
    after = embedded(tmp_path)
    await after.start()
    assert after.ca.fingerprint == fingerprint, "agents know this controller again"
    assert [(sla.service_id, sla.version) for sla in after.slas()] == [("tiny", version)]
    assert after.models() == [model]
    assert [service.id for service in after.service_list()] == ["tiny"]
    assert after.registry.profile("tiny").sha256 == model.sha256
    await after.stop()


async def test_counters_of_a_service_survive_a_stop(
    make_controller: Any, make_sla: Any, tiny_onnx: bytes, clock: Any
) -> None:
    before: Controller = make_controller()
    await before.start()
    await before.model_service.add_bytes("tiny", tiny_onnx)
    await before.apply_contract(make_sla("tiny"), None)
    sketch = LatencySketch()
    for _ in range(99):
        sketch.add(50.0)
    service = ServiceReport(
        service_id=ServiceId("tiny"), epoch=1, ok=99, failed=1, fell_back=0, latency_buckets=sketch.to_buckets()
    )
    report = Report(
        sequence=1, cpu_saturation=0, memory_free_bytes=1, queue_depth=0, loaded_bytes=0, services=(service,)
    )
    before._on_report(AgentId("a"), report)
    assert before.sla("tiny").availability == 0.99
    assert before.sla("tiny").budget_left == pytest.approx(-1.0), (
        "one failure of one hundred where one in two hundred may fail"
    )
    await before.stop()
    after: Controller = make_controller()
    await after.start()
    kept = after.sla("tiny")
    assert (kept.requests, kept.failed) == (100, 1)
    assert kept.p99_ms == pytest.approx(50.0, rel=0.02)


async def test_rollback_without_an_earlier_plan_says_so(make_controller: Any, make_sla: Any) -> None:
    controller: Controller = make_controller()
    await controller.start()
    await controller.apply_contract(make_sla(), None)
    with pytest.raises(ConflictError, match="no earlier plan"):
        await controller.rollback("reader")
    assert not controller.sla("reader").pinned


async def test_a_stop_ends_every_task_that_was_started(make_controller: Any) -> None:
    before = asyncio.all_tasks()
    controller: Controller = make_controller()
    await controller.start()
    await controller.stop()
    await asyncio.sleep(0)
    assert {task.get_name() for task in asyncio.all_tasks() - before} == set()
