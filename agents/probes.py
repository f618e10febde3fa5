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
    """Busy share of the device, our own shards included, [0, 1]."""
    foreign_saturation: float
    """See `foreign_saturation`; smoothed over some seconds."""
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
        threads: int = 1,
        free_budget_bytes: Callable[[], int],
        npu_load_file: Path = RKNPU_LOAD,
        thermal_zones: Path = THERMAL_ZONES,
    ) -> None:
        self._emulated = emulated
        self._busy_share = busy_share
        self._threads = threads
        self._foreign = 0.0
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
            # The host's other work is not the device's, and the device does nothing but our shards.
            return Readings(self._busy_share(), 0.0, (), None, self._free_budget_bytes())
        total = min(1.0, max(0.0, psutil.cpu_percent() / 100))
        now = foreign_saturation(total, self._busy_share(), threads=self._threads, cores=psutil.cpu_count() or 1)
        self._foreign += 0.1 * (now - self._foreign)
        return Readings(
            cpu_saturation=total,
            foreign_saturation=self._foreign,
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


def foreign_saturation(total: float, own_busy: float, *, threads: int, cores: int) -> float:
    """Share of the cores that our shards need which others take, [0, 1].

    `total` is the busy share of all cores, `own_busy` the share of the time our `threads` run. Cores that we do not need may be busy
    without any harm: our own load and an idle core's worth of others do not make a device look full.
    """
    others = max(0.0, total * cores - own_busy * threads)
    return min(1.0, max(0.0, (others - max(0, cores - threads)) / threads))


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
