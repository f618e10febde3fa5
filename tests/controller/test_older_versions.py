"""What an older Tidegate wrote, without the fields that came since, still makes sense."""

from __future__ import annotations

from typing import Any

import msgspec

from agents.messages import AnyMessage, DeviceFacts, Hello, Report
from benchmarks.synthetic import fleet_snapshot
from controller.records import AgentRecord, decode
from controller.replay import Look, look_bytes
from controller.snapshots import snapshot_bytes, snapshot_from
from policies.costs import CostModel
from policies.decide import Memory
from policies.ids import AgentId
from policies.roofline import BlockWork, DeviceCalibration
from policies.service import BlockTime, DeviceProfile, ModelProfile
from policies.snapshot import Snapshot

NEW = frozenset({"device_type", "calibration", "work", "timed_on", "device_profiles"})
DEVICE = DeviceCalibration(matmul_flops_per_s=1e10, conv_flops_per_s=1e10, copy_bytes_per_s=1e9, launch_ms=0.1)
WORK = BlockWork(matmul_flops=1e6, conv_flops=0.0, other_flops=0.0, moved_bytes=1e5, weight_bytes=1e5)


def rich() -> Snapshot:
    """A snapshot in which every new field says something."""
    plain = fleet_snapshot(devices=3, blocks=4, services=1)
    agents = {
        name: msgspec.structs.replace(agent, device_type="rk", calibration=DEVICE)
        for name, agent in plain.fleet.agents.items()
    }
    models = {
        name: msgspec.structs.replace(
            model, timed_on=DEVICE, blocks=tuple(msgspec.structs.replace(block, work=WORK) for block in model.blocks)
        )
        for name, model in plain.models.items()
    }
    profiles = {
        name: {"rk": DeviceProfile(
            device_type="rk", blocks=(BlockTime(fixed_ms=1.0, per_item_ms=2.0),) * len(model.blocks), provider="emulated",
            agent="a", measured_at_s=0.0, runs=3, spread=0.0,
        )}
        for name, model in models.items()
    }  # fmt: skip
    fleet = msgspec.structs.replace(plain.fleet, agents=agents)
    return msgspec.structs.replace(plain, fleet=fleet, models=models, device_profiles=profiles)


def without_new(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_new(item) for key, item in value.items() if key not in NEW}
    if isinstance(value, list):
        return [without_new(item) for item in value]
    return value


def older(data: bytes) -> bytes:
    return msgspec.msgpack.encode(without_new(msgspec.msgpack.decode(data)))


def test_a_snapshot_comes_through_bytes() -> None:
    assert snapshot_from(snapshot_bytes(rich())) == rich()


def test_an_older_snapshot_is_predicted_by_slowdown() -> None:
    snapshot = snapshot_from(older(snapshot_bytes(rich())))
    assert snapshot.device_profiles == {}
    model = next(iter(snapshot.models))
    assert (snapshot.models[model].timed_on, snapshot.models[model].blocks[0].work) == (None, None)
    costs = CostModel(snapshot)
    for agent, view in snapshot.fleet.agents.items():
        assert (view.device_type, view.calibration) == ("", None)
        whole = costs.sums(model).whole
        reference = costs.sums(model).run_ms(whole, 2.0)
        assert costs.modelled_ms(model, agent, whole, 2.0) == reference * view.slowdown


def test_an_older_decision_log_is_read() -> None:
    seen = look_bytes(rich(), Look(memory=Memory(), trigger=None))
    assert snapshot_from(older(seen)).services.keys() == rich().services.keys()


def test_older_agents_and_records_are_understood() -> None:
    facts = DeviceFacts(
        platform="rk3588", evidence="emulated", hostname="board", device_type="rk", calibration=DEVICE
    )  # fmt: skip
    record = AgentRecord(id=AgentId("a"), facts=facts, public_key_fingerprint="f", enrolled_at_s=0.0)
    stored = decode(b"\x01" + older(msgspec.msgpack.encode(record)), AgentRecord, "agent/a")
    assert (stored.facts.device_type, stored.facts.calibration) == ("", None)
    model = next(iter(rich().models.values()))
    assert decode(b"\x01" + older(msgspec.msgpack.encode(model)), ModelProfile, "model/m").timed_on is None
    report = Report(
        sequence=1, cpu_saturation=0, memory_free_bytes=1, queue_depth=0, loaded_bytes=0, calibration=DEVICE
    )
    for message in (Hello(protocol=1, facts=facts), report):
        found = msgspec.msgpack.decode(older(msgspec.msgpack.encode(message)), type=AnyMessage)
        assert type(found) is type(message)
