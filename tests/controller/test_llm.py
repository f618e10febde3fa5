"""The LLM in the loop, over a real HTTP endpoint that speaks OpenAI's protocol well, badly or not at all."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from controller.events import EventLog
from controller.llm import BREAK_AFTER, BREAK_S, LlmAdvisor
from controller.settings import LlmSettings
from policies.decide import Keep, Memory
from policies.decision import Proposal
from policies.fleet import AgentView, Fleet
from policies.ids import AgentId, ServiceId
from policies.snapshot import ServiceView, Snapshot
from sla.contract import parse_contract

READER = ServiceId("reader")
Reply = Callable[[dict[str, Any]], Response]


def say(content: str | None, finish_reason: str = "stop") -> Response:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": content}}
    return JSONResponse({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


class Endpoint:
    """Answers with the next reply of the list, and with the last one for ever after."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def complete(self, request: Request) -> Response:
        self.asked.append(await request.json())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return reply(self.asked[-1])


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    app = Starlette(routes=[Route("/v1/chat/completions", endpoint.complete, methods=["POST"])])
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield endpoint
    server.should_exit = True
    await task


@pytest.fixture
def snapshot(spec: Any, models: Any, make_plan: Any, make_sla: Any) -> Snapshot:
    """Two boards, of which the slower one serves."""
    agents = {
        AgentId(name): AgentView(id=AgentId(name), platform="rk3588", evidence="emulated", slowdown=slowdown)
        for name, slowdown in (("secret-hostname-a", 4.0), ("secret-hostname-b", 1.0))
    }
    view = ServiceView(
        spec=spec, contract=parse_contract(make_sla(intent="prefer the quiet board")), running=make_plan(7, "secret-hostname-a"),
        offered_rps=2.0,
    )  # fmt: skip
    return Snapshot(now_ms=0.0, fleet=Fleet(agents=agents), models=models, services={READER: view})


class Asked:
    """An advisor, and one round of asking."""

    def __init__(self, url: str | None, clock: Any, snapshot: Snapshot) -> None:
        self.clock, self.snapshot = clock, snapshot
        self.events = EventLog(clock)
        self.advisor = LlmAdvisor(LlmSettings(base_url=url, model="m", deadline_s=5.0), self.events, clock)

    async def round(self, epoch: int = 7) -> Proposal | Keep | None:
        self.clock.advance(60_000)
        self.advisor.consider(READER, self.snapshot, Memory())
        pending = self.advisor._pending[READER].task
        if pending is not None:
            await pending
        return self.advisor.take(READER, epoch)


@pytest_asyncio.fixture
async def asked(endpoint: Endpoint, clock: Any, snapshot: Snapshot) -> AsyncIterator[Asked]:
    asked = Asked(endpoint.url, clock, snapshot)
    yield asked
    await asked.advisor.close()


def select(request: dict[str, Any]) -> Response:
    return say('Sure!\n```json\n{"action": "select", "candidate": "C1", "rationale": "it is faster"}\n```')


async def test_a_choice_becomes_a_proposal_that_is_taken_once(endpoint: Endpoint, asked: Asked) -> None:
    endpoint.replies = [select]
    proposal = await asked.round()
    assert isinstance(proposal, Proposal)
    assert (proposal.proposer, proposal.rationale) == ("llm", "it is faster")
    assert proposal.plan.service_id == READER
    assert asked.advisor.take(READER, 7) is None
    assert (asked.advisor.asked, asked.advisor.answered) == (1, 1)


async def test_names_that_devices_chose_never_reach_the_prompt(endpoint: Endpoint, asked: Asked) -> None:
    endpoint.replies = [select]
    await asked.round()
    assert "secret-hostname" not in json.dumps(endpoint.asked)
    assert "prefer the quiet board" in json.dumps(endpoint.asked)
    assert endpoint.asked[0]["max_tokens"] == LlmSettings().max_output_tokens


async def test_a_wish_to_keep_is_advice_to_keep(endpoint: Endpoint, asked: Asked) -> None:
    endpoint.replies = [lambda _: say('{"action": "keep", "rationale": "it is fine"}')]
    assert isinstance(await asked.round(), Keep)


async def test_an_answer_about_an_older_plan_is_dropped(endpoint: Endpoint, asked: Asked) -> None:
    endpoint.replies = [select]
    assert await asked.round(epoch=8) is None


async def test_a_reply_that_cannot_be_read_gets_one_repair_round(endpoint: Endpoint, asked: Asked) -> None:
    """waybarrios/vllm-mlx issue 133: the schema is asked for, never trusted."""
    endpoint.replies = [lambda _: say("C1 looks good to me"), select]
    assert isinstance(await asked.round(), Proposal)
    assert len(endpoint.asked) == 2
    assert "cannot be used" in endpoint.asked[1]["messages"][-1]["content"]


BAD_REPLIES: dict[str, Reply] = {
    "prose": lambda _: say("I would rather not."),
    "nobody": lambda _: say('{"action": "select", "candidate": "C99"}'),
    "empty": lambda _: say(None),
    "cut-off": lambda _: say('{"action": "keep"}', "length"),
    "no-choices": lambda _: JSONResponse(
        {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}
    ),
    "other-json": lambda _: JSONResponse({"hello": "world"}),
    "list": lambda _: JSONResponse([1, 2]),
    "no-json": lambda _: PlainTextResponse("<html>gateway</html>"),
    "error-500": lambda _: PlainTextResponse("oops", status_code=500),
    "error-429": lambda _: JSONResponse({"error": {"message": "slow down"}}, status_code=429),
}


@pytest.mark.parametrize("reply", BAD_REPLIES.values(), ids=BAD_REPLIES.keys())
async def test_whatever_an_endpoint_says_the_solver_stands_and_it_is_told(
    endpoint: Endpoint, asked: Asked, reply: Reply
) -> None:
    endpoint.replies = [reply]
    assert await asked.round() is None
    assert len(endpoint.asked) <= 2
    assert [event.kind for event in asked.events.tail()] == ["llm"]
    assert "the solver's plan stands" in asked.events.tail()[0].text


async def test_an_endpoint_that_fails_again_and_again_is_left_alone_for_a_while(
    endpoint: Endpoint, asked: Asked
) -> None:
    endpoint.replies = [BAD_REPLIES["error-500"]]
    for _ in range(BREAK_AFTER):
        await asked.round()
    assert asked.advisor.policy().startswith("solver (the LLM endpoint failed")
    await asked.round()
    assert len(endpoint.asked) == BREAK_AFTER
    asked.clock.advance(BREAK_S * 1000)
    endpoint.replies = [select]
    assert isinstance(await asked.round(), Proposal)
    assert asked.advisor.policy().startswith("llm m")


async def test_it_is_not_asked_more_often_than_the_settings_say(endpoint: Endpoint, asked: Asked) -> None:
    endpoint.replies = [select]
    await asked.round()
    asked.advisor.consider(READER, asked.snapshot, Memory())
    asked.clock.advance(LlmSettings().min_interval_s * 1000 - 1)
    asked.advisor.consider(READER, asked.snapshot, Memory())
    assert len(endpoint.asked) == 1


async def test_without_an_endpoint_the_solver_decides_and_says_so(clock: Any, snapshot: Snapshot) -> None:
    asked = Asked(None, clock, snapshot)
    assert await asked.round() is None
    assert asked.advisor.policy() == "solver (no LLM is configured)"
    assert asked.events.tail() == []
