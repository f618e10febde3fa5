"""A served dashboard in a process of its own, and Debian's Chromium to look at it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Served:
    """A canned controller: where it is, and what it answers."""

    url: str
    scene_file: Path
    process: subprocess.Popen[str]

    def show(self, scene: str) -> None:
        """Let it answer `scene` from now on."""
        fresh = self.scene_file.with_suffix(".new")
        fresh.write_text(scene)
        fresh.replace(self.scene_file)


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts a canned controller; it ends with the session."""
    started: list[subprocess.Popen[str]] = []

    def start(scene: str, key: str | None = None) -> Served:
        scene_file = tmp_path_factory.mktemp("dashboard") / "scene"
        scene_file.write_text(scene)
        script = Path(__file__).with_name("canned_controller.py")
        arguments = [sys.executable, str(script), str(scene_file), *([key] if key else [])]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        return Served(f"http://127.0.0.1:{port}", scene_file, process)

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="session")
def shared(serve: Serve) -> Served:
    """One controller without keys for most tests: starting one costs seconds."""
    return serve("calm")


@pytest.fixture
def served(shared: Served) -> Served:
    """The shared controller, calm."""
    shared.show("calm")
    return shared


# Not for the session: while it is open, Playwright keeps a running event loop in this thread, which async tests would meet.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. Not having it is a failure: what is not looked at is not known to work."""
    found = shutil.which("chromium") or "/usr/bin/chromium"
    if not Path(found).exists():
        pytest.fail("This test needs Debian's chromium; install it with: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(_FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def new_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages of a given width and theme, each in a browser session of its own."""
    contexts = []

    def open_page(url: str, *, width: int = 1280, theme: str = "light") -> Page:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.goto(url)
        page.wait_for_selector(".tg-header")
        return page

    yield open_page
    for context in contexts:
        context.close()
