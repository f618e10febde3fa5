"""The real dashboard of the real stack in Debian's Chromium: a kill becomes a new plan on the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from controller.local.stack import LocalStack
from controller.local.trouble import SERVICE, running_plan, victim_of

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(300)]

CHROMIUM_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture
def page() -> Iterator[Page]:
    chromium = shutil.which("chromium")
    assert chromium, "This test needs Debian's chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(CHROMIUM_FLAGS))
        yield browser.new_page(viewport={"width": 1280, "height": 1500})
        browser.close()


def test_a_kill_becomes_a_new_plan_on_the_page(stack: LocalStack, page: Page, tmp_path: Path) -> None:
    before = running_plan(stack)
    victim = victim_of(before, stack)
    page.goto(stack.dashboard_url)
    sla = page.locator(f"[data-service='{SERVICE}']")
    expect(sla).to_contain_text(f"Plan {before['epoch']}", timeout=20_000)
    expect(sla.locator(f"svg.tg-plan .tg-shard[data-agent='{victim}']").first).to_be_visible()
    stack.kill_agent(victim)
    expect(page.locator(f"tr[data-agent='{victim}']")).to_contain_text("lost", timeout=20_000)
    expect(sla.locator(f"svg.tg-plan .tg-shard[data-agent='{victim}']")).to_have_count(0, timeout=60_000)
    expect(page.locator("tr[data-agent]").filter(has_text="emulated").first).to_be_visible()
    picture = Path(os.environ.get("TIDEGATE_SCREENSHOT") or tmp_path / "dashboard.png")
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 20_000
