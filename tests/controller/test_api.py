"""The HTTP API over a real controller: what is acknowledged is durable, and every error is a problem that helps."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.messages import Address, DeviceFacts
from controller.api import MAX_SLA_BYTES, create_api
from controller.auth import Keys, Role, keys_with_admin
from controller.core import Controller
from controller.problems import TYPE_PREFIX
from controller.records import AgentRecord
from controller.settings import CloudSettings, ControllerSettings, DoorSettings
from policies.ids import AgentId

LOCAL = "http://127.0.0.1:8080"


def client_of(controller: Controller, keys: Keys | None = None, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_api(controller, keys))
    return httpx.AsyncClient(transport=transport, base_url=LOCAL, headers=headers)


@pytest_asyncio.fixture
async def controller(make_controller: Any) -> Controller:
    controller: Controller = make_controller()
    await controller.start()
    return controller


@pytest_asyncio.fixture
async def api(controller: Controller) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(controller) as client:
        yield client


def problem_of(response: httpx.Response, status: int, slug: str | None = None) -> dict[str, Any]:
    """The problem document of an answer that must be one."""
    document: dict[str, Any] = response.json()
    assert response.status_code == document["status"] == status, document
    assert response.headers["content-type"] == "application/problem+json"
    assert document["type"].startswith(TYPE_PREFIX)
    assert document["title"]
    assert document["detail"]
    if slug is not None:
        assert document["type"] == TYPE_PREFIX + slug
    return document


# --- contracts


async def test_a_contract_is_accepted_and_says_that_its_service_is_missing(api: httpx.AsyncClient) -> None:
    document = {
        "service_id": "api-payment-v2",
        "latency_p99_ms": 150,
        "throughput_rps": 8000,
        "availability_sla": "99.95%",
    }
    response = await api.post("/v1/slas", json=document)
    assert response.status_code == 201
    applied = response.json()
    assert applied["created"]
    assert applied["admission"]["verdict"] == "unbound"
    assert response.headers["etag"] == f'"{applied["version"]}"'
    sla = (await api.get("/v1/slas/api-payment-v2")).json()
    assert sla["state"] == "unbound"
    assert sla["contract"]["availability_sla"] == 0.9995
    assert (sla["requests"], sla["p99_ms"], sla["latency_met"], sla["budget_left"]) == (0, None, None, None)


async def test_an_acknowledged_contract_survives_the_controller(
    make_controller: Any, controller: Controller, api: httpx.AsyncClient, make_sla: Any
) -> None:
    version = (await api.post("/v1/slas", content=make_sla())).json()["version"]
    again: Controller = (
        make_controller()
    )  # The first one is still there: as after kill -9, nothing was said goodbye to.
    await again.start()
    assert [(sla.service_id, sla.version) for sla in again.slas()] == [("reader", version)]


async def test_the_same_contract_again_changes_nothing(api: httpx.AsyncClient, make_sla: Any) -> None:
    first = await api.post("/v1/slas", content=make_sla())
    again = await api.post("/v1/slas", content=make_sla())
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["version"] == first.json()["version"]
    assert not again.json()["created"]


async def test_an_edit_of_an_old_version_is_a_conflict_that_names_the_current_one(
    api: httpx.AsyncClient, make_sla: Any
) -> None:
    old = (await api.post("/v1/slas", content=make_sla())).json()["version"]
    new = (await api.post("/v1/slas", content=make_sla(latency_p99_ms=300), headers={"If-Match": f'"{old}"'})).json()[
        "version"
    ]
    late = await api.post("/v1/slas", content=make_sla(latency_p99_ms=200), headers={"If-Match": f'"{old}"'})
    assert problem_of(late, 409, "conflict")["current_version"] == new
    assert (await api.get("/v1/slas/reader")).json()["contract"]["latency_p99_ms"] == 300
    problem_of(await api.delete("/v1/slas/reader", headers={"If-Match": str(old)}), 409, "conflict")
    assert (await api.delete("/v1/slas/reader", headers={"If-Match": str(new)})).status_code == 204
    problem_of(await api.get("/v1/slas/reader"), 404, "not-found")


@pytest.mark.parametrize("header", ["abc", "1.5", "", '"', "9" * 5000, "-", "*", "-1", "99999999999999999999"])
async def test_an_if_match_that_is_no_version_is_a_problem(api: httpx.AsyncClient, make_sla: Any, header: str) -> None:
    problem_of(await api.post("/v1/slas", content=make_sla(), headers={"If-Match": header}), 422, "invalid-input")
    assert (await api.get("/v1/slas")).json() == []


@pytest.mark.parametrize("version", ["7", "9007199254740991"])
async def test_a_version_that_never_was_is_a_conflict(api: httpx.AsyncClient, make_sla: Any, version: str) -> None:
    problem_of(await api.post("/v1/slas", content=make_sla(), headers={"If-Match": version}), 409, "conflict")


async def test_two_contracts_for_one_service_are_refused(api: httpx.AsyncClient, make_sla: Any) -> None:
    await api.post("/v1/slas", content=make_sla())
    problem_of(await api.post("/v1/slas", content=make_sla("other", model="reader")), 409, "conflict")
    assert len((await api.get("/v1/slas")).json()) == 1


async def test_a_wrong_field_is_named_and_nothing_is_stored(api: httpx.AsyncClient, make_sla: Any) -> None:
    wrong = problem_of(await api.post("/v1/slas", content=make_sla(latency_p99_ms=-5)), 422, "invalid-contract")
    assert wrong["pointer"] == "/latency_p99_ms"
    assert "-5" in wrong["found"]
    assert wrong["accepted"]
    assert (await api.get("/v1/slas")).json() == []


async def test_a_preview_changes_nothing(api: httpx.AsyncClient, make_sla: Any) -> None:
    assert (await api.post("/v1/slas:preview", content=make_sla())).json()["verdict"] == "unbound"
    problem_of(await api.post("/v1/slas:preview", content=b"{"), 422, "invalid-contract")
    assert (await api.get("/v1/slas")).json() == []


async def test_a_body_that_is_too_large_is_refused_before_it_is_read_whole(api: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(10_000):
            sent += 1
            yield b" " * 10_000

    problem_of(await api.post("/v1/slas", content=endless()), 422)
    assert sent * 10_000 < 2 * MAX_SLA_BYTES
    problem_of(await api.post("/v1/slas", content=b" " * (MAX_SLA_BYTES + 1)), 422)


FIELDS = st.sampled_from(
    ["service_id", "latency_p99_ms", "throughput_rps", "availability_sla", "model", "zones", "priority", "intent", "privacy", "x"]
)  # fmt: skip
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["99.9%", "a", 0.5, 100]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
DOCUMENTS = st.one_of(
    st.dictionaries(FIELDS, ANYTHING, max_size=10).map(lambda d: json.dumps(d).encode()),
    ANYTHING.map(lambda d: json.dumps(d).encode()),
    st.binary(max_size=200),
    st.builds(lambda n: b"[" * n, st.integers(1, 3000)),
)


@given(document=DOCUMENTS)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_submitted_is_accepted_or_refused_with_a_problem(document: bytes, fuzzed: Any) -> None:
    response = fuzzed(document)
    if response.status_code not in (200, 201):
        assert response.status_code in (409, 422)
        problem_of(response, response.status_code)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Submits documents to a controller of its own: hypothesis calls from outside of any event loop."""
    directory = tmp_path_factory.mktemp("fuzzed")
    configured = ControllerSettings(
        directory=directory, cache=directory, door=DoorSettings(agent_port=0), cloud=CloudSettings(ray="none")
    )
    with asyncio.Runner() as runner:
        controller = Controller(configured)
        runner.run(controller.start())
        client = client_of(controller)
        yield lambda document: runner.run(client.post("/v1/slas", content=document))
        runner.run(client.aclose())
        runner.run(controller.stop())


# --- who may call


@pytest.mark.parametrize("path", ["/v1/slas", "/v1/tokens", "/v1/links:shape", "/v1/services", "/v1/plans/x:pin"])
async def test_a_page_of_another_site_may_not_write(api: httpx.AsyncClient, path: str) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999"):
        problem_of(await api.post(path, content=b"{}", headers={"Origin": origin}), 403, "foreign-page")
    problem_of(await api.delete("/v1/slas/x", headers={"Origin": "http://evil.example"}), 403, "foreign-page")
    problem_of(await api.delete("/v1/slas/x", headers={"Origin": LOCAL}), 404, "not-found")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "127.evil.example:8080", "["])
async def test_without_keys_only_loopback_names_are_served(api: httpx.AsyncClient, host: str) -> None:
    problem_of(await api.get("/v1/slas", headers={"Host": host}), 403, "foreign-host")
    assert (await api.get("/v1/slas", headers={"Host": "localhost:8080"})).status_code == 200


async def test_with_keys_nothing_of_the_api_is_open_but_health(controller: Controller) -> None:
    async with client_of(controller, keys_with_admin("secret")) as anonymous:
        for path in ("/v1/slas", "/v1/agents", "/metrics", "/v1/status", "/openapi.json", "/v2/models/x"):
            answer = await anonymous.get(path)
            problem_of(answer, 401, "no-key")
            assert answer.headers["www-authenticate"] == "Bearer"
        problem_of(await anonymous.post("/v1/tokens", json={}), 401, "no-key")
        problem_of(await anonymous.get("/v1/slas", headers={"Authorization": "Bearer wrong"}), 401, "no-key")
        assert (await anonymous.get("/healthz")).status_code == 200
        assert (await anonymous.get("/readyz")).json() == {"ready": True}
        admin = {"Authorization": "Bearer secret", "Host": "tidegate.example"}
        assert (await anonymous.get("/v1/slas", headers=admin)).status_code == 200
        assert (await anonymous.post("/v1/tokens", json={}, headers=admin)).status_code == 201


async def test_a_viewer_may_read_and_not_write(controller: Controller, make_sla: Any) -> None:
    keys = Keys(
        {hashlib.sha256(b"view").hexdigest(): Role.VIEWER, hashlib.sha256(b"operate").hexdigest(): Role.OPERATOR}
    )
    async with client_of(controller, keys, Authorization="Bearer view") as viewer:
        assert (await viewer.get("/v1/slas")).status_code == 200
        for method, path in (
            ("POST", "/v1/slas"),
            ("DELETE", "/v1/slas/x"),
            ("POST", "/v1/tokens"),
            ("PUT", "/v1/models/m"),
        ):
            problem_of(await viewer.request(method, path, content=make_sla()), 403, "role")
        assert (await viewer.get("/v1/slas")).json() == []
    async with client_of(controller, keys, Authorization="Bearer operate") as operator:
        assert (await operator.post("/v1/slas", content=make_sla())).status_code == 201


# --- the rest speaks problems too


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/nothing", None, 404),
        ("PATCH", "/v1/slas", None, 405),
        ("GET", "/v1/slas/none", None, 404),
        ("DELETE", "/v1/agents/none", None, 404),
        ("POST", "/v1/agents/none:drain", None, 404),
        ("POST", "/v1/plans/none:rollback", None, 404),
        ("POST", "/v1/plans/none:pin", None, 404),
        ("GET", "/v1/events?limit=0", None, 422),
        ("GET", "/v1/decisions?limit=x", None, 422),
        ("POST", "/v1/tokens", b'{"uses": 0}', 422),
        ("POST", "/v1/tokens", b'{"uses": 1e99}', 422),
        ("POST", "/v1/tokens", b'{"ttl_s": NaN}', 422),
        ("POST", "/v1/tokens", b'{"ttl_s": Infinity}', 422),
        ("POST", "/v1/tokens", b'{"unknown": 1}', 422),
        ("POST", "/v1/tokens", b"not json", 422),
        ("POST", "/v1/tokens", b"\xff\xfe", 422),
        ("POST", "/v1/links:shape", b'{"src": "none"}', 404),
        ("POST", "/v1/links:shape", b'{"src": "none", "delay_ms": -1}', 422),
        ("POST", "/v1/links:shape", b'{"src": "none", "bandwidth_mbps": NaN}', 422),
        ("POST", "/v1/agents/none:throttle", b'{"factor": 2}', 404),
        ("POST", "/v1/agents/none:throttle", b'{"factor": 0}', 422),
        ("POST", "/v1/services", b'{"builtin": "none"}', 404),
        ("POST", "/v1/services", b"[]", 422),
        ("POST", "/v1/services", b"\xff", 422),
        ("PUT", "/v1/models/Bad_Name", b"", 422),
        ("PUT", "/v1/models/good-name", b"this is no ONNX file", 422),
        ("PUT", "/v1/models/good-name", b"", 422),
    ],
)
async def test_every_error_is_a_problem(
    api: httpx.AsyncClient, method: str, path: str, body: bytes | None, status: int
) -> None:
    headers = {"Content-Type": "application/json"}
    problem_of(await api.request(method, path, content=body, headers=headers), status)
    assert (await api.get("/v1/models")).json() == []
    assert (await api.get("/v1/services")).json() == []


async def test_a_failure_of_ours_is_a_problem_that_tells_nothing_of_the_inside(controller: Controller) -> None:
    def broken() -> Any:
        raise RuntimeError("secret inside")

    controller.slas = broken  # type: ignore[method-assign]
    transport = httpx.ASGITransport(create_api(controller, None), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as api:
        assert "secret" not in problem_of(await api.get("/v1/slas"), 500, "internal")["detail"]


async def test_a_model_is_registered_and_served_as_a_service_that_an_sla_may_name(
    api: httpx.AsyncClient, make_sla: Any, tiny_onnx: bytes
) -> None:
    model = (await api.put("/v1/models/tiny", content=tiny_onnx)).json()
    assert model["name"] == "tiny"
    assert len(model["blocks"]) >= 1
    assert [service["id"] for service in (await api.get("/v1/services")).json()] == ["tiny"]
    assert (await api.get("/v1/models")).json() == [model]
    applied = (await api.post("/v1/slas", content=make_sla("tiny"))).json()
    assert applied["admission"]["verdict"] == "infeasible", "there is no agent yet"
    assert (await api.get("/v1/slas/tiny")).json()["state"] in ("starting", "infeasible")


async def test_a_token_comes_with_the_command_to_run(api: httpx.AsyncClient, controller: Controller) -> None:
    offer = (await api.post("/v1/tokens", json={"uses": 3, "ttl_s": 60})).json()
    assert offer["command"] == (
        f"tidegate agent join {controller.door_url} --token {offer['token']} --ca-fingerprint {controller.ca.fingerprint}"
    )
    assert offer["uses"] == 3


# --- agents


def add_agent(controller: Controller, connection: Any, facts: DeviceFacts, name: str = "board-1") -> Any:
    agent = AgentId(name)
    record = AgentRecord(id=agent, facts=facts, public_key_fingerprint=name, enrolled_at_s=1.0, seen_host="10.0.0.7")
    controller.fleet.admit(record)
    controller.fleet.connected(agent, connection, facts, Address("10.0.0.9", 9000))
    return record


async def test_agents_are_listed_with_ages_and_both_addresses(
    api: httpx.AsyncClient, controller: Controller, make_facts: Any, make_connection: Any, clock: Any
) -> None:
    add_agent(controller, make_connection(), make_facts(claimed_host="192.168.9.9"))
    controller.fleet.restore(
        [AgentRecord(id=AgentId("silent"), facts=make_facts(), public_key_fingerprint="s", enrolled_at_s=1.0)]
    )
    clock.advance(250)
    board, silent = (await api.get("/v1/agents")).json()
    assert (board["id"], board["state"], board["age_ms"]) == ("board-1", "live", 250.0)
    assert (board["seen_host"], board["claimed_host"], board["peer_address"]) == (
        "10.0.0.7",
        "192.168.9.9",
        "10.0.0.9:9000",
    )
    assert board["ingress_url"] == "http://10.0.0.9:8001"
    assert (board["evidence"], board["cpu_saturation"], board["temperature_c"]) == ("emulated", None, None)
    assert (silent["id"], silent["age_ms"], silent["ingress_url"]) == ("silent", None, None)
    status = (await api.get("/v1/status")).json()
    assert (status["agents_live"], status["leader"], status["ready"]) == (1, True, True)
    metrics = (await api.get("/metrics")).text
    assert 'tidegate_agents{state="live"} 1.0' in metrics
    assert 'tidegate_agent_report_age_seconds{agent="board-1"} 0.25' in metrics


async def test_a_revoked_agent_is_gone_cut_off_and_stays_gone(
    api: httpx.AsyncClient, controller: Controller, make_controller: Any, make_facts: Any, make_connection: Any
) -> None:
    connection = make_connection()
    await controller.state.put_agent(add_agent(controller, connection, make_facts()))
    assert (await api.delete("/v1/agents/board-1")).status_code == 204
    assert connection.closed
    assert (await api.get("/v1/agents")).json() == []
    again: Controller = make_controller()
    await again.start()
    assert again.agents() == []


async def test_only_links_of_emulated_devices_can_be_shaped(
    api: httpx.AsyncClient, controller: Controller, make_facts: Any, make_connection: Any
) -> None:
    emulated, real = make_connection(), make_connection()
    add_agent(controller, emulated, make_facts())
    add_agent(controller, real, make_facts(evidence="measured"), "real")
    body = {"src": "board-1", "dst": "real", "delay_ms": 150, "jitter_ms": 60, "bandwidth_mbps": 4}
    assert (await api.post("/v1/links:shape", json=body)).status_code == 200
    sent = emulated.calls[-1]
    assert (sent.peer, sent.delay_ms, sent.jitter_ms, sent.bandwidth_bytes_per_s) == ("real", 150, 60, 500_000)
    problem_of(await api.post("/v1/links:shape", json={"src": "real"}), 422)
    problem_of(await api.post("/v1/links:shape", json={"src": "board-1", "dst": "none"}), 404)
    assert real.asked(type(sent)) == []


async def test_draining_is_shown(
    api: httpx.AsyncClient, controller: Controller, make_facts: Any, make_connection: Any
) -> None:
    add_agent(controller, make_connection(), make_facts())
    assert (await api.post("/v1/agents/board-1:drain")).json() == {"agent": "board-1", "state": "draining"}
    assert (await api.get("/v1/agents")).json()[0]["state"] == "draining"
    kinds = [event["kind"] for event in (await api.get("/v1/events")).json()]
    assert "agent-draining" in kinds
