"""The page itself: who may see it, its header, and how readings reach it. Imports the page's library."""

from __future__ import annotations

import functools
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from nicegui import app as library
from nicegui import ui

from controller.dashboard.api import Api
from controller.dashboard.browser_script import LOST_CONNECTION
from controller.dashboard.dialogs import sign_in_form, theme_button
from controller.dashboard.elements import LiveHtml, box, button
from controller.dashboard.feed import Feed, FeedState
from controller.dashboard.fragments import ICON, freshness, status_line
from controller.dashboard.mounting import SCOPE_KEY, DashboardSettings
from controller.dashboard.sections import LivePage
from controller.dashboard.sign_in import SignIns
from sla.errors import RetryableError

_STYLE = Path(__file__).with_name("style.css")
_DEFAULT_CLI_URL = "http://127.0.0.1:8080"


class Dashboard:
    """What all pages of one controller share. Owned by the event loop."""

    def __init__(self, settings: DashboardSettings) -> None:
        self._settings = settings
        self._feeds: dict[str | None, Feed] = {}
        self.sign_ins = SignIns()

    @property
    def needs_key(self) -> bool:
        """True if only those with an API key may look."""
        return self._settings.needs_key

    def feed(self, key: str | None) -> Feed:
        """The reader for a key; without keys there is one for everybody."""
        if key not in self._feeds:
            self._feeds[key] = Feed(self._api(key))
        return self._feeds[key]

    async def try_key(self, key: str) -> str | None:
        """Why the API does not take `key`; None if it does."""
        if not key or not key.isascii() or not key.isprintable():
            return "Enter an API key."
        api = self._api(key)
        try:
            answer = await api.get("/v1/status")
        except RetryableError as error:
            return str(error)
        finally:
            await api.close()
        if answer.ok:
            return None
        return "This key is not known here." if answer.status in (401, 403) else answer.sentence

    async def close(self) -> None:
        """Stop all reading."""
        for feed in self._feeds.values():
            await feed.close()
        self._feeds.clear()

    def _api(self, key: str | None) -> Api:
        return Api(self._settings.api_url, ca_pem=self._settings.ca_pem, key=key)


@functools.cache
def library_app(*, secure_cookie: bool) -> FastAPI:
    """The page's library as an application that serves the page at "/"; made once per process."""
    outer = FastAPI(openapi_url=None)
    ui.page("/", title="Tidegate", favicon=ICON)(_page)
    ui.run_with(
        outer,
        dark=None,
        tailwind=False,
        show_welcome_message=False,
        binding_refresh_interval=None,
        storage_secret=secrets.token_urlsafe(32),
        session_middleware_kwargs={
            "session_cookie": "tidegate_session",
            "same_site": "strict",
            "https_only": secure_cookie,
        },
    )
    return outer


async def _page(request: Request) -> None:
    dashboard: Dashboard = request.scope[SCOPE_KEY]
    session = str(library.storage.browser["id"])
    ui.add_css(_STYLE.read_text(), shared=False)
    ui.add_body_html(LOST_CONNECTION)
    key = dashboard.sign_ins.key_of(session) if dashboard.needs_key else None
    if dashboard.needs_key and key is None:
        _signed_out_page(dashboard, session)
    else:
        await _live_page(dashboard, session, key, request)


def _signed_out_page(dashboard: Dashboard, session: str) -> None:
    async def try_key(key: str) -> str | None:
        reason = await dashboard.try_key(key)
        if reason is None:
            dashboard.sign_ins.sign_in(session, key)
            ui.navigate.reload()
        return reason

    with box("header", "tg-header"):
        _brand()
        theme_button()
    with box("main", "tg-main"):
        sign_in_form(try_key)


async def _live_page(dashboard: Dashboard, session: str, key: str | None, request: Request) -> None:
    feed = dashboard.feed(key)
    client = ui.context.client
    with box("header", "tg-header"):
        _brand()
        facts = LiveHtml("div", "tg-facts")
        mark = LiveHtml("div", "tg-mark")
        with box("div", "tg-row"):
            theme_button()
            if key is not None:
                button("Sign out", lambda: _sign_out(dashboard, session), "tg-quiet")
    with box("main", "tg-main"):
        page = LivePage(feed.api, str(request.base_url), _cli(str(request.base_url)))

    def show(state: FeedState) -> None:
        if state.signed_out:
            feed.drop(show)
            with client:
                _sign_out(dashboard, session)
            return
        with client:
            if state.reading is not None:
                facts.show(status_line(state.reading.status, state.reading.agents))
            mark.show(freshness(state.error, state.age_s, known=state.reading is not None))
            page.show(state)

    show(await feed.fresh())
    # Only a browser that is really there keeps the reading alive.
    client.on_connect(lambda: feed.listen(show))
    client.on_disconnect(lambda: feed.drop(show))
    client.on_delete(lambda: feed.drop(show))


def _sign_out(dashboard: Dashboard, session: str) -> None:
    dashboard.sign_ins.sign_out(session)
    ui.navigate.reload()


def _brand() -> None:
    LiveHtml("div", "tg-brand", text=f"{ICON}<span>Tidegate</span>")


def _cli(base_url: str) -> str:
    """How to call the command line against the address at which the page was opened."""
    url = base_url.rstrip("/")
    if url == _DEFAULT_CLI_URL:
        return "tidegate"
    secured = " --key KEY --ca-file CA.pem" if urlsplit(url).scheme == "https" else ""
    return f"tidegate --url {url}{secured}"
