"""Where clients come in: the Open Inference Protocol v2 over HTTP, as a bare ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import uvicorn

from agents.driver import Result
from agents.oip import decode_request, encode_response, metadata
from policies.ids import ServiceId
from policies.service import ServiceSpec
from sla.errors import (
    DeadlineExceededError,
    InvalidInputError,
    ModelError,
    NotFoundError,
    OverloadedError,
    RefusedError,
    RetryableError,
    SettingsError,
    TidegateError,
)

log = logging.getLogger("tidegate.ingress")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
MODEL_VERSION = "1"
"""A service has one version; what changes is the plan's epoch, which is a response header."""
_MODEL = re.compile(r"/v2/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?(?P<action>/ready|/infer)?")
_SERVER = {
    "name": "tidegate",
    "version": "0.1.0",
    "extensions": ["binary_tensor_data", "model_repository", "parameters"],
}


class InferenceService(Protocol):
    """What an ingress serves."""

    @property
    def is_ready(self) -> bool:
        """False while the process starts or leaves."""
        ...

    def models(self) -> Mapping[ServiceId, ServiceSpec]:
        """What is served now."""
        ...

    async def infer(
        self,
        service_id: ServiceId,
        tensors: Mapping[str, np.ndarray],
        deadline_ms: float,
        *,
        request_id: str | None = None,
    ) -> Result:
        """See `agents.driver.Driver.infer`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """Bounds of what a client may ask."""

    max_body_bytes: int = 32 << 20
    max_held_bytes: int = 256 << 20
    """Bodies of all requests that are being worked on."""
    default_timeout_ms: float = 30_000.0
    """The deadline of a request that names none."""
    max_timeout_ms: float = 600_000.0


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()


def create_app(service: InferenceService, settings: IngressSettings | None = None) -> AsgiApp:
    """The ASGI application; it may be mounted in another one, at its root or at `/v2`."""
    ingress = _Ingress(service, settings or IngressSettings())
    return ingress.handle


class _Ingress:
    def __init__(self, service: InferenceService, settings: IngressSettings) -> None:
        self._service = service
        self._settings = settings
        self._held_bytes = 0

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"The ingress does not speak {scope['type']}.")
        try:
            response = await self._answer(scope, receive)
        except TidegateError as error:
            response = _problem(error)
        except _TooLargeError as error:
            response = _error(413, str(error))
        except Exception:
            log.exception("a request failed inside the ingress")
            response = _error(500, "The request failed inside Tidegate; its log says why.")
        headers = [(b"content-length", str(len(response.body)).encode()), *response.headers]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    async def _answer(self, scope: Scope, receive: Receive) -> _Response:
        method, path = scope["method"], _path(scope)
        match method, path:
            case "GET", "/v2" | "/v2/":
                return _json(_SERVER)
            case "GET", "/v2/health/live":
                return _Response(200)
            case "GET", "/v2/health/ready":
                return _Response(200 if self._service.is_ready else 503)
            case "POST", "/v2/repository/index":
                await _read_body(receive, scope, 1 << 16)
                return _json(
                    [
                        {"name": name, "version": MODEL_VERSION, "state": "READY", "reason": ""}
                        for name in self._service.models()
                    ]
                )
        model = _MODEL.fullmatch(path)
        if model is None:
            raise NotFoundError(f"There is nothing at {path[:100]}; the Open Inference Protocol begins at /v2.")
        spec = self._spec(model["name"], model["version"])
        match method, model["action"]:
            case "GET", None:
                return _json(metadata(spec, version=MODEL_VERSION))
            case "GET", "/ready":
                return _Response(200 if self._service.is_ready else 503)
            case "POST", "/infer":
                return await self._infer(spec, scope, receive)
        return _error(405, f"{method} is not offered at {path[:100]}.")

    def _spec(self, name: str, version: str | None) -> ServiceSpec:
        models = self._service.models()
        spec = models.get(ServiceId(name))
        if spec is None:
            raise NotFoundError(
                f"No model {name[:80]!r} is served here; served are: {', '.join(sorted(models)) or 'none yet'}."
            )
        if version not in (None, MODEL_VERSION):
            raise NotFoundError(
                f"{name} has version {MODEL_VERSION} only, not {version[:20] if version else version!r}."
            )
        return spec

    async def _infer(self, spec: ServiceSpec, scope: Scope, receive: Receive) -> _Response:
        headers = {key.lower(): value for key, value in scope["headers"]}
        if headers.get(b"content-encoding", b"identity") != b"identity":
            return _error(415, "Compressed bodies are not accepted; send the request uncompressed.")
        claimed = _announced(scope)
        held = self._settings.max_body_bytes if claimed is None else min(claimed, self._settings.max_body_bytes)
        if self._held_bytes + held > self._settings.max_held_bytes:
            raise OverloadedError("This ingress works on as much request data as it can hold already.")
        self._held_bytes += held
        try:
            return await self._infer_held(spec, scope, receive, headers)
        finally:
            self._held_bytes -= held

    async def _infer_held(
        self, spec: ServiceSpec, scope: Scope, receive: Receive, headers: Mapping[bytes, bytes]
    ) -> _Response:
        body = await _read_body(receive, scope, self._settings.max_body_bytes)
        request = decode_request(spec, body, _header_length(headers))
        deadline_ms = min(request.timeout_ms or self._settings.default_timeout_ms, self._settings.max_timeout_ms)
        result = await self._service.infer(spec.id, request.tensors, deadline_ms, request_id=request.id or None)
        content, json_length = encode_response(spec, request, result.tensors, version=MODEL_VERSION)
        kind = b"application/json" if json_length is None else b"application/octet-stream"
        told = [
            (b"content-type", kind),
            (b"x-tidegate-epoch", str(result.epoch).encode()),
            (b"x-tidegate-fallback", b"true" if result.fell_back else b"false"),
        ]
        if json_length is not None:
            told.append((b"inference-header-content-length", str(json_length).encode()))
        return _Response(200, content, tuple(told))


class IngressServer:
    """The ingress on a socket of its own, inside an event loop that runs already."""

    def __init__(self, app: AsgiApp, host: str, port: int, ssl_context: ssl.SSLContext | None = None) -> None:
        """Binds the port. Raises SettingsError if that is impossible, or if it would be open to all without TLS."""
        if ssl_context is None and host not in ("127.0.0.1", "::1", "localhost"):
            raise SettingsError(
                f"The ingress would listen on {host} without TLS; choose a loopback address or switch its TLS on."
            )
        self._socket = _bind(host, port)
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            app, interface="asgi3", http="auto", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
            timeout_keep_alive=75, timeout_graceful_shutdown=5,
            ssl_context_factory=None if ssl_context is None else lambda config, default: ssl_context,
        )  # fmt: skip
        self._server = EmbeddedServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when requests are answered."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="ingress")
        while not self._server.started and not self._task.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.005)
        if self._task.done():
            await self._task

    async def close(self) -> None:
        """Stop listening, let running requests end within a few seconds."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


class EmbeddedServer(uvicorn.Server):
    """Leaves the signals to the process that it lives in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _TooLargeError(Exception):
    pass


async def _read_body(receive: Receive, scope: Scope, limit: int) -> bytes:
    too_large = _TooLargeError(f"The body is larger than the {limit} bytes that are accepted.")
    if (_announced(scope) or 0) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise InvalidInputError("The client went away before its request was complete.")
        chunk = event.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
        if not event.get("more_body", False):
            return b"".join(chunks)


def _announced(scope: Scope) -> int | None:
    """The Content-Length; None if there is none (a chunked body)."""
    value = next((value for key, value in scope["headers"] if key.lower() == b"content-length"), b"")
    return int(value) if value.isdigit() and len(value) < 19 else None


def _path(scope: Scope) -> str:
    """The path from `/v2` on, wherever the application is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    inner = path.removeprefix(root) if root else path
    return inner if inner.startswith("/v2") else path


def _header_length(headers: Mapping[bytes, bytes]) -> int | None:
    value = headers.get(b"inference-header-content-length")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 12:
        raise InvalidInputError(
            "The header Inference-Header-Content-Length must be a number of bytes.",
            found=repr(value[:40]),
            accepted="a number of bytes",
        )
    return int(value)


def _problem(error: TidegateError) -> _Response:
    if isinstance(error, RetryableError):
        wait_s = max(1, math.ceil(error.retry_after_s))
        status = 504 if isinstance(error, DeadlineExceededError) else 503
        told = ((b"retry-after", str(wait_s).encode()),) if status == 503 else ()
        if not isinstance(error, OverloadedError):
            log.warning("a request failed: %s", error)
        return _error(status, str(error), told)
    match error:
        case ModelError():
            status = 500
        case InvalidInputError():
            status = 400
        case NotFoundError():
            status = 404
        case RefusedError():
            status = 403
        case _:
            status = 500
    if status == 500:
        log.warning("a request failed: %s", error)
    return _error(status, str(error))


def _error(status: int, sentence: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> _Response:
    body = msgspec.json.encode({"error": sentence})
    return _Response(status, body, ((b"content-type", b"application/json"), *headers))


def _json(value: object) -> _Response:
    return _Response(200, msgspec.json.encode(value), ((b"content-type", b"application/json"),))


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(256)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        raise SettingsError(
            f"Cannot listen on {host}:{port}: {error}; choose another address or a free port."
        ) from error
    return listener
