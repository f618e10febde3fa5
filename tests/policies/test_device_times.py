"""Which times the cost model believes of a device: measured shard, then its profile, then the roofline, then its slowdown."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from policies.costs import CostModel, PredictSettings
from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, StageName
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.roofline import BlockWork, DeviceCalibration
from policies.service import BlockTime, DeviceProfile, ModelProfile
from policies.snapshot import Snapshot, StageMeasure, measure_key
from policies.solve import candidates

HOST = DeviceCalibration(matmul_flops_per_s=60e9, conv_flops_per_s=60e9, copy_bytes_per_s=10e9, launch_ms=0.02)
NARROW = DeviceCalibration(matmul_flops_per_s=60e9, conv_flops_per_s=60e9, copy_bytes_per_s=1e9, launch_ms=0.02)
"""As quick in arithmetic, with a tenth of the memory bandwidth."""
DET = ModelName("det-small")
RK = AgentId("rk-1")
ITEMS = 1.0


def counted(model: ModelProfile, *, moved_bytes: float = 0.0) -> ModelProfile:
    """The model with its work: bound by arithmetic unless `moved_bytes` is large."""
    work = BlockWork(matmul_flops=0, conv_flops=1e8, other_flops=0, moved_bytes=moved_bytes, weight_bytes=0)
    blocks = tuple(msgspec.structs.replace(block, work=work) for block in model.blocks)
    return msgspec.structs.replace(model, blocks=blocks, timed_on=HOST)


def scaled(device: DeviceCalibration, times: float) -> DeviceCalibration:
    return DeviceCalibration(
        matmul_flops_per_s=device.matmul_flops_per_s / times, conv_flops_per_s=device.conv_flops_per_s / times,
        copy_bytes_per_s=device.copy_bytes_per_s / times, launch_ms=device.launch_ms * times,
    )  # fmt: skip


def with_agent(snapshot: Snapshot, agent: AgentId, **changed: object) -> Snapshot:
    view: AgentView = msgspec.structs.replace(snapshot.fleet.agents[agent], **changed)
    fleet = msgspec.structs.replace(snapshot.fleet, agents={**snapshot.fleet.agents, agent: view})
    return msgspec.structs.replace(snapshot, fleet=fleet)


def with_models(snapshot: Snapshot, **work: float) -> Snapshot:
    models = {name: counted(model, **work) for name, model in snapshot.models.items()}
    return msgspec.structs.replace(snapshot, models=models)


def profile_of(snapshot: Snapshot, per_block_ms: float) -> DeviceProfile:
    times = tuple(BlockTime(fixed_ms=0.0, per_item_ms=per_block_ms) for _ in snapshot.models[DET].blocks)
    return DeviceProfile(
        device_type="rk", blocks=times, provider="emulated", agent="rk-2", measured_at_s=0.0, runs=5, spread=0.01
    )


def run_ms(snapshot: Snapshot, agent: AgentId = RK) -> float:
    costs = CostModel(snapshot)
    return costs.run_ms(StageName("detect"), DET, agent, costs.sums(DET).whole, ITEMS)


def test_a_device_that_is_calibrated_like_its_slowdown_is_predicted_as_before(demo) -> None:
    plain = with_models(demo())
    everybody = plain
    for agent, view in plain.fleet.agents.items():
        everybody = with_agent(everybody, agent, calibration=scaled(HOST, view.slowdown))
    for agent in plain.fleet.agents:
        assert run_ms(everybody, agent) == pytest.approx(run_ms(plain, agent))
        assert CostModel(everybody).agent_factor(agent) == pytest.approx(CostModel(plain).agent_factor(agent))
    service = next(iter(plain.services))
    assert [c.plan for c in candidates(everybody, service, 6)] == [c.plan for c in candidates(plain, service, 6)]


def test_the_roofline_tells_arithmetic_from_memory(demo) -> None:
    bound_by_arithmetic = with_agent(with_models(demo()), RK, calibration=NARROW)
    bound_by_memory = with_agent(with_models(demo(), moved_bytes=1e9), RK, calibration=NARROW)
    reference = CostModel(demo()).sums(DET).run_ms(Span(0, 8), ITEMS)
    assert run_ms(bound_by_arithmetic) == pytest.approx(reference), "and not three times, as its slowdown says"
    assert run_ms(bound_by_memory) == pytest.approx(10 * reference, rel=1e-3)


def test_without_counted_work_or_calibration_the_slowdown_is_what_is_known(demo) -> None:
    plain = demo()
    assert run_ms(with_agent(plain, RK, calibration=NARROW)) == run_ms(plain)
    assert run_ms(with_models(plain)) == run_ms(plain)


def test_a_calibration_of_a_machine_that_was_too_busy_is_not_believed(demo) -> None:
    loose = msgspec.structs.replace(NARROW, spread=0.4)
    plain = with_models(demo())
    assert run_ms(with_agent(plain, RK, calibration=loose)) == run_ms(plain)
    models = {name: msgspec.structs.replace(model, timed_on=loose) for name, model in plain.models.items()}
    busy_reference = msgspec.structs.replace(plain, models=models)
    assert run_ms(with_agent(busy_reference, RK, calibration=NARROW)) == run_ms(plain)


def test_without_a_reference_the_roofline_stands_alone(demo) -> None:
    snapshot = with_models(demo())
    models = {name: msgspec.structs.replace(model, timed_on=None) for name, model in snapshot.models.items()}
    alone = with_agent(msgspec.structs.replace(snapshot, models=models), RK, calibration=HOST)
    assert run_ms(alone) == pytest.approx(8 * (0.02 + 1000 * 1e8 / 60e9))


def test_a_profile_of_the_type_of_device_is_believed_before_the_roofline(demo) -> None:
    snapshot = with_agent(with_models(demo()), RK, calibration=HOST, device_type="rk")
    known = msgspec.structs.replace(snapshot, device_profiles={DET: {"rk": profile_of(snapshot, 17.0)}})
    assert run_ms(known) == pytest.approx(8 * 17.0)
    assert run_ms(known, AgentId("rk-2")) == run_ms(snapshot, AgentId("rk-2")), "which is of another type"


def test_a_profile_of_another_cut_is_not_used(demo) -> None:
    snapshot = with_agent(demo(), RK, device_type="rk")
    profile = profile_of(snapshot, 17.0)
    stale = msgspec.structs.replace(profile, blocks=profile.blocks[:-1])
    assert run_ms(msgspec.structs.replace(snapshot, device_profiles={DET: {"rk": stale}})) == run_ms(snapshot)


def test_what_was_measured_of_a_running_shard_is_believed_before_its_profile(demo) -> None:
    whole = Span(0, 8)
    lane = make_lane(StageName("detect"), DET, None, WHOLE_AXIS, ((RK, whole),))
    stage = StagePlan(stage=StageName("detect"), model=DET, axis=None, lanes=(lane,))
    running = Plan(service_id=next(iter(demo().services)), epoch=1, stages=(stage,))
    measure = StageMeasure(count=100_000, mean_ms=300.0, std_ms=3.0, items=1.0)
    key = measure_key("detect", RK, 0, 8)
    snapshot = with_agent(demo(running=running, measures={key: measure}), RK, device_type="rk")
    known = msgspec.structs.replace(snapshot, device_profiles={DET: {"rk": profile_of(snapshot, 17.0)}})
    assert abs(math.log(run_ms(known) / 300.0)) < abs(math.log(run_ms(known) / (8 * 17.0)))
    sure = CostModel(known, PredictSettings(prior_samples=1e-6))
    assert sure.run_ms(StageName("detect"), DET, RK, whole, 1.0) == pytest.approx(300.0)


def test_the_tables_of_the_solver_hold_what_single_runs_are_predicted_to_take(demo) -> None:
    snapshot = with_agent(with_models(demo()), RK, calibration=NARROW, device_type="rk")
    snapshot = msgspec.structs.replace(snapshot, device_profiles={DET: {"rk": profile_of(snapshot, 17.0)}})
    costs = CostModel(snapshot)
    agents = list(snapshot.fleet.agents)
    fixed, per_item = costs.times_on(DET, agents)
    assert fixed.shape == per_item.shape == (len(agents), 9)
    for row, agent in enumerate(agents):
        expected = costs.run_ms(StageName("detect"), DET, agent, Span(2, 5), 3.0)
        found = fixed[row, 5] - fixed[row, 2] + 3.0 * (per_item[row, 5] - per_item[row, 2])
        np.testing.assert_allclose(found, expected)


def test_a_fleet_of_devices_that_are_alike_is_priced_once(demo) -> None:
    snapshot = with_models(demo())
    for agent in ("rk-1", "rk-2"):
        snapshot = with_agent(snapshot, AgentId(agent), calibration=NARROW, device_type="rk")
    costs = CostModel(snapshot)
    for agent in ("rk-1", "rk-2"):
        costs.modelled_ms(DET, AgentId(agent), Span(0, 8), 1.0)
    assert len(costs._timed_by_kind) == 1
