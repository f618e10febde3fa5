"""The roofline on its own: monotone, never below a launch, and silent where the device is the one that was timed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.roofline import BlockWork, DeviceCalibration, block_ms, compute_ms, memory_ms, transferred_ms

amounts = st.floats(0.0, 1e12)
rates = st.floats(1e6, 1e14)
works = st.builds(
    BlockWork, matmul_flops=amounts, conv_flops=amounts, other_flops=amounts, moved_bytes=amounts, weight_bytes=amounts
)
devices = st.builds(
    DeviceCalibration,
    matmul_flops_per_s=rates,
    conv_flops_per_s=rates,
    copy_bytes_per_s=rates,
    launch_ms=st.floats(0.0, 50.0),
)
fields = st.sampled_from(BlockWork.__struct_fields__)
DEVICE = DeviceCalibration(matmul_flops_per_s=50e9, conv_flops_per_s=25e9, copy_bytes_per_s=10e9, launch_ms=0.1)


def one_item(work: BlockWork, device: DeviceCalibration) -> float:
    return sum(block_ms(work, device))


def test_known_answers() -> None:
    work = BlockWork(matmul_flops=50e6, conv_flops=50e6, other_flops=0.0, moved_bytes=10e6, weight_bytes=0.0)
    assert compute_ms(work, DEVICE) == pytest.approx(1.0 + 2.0)
    assert memory_ms(work, DEVICE) == pytest.approx(1.0)
    assert block_ms(work, DEVICE) == (0.1, pytest.approx(3.0)), "bound by arithmetic"
    heavy = msgspec.structs.replace(work, weight_bytes=70e6)
    assert block_ms(heavy, DEVICE) == (0.1, pytest.approx(8.0)), "bound by memory"


@given(work=works, device=devices, name=fields, more=amounts)
def test_more_work_never_takes_less_time(work: BlockWork, device: DeviceCalibration, name: str, more: float) -> None:
    heavier = msgspec.structs.replace(work, **{name: getattr(work, name) + more})
    assert one_item(heavier, device) >= one_item(work, device)


@given(work=works, device=devices, items=st.floats(0.0, 100.0))
def test_no_run_is_shorter_than_its_launch(work: BlockWork, device: DeviceCalibration, items: float) -> None:
    fixed, per_item = block_ms(work, device)
    assert fixed + items * per_item >= device.launch_ms


@given(work=works, device=devices, items=st.floats(1.0, 100.0))
def test_several_items_take_at_least_what_the_roofline_of_all_of_them_says(
    work: BlockWork, device: DeviceCalibration, items: float
) -> None:
    moved = 1000.0 * (items * work.moved_bytes + work.weight_bytes) / device.copy_bytes_per_s
    together = device.launch_ms + max(items * compute_ms(work, device), moved)
    fixed, per_item = block_ms(work, device)
    assert fixed + items * per_item >= together * (1 - 1e-9)


@given(work=works, device=devices, fixed=st.floats(0.0, 1e4), per_item=st.floats(0.0, 1e4))
def test_the_machine_that_was_timed_keeps_its_times(
    work: BlockWork, device: DeviceCalibration, fixed: float, per_item: float
) -> None:
    assert transferred_ms(fixed, per_item, work, device, device) == (fixed, per_item)


@given(
    work=works, device=devices, times=st.floats(0.01, 100.0), fixed=st.floats(0.0, 1e4), per_item=st.floats(0.0, 1e4)
)
def test_a_device_that_is_slower_in_everything_takes_that_much_longer(
    work: BlockWork, device: DeviceCalibration, times: float, fixed: float, per_item: float
) -> None:
    slower = DeviceCalibration(
        matmul_flops_per_s=device.matmul_flops_per_s / times, conv_flops_per_s=device.conv_flops_per_s / times,
        copy_bytes_per_s=device.copy_bytes_per_s / times, launch_ms=device.launch_ms * times,
    )  # fmt: skip
    here = transferred_ms(fixed, per_item, work, device, slower)
    assert here == pytest.approx((fixed * times, per_item * times), rel=1e-6, abs=1e-6)


@given(work=works, timed_on=devices, device=devices)
def test_a_transfer_stays_between_what_the_single_rates_say(
    work: BlockWork, timed_on: DeviceCalibration, device: DeviceCalibration
) -> None:
    rates = [
        getattr(timed_on, name) / getattr(device, name)
        for name in ("matmul_flops_per_s", "conv_flops_per_s", "copy_bytes_per_s")
    ]
    _, per_item = transferred_ms(0.0, 1.0, work, timed_on, device)
    assert min(rates) * (1 - 1e-9) <= per_item <= max(rates) * (1 + 1e-9)
