"""An ordinary client of the Open Inference Protocol, NVIDIA's, against our ingress."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import tritonclient.http as triton

from agents.driver import Result
from agents.ingress import IngressServer, create_app
from policies.ids import ServiceId
from policies.service import ServiceSpec, TensorSpec

READER = ServiceSpec(
    id=ServiceId("reader"),
    inputs=(
        TensorSpec(name="image", datatype="BYTES", shape=(1,)),
        TensorSpec(name="question", datatype="BYTES", shape=(1,)),
        TensorSpec(name="x", datatype="FP16", shape=(-1, 2)),
    ),
    outputs=(
        TensorSpec(name="answer", datatype="BYTES", shape=(1,)),
        TensorSpec(name="lines", datatype="BYTES", shape=(-1,)),
        TensorSpec(name="x", datatype="FP16", shape=(-1, 2)),
    ),
    stages=(),
)
IMAGE = bytes(range(256))


class Reader:
    """Answers the question with itself, after a look at the image."""

    is_ready = True

    def models(self):
        return {READER.id: READER}

    async def infer(self, service_id, tensors, deadline_ms, *, request_id=None):
        assert tensors["image"].tobytes() == IMAGE
        assert (deadline_ms, request_id) == (2000.0, "77")
        lines = np.frombuffer(json.dumps(["first", "zweite ä"]).encode(), np.uint8)
        return Result({"answer": tensors["question"], "lines": lines, "x": tensors["x"] * 2}, 3, False, {})


def _talk(port: int, binary: bool) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("reader")
    assert client.get_model_metadata("reader")["outputs"][2] == {"name": "x", "datatype": "FP16", "shape": [-1, 2]}
    assert client.get_model_repository_index()[0]["name"] == "reader"
    inputs = [triton.InferInput("image", [1], "BYTES"), triton.InferInput("question", [1], "BYTES")]
    inputs.append(triton.InferInput("x", [3, 2], "FP16"))
    inputs[0].set_data_from_numpy(np.array([IMAGE], dtype=object))
    inputs[1].set_data_from_numpy(np.array(["Wie groß?"], dtype=object), binary_data=binary)
    inputs[2].set_data_from_numpy(np.ones((3, 2), np.float16))
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("lines", "answer")]
    for wanted in (None, outputs):
        result = client.infer("reader", inputs, outputs=wanted, request_id="77", timeout=2_000_000)
        assert [_text(line) for line in result.as_numpy("lines")] == ["first", "zweite ä"]
        assert _text(result.as_numpy("answer")[0]) == "Wie groß?"
    np.testing.assert_array_equal(client.infer("reader", inputs, request_id="77", timeout=2_000_000).as_numpy("x"), 2)
    with pytest.raises(triton.InferenceServerException, match="No model 'nothing' is served here"):
        client.infer("nothing", inputs)
    client.close()


def _text(element: bytes | str) -> str:
    return element.decode() if isinstance(element, bytes) else element


@pytest.mark.parametrize("binary", [True, False])
async def test_tritonclient_is_served(binary):
    server = IngressServer(create_app(Reader()), "127.0.0.1", 0)
    await server.start()
    try:
        await asyncio.to_thread(_talk, server.port, binary)
    finally:
        await server.close()
