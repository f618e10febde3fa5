"""A real model behind a real server, which chooses about at random: whatever it says, the gate holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.events import EventLog
from controller.llm import LlmAdvisor
from controller.local.llm_server import MODEL_NAME, LocalLlm
from controller.settings import LlmSettings
from policies.admit import SCORE_TOLERANCE
from policies.decide import Memory
from policies.fleet import AgentView, Fleet
from policies.ids import AgentId, ServiceId
from policies.snapshot import ServiceView, Snapshot
from sla.contract import parse_contract

READER = ServiceId("reader")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(zoo_cache: Path) -> Iterator[LocalLlm]:
    with LocalLlm(zoo_cache) as server:
        yield server


async def test_a_real_model_is_asked_and_can_do_no_harm(
    model: LocalLlm, clock: Any, spec: Any, models: Any, make_plan: Any, make_sla: Any
) -> None:
    agents = {
        AgentId(name): AgentView(id=AgentId(name), platform="rk3588", evidence="emulated", slowdown=slowdown)
        for name, slowdown in (("a", 4.0), ("b", 1.0))
    }
    view = ServiceView(spec=spec, contract=parse_contract(make_sla()), running=make_plan(7, "a"), offered_rps=2.0)
    snapshot = Snapshot(now_ms=0.0, fleet=Fleet(agents=agents), models=models, services={READER: view})
    settings = LlmSettings(base_url=model.url, model=MODEL_NAME, mode="control", deadline_s=90.0, candidates=1)
    advisor = LlmAdvisor(settings, EventLog(clock), clock)
    advisor.consider(READER, snapshot, Memory())
    task = advisor._pending[READER].task
    assert task is not None
    await asyncio.wait([task])
    (exchange,) = advisor.ledger.recent
    assert exchange.replies
    assert exchange.output_tokens > 0
    assert exchange.regret <= SCORE_TOLERANCE + 1e-9
    assert exchange.verdict in ("won", "agreed", "refused") or exchange.reason in ("malformed", "cut-off")
    assert advisor.endpoint.response_format == "json_schema"
    await advisor.close()
