"""The page's place in the API's application, and the moment at which its library is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.routing import Match, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from controller.dashboard.page import Dashboard

SCOPE_KEY = "tidegate.dashboard"
"""Where a request's scope holds the Dashboard that it is for."""

_API_PREFIXES = ("/v1", "/v2", "/metrics", "/docs", "/openapi.json", "/healthz", "/readyz")


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """What the page needs to call the API."""

    api_url: str
    needs_key: bool
    """True: whoever opens the page must sign in with an API key."""
    ca_pem: str
    """Certificate authority of the API over https."""


def mount_dashboard(app: FastAPI, *, api_url: str, key: str | None, ca_pem: str) -> None:
    """Serve the page at "/" of `app`; everything that belongs to the API stays the API's.

    `key` only says whether keys are in force (not None): it is not kept, so that it can never reach a browser.
    """
    page = LazyPage(DashboardSettings(api_url=api_url, needs_key=key is not None, ca_pem=ca_pem))
    app.router.routes.append(PageMount("/", app=page))
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with inner(app) as state:
            yield state
        await page.close()

    app.router.lifespan_context = lifespan


class PageMount(Mount):
    """Takes what is left over, but not the API's paths: a wrong one there must get the API's own 404 or 405."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope.get("path", "").startswith(_API_PREFIXES):
            return Match.NONE, {}
        return super().matches(scope)


class LazyPage:
    """An ASGI application that loads the page with the first request for it."""

    def __init__(self, settings: DashboardSettings) -> None:
        self._settings = settings
        self._dashboard: Dashboard | None = None
        self._loading = asyncio.Lock()
        self._library_life = AsyncExitStack()
        self._owns_library = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._loading:
            dashboard, library = await self._load()
        scope[SCOPE_KEY] = dashboard
        await library(scope, receive, send)

    async def close(self) -> None:
        """Stop reading the API and end the page's library, if it was ever loaded."""
        global _library
        if self._dashboard is not None:
            await self._dashboard.close()
            self._dashboard = None
        if self._owns_library:
            await self._library_life.aclose()
            self._owns_library, _library = False, None

    async def _load(self) -> tuple[Dashboard, ASGIApp]:
        global _library
        if self._dashboard is not None and _library is not None:
            return self._dashboard, _library
        # In a thread: half a second of imports on the loop would look like jitter to every agent.
        page = await asyncio.to_thread(import_module, "controller.dashboard.page")
        if _library is None:
            library = page.library_app(secure_cookie=self._settings.api_url.startswith("https:"))
            await self._library_life.enter_async_context(library.router.lifespan_context(library))
            self._owns_library, _library = True, library
        dashboard = self._dashboard or page.Dashboard(self._settings)
        self._dashboard = dashboard
        return dashboard, _library


# The page's library keeps its state in globals, so there is one of it per process.
_library: ASGIApp | None = None
