"""Recorded exchanges are decided again without the endpoint, and come to the same."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.llm_server import Answer, LlmServer, Script, refuses, says
from controller.cli import main
from controller.events import EventLog
from controller.llm import LlmAdvisor
from controller.llm_records import LlmLog
from controller.llm_replay import replayed
from controller.replay import DecisionLog, LoggedExchange, log_bytes
from controller.settings import LlmSettings
from controller.snapshots import snapshot_bytes, snapshot_from
from controller.state import State
from controller.store import Store
from policies.decide import Memory
from policies.fleet import AgentView, Fleet
from policies.ids import AgentId, ServiceId
from policies.snapshot import ServiceView, Snapshot
from sla.contract import parse_contract

READER = ServiceId("reader")
RULES = [{"kind": "avoid", "target": "A1", "minutes": 60}]
STAGES = [{"stage": "S1", "model": "M1", "agent": "A1"}]

SAID: dict[str, Script] = {
    "select": lambda _: says('{"action": "select", "candidate": "C2"}'),
    "keep": lambda _: says('Call +49 30 1234567. {"action": "keep"}'),
    "constrain": lambda _: says(json.dumps({"action": "constrain", "rules": RULES})),
    "place": lambda _: says(json.dumps({"action": "place", "stages": STAGES})),
    "nonsense": lambda _: says("no"),
    "error": lambda _: refuses(500),
}


@pytest.fixture
def snapshot(spec: Any, models: Any, make_plan: Any, make_sla: Any) -> Snapshot:
    agents = {
        AgentId(name): AgentView(id=AgentId(name), platform="rk3588", evidence="emulated", slowdown=slowdown)
        for name, slowdown in (("a", 4.0), ("b", 1.0))
    }
    view = ServiceView(spec=spec, contract=parse_contract(make_sla()), running=make_plan(7, "a"), offered_rps=2.0)
    return Snapshot(now_ms=0.0, fleet=Fleet(agents=agents), models=models, services={READER: view})


@pytest.mark.parametrize("case", SAID)
async def test_the_same_is_decided_again(
    valkey_store: Store, clock: Any, snapshot: Snapshot, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: dict[str, Any]) -> Answer:
        return SAID[case](request)

    records = LlmLog(State(valkey_store))
    async with LlmServer(answer) as server:
        advisor = LlmAdvisor(LlmSettings(base_url=server.url, model="m"), EventLog(clock), clock, records=records)
        for _ in range(2):
            clock.advance(60_000)
            advisor.consider(READER, snapshot, Memory())
            task = advisor._pending[READER].task
            assert task is not None
            await asyncio.wait([task])
        await advisor.close()
    exchanges = await records.tail(READER, 10)
    assert len(exchanges) == 2
    for exchange in exchanges:
        assert "1234567" not in repr(exchange)
        again = replayed(exchange, await records.snapshot_of(READER, exchange.id))
        assert (again.same_prompt, again.same_decision) == (True, True), again.text
    if exchanges[0].verdict != "fallback":
        changed = msgspec.structs.replace(exchanges[0], regret=0.5)
        assert not replayed(changed, snapshot_bytes(snapshot)).same_decision
    assert replayed(exchanges[0], None).is_gone
    logged = [LoggedExchange(exchange=e, seen=await records.snapshot_of(READER, e.id)) for e in exchanges]
    log, page = tmp_path / "log", tmp_path / "page.html"
    log.write_bytes(log_bytes(DecisionLog(entries=(), exchanges=tuple(logged))))
    assert main(["replay", str(log), "--html", str(page)]) == 0
    assert "The LLM's answers: 2 the same, 0 different" in capsys.readouterr().out
    assert "What the LLM was asked" in page.read_text()
    wrong = msgspec.structs.replace(
        logged[0], exchange=msgspec.structs.replace(exchanges[0], verdict="won", regret=0.5)
    )
    log.write_bytes(log_bytes(DecisionLog(entries=(), exchanges=(wrong,))))
    assert main(["replay", str(log), "--json"]) == 1


def test_a_snapshot_comes_back_as_it_was(snapshot: Snapshot) -> None:
    assert snapshot_from(snapshot_bytes(snapshot)) == snapshot
