"""The ingress over real HTTP."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest

from agents.driver import Result
from agents.identity import Identity
from agents.ingress import IngressServer, IngressSettings, create_app
from policies.ids import AgentId, ServiceId
from policies.service import ServiceSpec, TensorSpec
from sla.errors import (
    DeadlineExceededError,
    InvalidInputError,
    ModelError,
    OverloadedError,
    PermanentError,
    RetryableError,
    SettingsError,
    TidegateError,
)

ECHO = ServiceSpec(
    id=ServiceId("echo"),
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1,)),),
    outputs=(TensorSpec(name="x", datatype="FP32", shape=(-1,)),),
    stages=(),
)
ASK = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.0, 2.5]}]}


@dataclass
class Echo:
    """Answers what it is given, or fails as it is told."""

    is_ready: bool = True
    fail_with: Exception | None = None
    deadlines_ms: list[float] = field(default_factory=list)

    def models(self) -> Mapping[ServiceId, ServiceSpec]:
        return {ECHO.id: ECHO}

    async def infer(
        self,
        service_id: ServiceId,
        tensors: Mapping[str, np.ndarray],
        deadline_ms: float,
        *,
        request_id: str | None = None,
    ) -> Result:
        self.deadlines_ms.append(deadline_ms)
        if self.fail_with is not None:
            raise self.fail_with
        return Result(dict(tensors), 7, True, {})


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def client(echo: Echo) -> AsyncIterator[httpx.AsyncClient]:
    server = IngressServer(create_app(echo, IngressSettings(max_body_bytes=1000)), "127.0.0.1", 0)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        yield client
    await server.close()


async def test_what_a_client_may_look_up(client, echo):
    assert (await client.get("/v2")).json()["extensions"][0] == "binary_tensor_data"
    assert (await client.get("/v2/health/live")).status_code == 200
    assert (await client.get("/v2/health/ready")).status_code == 200
    assert (await client.get("/v2/models/echo/ready")).status_code == 200
    assert (await client.get("/v2/models/echo/versions/1/ready")).status_code == 200
    assert (await client.get("/v2/models/echo")).json()["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
    index = await client.post("/v2/repository/index", json={})
    assert index.json() == [{"name": "echo", "version": "1", "state": "READY", "reason": ""}]
    echo.is_ready = False
    assert (await client.get("/v2/health/ready")).status_code == 503
    assert (await client.get("/v2/health/live")).status_code == 200


async def test_an_inference_and_what_its_headers_say(client, echo):
    response = await client.post("/v2/models/echo/infer", json=ASK)
    assert response.json()["outputs"] == [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.0, 2.5]}]
    assert (response.headers["x-tidegate-epoch"], response.headers["x-tidegate-fallback"]) == ("7", "true")
    await client.post("/v2/models/echo/versions/1/infer", json=ASK | {"parameters": {"timeout": 250_000}})
    assert echo.deadlines_ms == [30_000.0, 250.0]


async def test_the_binary_extension(client):
    document = json.dumps(
        {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    values = np.array([3, 4], "<f4").tobytes()
    headers = {"Inference-Header-Content-Length": str(len(document))}
    response = await client.post("/v2/models/echo/infer", content=document + values, headers=headers)
    length = int(response.headers["inference-header-content-length"])
    assert response.content[length:] == values
    assert response.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidInputError("wrong"), 400),
        (ModelError("pipeline"), 500),
        (OverloadedError("full", retry_after_s=2.2), 503),
        (RetryableError("not loaded"), 503),
        (DeadlineExceededError("late"), 504),
        (PermanentError("no"), 500),
        (TidegateError("some fault"), 500),
        (ZeroDivisionError("secret"), 500),
    ],
)
async def test_errors_have_the_status_that_a_client_can_act_on(client, echo, error, status):
    echo.fail_with = error
    response = await client.post("/v2/models/echo/infer", json=ASK)
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status == 503)
    if isinstance(error, OverloadedError):
        assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404), ("GET", "/v2/models/none", 404), ("POST", "/v2/models/none/infer", 404), ("GET", "/v2/models/echo/versions/9", 404),
        ("GET", "/v2/models/echo/infer", 405), ("GET", "/v2/models/echo/config", 404), ("POST", "/v2/models/echo", 405),
    ],
)  # fmt: skip
async def test_places_that_are_not_there(client, method, path, status):
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]


async def test_bodies_are_bounded_announced_or_not(client):
    assert (await client.post("/v2/models/echo/infer", content=b"x" * 1001)).status_code == 413

    async def stream() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 500

    assert (await client.post("/v2/models/echo/infer", content=stream())).status_code == 413
    compressed = await client.post("/v2/models/echo/infer", content=b"x", headers={"content-encoding": "gzip"})
    assert compressed.status_code == 415
    torn = await client.post("/v2/models/echo/infer", json=ASK, headers={"Inference-Header-Content-Length": "many"})
    assert torn.status_code == 400


async def test_more_request_data_than_it_can_hold_is_shed(echo):
    server = IngressServer(create_app(echo, IngressSettings(max_held_bytes=200)), "127.0.0.1", 0)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        for _ in range(3):
            large = ASK | {"id": "x" * 200}
            assert (await client.post("/v2/models/echo/infer", json=large)).status_code == 503
            assert (await client.post("/v2/models/echo/infer", json=ASK)).status_code == 200
    await server.close()


async def test_a_mounted_app_finds_its_paths(echo):
    app = create_app(echo)
    for prefix, root in (("", ""), ("/gateway", "/gateway"), ("", "/v2")):
        sent: list[Mapping[str, object]] = []

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Mapping[str, object], sent: list[Mapping[str, object]] = sent) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": f"{prefix}/v2/models/echo", "root_path": root, "headers": []}
        await app(scope, receive, send)
        assert sent[0]["status"] == 200


async def test_a_port_in_use_and_an_open_door_are_settings_errors(echo):
    first = IngressServer(create_app(echo), "127.0.0.1", 0)
    with pytest.raises(SettingsError, match=f"Cannot listen on 127.0.0.1:{first.port}"):
        IngressServer(create_app(echo), "127.0.0.1", first.port)
    with pytest.raises(SettingsError, match="without TLS"):
        IngressServer(create_app(echo), "0.0.0.0", 0)
    await first.close()


async def test_under_tls_only_clients_of_the_cluster_come_in(echo, ca, tmp_path: Path):
    identity = Identity(tmp_path / "agent")
    identity.save_certificate(ca.sign_agent(identity.csr_pem(), AgentId("one"), now_s=time.time()), ca.ca_pem)
    server = IngressServer(create_app(echo), "0.0.0.0", 0, identity.server_context())
    await server.start()
    try:
        url = f"https://127.0.0.1:{server.port}/v2/models/echo/infer"
        async with httpx.AsyncClient(verify=identity.client_context()) as known:
            assert (await known.post(url, json=ASK)).status_code == 200
        stranger = ssl.create_default_context(cadata=ca.ca_pem)
        stranger.check_hostname = False
        async with httpx.AsyncClient(verify=stranger) as unknown:
            with pytest.raises(httpx.TransportError):
                await unknown.post(url, json=ASK)
    finally:
        await server.close()
