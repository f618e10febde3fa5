"""The LLM in the loop, over a real HTTP endpoint that speaks OpenAI's protocol well, badly or not at all."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from benchmarks.llm_server import Answer, LlmServer, Script, document, refuses, says
from controller.events import EventLog
from controller.llm import BREAK_AFTER, BREAK_S, LlmAdvisor
from controller.llm_records import Exchange, LlmLog
from controller.settings import LlmMode, LlmSettings
from controller.state import State
from controller.store import Store
from policies.decide import Keep, Memory
from policies.decision import Proposal
from policies.effects import Effect
from policies.fleet import AgentView, Fleet
from policies.ids import AgentId, ServiceId
from policies.llm_resolve import Wish
from policies.snapshot import ServiceView, Snapshot
from sla.contract import parse_contract

READER = ServiceId("reader")


class Endpoint(LlmServer):
    """Answers with the next reply of the list, and with the last one for ever after."""

    def __init__(self) -> None:
        super().__init__(self._next)
        self.replies: list[Script] = []

    def _next(self, request: dict[str, Any]) -> Answer:
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return reply(request)


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with Endpoint() as endpoint:
        yield endpoint


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


def running(snapshot: Snapshot, plan: Any) -> Snapshot:
    view = msgspec.structs.replace(snapshot.services[READER], running=plan)
    return msgspec.structs.replace(snapshot, services={READER: view})


def loaded(snapshot: Snapshot) -> Snapshot:
    """So much work that the slower board is clearly the worse one."""
    agents = dict(snapshot.fleet.agents)
    slow = AgentId("secret-hostname-a")
    agents[slow] = msgspec.structs.replace(agents[slow], slowdown=40.0)
    return msgspec.structs.replace(snapshot, fleet=Fleet(agents=agents))


def place_on(alias: str) -> Script:
    stages = [{"stage": "S1", "model": "M1", "agent": alias}]
    return lambda _: says(json.dumps({"action": "place", "stages": stages, "rationale": "quick"}))


class Wishes:
    """Keeps what the model would like to last."""

    def __init__(self) -> None:
        self.offered: list[tuple[Wish, ...]] = []
        self.admitted: list[bool] = []

    def offer(self, service: ServiceId, wishes: tuple[Wish, ...], rationale: str, *, admitted: bool) -> None:
        self.offered.append(wishes)
        self.admitted.append(admitted)


class Asked:
    """An advisor, and one round of asking."""

    def __init__(
        self, url: str | None, clock: Any, snapshot: Snapshot, records: LlmLog | None = None, **settings: Any
    ) -> None:
        self.clock, self.snapshot = clock, snapshot
        self.events, self.wishes = EventLog(clock), Wishes()
        chosen: dict[str, Any] = {"mode": "control", "deadline_s": 5.0, "api_key": "sk-secret-key", **settings}
        self.advisor = LlmAdvisor(
            LlmSettings(base_url=url, model="m", **chosen), self.events, clock, records=records, wishes=self.wishes
        )

    async def round(self, epoch: int = 7) -> Proposal | Keep | None:
        self.clock.advance(60_000)
        self.advisor.consider(READER, self.snapshot, Memory())
        pending = self.advisor._pending[READER].task
        if pending is not None:
            await asyncio.wait([pending])
        return self.advisor.take(READER, epoch)

    @property
    def last(self) -> Exchange:
        return self.advisor.ledger.recent[-1]


@pytest_asyncio.fixture
async def asked(endpoint: Endpoint, clock: Any, snapshot: Snapshot) -> AsyncIterator[Asked]:
    asked = Asked(endpoint.url, clock, snapshot)
    yield asked
    await asked.advisor.close()


def select(request: dict[str, Any]) -> Answer:
    """The best one, in the words of somebody who cannot help being friendly."""
    found = re.search(r"(C\d+): meets SLA: \w+, score best", request["messages"][1]["content"])
    name = found.group(1) if found else "C1"
    return says(f'Sure!\n```json\n{{"action": "select", "candidate": "{name}", "rationale": "it is faster"}}\n```')


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


async def test_a_wish_to_keep_is_advice_to_keep(endpoint: Endpoint, asked: Asked, make_plan: Any) -> None:
    asked.snapshot = running(asked.snapshot, make_plan(7, "secret-hostname-b"))
    endpoint.replies = [lambda _: says('{"action": "keep", "rationale": "it is fine"}')]
    assert isinstance(await asked.round(), Keep)


async def test_keeping_a_plan_that_is_clearly_worse_is_refused(endpoint: Endpoint, asked: Asked) -> None:
    asked.snapshot = loaded(asked.snapshot)
    endpoint.replies = [lambda _: says('{"action": "keep", "rationale": "it is fine"}')]
    assert await asked.round() is None
    assert (asked.last.verdict, asked.last.reason, asked.last.regret) == ("refused", "score-worse", 0.0)
    assert "score-worse" in endpoint.asked[1]["messages"][-1]["content"]


async def test_an_answer_about_an_older_plan_is_dropped(endpoint: Endpoint, asked: Asked) -> None:
    endpoint.replies = [select]
    assert await asked.round(epoch=8) is None


async def test_a_reply_that_cannot_be_read_gets_one_repair_round(endpoint: Endpoint, asked: Asked) -> None:
    """waybarrios/vllm-mlx issue 133: the schema is asked for, never trusted."""
    endpoint.replies = [lambda _: says("C1 looks good to me"), select]
    assert isinstance(await asked.round(), Proposal)
    assert len(endpoint.asked) == 2
    assert "cannot be used" in endpoint.asked[1]["messages"][-1]["content"]


BAD_REPLIES: dict[str, tuple[Script, str]] = {
    "prose": (lambda _: says("I would rather not."), "malformed"),
    "nobody": (lambda _: says('{"action": "select", "candidate": "C99"}'), "malformed"),
    "unknown agent": (
        lambda _: says('{"action": "place", "stages": [{"stage": "S1", "model": "M1", "agent": "A9"}]}'), "malformed"
    ),
    "unknown zone": (lambda _: says('{"action": "constrain", "rules": [{"kind": "avoid", "target": "Z7"}]}'), "malformed"),
    "two days": (
        lambda _: says('{"action": "constrain", "rules": [{"kind": "avoid", "target": "A1", "minutes": 2880}]}'), "malformed",
    ),
    "empty": (lambda _: says(None), "malformed"),
    "refusal": (lambda _: says(None, refusal="I must not."), "refusal"),
    "filtered": (lambda _: says("", "content_filter"), "refusal"),
    "length": (lambda _: says('{"action": "keep"}', "length"), "cut-off"),
    "parts": (lambda _: says([{"type": "text", "text": "no"}, 7, None]), "malformed"),
    "number": (lambda _: says(12), "malformed"),
    "no-choices": (lambda _: document({"choices": []}), "no-completion"),
    "other-json": (lambda _: document({"hello": "world"}), "no-completion"),
    "list": (lambda _: document([1, 2]), "no-completion"),
    "null": (lambda _: document(None), "no-completion"),
    "choice-is-text": (lambda _: document({"choices": ["x"]}), "no-completion"),
    "no-json": (lambda _: Answer(body=b"<html>gateway</html>"), "no-completion"),
    "deep-json": (lambda _: Answer(body=b"[" * 100_000), "no-completion"),
    "not-utf8": (lambda _: Answer(body=b"\xff\xfe\x00"), "no-completion"),
    "nothing": (lambda _: Answer(), "no-completion"),
    "huge body": (lambda _: says("x" * 400_000), "too-long"),
    "huge reply": (lambda _: says(" " * 20_000 + '{"action": "keep"}'), "too-long"),
    "broke off": (lambda _: msgspec.structs.replace(says('{"action": "keep"}'), cut_at=60), "cut-off"),
    "stream that broke off": (
        lambda _: Answer(body=b'data: {"choices": [{"delta": {"content": "{\\"act"}}]}\n\ndata: {"choi'), "cut-off",
    ),
    "stream without an end": (
        lambda _: Answer(body=b'data: {"choices": [{"delta": {"content": "{}"}}]}\n\n'), "cut-off",
    ),
    "error-500": (lambda _: refuses(500), "http-error"),
    "error-401": (lambda _: refuses(401), "http-error"),
    "error-429": (lambda _: refuses(429, retry_after="3000"), "rate-limited"),
    "error-503": (lambda _: refuses(503, retry_after="Fri, 31 Dec 2100 23:59:59 GMT"), "rate-limited"),
}  # fmt: skip


@pytest.mark.parametrize(("reply", "reason"), BAD_REPLIES.values(), ids=BAD_REPLIES.keys())
async def test_whatever_an_endpoint_says_the_solver_stands_and_it_is_told(
    endpoint: Endpoint, asked: Asked, reply: Script, reason: str
) -> None:
    endpoint.replies = [reply]
    assert await asked.round() is None
    assert len(endpoint.asked) <= 2
    assert [event.kind for event in asked.events.tail()] == ["llm"]
    assert f"({reason}); the solver's plan stands" in asked.events.tail()[0].text
    assert (asked.last.verdict, asked.last.reason) == ("fallback", reason)
    assert "sk-secret" not in repr(asked.last)
    assert "127.0.0.1" not in repr(asked.last)


SLOW: dict[str, Script] = {
    "silent": lambda _: Answer(delay_s=30.0),
    "dripping": lambda _: msgspec.structs.replace(says('{"action": "keep"}'), drip_s=0.05),
}


@pytest.mark.parametrize("reply", SLOW.values(), ids=SLOW.keys())
async def test_a_slow_endpoint_is_given_up_at_the_deadline(
    endpoint: Endpoint, clock: Any, snapshot: Snapshot, reply: Script
) -> None:
    endpoint.replies = [reply]
    asked = Asked(endpoint.url, clock, snapshot, deadline_s=0.3)
    assert await asked.round() is None
    assert asked.last.reason == "timeout"
    await asked.advisor.close()


async def test_a_dead_endpoint_is_unreachable(clock: Any, snapshot: Snapshot) -> None:
    asked = Asked("http://127.0.0.1:9/v1", clock, snapshot, deadline_s=0.3)
    assert await asked.round() is None
    assert asked.last.reason in ("unreachable", "timeout")
    await asked.advisor.close()


async def test_a_short_retry_after_is_waited_out(endpoint: Endpoint, asked: Asked) -> None:
    endpoint.replies = [lambda _: refuses(429, retry_after="0.2"), select]
    assert isinstance(await asked.round(), Proposal)
    assert len(endpoint.asked) == 2


async def test_a_long_retry_after_is_kept_to(endpoint: Endpoint, asked: Asked) -> None:
    endpoint.replies = [lambda _: refuses(429, retry_after="600"), select]
    assert await asked.round() is None
    assert asked.advisor.policy() == "solver (the LLM endpoint asked to wait)"
    for _ in range(9):
        assert await asked.round() is None
    assert len(endpoint.asked) == 1
    asked.clock.advance(300_000)
    assert isinstance(await asked.round(), Proposal)


async def test_the_form_of_response_format_is_found_once_and_remembered(endpoint: Endpoint, asked: Asked) -> None:
    """Old servers take no json_schema, older ones no response_format at all."""

    def picky(request: dict[str, Any]) -> Answer:
        return refuses(400) if "response_format" in request else select(request)

    endpoint.replies = [picky]
    assert isinstance(await asked.round(), Proposal)
    forms = [request.get("response_format", {}).get("type") for request in endpoint.asked]
    assert forms == ["json_schema", "json_object", None]
    await asked.round()
    assert len(endpoint.asked) == 4
    assert asked.advisor.endpoint.response_format == "plain"


async def test_a_question_that_is_refused_in_every_form_changes_nothing(endpoint: Endpoint, asked: Asked) -> None:
    """llama.cpp answers 400 to a prompt that is too long, whatever its form."""
    endpoint.replies = [lambda _: refuses(400)]
    assert await asked.round() is None
    assert asked.last.reason == "http-error"
    assert [request.get("response_format", {}).get("type") for request in endpoint.asked] == [
        "json_schema",
        "json_object",
        None,
    ]
    assert asked.advisor.endpoint.response_format == "json_schema"


async def test_a_stream_that_nobody_asked_for_is_read(endpoint: Endpoint, asked: Asked) -> None:
    pieces = ['{"action": "constrain", "rules": ', '[{"kind": "avoid", "target": "A1"}]}']
    chunks = [{"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
    lines = [*chunks, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    body = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
    endpoint.replies = [lambda _: Answer(body=body.encode())]
    assert isinstance(await asked.round(), Proposal)


async def test_the_tokens_of_an_hour_are_bounded(endpoint: Endpoint, clock: Any, snapshot: Snapshot) -> None:
    asked = Asked(endpoint.url, clock, snapshot, tokens_per_hour=1500, price_per_million_tokens=2.0)
    endpoint.replies = [select]
    for _ in range(5):
        await asked.round()
    assert len(endpoint.asked) == 2
    assert asked.advisor.policy() == "solver (the LLM's tokens of this hour are spent)"
    assert asked.advisor.ledger.verdicts[("fallback", "budget")] >= 1
    assert (asked.last.prompt_tokens, asked.last.output_tokens, asked.last.cost) == (900, 60, pytest.approx(960 * 2e-6))
    clock.advance(3_600_000)
    await asked.round()
    assert len(endpoint.asked) == 3
    await asked.advisor.close()


async def test_an_answer_that_is_awaited_for_an_older_plan_is_given_up(endpoint: Endpoint, asked: Asked) -> None:
    endpoint.replies = [lambda _: Answer(delay_s=30.0)]
    asked.advisor.consider(READER, asked.snapshot, Memory())
    task = asked.advisor._pending[READER].task
    assert task is not None
    await endpoint.first.wait()
    assert asked.advisor.take(READER, 8) is None
    await asyncio.wait([task])
    assert task.cancelled()
    assert asked.advisor.ledger.verdicts[("fallback", "epoch")] == 1


@pytest.mark.parametrize(("mode", "acts"), [("off", False), ("shadow", False), ("advise", False), ("control", True)])
async def test_what_an_answer_may_do_depends_on_the_mode(
    endpoint: Endpoint, clock: Any, snapshot: Snapshot, mode: LlmMode, acts: bool
) -> None:
    asked = Asked(endpoint.url, clock, snapshot, mode=mode)
    endpoint.replies = [select]
    assert (await asked.round() is not None) is acts
    assert bool(endpoint.asked) is (mode != "off")
    if mode != "off":
        assert asked.last.acted is acts
    await asked.advisor.close()


async def test_an_advice_acts_once_a_person_accepts_it(endpoint: Endpoint, clock: Any, snapshot: Snapshot) -> None:
    asked = Asked(endpoint.url, clock, loaded(snapshot), mode="advise")
    endpoint.replies = [place_on("A2")]
    assert await asked.round() is None
    (advice,) = asked.advisor.advices() or [None]
    if advice is None:
        assert asked.last.verdict == "agreed"
    else:
        asked.advisor.accept(advice.id)
        assert isinstance(asked.advisor.take(READER, 7), Proposal)
        assert asked.advisor.advices() == []
    await asked.advisor.close()


async def test_shards_that_the_model_places_itself_pass_the_gate(endpoint: Endpoint, asked: Asked) -> None:
    asked.snapshot = loaded(asked.snapshot)
    endpoint.replies = [place_on("A2")]
    proposal = await asked.round()
    assert isinstance(proposal, Proposal)
    assert proposal.plan.agents() == {AgentId("secret-hostname-b")}
    endpoint.replies = [place_on("A1")]
    assert await asked.round() is None
    assert asked.last.verdict == "refused"


def three_services(snapshot: Snapshot) -> Snapshot:
    """Two that share a device, and one in a zone of its own."""
    view = snapshot.services[READER]
    agents = dict(snapshot.fleet.agents)
    for name in ("far-1", "far-2"):
        agents[AgentId(name)] = AgentView(id=AgentId(name), platform="x86", evidence="emulated", zone="far")
    others = {
        ServiceId(name): msgspec.structs.replace(
            view, running=None, contract=view.contract.model_copy(update={"zones": (zone,)})
        )
        for name, zone in (("neighbour", "default"), ("apart", "far"))
    }
    fleet = msgspec.structs.replace(snapshot.fleet, agents=agents)
    return msgspec.structs.replace(snapshot, fleet=fleet, services={READER: view, **others})


async def test_one_call_at_a_time_per_group_of_services_and_each_gets_its_turn(
    endpoint: Endpoint, asked: Asked
) -> None:
    snapshot, advisor, memory = three_services(asked.snapshot), asked.advisor, Memory()
    endpoint.replies = [lambda _: Answer(delay_s=60.0)]
    asked.clock.advance(60_000)
    for name in ("reader", "neighbour", "apart"):
        advisor.consider(ServiceId(name), snapshot, memory)
    busy = {name for name, pending in advisor._pending.items() if pending.is_busy()}
    assert busy == {READER, ServiceId("apart")}
    await endpoint.first.wait()
    advisor.take(READER, 8)  # The world has moved on, so this question ends.
    asked_now = advisor._pending[READER].task
    assert asked_now is not None
    await asyncio.wait([asked_now])
    asked.clock.advance(5_000)
    advisor.settings = dataclasses.replace(advisor.settings, min_interval_s=0.0)
    advisor.consider(READER, snapshot, memory)
    assert not advisor._pending[READER].is_busy()  # The neighbour was turned away and has waited longer.
    advisor.consider(ServiceId("neighbour"), snapshot, memory)
    assert advisor._pending[ServiceId("neighbour")].is_busy()


async def test_constraints_choose_one_plan_at_once_and_are_offered_to_last(endpoint: Endpoint, asked: Asked) -> None:
    endpoint.replies = [
        lambda _: says('{"action": "constrain", "rules": [{"kind": "avoid", "target": "A1", "minutes": 30}]}')
    ]
    proposal = await asked.round()
    assert isinstance(proposal, Proposal)
    assert AgentId("secret-hostname-a") not in proposal.plan.agents()
    ((wish,),) = asked.wishes.offered
    assert wish.ends_in_s == 1800.0
    assert asked.wishes.admitted == [True]


async def test_a_wish_whose_plan_the_gate_refuses_is_not_admitted(endpoint: Endpoint, asked: Asked) -> None:
    asked.snapshot = loaded(asked.snapshot)
    endpoint.replies = [lambda _: says('{"action": "constrain", "rules": [{"kind": "keep"}]}')]
    assert await asked.round() is None
    assert (asked.last.verdict, asked.wishes.admitted) == ("refused", [False])


async def test_a_wish_that_no_plan_can_keep_to_is_none(endpoint: Endpoint, asked: Asked) -> None:
    asked.snapshot = loaded(asked.snapshot)
    endpoint.replies = [lambda _: says('{"action": "constrain", "rules": [{"kind": "avoid", "target": "A2"}]}')]
    assert await asked.round() is None
    assert (asked.last.verdict, asked.last.reason, asked.wishes.offered) == ("fallback", "malformed", [])


async def test_what_both_choices_brought_is_noted_once_it_was_measured(
    endpoint: Endpoint, clock: Any, snapshot: Snapshot, valkey_store: Store
) -> None:
    records = LlmLog(State(valkey_store))
    asked = Asked(endpoint.url, clock, snapshot, records)
    endpoint.replies = [lambda _: says('{"action": "keep"}')]
    await asked.round()
    assert asked.last.effects is None
    await asked.round()
    assert asked.last.effects is None  # Nothing was measured meanwhile.
    view = msgspec.structs.replace(snapshot.services[READER], measured_p99_ms=250.0)
    asked.snapshot = msgspec.structs.replace(snapshot, services={READER: view})
    await asked.round()
    first = asked.advisor.ledger.recent[0]
    assert first.effects is not None
    assert first.effects.llm == Effect(p99_ms=250.0, how="measured")  # What it wants to keep.
    assert first.effects.solver is not None
    assert first.effects.solver.how == "estimated"
    again = LlmAdvisor(asked.advisor.settings, asked.events, clock, records=records)
    await again.restore()
    assert again.ledger.recent[0].effects == first.effects
    await again.close()
    await asked.advisor.close()


async def test_exchanges_are_recorded_and_restored(
    endpoint: Endpoint, clock: Any, snapshot: Snapshot, valkey_store: Store
) -> None:
    records = LlmLog(State(valkey_store))
    asked = Asked(endpoint.url, clock, snapshot, records)
    endpoint.replies = [lambda _: says("Mail me at joe@example.com"), select]
    await asked.round()
    (kept,) = await records.tail(READER, 10)
    assert msgspec.structs.replace(kept, id="") == asked.last
    assert kept.replies[0] == "Mail me at [mail]"
    assert await records.snapshot_of(READER, kept.id) is not None
    again = Asked(endpoint.url, clock, snapshot, records)
    await again.advisor.restore()
    assert again.last == kept
    await asked.advisor.close()


async def test_an_endpoint_that_fails_again_and_again_is_left_alone_for_a_while(
    endpoint: Endpoint, asked: Asked
) -> None:
    endpoint.replies = [lambda _: refuses(500)]
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
