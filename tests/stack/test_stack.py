"""The main job on real processes, and what must hold when some of them are killed. Each test leaves a stack that serves."""

from __future__ import annotations

import httpx
import pytest

from controller.local.oip_client import bytes_output, encode_request
from controller.local.stack import LocalStack
from controller.local.trouble import SERVICE, ingress_urls, running_plan, victim_of, wait_for_plan
from controller.services.document_reader import correct
from controller.services.documents import render
from sla.errors import ConflictError, InvalidInputError, RetryableError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def ask(ingress: str, seed: int = 3) -> bool:
    """True if a rendered document's question is answered right through this ingress."""
    document = render(seed)
    question, answer = document.questions[0]
    body, headers = encode_request({"image": [document.png_bytes], "question": [question.encode()]})
    response = httpx.post(
        f"{ingress}/v2/models/{SERVICE}/infer", content=body, headers=headers, timeout=60, trust_env=False
    )
    assert response.status_code == 200, response.text
    return correct(bytes_output(response, "answer")[0].decode(), answer)


def test_every_device_and_the_cloud_are_enrolled_and_say_how_they_are_known(stack: LocalStack) -> None:
    agents = stack.api.get("/v1/agents")
    assert sorted(agent["platform"] for agent in agents) == ["ascend310p", "imx93", "ray", "rk3588", "rk3588"]
    assert {agent["evidence"] for agent in agents if agent["platform"] != "ray"} == {"emulated"}
    assert all(agent["enrolled_in_ms"] > 0 for agent in agents)


def test_questions_are_answered_through_an_agents_ingress_and_the_controllers(stack: LocalStack) -> None:
    assert ask(ingress_urls(stack)[0])
    assert ask(stack.api.url)


def test_the_seed_contract_is_accepted_and_says_that_no_model_is_bound(stack: LocalStack) -> None:
    seed = {"service_id": "api-payment-v2", "latency_p99_ms": 150, "throughput_rps": 8000, "availability_sla": "99.95%"}
    applied = stack.api.post("/v1/slas", json=seed)
    assert applied["admission"]["verdict"] == "unbound"
    assert stack.api.get("/v1/slas/api-payment-v2/status")["state"] == "unbound"
    assert stack.api.post("/v1/slas", json=seed)["version"] == applied["version"]


def test_an_infeasible_contract_names_what_binds(stack: LocalStack) -> None:
    wanted = {"service_id": SERVICE, "latency_p99_ms": 1, "throughput_rps": 0.5, "availability_sla": "99%"}
    preview = stack.api.post("/v1/slas:preview", json=wanted)
    assert preview["verdict"] == "infeasible"
    assert "ms" in preview["text"]


def test_wrong_input_is_one_sentence_and_stores_nothing(stack: LocalStack) -> None:
    before = stack.api.get("/v1/models")
    with pytest.raises(InvalidInputError, match="latency_p99_ms"):
        stack.api.post("/v1/slas", json={"service_id": "x", "throughput_rps": 1, "availability_sla": "99%"})
    with pytest.raises(InvalidInputError, match="ONNX"):
        stack.api.put("/v1/models/broken", body=b"this is a text")
    assert stack.api.get("/v1/models") == before
    with pytest.raises(ConflictError):
        stack.api.post(
            "/v1/slas",
            json=stack.api.get(f"/v1/slas/{SERVICE}")["contract"] | {"priority": 6},
            headers={"If-Match": '"1"'},
        )


def test_a_killed_controller_stops_no_request_and_loses_nothing_acknowledged(stack: LocalStack) -> None:
    contracts = {sla["service_id"]: sla["version"] for sla in stack.api.get("/v1/slas")}
    agents = {agent["id"] for agent in stack.api.get("/v1/agents")}
    epoch = running_plan(stack)["epoch"]
    ingresses = ingress_urls(stack)
    stack.kill_controller()
    with pytest.raises(RetryableError):
        stack.api.get("/readyz")
    assert ask(ingresses[0])
    stack.start_controller()
    assert {sla["service_id"]: sla["version"] for sla in stack.api.get("/v1/slas")} == contracts
    assert agents <= {agent["id"] for agent in stack.api.get("/v1/agents")}
    assert running_plan(stack)["epoch"] >= epoch
    assert ask(ingresses[0])


def test_a_killed_agent_is_replaced_no_request_fails_and_it_may_come_back(stack: LocalStack) -> None:
    before = running_plan(stack)
    ingress = ingress_urls(stack)[0]
    victim = victim_of(before, stack)
    stack.kill_agent(victim)
    assert ask(ingress)
    after = wait_for_plan(stack, after_epoch=before["epoch"], without=victim, timeout_s=90)
    assert after["trigger"] == "agent-lost"
    assert ask(ingress)
    stack.restart_agent(victim)
    decisions = stack.api.get("/v1/decisions", service_id=SERVICE)
    assert any(victim in reason["text"] for decision in decisions for reason in decision["reasons"])


def test_an_agent_that_hangs_is_left_and_comes_back_when_it_wakes(stack: LocalStack) -> None:
    before = running_plan(stack)
    ingress = ingress_urls(stack)[0]
    victim = victim_of(before, stack)
    stack.freeze_agent(victim, True)
    try:
        assert ask(ingress), "what waits for the hung agent falls back"
        wait_for_plan(stack, after_epoch=before["epoch"], without=victim, timeout_s=90)
        assert ask(ingress)
    finally:
        stack.freeze_agent(victim, False)
    stack.wait_until(
        lambda: victim in {agent["id"] for agent in stack.live_agents()}, 60.0, f"{victim} did not come back"
    )
