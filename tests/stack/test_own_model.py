"""A user's own model, from the file to an answer, over the command line and the Open Inference Protocol."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from controller.local.stack import LocalStack
from controller.local.trouble import ingress_urls

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
Serve = Callable[[str, dict[str, object]], httpx.Response]


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """Four dense layers over a batch of vectors."""
    rng = np.random.default_rng(5)
    weights = [rng.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(4)]
    nodes, last = [], "x"
    for number in range(4):
        nodes.append(helper.make_node("MatMul", [last, f"w{number}"], [f"m{number}"], name=f"layer.{number}.dense"))
        nodes.append(helper.make_node("Relu", [f"m{number}"], [f"r{number}"], name=f"layer.{number}.relu"))
        last = f"r{number}"
    graph = helper.make_graph(
        nodes,
        "own",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, ["batch", 64])],
        [numpy_helper.from_array(weight, f"w{number}") for number, weight in enumerate(weights)],
    )
    path = tmp_path / "own.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_an_own_model_is_registered_promised_placed_and_served(
    stack: LocalStack, cli: Cli, model_file: Path, tmp_path: Path, until_served: Serve
) -> None:
    added = cli("model", "add", "own-model", str(model_file))
    assert added.returncode == 0, added.stderr
    assert "own-model" in cli("model", "show", "own-model", "--json").stdout
    contract = tmp_path / "sla.json"
    contract.write_text(
        json.dumps({"service_id": "own-model", "latency_p99_ms": 2000, "throughput_rps": 1, "availability_sla": "99%"})
    )
    assert cli("sla", "preview", str(contract)).stdout.startswith("admissible")
    applied = cli("sla", "apply", str(contract))
    assert applied.returncode == 0, applied.stderr
    assert "accepted as version" in applied.stdout
    x = np.random.default_rng(6).standard_normal((3, 64)).astype(np.float32)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 64], "data": x.ravel().tolist()}]}
    url = f"{ingress_urls(stack)[0]}/v2/models/own-model/infer"
    response = until_served(url, body)
    (output,) = response.json()["outputs"]
    session = onnxruntime.InferenceSession(str(model_file), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(
        np.array(output["data"], np.float32).reshape(3, 64), session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5
    )
    assert "own-model" in cli("plan", "show", "own-model").stdout
    assert "nothing runs yet" in cli("explain", "own-model").stdout
    assert cli("sla", "delete", "own-model").returncode == 0
    assert _status_after_withdrawal(url, body) == 404


def _status_after_withdrawal(url: str, body: dict[str, object]) -> int:
    deadline = time.monotonic() + 30
    while (status := httpx.post(url, json=body, timeout=30, trust_env=False).status_code) == 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return status


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("model", "add", "broken", "{text}"), "ONNX"),
        (("model", "add", "broken", "{missing}"), "cannot be read"),
        (("model", "add", "Not A Name", "{text}"), "model name"),
        (("sla", "apply", "{wrong}"), "latency_p99_ms"),
        (("sla", "validate", "{wrong}"), "latency_p99_ms"),
        (("sla", "status", "nobody"), "no SLA"),
        (("service", "add", "nothing"), "document-reader"),
        (("plan", "rollback", "nobody"), "no SLA"),
    ],
)
def test_wrong_input_is_one_sentence_and_status_2(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "text").write_text("this is a text")
    (tmp_path / "wrong").write_text(
        '{"service_id": "x", "latency_p99_ms": -1, "throughput_rps": 1, "availability_sla": "99%"}'
    )
    done = cli(
        *(argument.format(**{name: tmp_path / name for name in ("text", "missing", "wrong")}) for argument in arguments)
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert says in done.stderr


def test_a_used_up_token_and_a_port_in_use_are_one_sentence(stack: LocalStack, cli: Cli, tmp_path: Path) -> None:
    offer = json.loads(cli("token", "create", "--json").stdout)
    join = [
        "agent", "join", offer["controller"], "--token", "tgj_" + "x" * 32, "--ca-fingerprint", offer["ca_fingerprint"],
        "--platform", "rk3588", "--emulate", "--dir", str(tmp_path / "agent"),
    ]  # fmt: skip
    refused = cli(*join)
    assert refused.returncode == 2
    assert "token" in refused.stderr.splitlines()[-1]
    port = stack.api.url.rpartition(":")[2]
    taken = cli("controller", "--port", port, "--dir", str(tmp_path / "second"))
    assert taken.returncode == 2
    assert port in taken.stderr
    demo = cli("demo", "--port", port)
    assert demo.returncode == 2
    assert "in use" in demo.stderr
