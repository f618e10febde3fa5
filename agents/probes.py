"""What the device says of itself while it runs: every reading is bounded, a bad one is dropped and counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

RKNPU_LOAD = Path("/sys/kernel/debug/rknpu/load")
THERMAL_ZONES = Path("/sys/class/thermal")
_CORE = re.compile(r"Core\d+:\s*(\d+)%")
_SINGLE = re.compile(r"NPU load:\s*(\d+)%")


@dataclass(frozen=True, slots=True)
class Readings:
    """One look at the device."""

    cpu_saturation: float
    """[0, 1]."""
    npu_load: tuple[float, ...]
    """Per core, [0, 1]; empty where there is none, or where the reading made no sense."""
    temperature_c: float | None
    memory_free_bytes: int


class DeviceProbe:
    """Reads the device. For an emulated one the CPU is the queue's busy share: the host's load is not the device's."""

    def __init__(
        self,
        *,
        emulated: bool,
        busy_share: Callable[[], float],
        free_budget_bytes: Callable[[], int],
        npu_load_file: Path = RKNPU_LOAD,
        thermal_zones: Path = THERMAL_ZONES,
    ) -> None:
        self._emulated = emulated
        self._busy_share = busy_share
        self._free_budget_bytes = free_budget_bytes
        self._npu_load_file = npu_load_file
        self._thermal_zones = thermal_zones
        self.bad_readings = 0
        """Readings that were out of bounds and dropped."""
        if not emulated:
            psutil.cpu_percent()  # the first call has nothing to compare with and says 0

    def read(self) -> Readings:
        """Never raises: what cannot be read is left out."""
        if self._emulated:
            return Readings(self._busy_share(), (), None, self._free_budget_bytes())
        return Readings(
            cpu_saturation=min(1.0, max(0.0, psutil.cpu_percent() / 100)),
            npu_load=self._npu_load(),
            temperature_c=self._temperature_c(),
            memory_free_bytes=min(self._free_budget_bytes(), int(psutil.virtual_memory().available)),
        )

    def _npu_load(self) -> tuple[float, ...]:
        text = _text(self._npu_load_file)
        if text is None:
            return ()
        loads = parse_npu_load(text)
        if loads is None:
            self.bad_readings += 1
            return ()
        return loads

    def _temperature_c(self) -> float | None:
        for zone in sorted(self._thermal_zones.glob("thermal_zone*")):
            # By type, never by index: the numbering differs between kernels.
            if (_text(zone / "type") or "").strip() in ("npu-thermal", "x86_pkg_temp", "cpu-thermal"):
                celsius = parse_millidegrees(_text(zone / "temp") or "")
                if celsius is None:
                    self.bad_readings += 1
                return celsius
        return None


def parse_npu_load(text: str) -> tuple[float, ...] | None:
    """Load per NPU core as shares of 1, from Rockchip's debug file; None if any number in it is impossible.

    `NPU load:  Core0: 21%, Core1: 11%, Core2:  0%,` has three cores, `NPU load:  0%` one. Drivers were seen to print 429496 %.
    """
    percents = [int(each) for each in _CORE.findall(text)] or [int(each) for each in _SINGLE.findall(text)]
    if not percents or len(percents) > 16 or any(percent > 100 for percent in percents):
        return None
    return tuple(percent / 100 for percent in percents)


def parse_millidegrees(text: str) -> float | None:
    """Degrees Celsius from a thermal zone; None if it is no number or no temperature that a device survives."""
    try:
        celsius = int(text.strip()[:12]) / 1000
    except ValueError:
        return None
    return celsius if -60.0 <= celsius <= 200.0 else None


def _text(path: Path) -> str | None:
    try:
        with path.open("r", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return None
