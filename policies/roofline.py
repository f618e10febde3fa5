"""How long a block takes on a device, from what it computes and moves and what the device was measured to do. Pure.

The roofline model: a run is bound by arithmetic or by memory, whichever takes longer, and no run is shorter than its launch.
Source: Williams, Waterman, Patterson (2009), "Roofline: an insightful visual performance model for multicore architectures", CACM 52(4).

Peaks are measured with dense products, and real operators stay below them. So where the block was timed on a calibrated machine, only the
ratio of the two rooflines is used: what the block loses against the peak there, it is taken to lose on the other device as well.
"""

from __future__ import annotations

import msgspec


class DeviceCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """What one device does through its own inference backend, from the micro-benchmark of its agent. All rates are above 0."""

    matmul_flops_per_s: float
    """float32 matrix products; a multiply-accumulate is two operations."""
    conv_flops_per_s: float
    """float32 convolutions."""
    copy_bytes_per_s: float
    """Bytes read and written by element-wise operators on tensors larger than the caches next to a core."""
    launch_ms: float
    """A run that computes nothing."""
    spread: float = 0.0
    """How far the estimates lie above the quickest runs, relative: large on a machine that was busy meanwhile."""
    provider: str = ""
    """The execution provider that ran."""


class BlockWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a block computes and moves for one item, counted from its shapes."""

    matmul_flops: float
    conv_flops: float
    other_flops: float
    """Element-wise operators, in operations of a matrix product that take as long."""
    moved_bytes: float
    """Activations read and written."""
    weight_bytes: float
    """Constants read, once per run."""


def compute_ms(work: BlockWork, device: DeviceCalibration) -> float:
    """Time of the arithmetic of one item."""
    products = (work.matmul_flops + work.other_flops) / device.matmul_flops_per_s
    return 1000.0 * (products + work.conv_flops / device.conv_flops_per_s)


def memory_ms(work: BlockWork, device: DeviceCalibration) -> float:
    """Time of the memory traffic of one item."""
    return 1000.0 * (work.moved_bytes + work.weight_bytes) / device.copy_bytes_per_s


def block_ms(work: BlockWork, device: DeviceCalibration) -> tuple[float, float]:
    """(fixed, per item) milliseconds of a block of which nothing was timed.

    Exact for one item; for more an upper bound, since weights are counted once for each and the bound may change sides.
    """
    return device.launch_ms, max(compute_ms(work, device), memory_ms(work, device))


def transferred_ms(
    fixed_ms: float, per_item_ms: float, work: BlockWork, timed_on: DeviceCalibration, device: DeviceCalibration
) -> tuple[float, float]:
    """(fixed, per item) milliseconds on `device` of a block that was timed on another machine. The same machine gives the same times."""
    _, there = block_ms(work, timed_on)
    _, here = block_ms(work, device)
    ratio = here / there if there > 0 else timed_on.matmul_flops_per_s / device.matmul_flops_per_s
    launch_ms = device.launch_ms - ratio * timed_on.launch_ms
    return max(0.0, ratio * fixed_ms + launch_ms), ratio * per_item_ms
