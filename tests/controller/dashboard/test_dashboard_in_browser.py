"""The dashboard as a person sees it: a real browser, the real page, the real API over canned answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

OpenPage = Callable[..., Page]
KEY = "tga_a-key-for-this-test"


def test_one_page_shows_everything_and_follows_a_change_of_plan(served: Any, new_page: OpenPage) -> None:
    page = new_page(served.url)

    sla = page.locator("[data-service='document-reader']")
    expect(sla.locator(".tg-pill").first).to_have_text("met")
    expect(sla).to_contain_text("p99 2310 of 4000 ms, 1284 requests, 2 failed.")
    expect(page.locator("[data-service='api-payment-v2']")).to_contain_text("unbound")
    expect(page.locator("tr[data-agent]")).to_have_count(5)
    expect(page.locator("tr[data-agent='ascend310p-4be012']")).to_contain_text("emulated")
    expect(page.locator(".tg-log").first).to_contain_text("the best score of 41 admissible plans")
    plan = sla.locator("svg.tg-plan")
    expect(plan.locator(".tg-shard[data-agent='rk3588-0f3a91']")).to_have_count(1)
    page.evaluate("window.notReloaded = true")

    served.show("moved")

    expect(sla).to_contain_text("Plan 8", timeout=6_000)
    expect(sla.locator(".tg-pill").first).to_have_text("violated")
    expect(plan.locator(".tg-shard[data-agent='rk3588-0f3a91']")).to_have_count(0)
    expect(page.locator("tr[data-agent='rk3588-0f3a91']")).to_contain_text("lost")
    assert page.evaluate("window.notReloaded")


def test_what_agents_and_models_say_is_text_and_never_markup(served: Any, new_page: OpenPage) -> None:
    page = new_page(served.url)
    expect(page.locator("tr[data-agent='imx93-<b>evil</b>'] b").first).to_have_text("imx93-<b>evil</b>")
    expect(page.locator(".tg-rationale")).to_contain_text("<script>alert(1)</script>")
    assert page.locator(".tg-rationale script").count() == 0


def test_an_outage_is_shown_and_ends(served: Any, new_page: OpenPage) -> None:
    page = new_page(served.url)
    expect(page.locator(".tg-mark")).to_contain_text("up to date")
    served.show("down")
    expect(page.locator(".tg-mark")).to_contain_text("unreachable", timeout=8_000)
    expect(page.locator(".tg-mark")).to_contain_text("last seen")
    expect(page.locator(".tg-stale")).to_have_count(1)
    expect(page.locator("[data-service='document-reader']")).to_contain_text("Plan 7")
    served.show("calm")
    expect(page.locator(".tg-mark")).to_contain_text("up to date", timeout=8_000)
    expect(page.locator(".tg-stale")).to_have_count(0)


def test_a_dead_controller_is_told_by_the_browser_itself(serve: Any, new_page: OpenPage) -> None:
    served = serve("calm")
    page = new_page(served.url)
    expect(page.locator(".tg-mark")).to_contain_text("up to date")
    expect(page.locator("#tg-lost")).to_be_hidden()
    served.process.kill()
    expect(page.locator("#tg-lost")).to_contain_text(re.compile(r"last seen \d+ s ago"), timeout=10_000)
    expect(page.locator(".tg-mark")).to_be_hidden()


def test_nothing_there_yet_says_what_to_run(served: Any, new_page: OpenPage) -> None:
    served.show("empty")
    page = new_page(served.url)
    expect(page.locator(".tg-empty", has_text="No SLA yet")).to_contain_text(
        f"tidegate --url {served.url} sla apply sla/examples/document-reader.json"
    )
    expect(page.locator(".tg-empty", has_text="No agents yet")).to_contain_text("token create")
    served.show("calm")
    expect(page.locator("tr[data-agent]")).to_have_count(5)


def test_an_sla_is_previewed_and_then_applied(served: Any, new_page: OpenPage) -> None:
    page = new_page(served.url)
    page.get_by_role("button", name="Submit SLA").click()
    dialog = page.locator(".tg-dialog")
    apply = dialog.get_by_role("button", name="Apply")
    expect(apply).to_be_disabled()
    editor = dialog.locator("textarea").first
    editor.fill('{"service_id": "x", "latency_p99_ms": "fast", "throughput_rps": 1, "availability_sla": "99%"}')
    dialog.get_by_role("button", name="Preview").click()
    expect(dialog.locator(".tg-note-bad code")).to_have_text("/latency_p99_ms")
    expect(apply).to_be_disabled()
    editor.fill('{"service_id": "x", "latency_p99_ms": 900, "throughput_rps": 1, "availability_sla": "99%"}')
    dialog.get_by_role("button", name="Preview").click()
    expect(dialog.locator(".tg-note-ok")).to_contain_text("admissible")
    expect(dialog.locator("svg.tg-plan")).to_have_count(1)
    expect(apply).to_be_enabled()
    apply.click()
    expect(dialog).to_have_count(0)


def test_a_plan_is_pinned_after_a_question(served: Any, new_page: OpenPage) -> None:
    page = new_page(served.url)
    sla = page.locator("[data-service='document-reader']")
    sla.get_by_role("button", name="Pin plan").click()
    page.locator(".tg-dialog").get_by_role("button", name="Pin").click()
    expect(sla).to_contain_text("pinned", timeout=6_000)
    sla.get_by_role("button", name="Unpin").click()
    page.locator(".tg-dialog").get_by_role("button", name="Unpin").click()
    expect(sla.get_by_role("button", name="Pin plan")).to_be_visible()


def test_adding_an_agent_shows_the_command(served: Any, new_page: OpenPage) -> None:
    page = new_page(served.url)
    page.get_by_role("button", name="Add agent").click()
    page.get_by_role("button", name="Create token").click()
    expect(page.locator(".tg-dialog .tg-command")).to_contain_text(
        "tidegate agent join tidegate://127.0.0.1:7443 --token tgj_abc"
    )


def test_with_keys_in_force_nothing_is_shown_before_the_sign_in(serve: Any, new_page: OpenPage) -> None:
    served = serve("calm", KEY)
    page = new_page(served.url)
    expect(page.locator(".tg-sign-in")).to_be_visible()
    assert "document-reader" not in page.content()
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator(".tg-note-bad")).to_contain_text("not known here")
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("[data-service='document-reader']")).to_be_visible()
    assert KEY not in page.content()
    page.locator("[data-service='document-reader']").get_by_role("button", name="Pin plan").click()
    page.locator(".tg-dialog").get_by_role("button", name="Pin").click()
    expect(page.locator("[data-service='document-reader']")).to_contain_text("pinned", timeout=6_000)
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator(".tg-sign-in")).to_be_visible()
    other = new_page(served.url)
    expect(other.locator(".tg-sign-in")).to_be_visible()


def test_a_phone_scrolls_in_one_direction_dark_and_light(served: Any, new_page: OpenPage) -> None:
    page = new_page(served.url, width=400, theme="dark")
    expect(page.locator("tr[data-agent]")).to_have_count(5)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    expect(page.locator("body.body--dark")).to_have_count(1)
    page.emulate_media(color_scheme="light")
    expect(page.locator("body.body--dark")).to_have_count(0)


def test_nothing_is_fetched_from_elsewhere(served: Any, new_page: OpenPage) -> None:
    page = new_page(served.url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    expect(page.locator("tr[data-agent]")).to_have_count(5)
    foreign = [url for url in asked if not url.startswith((served.url, served.url.replace("http", "ws"), "data:"))]
    assert foreign == []


def test_the_api_keeps_its_own_answers_beside_the_page(served: Any) -> None:
    with httpx.Client(base_url=served.url, trust_env=False) as client:
        assert client.get("/").status_code == 200
        missing = client.get("/v1/nothing-like-it")
        assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
        assert client.delete("/v1/status").status_code == 405
        wrong = client.get("/v1/plans", params={"limit": 0})
        assert (wrong.status_code, wrong.json()["pointer"]) == (422, "/limit")
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
