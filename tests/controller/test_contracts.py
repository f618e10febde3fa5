"""What the API says about contracts: attained, budgets, alerts, reports. Reports of requests are made up; everything else is real."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from agents.messages import ServiceReport
from controller.api import create_api
from controller.core import Controller
from controller.sla_reports import month_bounds, month_of
from policies.ids import ServiceId
from sla.errors import InvalidInputError
from sla.schema import EXAMPLES, contract_schema
from sla.sketch import LatencySketch

SERVICE = ServiceId("tiny")


def reported(ok: int, failed: int = 0, ms: float = 50.0) -> tuple[ServiceReport, ...]:
    sketch = LatencySketch()
    sketch.add(ms, ok)
    return (
        ServiceReport(
            service_id=SERVICE, epoch=1, ok=ok, failed=failed, fell_back=0, latency_buckets=sketch.to_buckets()
        ),
    )  # fmt: skip


@pytest_asyncio.fixture
async def controller(make_controller: Any) -> Controller:
    controller: Controller = make_controller()
    await controller.start()
    return controller


@pytest_asyncio.fixture
async def api(controller: Controller) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_api(controller, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
        contract = {"service_id": "tiny", "latency_p99_ms": 150, "throughput_rps": 2, "availability_sla": "99%"}
        assert (await client.post("/v1/slas", json=contract)).status_code == 201
        yield client


def serve(
    controller: Controller, clock: Any, *, minutes: int, ok: int = 100, failed: int = 0, ms: float = 50.0
) -> None:
    """Requests at one ingress, minute after minute, as the save task of the controller sees them."""
    for _ in range(minutes):
        controller.slis.fold(reported(ok, failed, ms), "rk-1")
        clock.advance(60_000)
        controller.contracts.tick()


async def test_status_tells_budgets_burns_alerts_and_risk(
    controller: Controller, clock: Any, api: httpx.AsyncClient
) -> None:
    serve(controller, clock, minutes=120, failed=0)
    calm = (await api.get("/v1/slas/tiny/status")).json()
    assert calm["firing"] == []
    assert calm["coverage"] > 0.95
    assert {p["name"]: p["met"] for p in calm["promises"]} == {
        "availability": True, "throughput": True, "latency-p99": True
    }  # fmt: skip
    assert calm["burns"]["availability"]["1h"] == 0.0
    assert calm["risk"]["contract"] < 0.1
    serve(controller, clock, minutes=15, ok=50, failed=50)
    burning = (await api.get("/v1/slas/tiny/status")).json()
    assert any(a["rule"] == "1h/5m" and a["severity"] == "page" and a["state"] == "firing" for a in burning["alerts"])
    assert len(burning["firing"]) == 4
    assert burning["firing"][0].startswith("page: availability burns its budget")
    assert burning["budget_left"] < 0  # 750 of 13,500 failed; 135 were allowed.
    assert burning["risk"]["promises"]["availability"] > 0.9
    assert burning["spans"]["1h"]["failed"] == 750
    assert next(e.text for e in controller.events.tail() if e.kind == "sla-alert").startswith("tiny (page): ")
    serve(controller, clock, minutes=420)
    assert any("is calm again" in e.text for e in controller.events.tail() if e.kind == "sla-alert")


async def test_counters_survive_a_restart_and_what_was_missed_is_not_good(
    make_controller: Any, controller: Controller, clock: Any, api: httpx.AsyncClient
) -> None:
    await controller.desired.put_service(*await _tiny(controller))
    serve(controller, clock, minutes=30)
    await controller.slis.save()
    clock.advance(30 * 60_000)
    again: Controller = make_controller()
    await again.start()
    status = again.sla_status("tiny")
    assert status.requests == 3_000
    assert status.spans["1h"].coverage == pytest.approx(0.5, abs=0.05)
    assert {a.state for a in status.alerts if a.rule == "1h/5m"} == {"no-data"}


async def test_damaged_counters_do_not_stop_a_controller(
    make_controller: Any, controller: Controller, api: httpx.AsyncClient
) -> None:
    await controller.desired.put_service(*await _tiny(controller))
    await controller.state.save_window("tiny", b"\xff not a window")
    again: Controller = make_controller()
    await again.start()
    assert again.sla_status("tiny").requests == 0


async def test_a_report_of_the_month_names_the_worst_hour(
    controller: Controller, clock: Any, api: httpx.AsyncClient
) -> None:
    clock.advance((3600 - clock.wall_s() % 3600) * 1000)
    serve(controller, clock, minutes=60)
    bad_hour = clock.wall_s()
    serve(controller, clock, minutes=60, ok=60, failed=40, ms=400)
    serve(controller, clock, minutes=61)
    month = month_of(bad_hour)
    report = (await api.get("/v1/slas/tiny/report", params={"month": month})).json()
    assert (report["requests"], report["failed"], report["state"]) == (18_100, 2_400, "violated")
    worst = report["worst_hours"][0]
    assert (worst["start_s"], worst["failed"], worst["slow"], worst["bad_minutes"]) == (bad_hour, 2_400, 3_600, 60)
    assert len(report["worst_hours"]) == 1
    assert sum(day["failed"] for day in report["days"]) == 2_400
    assert not report["complete"]
    page = await api.get("/v1/slas/tiny/report", params={"month": month, "format": "html"})
    assert page.headers["content-type"].startswith("text/html")
    assert f"tiny-{month}.html" in page.headers["content-disposition"]
    assert "http" not in page.text.replace("<!doctype html>", "")  # Nothing from elsewhere.
    assert "Not all promises were kept" in page.text
    assert "<script" not in page.text


async def test_reports_of_other_months_are_empty_or_refused(api: httpx.AsyncClient) -> None:
    empty = await api.get("/v1/slas/tiny/report", params={"month": "2020-02", "format": "html"})
    assert "no requests to judge" in empty.text
    for month in ("2020-13", "x", "2020-1", "٢٠٢٠-01"):
        refused = await api.get("/v1/slas/tiny/report", params={"month": month})
        assert (refused.status_code, refused.json()["pointer"]) == (422, "/month")
    assert (await api.get("/v1/slas/nobody/report")).status_code == 404
    assert (await api.get("/v1/slas/nobody/status")).status_code == 404


def test_months_begin_and_end_where_they_should() -> None:
    december, leap = month_bounds("2026-12"), month_bounds("2028-02")
    assert december.end_s == month_bounds("2027-01").start_s
    assert leap.end_s - leap.start_s == 29 * 86_400
    assert month_of(december.start_s) == "2026-12"
    assert month_of(december.end_s - 1) == "2026-12"
    with pytest.raises(InvalidInputError):
        month_bounds("1999-01")


async def test_what_came_from_outside_is_escaped_in_a_report(controller: Controller, api: httpx.AsyncClient) -> None:
    from controller.sla_reports import report_html

    report = await controller.sla_report("tiny", None)
    hostile = report.model_copy(update={"service_id": "<b>x</b>", "actions": ["<script>alert(1)</script>"], "moves": 1})
    assert "<script>" not in report_html(hostile)
    assert "<b>x" not in report_html(hostile)


async def test_metrics_carry_burn_rates_and_alerts(controller: Controller, clock: Any, api: httpx.AsyncClient) -> None:
    serve(controller, clock, minutes=20, ok=50, failed=50)
    text = (await api.get("/metrics")).text
    assert 'tidegate_sla_burn_alert{promise="availability",rule="1h/5m",service="tiny",severity="page"} 1.0' in text
    rate = re.search(r'tidegate_sla_burn_rate\{promise="availability",service="tiny",window="5m"\} (.*)', text)
    assert rate is not None
    assert float(rate.group(1)) == pytest.approx(50.0)
    assert 'tidegate_sla_violation_risk{service="tiny"}' in text
    assert 'tidegate_requests_fell_back{service="tiny"} 0.0' in text
    assert 'tidegate_lane_copies{service="tiny"} 0.0' in text


async def test_the_schema_is_served(api: httpx.AsyncClient) -> None:
    assert (await api.get("/v1/schemas/sla")).json() == contract_schema()


async def test_broken_documents_are_never_an_internal_error(api: httpx.AsyncClient) -> None:
    chance, text = random.Random(11), json.dumps(EXAMPLES[2])
    for _ in range(300):
        at = chance.randrange(len(text))
        broken = (
            text[:at]
            + chance.choice(['"\\ud800":1,', "1e999", "{", "9" * 400, "[[", "\x00", '"', "é"])
            + text[at + chance.randint(0, 6) :]
        )
        response = await api.post("/v1/slas:preview", content=broken.encode())
        assert response.status_code in (200, 422), broken
        if response.status_code == 422:
            assert response.json()["type"].endswith(("/invalid-contract", "/invalid-input"))


async def test_an_infeasible_contract_says_what_binds(controller: Controller, api: httpx.AsyncClient) -> None:
    await controller.desired.put_service(*await _tiny(controller))
    contract = {"service_id": "tiny", "latency_p99_ms": 150, "throughput_rps": 2, "availability_sla": "99%"}
    admission = (await api.post("/v1/slas:preview", json=contract)).json()
    assert admission["verdict"] == "infeasible"
    assert admission["binding"][0]["dimension"] == "fleet"
    assert admission["text"] == "infeasible: There is no live agent"


async def _tiny(controller: Controller) -> tuple[Any, Any]:
    """A service named tiny, with a model that nobody runs."""
    from policies.ids import BlobHash, ModelName, StageName
    from policies.service import BlockProfile, ModelProfile, OnnxStage, ServiceSpec

    block = BlockProfile(name="b", fixed_ms=1, per_item_ms=1, param_bytes=10, cut_bytes_per_item=10)
    model = ModelProfile(name=ModelName("tiny"), sha256=BlobHash("0" * 64), blocks=(block,), input_bytes_per_item=10)
    stage = OnnxStage(name=StageName("tiny"), variants=(model.name,), inputs={"x": "x"}, outputs={"y": "y"})
    return ServiceSpec(id=SERVICE, inputs=(), outputs=(), stages=(stage,)), {model.name: model}
