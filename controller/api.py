"""The HTTP API: a thin translation between requests and the controller's operations."""

from __future__ import annotations

import logging
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from controller.auth import Keys, Role, is_foreign_page, is_loopback_name
from controller.core import Controller
from controller.knob_api import knob_routes
from controller.llm_api import llm_routes
from controller.metrics import render_metrics
from controller.model_api import model_routes
from controller.plan_api import plan_routes
from controller.problems import plain_problem, problem
from controller.request_bodies import read_body
from controller.sla_reports import report_html
from controller.sla_views import SlaReport, SlaStatusOut
from controller.views import (
    Admission,
    AgentOut,
    Applied,
    DecisionOut,
    EventOut,
    KeyIn,
    KeyOut,
    LinkShapeIn,
    NewKeyOut,
    PlanOut,
    SlaOut,
    StatusOut,
    ThrottleIn,
    TokenIn,
    TokenOut,
)
from sla.errors import InvalidInputError, TidegateError
from sla.schema import contract_schema

log = logging.getLogger(__name__)

MAX_SLA_BYTES = 64 * 1024
_OPEN_PATHS = frozenset({"/healthz", "/readyz"})


def create_api(controller: Controller, keys: Keys | None) -> FastAPI:
    """The application. `keys` None: loopback only, no key needed, but no web page of another site may call."""
    app = FastAPI(
        title="Tidegate", version=controller.version, description="SLAs, agents, plans and decisions of one Tidegate.",
        docs_url="/docs", redoc_url=None,
    )  # fmt: skip
    app.include_router(_routes(controller))

    @app.exception_handler(TidegateError)
    async def _tidegate_error(request: Request, error: TidegateError) -> Response:
        status, document, headers = problem(error)
        return _problem_response(status, document, headers)

    @app.exception_handler(RequestValidationError)
    async def _validation_error(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        pointer = "/" + "/".join(str(part) for part in first["loc"][1:])
        wrong = InvalidInputError(
            f"The field {pointer} is wrong: {first['msg']}.",
            pointer=pointer,
            found=str(first.get("input"))[:80],
            accepted=first["msg"],
        )
        return _problem_response(*problem(wrong))

    @app.exception_handler(HTTPException)
    async def _http_error(request: Request, error: HTTPException) -> Response:
        return _problem_response(
            error.status_code, plain_problem(error.status_code, "http", "HTTP error", str(error.detail)), {}
        )

    @app.exception_handler(Exception)
    async def _unexpected_error(request: Request, error: Exception) -> Response:
        # Starlette raises it again for the log; the caller gets no inside of ours.
        return _problem_response(
            500, plain_problem(500, "internal", "Internal error", "The controller failed; its log says why."), {}
        )

    app.add_middleware(_Guard, keys=keys)
    return app


class _Guard:
    """Lets a request or a websocket in, or not, before anything else sees it."""

    def __init__(self, app: ASGIApp, keys: Keys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = _refusal(Request(scope), "GET" if scope["method"] == "HEAD" else scope["method"], self._keys)
            await (refusal or self._app)(scope, receive, send)
        elif scope["type"] == "websocket":
            # A page of another site can open a websocket without asking first, so it is held to what a writing request is.
            socket = WebSocket(scope, receive, send)
            if _refusal(socket, "WEBSOCKET", self._keys) is None:
                await self._app(scope, receive, send)
            else:
                await socket.close(code=1008)
        else:
            await self._app(scope, receive, send)


def _refusal(request: HTTPConnection, method: str, keys: Keys | None) -> Response | None:
    """Why this request may not pass, None if it may."""
    host = request.headers.get("host", "")
    if method != "GET" and is_foreign_page(host, request.headers.get("origin")):
        return _problem_response(
            403, plain_problem(403, "foreign-page", "Refused", "A page of another site may not call this API."), {}
        )
    if keys is None:
        if is_loopback_name(host):
            return None
        return _problem_response(
            403, plain_problem(403, "foreign-host", "Refused", "Without keys only loopback names are served."), {}
        )
    if request.url.path in _OPEN_PATHS:
        return None
    key = request.headers.get("authorization", "").removeprefix("Bearer ").strip() or request.cookies.get(
        "tidegate_key", ""
    )
    role = keys.role_of(key) if key else None
    # Asking a model changes nothing here, so whoever may look may ask.
    needed = Role.VIEWER if method == "GET" or request.url.path.startswith("/v2") else Role.OPERATOR
    if request.url.path.startswith("/v1/keys"):
        needed = Role.ADMIN
    if role is None:
        if _wants_page(request):
            return None  # The dashboard shows its own sign-in; its data comes through this API with the key.
        return _problem_response(
            401,
            plain_problem(401, "no-key", "No key", "Send an API key: Authorization: Bearer KEY."),
            {"WWW-Authenticate": "Bearer"},
        )
    if role < needed:
        return _problem_response(
            403, plain_problem(403, "role", "Refused", f"This key is for a {role.name.lower()}."), {}
        )
    return None


def _wants_page(request: HTTPConnection) -> bool:
    return not request.url.path.startswith(("/v1", "/v2", "/metrics", "/docs", "/openapi.json"))


def _problem_response(status: int, document: dict[str, Any], headers: dict[str, str]) -> Response:
    return JSONResponse(document, status_code=status, headers=headers, media_type="application/problem+json")


def _if_match(request: Request) -> int | None:
    """The version in an If-Match header, None without one. Raises InvalidInputError."""
    header = request.headers.get("if-match")
    if header is None:
        return None
    try:
        version = int(header.strip().strip('"'))
        if not 0 <= version < 1 << 53:
            raise ValueError(header)
        return version
    except ValueError:
        raise InvalidInputError(
            f"If-Match must be a version number, not {header[:40]!r}.", found=header[:40], accepted="a version number"
        ) from None


def _routes(controller: Controller) -> APIRouter:
    router = APIRouter()
    _health(router, controller)
    _slas(router, controller)
    _fleet(router, controller)
    _plans(router, controller)
    plan_routes(router, controller)
    model_routes(router, controller)
    knob_routes(router, controller)
    llm_routes(router, controller)
    return router


def _health(router: APIRouter, controller: Controller) -> None:
    @router.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @router.get("/readyz", tags=["health"])
    async def readyz() -> Response:
        """The store answers and the agents' door is open."""
        ready = await controller.ready()
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    @router.get("/v1/status", tags=["health"])
    async def status() -> StatusOut:
        return await controller.status()

    @router.get("/v1/events", tags=["health"])
    async def events(limit: int = Query(default=200, ge=1, le=1000)) -> list[EventOut]:
        """What happened, newest last."""
        return controller.recent_events(limit)

    @router.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text format."""
        return PlainTextResponse(await render_metrics(controller), media_type="text/plain; version=0.0.4")


def _slas(router: APIRouter, controller: Controller) -> None:
    @router.post("/v1/slas", tags=["slas"], status_code=201)
    async def apply_sla(request: Request) -> Response:
        """Submit a contract. Idempotent by `service_id`; send If-Match with the version you edited."""
        applied = await controller.apply_contract(await read_body(request, MAX_SLA_BYTES + 1), _if_match(request))
        return _versioned(applied, 201 if applied.created else 200)

    @router.post("/v1/slas:preview", tags=["slas"])
    async def preview_sla(request: Request) -> Admission:
        """Could this contract be kept? Changes nothing."""
        return await controller.preview(await read_body(request, MAX_SLA_BYTES + 1))

    @router.get("/v1/slas", tags=["slas"])
    async def slas() -> list[SlaOut]:
        return controller.slas()

    @router.get("/v1/slas/{service_id}", tags=["slas"])
    async def sla(service_id: str) -> SlaOut:
        return controller.sla(service_id)

    @router.get("/v1/slas/{service_id}/status", tags=["slas"])
    async def sla_status(service_id: str) -> SlaStatusOut:
        """The contract with its error budgets, burn rates, alerts and the risk of breaking it soon."""
        return controller.sla_status(service_id)

    @router.get("/v1/slas/{service_id}/report", tags=["slas"], response_model=SlaReport)
    async def sla_report(
        service_id: str, month: str | None = None, form: Literal["html", "json"] = Query(default="json", alias="format")
    ) -> Response:
        """One month (`YYYY-MM`, UTC; default: the running one) as JSON, or as one HTML page to send to a customer."""
        report = await controller.sla_report(service_id, month)
        name = f"{service_id}-{report.month}"
        if form == "html":
            download = {"Content-Disposition": f'attachment; filename="{name}.html"'}
            return HTMLResponse(report_html(report), headers=download)
        return JSONResponse(report.model_dump(mode="json"))

    @router.get("/v1/schemas/sla", tags=["slas"])
    async def sla_schema() -> dict[str, Any]:
        """The JSON Schema of a contract."""
        return contract_schema()

    @router.delete("/v1/slas/{service_id}", tags=["slas"], status_code=204)
    async def delete_sla(service_id: str, request: Request) -> Response:
        await controller.delete_contract(service_id, _if_match(request))
        return Response(status_code=204)


def _versioned(applied: Applied, status: int) -> Response:
    return JSONResponse(applied.model_dump(), status_code=status, headers={"ETag": f'"{applied.version}"'})


def _fleet(router: APIRouter, controller: Controller) -> None:
    @router.get("/v1/agents", tags=["agents"])
    async def agents() -> list[AgentOut]:
        return controller.agents()

    @router.post("/v1/agents/{agent_id}:drain", tags=["agents"])
    async def drain(agent_id: str) -> dict[str, str]:
        """Move the agent's shards elsewhere and give it no new ones."""
        await controller.drain(agent_id)
        return {"agent": agent_id, "state": "draining"}

    @router.post("/v1/agents/{agent_id}:undrain", tags=["agents"])
    async def undrain(agent_id: str) -> dict[str, str]:
        """Let a drained agent have work again."""
        await controller.undrain(agent_id)
        return {"agent": agent_id, "state": "live"}

    @router.delete("/v1/agents/{agent_id}", tags=["agents"], status_code=204)
    async def remove(agent_id: str) -> Response:
        """Revoke the agent's identity; it must enroll anew to come back."""
        await controller.revoke(agent_id)
        return Response(status_code=204)

    @router.post("/v1/tokens", tags=["agents"], status_code=201)
    async def create_token(body: TokenIn) -> TokenOut:
        """A join token; it is shown once."""
        return await controller.create_token(body)

    @router.post("/v1/keys", tags=["keys"], status_code=201)
    async def create_key(body: KeyIn) -> NewKeyOut:
        """An API key for somebody else; it is shown once. Only an admin may."""
        return await controller.api_keys.create(body, controller.clock.wall_s())

    @router.get("/v1/keys", tags=["keys"])
    async def keys() -> list[KeyOut]:
        return controller.api_keys.list()

    @router.delete("/v1/keys/{key_id}", tags=["keys"], status_code=204)
    async def revoke_key(key_id: str) -> Response:
        await controller.api_keys.revoke(key_id)
        return Response(status_code=204)

    @router.post("/v1/links:shape", tags=["agents"])
    async def shape_link(body: LinkShapeIn) -> dict[str, str]:
        """Make trouble: slow a link between emulated devices."""
        await controller.shape_link(body)
        return {"status": "shaped"}

    @router.post("/v1/agents/{agent_id}:throttle", tags=["agents"])
    async def throttle(agent_id: str, body: ThrottleIn) -> dict[str, str]:
        """Make trouble: let the runs of an emulated device take longer; a factor of 1 ends it."""
        await controller.throttle(agent_id, body.factor)
        return {"status": "throttled"}


def _plans(router: APIRouter, controller: Controller) -> None:
    @router.get("/v1/plans", tags=["plans"])
    async def plans(service_id: str | None = None, limit: int = Query(default=50, ge=1, le=200)) -> list[PlanOut]:
        """Plans that were decided, newest last."""
        return await controller.plans(service_id, limit)

    @router.get("/v1/decisions", tags=["plans"])
    async def decisions(
        service_id: str | None = None, limit: int = Query(default=50, ge=1, le=500)
    ) -> list[DecisionOut]:
        """Decisions with their reasons, newest last."""
        return await controller.decisions(service_id, limit)

    @router.get("/v1/decisions/{service_id}:log", tags=["plans"])
    async def decision_log(service_id: str, limit: int = Query(default=50, ge=1, le=500)) -> Response:
        """Decisions with everything that they were made from, as a file for `tidegate replay`."""
        return Response(await controller.decision_log(service_id, limit), media_type="application/octet-stream")

    @router.post("/v1/plans/{service_id}:rollback", tags=["plans"])
    async def rollback(service_id: str) -> dict[str, Any]:
        """Go back to the last plan that ran well before this one, and pin it."""
        return {"service_id": service_id, "epoch": await controller.rollback(service_id)}

    @router.post("/v1/plans/{service_id}:pin", tags=["plans"])
    async def pin(service_id: str) -> dict[str, Any]:
        """Keep the running plan; only the loss of a device moves it."""
        await controller.pin(service_id, True)
        return {"service_id": service_id, "pinned": True}

    @router.post("/v1/plans/{service_id}:unpin", tags=["plans"])
    async def unpin(service_id: str) -> dict[str, Any]:
        await controller.pin(service_id, False)
        return {"service_id": service_id, "pinned": False}
