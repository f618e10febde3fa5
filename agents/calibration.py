"""What this device does: a short micro-benchmark through its own backend, kept by the type of device, refined while nothing else runs.

Matrix products, convolutions, memory traffic and the empty run (see `agents.workloads`) run one by one through the accelerator's queue as
the least urgent work, so that a request waits for one of them at most (tens of milliseconds on the slowest emulated device). Each
rate comes from the quickest quarter of the runs: on a busy machine most of those were left alone. Where the processor does the work in
one thread, that thread's processor time counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from agents.backends.base import InferenceBackend
from agents.backends.timing import clock_for, quickest, timed_run
from agents.queue import AcceleratorQueue
from agents.workloads import CONV, COPY, LAUNCH, MATMUL, WORKLOADS, Workload
from policies.roofline import DeviceCalibration
from sla.errors import SettingsError, TidegateError

log = logging.getLogger("tidegate.calibration")

OpenBackend = Callable[[Path], InferenceBackend]
MIN_ROUNDS = 8
MAX_KEPT = 16
"""Types of devices that one directory remembers: options and runtimes change, and change back."""
NEVER_S = 3600.0
"""Deadline of a run: everything else is more urgent."""
IDLE_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """How much of a device's time its calibration may take; seconds of runs, loading and waiting not counted."""

    first_s: float = 0.5
    """Once after the first start; several devices may begin at once on one machine."""
    budget_s: float = 10.0
    """In all, with what is added while the device is idle; nothing is added to an estimate that is tight."""
    refine_every_s: float = 30.0
    tight: float = 0.05
    """Spread of an estimate that needs no refining."""

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.budget_s:
            raise SettingsError("A calibration's first_s must be above 0 and at most its budget_s.")


class Calibrator:
    """Owned by the agent's event loop; `calibration` is what is known now."""

    def __init__(
        self, *, device_type: str, file: Path, queue: AcceleratorQueue, open_backend: OpenBackend,
        settings: CalibrationSettings | None = None, threads: int = 1,
    ) -> None:  # fmt: skip
        self._device_type = device_type
        self._file = file
        self._queue = queue
        self._open_backend = open_backend
        self._settings = settings or CalibrationSettings()
        self._threads = threads
        self.calibration: DeviceCalibration | None = read_kept(file).get(device_type)

    async def run(self) -> None:
        """Measure unless it was measured before; then refine while there is need and leave. Ends when nothing is left to do."""
        settings, spent_s = self._settings, 0.0
        while spent_s < settings.budget_s and not self._is_tight:
            if self.calibration is not None:
                await asyncio.sleep(settings.refine_every_s)
                if self._queue.depth > 0 or self._queue.busy_share() > IDLE_SHARE:
                    continue
            budget_s = min(2.0 * settings.first_s if spent_s else settings.first_s, settings.budget_s - spent_s)
            spent_s += budget_s
            try:
                found = await measure(
                    self._open_backend, self._queue, budget_s=budget_s, tight=settings.tight, threads=self._threads
                )
            except TidegateError as error:
                log.info("the calibration waits: %s", error)
                await asyncio.sleep(settings.refine_every_s)
                continue
            if self.calibration is None or found.spread < self.calibration.spread:
                self.calibration = found
                await asyncio.to_thread(keep, self._file, self._device_type, found)
                log.info("calibrated: %s", in_words(found))

    @property
    def _is_tight(self) -> bool:
        return self.calibration is not None and self.calibration.spread <= self._settings.tight


async def measure(
    open_backend: OpenBackend, queue: AcceleratorQueue, *, budget_s: float, tight: float, threads: int = 1
) -> DeviceCalibration:
    """Run all workloads in turn until the estimate is tight or the runs took `budget_s`; at least twice each.

    Raises ModelError if the backend refuses a workload, OverloadedError if the queue is full.
    """
    backends: list[tuple[Workload, InferenceBackend]] = []
    times = _no_times()
    try:
        for workload in WORKLOADS:
            backend = await asyncio.to_thread(open_backend, workload.path)
            backends.append((workload, backend))
            await _in_queue(queue, backend, workload, threads)  # warms up
        while not _are_enough(times, budget_s, tight):
            for workload, backend in backends:
                times[workload.file].append(await _in_queue(queue, backend, workload, threads))
    finally:
        for _, backend in backends:
            queue.run_after(backend.close)
    return _calibration(times, backends[0][1].provider)


def measure_here(open_backend: OpenBackend, *, budget_s: float, tight: float) -> DeviceCalibration:
    """The same in the calling thread, for a machine that is no agent. Raises ModelError."""
    backends = [(workload, open_backend(workload.path)) for workload in WORKLOADS]
    times = _no_times()
    for workload, backend in backends:
        _timed(backend, workload)
    while not _are_enough(times, budget_s, tight):
        for workload, backend in backends:
            times[workload.file].append(_timed(backend, workload))
    for _, backend in backends:
        backend.close()
    return _calibration(times, backends[0][1].provider)


def read_kept(file: Path) -> dict[str, DeviceCalibration]:
    """What was kept by type of device; nothing if the file is not there or makes no sense: then it is measured again."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=dict[str, DeviceCalibration])
    except (OSError, msgspec.MsgspecError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("%s is not a calibration that makes sense and is measured again: %s", file.name, error)
        return {}
    return {name: calibration for name, calibration in kept.items() if is_sound(calibration)}


def keep(file: Path, device_type: str, calibration: DeviceCalibration) -> None:
    """Remember a calibration, on disk when this returns."""
    kept = {name: held for name, held in read_kept(file).items() if name != device_type}
    newest = list(kept.items())[-(MAX_KEPT - 1) :]
    temporary = file.with_suffix(".new")
    temporary.write_bytes(msgspec.json.encode(dict([*newest, (device_type, calibration)])))
    temporary.replace(file)


def is_sound(calibration: DeviceCalibration) -> bool:
    """True if every number is one that a device can have."""
    rates = (calibration.matmul_flops_per_s, calibration.conv_flops_per_s, calibration.copy_bytes_per_s)
    return (
        all(1e3 <= rate <= 1e18 for rate in rates)
        and 0.0 <= calibration.launch_ms <= 1e5
        and 0.0 <= calibration.spread <= 1e6
        and len(calibration.provider) <= 100
    )


def in_words(calibration: DeviceCalibration) -> str:
    """For a log line."""
    return (
        f"matrix products {calibration.matmul_flops_per_s / 1e9:.1f} GFLOP/s, convolutions {calibration.conv_flops_per_s / 1e9:.1f} GFLOP/s, "
        f"memory {calibration.copy_bytes_per_s / 1e9:.1f} GB/s, a run at least {calibration.launch_ms:.3f} ms, "
        f"within {calibration.spread:.0%} on {calibration.provider}"
    )


async def _in_queue(queue: AcceleratorQueue, backend: InferenceBackend, workload: Workload, threads: int) -> float:
    return await queue.submit(
        lambda: _timed(backend, workload, threads), deadline_s=queue.now_s() + NEVER_S, modality="text"
    )


def _timed(backend: InferenceBackend, workload: Workload, threads: int = 1) -> float:
    """Seconds of one run."""
    _, took_s = timed_run(backend, workload.feed(), ["y"], clock_for(backend, threads))
    return took_s


def _no_times() -> dict[str, list[float]]:
    return {workload.file: [] for workload in WORKLOADS}


def _are_enough(times: dict[str, list[float]], budget_s: float, tight: float) -> bool:
    rounds = len(times[LAUNCH.file])
    if rounds < 2:
        return False
    return sum(map(sum, times.values())) >= budget_s or (rounds >= MIN_ROUNDS and _spread(times) <= tight)


def _spread(times: dict[str, list[float]]) -> float:
    """How far the estimates lie above the quickest runs; launches are too short to tell."""
    return max(quickest(times[w.file]) / min(times[w.file]) - 1.0 for w in (MATMUL, CONV, COPY))


def _calibration(times: dict[str, list[float]], provider: str) -> DeviceCalibration:
    launch_s = min(times[LAUNCH.file])  # so short that waking up late is most of what a busy machine adds

    def rate(workload: Workload) -> float:
        took_s = quickest(times[workload.file])
        return workload.amount / max(took_s - launch_s, 0.1 * took_s)

    return DeviceCalibration(
        matmul_flops_per_s=rate(MATMUL), conv_flops_per_s=rate(CONV), copy_bytes_per_s=rate(COPY),
        launch_ms=1000.0 * launch_s, spread=_spread(times), provider=provider,
    )  # fmt: skip
