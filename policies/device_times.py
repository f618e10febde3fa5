"""Which times hold for the blocks of a model on one device, the best known first: timed there, transferred by the roofline, guessed."""

from __future__ import annotations

from collections.abc import Mapping

from policies.fleet import AgentView
from policies.roofline import DeviceCalibration, block_ms, transferred_ms
from policies.service import BlockTime, DeviceProfile, ModelProfile

LOOSE_SPREAD = 0.25
"""A calibration with a larger spread was made on a machine so busy that it says less than the device's slowdown."""


def block_times(
    model: ModelProfile, agent: AgentView, profiles: Mapping[str, DeviceProfile]
) -> tuple[BlockTime, ...] | None:
    """Time of each block on the agent's kind of device; `profiles` are the model's, by device type.

    None where neither a profile nor a calibration that is tight enough helps: the reference times the agent's slowdown are all that is known then.
    """
    profile = profiles.get(agent.device_type) if agent.device_type else None
    if profile is not None and len(profile.blocks) == len(model.blocks):
        return profile.blocks
    device = agent.calibration
    if device is None or any(_is_loose(found) for found in (device, model.timed_on)):
        return None
    times = []
    for block in model.blocks:
        if block.work is None:
            return None
        if model.timed_on is None:
            fixed_ms, per_item_ms = block_ms(block.work, device)
        else:
            fixed_ms, per_item_ms = transferred_ms(
                block.fixed_ms, block.per_item_ms, block.work, model.timed_on, device
            )
        times.append(BlockTime(fixed_ms=fixed_ms, per_item_ms=per_item_ms))
    return tuple(times)


def _is_loose(calibration: DeviceCalibration | None) -> bool:
    return calibration is not None and calibration.spread > LOOSE_SPREAD
