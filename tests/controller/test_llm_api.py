"""The LLM and intents over the HTTP API of a real controller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest_asyncio

from controller.api import create_api
from controller.core import Controller
from controller.settings import LlmSettings
from policies.constraints import KeepPlan
from policies.ids import ServiceId
from policies.llm_resolve import Wish

READER = ServiceId("reader")


@pytest_asyncio.fixture
async def controller(make_controller: Any, spec: Any, models: Any, make_sla: Any) -> Controller:
    controller: Controller = make_controller()
    await controller.start()
    await controller.desired.put_service(spec, models)
    await controller.apply_contract(make_sla(), None)
    return controller


@pytest_asyncio.fixture
async def api(controller: Controller) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_api(controller, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
        yield client


async def test_an_intent_is_shown_back_confirmed_and_revoked(api: httpx.AsyncClient, controller: Controller) -> None:
    body = {"service_id": "reader", "rules": [{"kind": "keep"}], "lasts_s": 1200}
    made = (await api.post("/v1/intents", json=body)).json()
    assert made["state"] == "proposed"
    assert made["rules"][0]["text"].startswith("keep the running plan unless a device is lost, until ")
    assert controller.loop.snapshot().services[READER].constraints == ()
    confirmed = (await api.post(f"/v1/intents/{made['id']}:confirm")).json()
    assert confirmed["state"] == "active"
    assert controller.loop.snapshot().services[READER].constraints == (KeepPlan(),)
    assert (await api.get("/v1/intents", params={"service_id": "reader"})).json() == [confirmed]
    assert (await api.post(f"/v1/intents/{made['id']}:revoke")).json()["state"] == "revoked"
    assert controller.loop.snapshot().services[READER].constraints == ()


async def test_in_control_the_llms_own_wish_is_shown_acts_and_is_revoked(
    make_controller: Any, spec: Any, models: Any, make_sla: Any
) -> None:
    controller: Controller = make_controller(llm=LlmSettings(base_url="http://127.0.0.1:9/v1", mode="control"))
    await controller.start()
    await controller.desired.put_service(spec, models)
    await controller.apply_contract(make_sla(), None)
    controller.llm.offer(READER, (Wish(rule=KeepPlan(), ends_in_s=1200.0),), "it runs well", admitted=True)
    await controller.llm.intents.close()
    view = controller.loop.snapshot().services[READER]
    assert (view.constraints, view.advised) == ((), (KeepPlan(),))
    transport = httpx.ASGITransport(create_api(controller, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as api:
        (shown,) = (await api.get("/v1/intents")).json()
        assert (shown["by"], shown["confirmed_by"], shown["state"]) == ("llm", "gate", "active")
        assert shown["said"] == "it runs well"
        await api.post(f"/v1/intents/{shown['id']}:revoke")
    assert controller.loop.snapshot().services[READER].advised == ()


async def test_what_cannot_be_an_intent_is_a_problem_that_helps(api: httpx.AsyncClient) -> None:
    async def status(**body: Any) -> tuple[int, str]:
        answer = await api.post("/v1/intents", json={"service_id": "reader", **body})
        return answer.status_code, answer.json()["detail"]

    assert (await status())[0] == 422 or (await status())[0] == 400
    code, detail = await status(rules=[{"kind": "avoid", "agent": "nobody"}])
    assert code in (400, 422)
    assert detail == "There is no agent nobody."
    code, detail = await status(text="site B matters")
    assert code == 409
    assert detail.startswith("No LLM is configured")
    assert (await status(rules=[{"kind": "shift", "risk": 7}]))[0] in (400, 422)
    assert (await status(rules=[{"kind": "keep"}], lasts_s=1e9))[0] in (400, 422)
    assert (await api.post("/v1/intents/nope:confirm")).status_code == 404
    assert (await api.post("/v1/llm/advice/nope:accept")).status_code == 404


async def test_the_report_and_the_metrics_without_a_model(api: httpx.AsyncClient, controller: Controller) -> None:
    report = (await api.get("/v1/llm/report")).json()
    assert (report["mode"], report["asked"], report["win_rate"]) == ("off", 0, None)
    assert (await api.get("/v1/llm/advice")).json() == []
    controller.llm.advisor.ledger.passed_over("breaker")
    metrics = (await api.get("/metrics")).text
    assert 'tidegate_llm_decisions_total{reason="breaker",verdict="fallback"} 1.0' in metrics
