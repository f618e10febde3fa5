"""The API of a real controller, with small models to register."""

from __future__ import annotations

import hashlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import pytest_asyncio
from onnx import TensorProto, helper, numpy_helper

from controller.api import create_api
from controller.core import Controller

WIDTH, LAYERS = 64, 6


@pytest_asyncio.fixture
async def controller(make_controller: Any) -> Controller:
    controller: Controller = make_controller()
    await controller.start()
    return controller


@pytest_asyncio.fixture
async def api(controller: Controller) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_api(controller, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080", timeout=60) as client:
        yield client


Send = Callable[[bytes], Awaitable[str]]


@pytest.fixture
def send(api: httpx.AsyncClient) -> Send:
    """Upload content in one piece; its hash."""

    async def sent(content: bytes) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        response = await api.put(f"/v1/uploads/{sha256}", params={"offset": 0, "size": len(content)}, content=content)
        assert response.status_code == 200, response.text
        assert response.json()["is_whole"]
        return sha256

    return sent


def npz(**arrays: Any) -> bytes:
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    return packed.getvalue()


@pytest.fixture
def pack() -> Callable[..., bytes]:
    """Arrays as the content of an .npz file."""
    return npz


@pytest.fixture(scope="session")
def dense() -> Any:
    """Six layers of 16 KB; items along axis 0 are independent; `y` are scores of 64 classes."""
    rng = np.random.default_rng(3)
    weights = [rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 6 for _ in range(LAYERS)]
    nodes, last = [], "x"
    for layer in range(LAYERS):
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"], name=f"/layer.{layer}/product"))
        last = f"h{layer}" if layer < LAYERS - 1 else "y"
        nodes.append(helper.make_node("Tanh", [f"m{layer}"], [last], name=f"/layer.{layer}/tanh"))
    graph = helper.make_graph(
        nodes, "dense", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        [numpy_helper.from_array(weight, f"w{at}") for at, weight in enumerate(weights)],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture
def dense_files(dense: Any, tmp_path: Path) -> dict[str, bytes]:
    """The same with its weights in a file of their own."""
    copied = onnx.ModelProto()
    copied.CopyFrom(dense)
    onnx.save(copied, tmp_path / "dense.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    return {name: (tmp_path / name).read_bytes() for name in ("dense.onnx", "weights.bin")}


@pytest.fixture
def rows() -> Callable[[int, int], np.ndarray]:
    """(seed, count) -> inputs of that model."""
    return lambda seed, count: np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)
