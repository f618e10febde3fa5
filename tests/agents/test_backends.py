"""Backends: the provider that really runs, emulated time and memory, and the vendor's return codes."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest

from agents.backends import open_backend
from agents.backends.emulated import EmulatedBackend
from agents.backends.onnx import OnnxBackend
from agents.backends.remembered import Memory
from policies.platforms import platform
from sla.errors import InvalidInputError, ModelError, RetryableError


@pytest.fixture
def model_path(tiny, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_bytes(tiny.source.blobs[tiny.file(0, 2).sha256])
    return path


def test_the_provider_that_runs_is_reported(model_path, tiny, items):
    backend = open_backend(platform("x86"), model_path, emulate=False)
    assert (backend.provider, backend.fault) == ("CPUExecutionProvider", None)
    np.testing.assert_allclose(backend.run({"x": items(2)}, ["y"])["y"], tiny.expected(items(2)), rtol=1e-5)
    backend.close()


@pytest.mark.parametrize(
    ("name", "missing"), [("jetson-orin", "TensorrtExecutionProvider"), ("rk3588", "not compiled")]
)
def test_a_silent_fall_back_to_the_cpu_is_a_fault(model_path, name, missing):
    backend = open_backend(platform(name), model_path, emulate=False)
    assert backend.provider == "CPUExecutionProvider"
    assert backend.fault is not None
    assert missing in backend.fault
    assert "CPUExecutionProvider" in backend.fault


def test_an_emulated_device_takes_its_multiple_of_the_cpu_time(model_path, items):
    slept = []
    cpu_s, wall_s = iter([5.0, 5.1]), iter([0.0, 0.12])
    backend = EmulatedBackend(
        model_path, slowdown=3.0, budget_bytes=1 << 20, sleep=slept.append, cpu_time_s=lambda: next(cpu_s), wall_time_s=lambda: next(wall_s),
    )  # fmt: skip
    backend.run({"x": items(1)}, ["y"])
    assert slept == [pytest.approx(0.3 - 0.12)]
    assert backend.provider == "emulated"


def test_an_emulated_device_that_is_late_already_does_not_wait(model_path, items):
    slept = []
    cpu_s, wall_s = iter([5.0, 5.1]), iter([0.0, 0.9])
    backend = EmulatedBackend(
        model_path, slowdown=3.0, budget_bytes=1 << 20, sleep=slept.append, cpu_time_s=lambda: next(cpu_s), wall_time_s=lambda: next(wall_s),
    )  # fmt: skip
    backend.run({"x": items(1)}, ["y"])
    assert slept == []


def test_a_throttled_device_takes_longer_until_it_is_not(model_path, items):
    slept, factor = [], [4.0]
    cpu_s = iter([5.0, 5.1, 6.0, 6.1])
    backend = EmulatedBackend(
        model_path, slowdown=3.0, budget_bytes=1 << 20, sleep=slept.append, cpu_time_s=lambda: next(cpu_s), wall_time_s=lambda: 0.0,
        throttle=lambda: factor[0],
    )  # fmt: skip
    backend.run({"x": items(1)}, ["y"])
    factor[0] = 1.0
    backend.run({"x": items(1)}, ["y"])
    assert slept == [pytest.approx(1.2), pytest.approx(0.3)]


def test_an_emulated_device_has_the_memory_of_its_platform(model_path):
    with pytest.raises(ModelError, match="the emulated device has 0 MB"):
        open_backend(platform("imx93"), model_path, emulate=True, budget_bytes=100)


def test_errors_of_the_runtime_become_ours(model_path, tmp_path, items):
    backend = OnnxBackend(model_path)
    for inputs in ({"x": items(1).astype(np.int64)}, {"z": items(1)}, {}):
        with pytest.raises(InvalidInputError, match="refused its inputs"):
            backend.run(inputs, ["y"])
    junk = tmp_path / "junk"
    junk.write_bytes(b"junk")
    with pytest.raises(ModelError, match="cannot be loaded"):
        OnnxBackend(junk)


class RKNNLite:
    """The calls of rknn-toolkit-lite2 2.5.0 that we use, with the return codes that its documentation names."""

    load_status, init_status, answer = 0, 0, [np.zeros(1)]

    def load_rknn(self, path):
        return self.load_status

    def init_runtime(self, target=None, device_id=None, async_mode=False, core_mask=0):
        assert core_mask == 0xFFFF
        return self.init_status

    def inference(
        self,
        inputs,
        data_type=None,
        data_format=None,
        inputs_pass_through=None,
        get_frame_id=False,
        reuse_outputs=False,
    ):
        assert not reuse_outputs
        self.seen = (inputs, data_format)
        return self.answer

    def release(self):
        self.released = True


@pytest.fixture
def rknn(monkeypatch, tmp_path):
    """An NPU library, as far as a contract test can have one."""
    api = types.ModuleType("rknnlite.api")
    api.RKNNLite = type("RKNNLite", (RKNNLite,), {})
    monkeypatch.setitem(sys.modules, "rknnlite", types.ModuleType("rknnlite"))
    monkeypatch.setitem(sys.modules, "rknnlite.api", api)
    return api.RKNNLite


@pytest.fixture
def compiled(tmp_path) -> Path:
    path = tmp_path / "compiled"
    path.write_bytes(b"RKNN....")
    return path


def open_rknn(path: Path):
    return open_backend(platform("rk3588"), path, emulate=False, input_names=("a", "b"), output_names=("y",))


def test_compiled_files_run_on_the_npu_by_position_in_nchw(rknn, compiled):
    backend = open_rknn(compiled)
    picture, vector = np.ones((1, 3, 2, 2), np.float32), np.ones((1, 2), np.float32)
    assert backend.run({"b": vector, "a": picture}, ["y"])["y"] is RKNNLite.answer[0]
    inputs, layout = backend._npu.seen
    assert [each.ndim for each in inputs] == [4, 2]
    assert layout == ["nchw", None]
    assert (backend.provider, backend.fault) == ("rknn", None)
    backend.close()
    assert backend._npu.released


def test_what_the_npu_refuses_is_said_in_our_words(rknn, compiled):
    rknn.answer = None
    with pytest.raises(RetryableError, match="gave no result"):
        open_rknn(compiled).run({"a": np.ones(1), "b": np.ones(1)}, ["y"])
    with pytest.raises(InvalidInputError, match="needs the input 'b'"):
        open_rknn(compiled).run({"a": np.ones(1)}, ["y"])
    rknn.init_status = -1
    with pytest.raises(ModelError, match="driver refuses"):
        open_rknn(compiled)
    rknn.load_status = -1
    with pytest.raises(ModelError, match="cannot read"):
        open_rknn(compiled)


def test_a_compiled_file_without_the_library_names_what_is_missing(compiled):
    with pytest.raises(ModelError, match="rknn-toolkit-lite2"):
        open_rknn(compiled)


def test_a_remembered_run_gives_the_same_outputs_for_no_work(model_path, items):
    slept, computed, memory = [], [], Memory()

    def cpu_s() -> float:
        computed.append(1)
        return 0.05 * len(computed)

    backend = EmulatedBackend(
        model_path, slowdown=4.0, budget_bytes=1 << 20, sleep=slept.append, cpu_time_s=cpu_s, wall_time_s=lambda: 0.0, memory=memory,
    )  # fmt: skip
    plain = EmulatedBackend(model_path, slowdown=0.0, budget_bytes=1 << 20, sleep=slept.append)
    first, second = items(2), items(2) + 1
    for feed in (first, second, first, second, first):
        np.testing.assert_array_equal(backend.run({"x": feed}, ["y"])["y"], plain.run({"x": feed}, ["y"])["y"])
    assert len(computed) == 2 * 2  # The clock is read before and after each of two computations.
    assert slept == [pytest.approx(0.2)] * 5


def test_what_is_remembered_is_bounded_and_the_warm_up_is_no_typical_run():
    calls = []

    def compute(inputs, outputs):
        calls.append(float(inputs["x"][0]))
        return {"y": inputs["x"] * 2}, 9.0 if len(calls) == 1 else 1.0

    memory = Memory(max_bytes=100)

    def run(feed, outputs, shard="a"):
        return memory.run(shard, compute, feed, outputs)

    feeds = [{"x": np.full(5, number, np.float64)} for number in range(4)]
    for feed in feeds:
        run(feed, ["y"])
    assert run(feeds[3], ["y"])[1] == 1.0
    assert len(calls) == 4
    assert run(feeds[0], ["y"])[0]["y"].tolist() == [0.0] * 5
    assert len(calls) == 5, "it was dropped to make room"
    assert run(feeds[0], ["z"])[1] == 1.0
    assert len(calls) == 6, "other outputs are another run"
    assert run(feeds[0], ["z"], "b")[1] == 1.0
    assert len(calls) == 7, "and so is another shard"


def test_a_run_during_which_the_machine_was_busy_is_not_spent_again_and_again():
    took_s = iter([9.0, 1.0, 1.1, 6.0, 1.2])
    memory = Memory()
    feeds = [{"x": np.full(5, number, np.float64)} for number in range(5)]
    for feed in feeds:
        memory.run("a", lambda inputs, outputs: ({"y": inputs["x"]}, next(took_s)), feed, ["y"])
    again = [memory.run("a", lambda *_: pytest.fail("it is known"), feeds[at % 5], ["y"])[1] for at in range(12)]
    assert set(again) == {1.0, 1.1, 1.2}
