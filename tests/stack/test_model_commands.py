"""Models with what their owner says of them, from the command line to answers: samples, state between calls, variants, activations, removal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.vlm import build_vlm
from controller.cli import main
from controller.local.stack import LocalStack
from controller.local.trouble import ingress_urls
from controller.models.sharding_zoo import fetch_specimen, specimen_sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


Cli = Callable[..., Done]
Serve = Callable[[str, dict[str, object]], httpx.Response]
DATATYPES = {"float32": "FP32", "int64": "INT64"}


@pytest.fixture
def cli(stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs `tidegate` against the stack, in this process: starting Python anew takes longer than most commands."""

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        code = main(["--url", stack.api.url, *arguments])
        written = capsys.readouterr()
        return Done(code, written.out, written.err)

    return run


def asking(**tensors: np.ndarray) -> dict[str, object]:
    """A request in the Open Inference Protocol."""
    return {
        "inputs": [
            {"name": n, "datatype": DATATYPES[str(t.dtype)], "shape": list(t.shape), "data": t.ravel().tolist()}
            for n, t in tensors.items()
        ]
    }


def answered(response: httpx.Response) -> dict[str, np.ndarray]:
    outputs = response.json()["outputs"]
    return {o["name"]: np.array(o["data"], np.float32).reshape(o["shape"]) for o in outputs}


def epoch_of(cli: Cli, service: str) -> int:
    """Of the running plan."""
    return max(int(plan["epoch"]) for plan in json.loads(cli("plan", "show", service, "--json").stdout))


def promise(cli: Cli, directory: Path, service: str, **more: Any) -> None:
    contract = directory / f"{service}.json"
    contract.write_text(
        json.dumps(
            {"service_id": service, "latency_p99_ms": 2000, "throughput_rps": 1, "availability_sla": "99%", **more}
        )
    )
    applied = cli("sla", "apply", str(contract))
    assert applied.returncode == 0, applied.stderr


@pytest.mark.parametrize("specimen", ["silero-vad", "silero-vad-16k"])
def test_state_is_carried_between_calls_of_a_served_model(
    stack: LocalStack, cli: Cli, until_served: Serve, zoo_cache: Path, tmp_path: Path, specimen: str
) -> None:
    """Speech goes in piece by piece with the state that the call before gave; ONNX Runtime says what must come out."""
    model, sample = fetch_specimen(specimen, zoo_cache), specimen_sample(specimen)
    np.savez(tmp_path / "sample.npz", allow_pickle=False, **sample)
    added = cli("model", "add", specimen, str(model), "--sample", str(tmp_path / "sample.npz"))
    assert added.returncode == 0, added.stderr
    promise(cli, tmp_path, specimen)
    url = f"{ingress_urls(stack)[0]}/v2/models/{specimen}/infer"
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    rng = np.random.default_rng(4)
    expected_state = found_state = sample["state"]
    for _ in range(6):
        sound = np.asarray(rng.standard_normal(sample["input"].shape) / 10, np.float32)
        rate = {"sr": sample["sr"]} if "sr" in wanted else {}
        expected: dict[str, Any] = dict(
            zip(names, session.run(None, {"input": sound, "state": expected_state, **rate}), strict=True)
        )
        found = answered(until_served(url, asking(input=sound, state=found_state, **rate)))
        np.testing.assert_allclose(found["output"], expected["output"], rtol=1e-4, atol=1e-5)
        expected_state, found_state = expected["stateN"], found["stateN"]
    assert np.abs(found_state - sample["state"]).max() > 0.01
    assert cli("model", "delete", specimen).returncode == 2
    assert cli("sla", "delete", specimen).returncode == 0
    gone = cli("model", "delete", specimen)
    assert gone.returncode == 0, gone.stderr


def test_variants_and_activations_from_the_command_line(
    stack: LocalStack, cli: Cli, until_served: Serve, tmp_path: Path
) -> None:
    model = tmp_path / "vision.onnx"
    onnx.save(build_vlm().vision, model)
    rng = np.random.default_rng(2)
    tiles = rng.standard_normal((4, 3, 32, 32)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", tiles=tiles)
    np.savez(tmp_path / "indoor.npz", tiles=rng.standard_normal((200, 3, 32, 32)).astype(np.float32))
    np.savez(tmp_path / "outdoor.npz", tiles=rng.standard_normal((56, 3, 32, 32)).astype(np.float32))
    samples = ("--samples", str(tmp_path / "samples.npz"))
    assert cli("model", "add", "vision", str(model)).returncode == 0
    made = cli(
        "model", "calibration", "make", str(tmp_path / "set.npz"), "--preprocessing", "tiles-v1",
        "--scene", f"indoor=0.4:{tmp_path / 'indoor.npz'}", "--scene", f"outdoor=0.6:{tmp_path / 'outdoor.npz'}",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    assert "256 samples made by tiles-v1" in cli("model", "calibration", "check", str(tmp_path / "set.npz")).stdout
    for suffix, how in {
        "fp16": ("--precision", "fp16"),
        "static": ("--precision", "int8-static", "--calibration", str(tmp_path / "set.npz"), "--preprocessing", "tiles-v1"),
        "fewer": ("--prune-tokens", "0", "--keep", "0.7", "--protect", "0", "--restore", "1"),
    }.items():  # fmt: skip
        variant = cli("model", "variant", "vision", suffix, *how, *samples)
        assert variant.returncode == 0, variant.stderr
        accuracy = float(variant.stdout.partition("accuracy ")[2].partition(",")[0])
        assert 0.8 < accuracy <= 1, variant.stdout
        assert f"Variant vision.{suffix} registered" in variant.stdout
    promise(cli, tmp_path, "vision", accuracy_floor=0.9999)
    url = f"{ingress_urls(stack)[0]}/v2/models/vision/infer"
    expected = onnxruntime.InferenceSession(str(model)).run(None, {"tiles": tiles})[0]
    (found,) = answered(until_served(url, asking(tiles=tiles))).values()
    # Only the model itself and its fp16 variant reach the floor.
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    (plan,) = json.loads(cli("plan", "show", "vision", "--json").stdout)
    assert {shard["model"] for shard in plan["shards"]} <= {"vision", "vision.fp16"}
    travel = cli("model", "activations", "vision", "fp16", *samples)
    assert travel.returncode == 0, travel.stderr
    assert "vision.static" in travel.stdout
    # The running plan is rolled out once more, so that its shards learn of the format.
    stack.wait_until(
        lambda: epoch_of(cli, "vision") > plan["epoch"], 60.0, "The format of activations was not rolled out"
    )
    (found,) = answered(until_served(url, asking(tiles=tiles))).values()
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    assert cli("sla", "delete", "vision").returncode == 0
    assert "so is the service vision" in cli("model", "delete", "vision").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("model", "add", "m", "{model}", "--sample", "{text}"), "is not an .npz file of numbers"),
        (("model", "add", "m", "{model}", "--sample", "{missing}"), "cannot be read"),
        (("model", "add", "m", "{external}"), "cannot name a file of a model"),
        (("model", "variant", "ghost", "fp16", "--precision", "fp16", "--samples", "{samples}"), "ghost"),
        (("model", "variant", "m", "x", "--prune-tokens", "--samples", "{samples}"), "--keep"),
        (("model", "delete", "ghost"), "no model"),
        (("model", "activations", "ghost", "fp16", "--samples", "{samples}"), "ghost"),
        (("model", "calibration", "check", "{text}"), "not a calibration set"),
        (("model", "calibration", "make", "{out}", "--preprocessing", "p", "--scene", "a:b"), "is not a scene"),
        (("model", "calibration", "make", "{out}", "--preprocessing", "p", "--scene", "a=1:{samples}"), "at least 256"),
    ],
)
def test_wrong_input_is_one_sentence(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "text").write_text("this is a text")
    vision = build_vlm().vision
    onnx.save(vision, tmp_path / "model")
    np.savez(tmp_path / "samples.npz", tiles=np.zeros((2, 3, 32, 32), np.float32))
    (tmp_path / "samples.npz").rename(tmp_path / "samples")
    tensor = vision.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../elsewhere.bin")
    (tmp_path / "external").write_bytes(vision.SerializeToString())
    places = {name: tmp_path / name for name in ("text", "model", "missing", "external", "samples", "out")}
    done = cli(*(argument.format(**places) for argument in arguments))
    assert done.returncode == 2, done.stdout
    lines = done.stderr.strip().splitlines()
    assert says in lines[-1]
    assert len([line for line in lines if not line.startswith("  ")]) == 1
