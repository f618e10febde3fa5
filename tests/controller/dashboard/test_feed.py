"""The one reader behind all pages, against a real server: over TLS, with a key, with little load."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from controller.dashboard.api import Api
from controller.dashboard.feed import Feed, FeedState
from controller.pki import CertificateAuthority
from policies.ids import AgentId
from sla.errors import RetryableError

KEY = "tga_right"
_STATUS = {
    "version": "0", "ready": True, "leader": True, "policy": "solver", "cloud": "none", "store": "embedded", "agents_live": 0, "services": 0,
}  # fmt: skip


class CannedApi:
    """Counts what it is asked. `status` may be changed to break it; `old_plan` is beyond the newest plans."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.status: int = 200
        self.slas: list[dict[str, Any]] = []
        self.old_plan: dict[str, Any] | None = None
        self.app = FastAPI()
        self.app.add_api_route("/v1/{what}", self._answer)

    async def _answer(self, what: str, request: Request, service_id: str | None = None) -> Response:
        self.asked[what if service_id is None else f"{what} of {service_id}"] += 1
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"detail": "Send an API key."}, status_code=401)
        if self.status != 200:
            return JSONResponse({"detail": "The store does not answer."}, status_code=self.status)
        if what == "plans" and service_id is not None and self.old_plan is not None:
            return JSONResponse([self.old_plan])
        known: dict[str, Any] = {"status": _STATUS, "slas": self.slas}
        return JSONResponse(known.get(what, []))


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - what is waited for has no event to offer
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def _serving(app: FastAPI, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
    if context is not None:
        config.ssl_context_factory = lambda config, default: context
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await _until(lambda: server.started)
    yield listener.getsockname()[1]
    server.should_exit = True
    await task


@contextlib.asynccontextmanager
async def _feed(canned: CannedApi, key: str = KEY) -> AsyncIterator[Feed]:
    async with _serving(canned.app) as port:
        feed = Feed(Api(f"http://127.0.0.1:{port}", ca_pem="", key=key))
        yield feed
        await feed.close()


async def _state(states: list[FeedState], wanted: Callable[[FeedState], bool]) -> FeedState:
    await _until(lambda: bool(states) and wanted(states[-1]))
    return states[-1]


async def test_over_https_only_our_own_authority_is_trusted(tmp_path: Path) -> None:
    ours, other = CertificateAuthority(tmp_path / "ours"), CertificateAuthority(tmp_path / "other")
    canned = CannedApi()
    async with _serving(canned.app, ours.identity_for(AgentId("some-host")).server_context("none")) as port:
        url = f"https://127.0.0.1:{port}"
        api = Api(url, ca_pem=ours.ca_pem, key=KEY)
        assert (await api.get("/v1/status")).ok
        await api.close()
        stranger = Api(url, ca_pem=other.ca_pem, key=KEY)
        with pytest.raises(RetryableError, match="cannot be reached"):
            await stranger.get("/v1/status")
        await stranger.close()


async def test_many_pages_cost_as_much_as_one_and_none_costs_nothing() -> None:
    canned = CannedApi()
    async with _feed(canned) as feed:
        pages: list[list[FeedState]] = [[] for _ in range(20)]
        listeners = [page.append for page in pages]
        for listener in listeners:
            feed.listen(listener)
            feed.listen(listener)
        await _state(pages[-1], lambda state: state.reading is not None)
        assert canned.asked == Counter(["status", "slas", "agents", "plans", "decisions", "events", "intents"])
        assert all(len(page) == 1 for page in pages)
        for listener in listeners:
            feed.drop(listener)
        before = canned.asked.total()
        await asyncio.sleep(1.2)
        assert canned.asked.total() == before


async def test_an_outage_keeps_the_last_reading_and_says_so() -> None:
    canned = CannedApi()
    async with _feed(canned) as feed:
        states: list[FeedState] = []
        feed.listen(states.append)
        last = await _state(states, lambda state: state.reading is not None)
        canned.status = 503
        out = await _state(states, lambda state: state.error is not None)
        assert out.reading is last.reading
        assert out.error == "The store does not answer."
        assert out.age_s > 0
        canned.status = 200
        assert (await _state(states, lambda state: state.error is None)).reading is not last.reading


async def test_a_refused_key_signs_out_and_shows_nothing() -> None:
    async with _feed(CannedApi(), key="tga_wrong") as feed:
        state = await feed.fresh()
        assert (state.signed_out, state.reading) == (True, None)


async def test_nobody_there_is_an_error_not_a_crash() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        feed = Feed(Api(f"http://127.0.0.1:{unused.getsockname()[1]}", ca_pem="", key=None))
        state = await feed.fresh()
    assert (state.reading, state.error) == (None, "The controller cannot be reached.")
    await feed.close()


async def test_a_broken_page_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async with _feed(CannedApi()) as feed:
        states: list[FeedState] = []

        def broken(state: FeedState) -> None:
            raise ValueError("a page is broken")

        feed.listen(broken)
        feed.listen(states.append)
        await _state(states, lambda state: state.reading is not None)
    assert "a dashboard page could not be updated" in caplog.text


async def test_a_plan_older_than_the_newest_ones_is_asked_for_once() -> None:
    canned = CannedApi()
    canned.slas = [
        {
            "service_id": "calm", "version": 1, "contract": {}, "state": "met", "text": "", "requests": 0, "failed": 0, "availability": None,
            "p50_ms": None, "p95_ms": None, "p99_ms": None, "offered_rps": 0, "latency_met": None, "availability_met": None,
            "budget_left": None, "fell_back": 0, "running_epoch": 3, "predicted_p99_ms": None,
        }
    ]  # fmt: skip
    canned.old_plan = {
        "service_id": "calm", "epoch": 3, "running": True, "trigger": "t", "proposer": "solver", "score": None, "predicted_p99_ms": None,
        "measured_p99_ms": None, "requests": 0, "decided_at_s": 0, "active_at_s": None, "sentence": "", "shards": [],
    }  # fmt: skip
    async with _feed(canned) as feed:
        states: list[FeedState] = []
        feed.listen(states.append)
        await _state(states, lambda state: len(states) >= 2)
        reading = states[-1].reading
        assert reading is not None
        assert reading.running["calm"].epoch == 3
    assert canned.asked["plans of calm"] == 1
