"""The micro-benchmark: through the real backends, kept by type of device, never in the way, and bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agents.backends import InferenceBackend, open_backend
from agents.backends.emulated import EmulatedBackend
from agents.backends.onnx import OnnxBackend
from agents.backends.timing import clock_for, quickest, timed_run
from agents.calibration import (
    MAX_KEPT,
    CalibrationSettings,
    Calibrator,
    is_sound,
    keep,
    measure,
    read_kept,
)
from agents.facts import device_type
from agents.queue import AcceleratorQueue
from agents.workloads import CONV, COPY, LAUNCH, MATMUL, WORKLOADS, directory
from controller.models.workload_graphs import build_workloads
from policies.platforms import platform
from policies.roofline import DeviceCalibration
from sla.errors import ModelError, SettingsError

SOUND = DeviceCalibration(
    matmul_flops_per_s=6e10, conv_flops_per_s=5e10, copy_bytes_per_s=1e10, launch_ms=0.05, spread=0.04
)
QUICK = CalibrationSettings(first_s=0.01, budget_s=0.02, refine_every_s=0.001, tight=0.0)


class SteadyBackend:
    """A device that takes exactly as long as it is told, on a clock that only it moves; each run is noted."""

    provider = "steady"
    fault = None

    def __init__(self, path: Path, runs: list[str]) -> None:
        self._path, self._runs = path, runs

    def run(self, inputs: object, outputs: object) -> dict[str, np.ndarray]:
        self._runs.append(self._path.name)
        return {}

    def close(self) -> None:
        self._runs.append(f"closed {self._path.name}")


@pytest.fixture
async def queue() -> AsyncIterator[AcceleratorQueue]:
    queue = AcceleratorQueue()
    yield queue
    queue.close()


def plain(path: Path) -> InferenceBackend:
    return open_backend(platform("x86"), path, emulate=False)


def test_the_graphs_in_the_package_are_those_that_are_built():
    packaged = {path.name: path.read_bytes() for path in directory().glob("*.onnx")}
    assert packaged == build_workloads(), "run: python -m controller.models.workload_graphs"
    assert sum(map(len, packaged.values())) < 2000


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.file)
def test_each_graph_computes_what_it_says(workload):
    found = OnnxBackend(workload.path).run(workload.feed(), ["y"])["y"]
    assert np.isfinite(found).all()
    if workload is MATMUL:
        np.testing.assert_allclose(found, 0.5, rtol=1e-5)  # rows of means of means
    elif workload is COPY:
        np.testing.assert_allclose(found, 0.5)  # an even number of signs
    elif workload is LAUNCH:
        np.testing.assert_allclose(found, 1.0)
    else:
        assert workload is CONV
        assert (found > 0.4).all()
        assert (found < 0.5).all(), "less at the edges, where zeros are padded"


async def test_a_processor_is_measured_and_stands_the_bounds(queue):
    found = await measure(plain, queue, budget_s=0.05, tight=0.05)
    assert is_sound(found)
    assert found.provider == "CPUExecutionProvider"


async def test_an_emulated_device_is_measured_as_what_it_is(queue):
    """Its clocks are given, so that the ratio is exact: every run takes 2 ms of the processor, and so 2 ms times its slowdown."""
    slept: list[float] = []

    def emulated(path: Path) -> InferenceBackend:
        ticks = iter(range(1_000_000))
        return EmulatedBackend(
            path, slowdown=7.0, budget_bytes=1 << 20, sleep=slept.append, cpu_time_s=lambda: 0.002 * next(ticks),
            wall_time_s=lambda: 0.0,
        )  # fmt: skip

    found = await measure(emulated, queue, budget_s=0.001, tight=0.0)
    assert found.provider == "emulated"
    assert set(np.round(slept, 9)) == {0.014}


async def test_runs_end_early_when_they_agree_and_backends_are_closed(queue):
    runs: list[str] = []
    await measure(lambda path: SteadyBackend(path, runs), queue, budget_s=1e9, tight=1e9)
    await asyncio.to_thread(lambda: None)
    await queue.submit(lambda: None, deadline_s=queue.now_s() + 10)  # after the closing
    assert runs.count("matmul.onnx") == 1 + 8
    assert [run for run in runs if run.startswith("closed")] == [f"closed {w.file}" for w in WORKLOADS]


async def test_a_request_goes_before_the_runs_that_wait(queue):
    order: list[str] = []
    runs: list[str] = []
    measuring = asyncio.create_task(measure(lambda path: SteadyBackend(path, runs), queue, budget_s=1e9, tight=-1.0))
    while len(runs) < 40:
        before = len(runs)
        await queue.submit(lambda: order.append("request"), deadline_s=queue.now_s() + 10)
        assert len(runs) - before <= 2, "at most the run under way, and one that was next when the request ended"
    measuring.cancel()
    await asyncio.gather(measuring, return_exceptions=True)
    assert len(order) > 0


def test_processor_time_counts_where_one_thread_of_it_does_all_the_work():
    processor = OnnxBackend(LAUNCH.path)
    assert clock_for(processor, 1) is time.thread_time
    assert clock_for(processor, 2) is time.perf_counter
    assert clock_for(SteadyBackend(LAUNCH.path, []), 1) is time.perf_counter


def test_an_emulated_device_is_timed_by_its_own_clock_however_late_this_machine_is():
    cpu_s, wall_s = iter([5.0, 5.1, 6.0, 6.2]), iter([0.0, 7.0, 10.0, 90.0])
    device = EmulatedBackend(
        LAUNCH.path, slowdown=3.0, budget_bytes=1 << 20, cpu_time_s=lambda: next(cpu_s), wall_time_s=lambda: next(wall_s)
    )  # fmt: skip
    times = [timed_run(device, LAUNCH.feed(), ["y"], clock_for(device, 1))[1] for _ in range(2)]
    assert times == [pytest.approx(0.3), pytest.approx(0.6)]


def test_the_quickest_quarter_is_what_counts():
    assert quickest([1.0] * 4 + [100.0] * 12) == 1.0
    assert quickest([5.0]) == 5.0


async def test_it_is_kept_by_type_of_device(queue, tmp_path):
    file, opened = tmp_path / "calibration.json", []

    def counting(path: Path) -> InferenceBackend:
        opened.append(path)
        return plain(path)

    def calibrator(kind: str, settings: CalibrationSettings) -> Calibrator:
        return Calibrator(device_type=kind, file=file, queue=queue, open_backend=counting, settings=settings)

    first = calibrator("x86-1", QUICK)
    await first.run()
    assert first.calibration is not None
    assert read_kept(file) == {"x86-1": first.calibration}
    opened.clear()
    sure = CalibrationSettings(first_s=0.01, budget_s=0.02, tight=1e6)
    again = calibrator("x86-1", sure)
    assert again.calibration == first.calibration
    await again.run()
    assert opened == [], "a restart does not measure again"
    await calibrator("x86-2", sure).run()
    assert set(read_kept(file)) == {"x86-1", "x86-2"}, "another runtime or number of threads does"


async def test_a_wide_estimate_is_refined_only_while_nothing_runs(queue, tmp_path, until: Callable[..., object]):
    file = tmp_path / "calibration.json"
    keep(file, "x86-1", msgspec.structs.replace(SOUND, spread=1e5))
    opened: list[Path] = []

    def counting(path: Path) -> InferenceBackend:
        opened.append(path)
        return plain(path)

    calibrator = Calibrator(device_type="x86-1", file=file, queue=queue, open_backend=counting, settings=QUICK)
    busy = asyncio.create_task(
        queue.submit(lambda: time.sleep(0.3), deadline_s=queue.now_s() + 10)
    )  # real work of 0.3 s in the accelerator's thread
    running = asyncio.create_task(calibrator.run())
    await busy
    assert opened == []
    queue._spans.clear()  # five idle seconds later
    await running
    assert opened
    assert calibrator.calibration is not None
    assert calibrator.calibration.spread < 1e5


async def test_a_device_whose_backend_refuses_the_graphs_goes_without(queue, tmp_path):
    def refuse(path: Path) -> InferenceBackend:
        raise ModelError("The NPU takes compiled files only.")

    calibrator = Calibrator(
        device_type="npu", file=tmp_path / "c.json", queue=queue, open_backend=refuse, settings=QUICK
    )
    await calibrator.run()
    assert calibrator.calibration is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"x86-1": {"launch_ms": 1}}'])
def test_a_damaged_file_is_no_calibration(tmp_path, content, caplog):
    file = tmp_path / "calibration.json"
    file.write_bytes(content)
    assert read_kept(file) == {}
    assert "measured again" in caplog.text
    keep(file, "x86-1", SOUND)
    assert read_kept(file) == {"x86-1": SOUND}


def test_numbers_that_no_device_has_are_not_believed(tmp_path):
    file = tmp_path / "calibration.json"
    keep(file, "x86-1", msgspec.structs.replace(SOUND, conv_flops_per_s=0.0))
    assert read_kept(file) == {}
    assert not is_sound(msgspec.structs.replace(SOUND, launch_ms=-1.0))
    assert not is_sound(msgspec.structs.replace(SOUND, provider="x" * 101))


def test_only_so_many_types_are_remembered(tmp_path):
    file = tmp_path / "calibration.json"
    for number in range(MAX_KEPT + 5):
        keep(file, f"x86-{number}", SOUND)
    assert list(read_kept(file)) == [f"x86-{number}" for number in range(5, MAX_KEPT + 5)]


def test_what_makes_devices_run_shards_differently_makes_another_type():
    versions = {"onnxruntime": "1.20", "python": "3.11"}

    def kind(name: str = "rk3588", **changed: object) -> str:
        return device_type(platform(name), **({"emulate": True, "threads": 1, "versions": versions} | changed))

    assert kind() == kind(versions=versions | {"python": "3.12"})
    others = {kind(threads=2), kind("rk3576"), kind(emulate=False), kind(versions={"onnxruntime": "1.21"})}
    assert len(others | {kind()}) == 5
    assert kind().startswith("rk3588-emulated-")


def test_a_budget_below_the_first_look_is_refused():
    with pytest.raises(SettingsError):
        CalibrationSettings(first_s=2.0, budget_s=1.0)
