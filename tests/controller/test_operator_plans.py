"""An operator's own plan: read, judged by the gate, rolled out with proof, pinned. Real store, registry and API; agents that obey."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
import uvicorn

from agents.ingress import EmbeddedServer
from agents.messages import Activate, Address, Hello, Report, ServiceReport, ShardReport
from controller.api import create_api
from controller.cli import main
from controller.core import Controller
from controller.operator_plans import judged
from controller.plan_commands import plan_of, preview_lines
from controller.plan_documents import PlanIn, plan_from
from controller.present import shards_out
from controller.records import AgentRecord
from controller.simulate_cli import load_scenario
from controller.world import LEARN_EVERY_MS
from policies.costs import CostModel
from policies.ids import AgentId, ServiceId
from policies.plan import Plan
from policies.scenario import world_of
from policies.simulate import Choice, Simulation
from policies.snapshot import Learned, Snapshot
from policies.solve import candidates
from sla.errors import AgentLostError, InvalidInputError

TINY = ServiceId("tiny")
SIMULATED = ServiceId("simulated")


@pytest.fixture
def seen() -> Snapshot:
    """What a controller would see of a built-in scenario with several stages and devices."""
    scenario = msgspec.structs.replace(load_scenario("flash-crowd"), seconds=60.0, troubles=())
    return Simulation(world_of(scenario, seed=1), lambda _snapshot, _world: Choice(), 0).snapshot(30_000.0)


class Site:
    """A controller with two agents that do what they are told, and the service `tiny` under contract."""

    def __init__(self, controller: Controller, api: httpx.AsyncClient) -> None:
        self.controller, self.api = controller, api
        self.connections: dict[str, Any] = {}

    async def enroll(self, name: str, connection: Any, facts: Any) -> None:
        fleet, agent = self.controller.fleet, AgentId(name)
        record = AgentRecord(id=agent, facts=facts, public_key_fingerprint=name, enrolled_at_s=0.0)
        fleet.admit(await self.controller.state.put_agent(record))
        fleet.connected(agent, connection, facts, Address("10.0.0.1", 9000))
        self.connections[name] = connection
        self.report()
        self.controller.loop.said_hello(agent, Hello(protocol=1, facts=facts))

    def report(self) -> None:
        now_ms = self.controller.clock.now_ms()
        for name in self.connections:
            plain = Report(sequence=1, cpu_saturation=0.0, memory_free_bytes=1 << 30, queue_depth=0, loaded_bytes=0)
            self.controller.telemetry.fold(AgentId(name), plain, now_ms)

    async def runs(self, epoch: int) -> None:
        """Returns when a plan of at least this epoch runs."""
        async with asyncio.timeout(20):
            while (self.controller.desired.book(TINY).running_epoch or 0) < epoch:
                self.report()
                self.controller.loop.poke("operator", TINY)
                await asyncio.sleep(0.01)

    async def shown(self) -> dict[str, Any]:
        """What `tidegate plan show --json` prints of the running plan."""
        plans = (await self.api.get("/v1/plans", params={"service_id": TINY})).json()
        return next(plan for plan in plans if plan["running"])

    @property
    def running(self) -> Plan:
        plan = self.controller.desired.book(TINY).running
        assert plan is not None
        return plan


@pytest_asyncio.fixture
async def site(
    make_controller: Any, make_sla: Any, make_connection: Any, make_facts: Any, tiny_onnx: bytes
) -> AsyncIterator[Site]:
    controller: Controller = make_controller()
    await controller.start()
    await controller.model_service.add_bytes("tiny", tiny_onnx)
    transport = httpx.ASGITransport(create_api(controller, None), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as api:
        found = Site(controller, api)
        for name in ("a", "b"):
            await found.enroll(name, make_connection(), make_facts(hostname=name, fingerprint=name, slowdown=1.0))
        await controller.apply_contract(make_sla("tiny", latency_p99_ms=4000, throughput_rps=1), None)
        await found.runs(1)
        yield found


def _moved(plan: dict[str, Any], *agents: str) -> list[dict[str, Any]]:
    """The serving shards of a shown plan, its blocks handed round these agents."""
    first = next(shard for shard in plan["shards"] if shard["role"] == "serving")
    bounds = [first["block_count"] * at // len(agents) for at in range(len(agents) + 1)]
    return [
        {**first, "agent": agent, "blocks": [low, high]}
        for agent, low, high in zip(agents, bounds, bounds[1:], strict=False)
    ]


async def test_a_shown_plan_that_was_edited_runs_pinned_and_proven(site: Site) -> None:
    before = await site.shown()
    answer = await site.api.post("/v1/plans/tiny:run", json={"shards": _moved(before, "b", "a")})
    assert answer.status_code == 200, answer.text
    started = answer.json()
    assert started["epoch"] > before["epoch"]
    assert started["prediction"]["p99_ms"] > 0
    assert [shard.agent for shard in site.running.shards()] == ["b", "a"]
    assert site.controller.sla(TINY).pinned
    activated = site.connections["a"].asked(Activate)[-1]
    assert activated.route.plan.epoch == started["epoch"]
    decision = (await site.api.get("/v1/decisions", params={"service_id": TINY})).json()[-1]
    assert (decision["proposer"], decision["trigger"], decision["epoch"]) == ("operator", "operator", started["epoch"])
    site.report()
    site.controller.loop.poke("better-plan", TINY)
    await asyncio.sleep(0.05)
    assert site.running.epoch == started["epoch"], "a pinned plan stays"


BODIES_WITHOUT_A_PLAN: list[Any] = [{}, {"shards": []}, {"shards": "all"}, {"shards": [{}]}, {"shards": None}, []]
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"agent": "nobody"}, 409, "there is no agent nobody"),
    ({"blocks": [0, 1]}, 409, "does not run each of its"),
    ({"stage": "other"}, 409, "not part of tiny"),
    ({"model": "other"}, 409, "cannot run model other"),
    ({"patch": [0, 500]}, 409, "do not cover its items"),
    ({"role": "fallback"}, 422, "no shard that serves"),
    ({"role": "idle"}, 422, "/shards/0/role"),
    ({"blocks": [-1, 3]}, 422, "/shards/0/blocks/0"),
    ({"colour": "red"}, 422, "/shards/0/colour"),
]


async def test_a_plan_that_cannot_be_is_refused_in_a_sentence_and_nothing_moves(site: Site) -> None:
    before = await site.shown()
    for change, status, sentence in REFUSED:
        shards = _moved(before, "a")
        shards[0] |= change
        answer = await site.api.post("/v1/plans/tiny:run", json={"shards": shards})
        assert (answer.status_code, sentence in answer.json()["detail"]) == (status, True), (change, answer.text)
        assert not site.controller.sla(TINY).pinned
        if status == 409:
            preview = (await site.api.post("/v1/plans/tiny:preview", json={"shards": shards})).json()
            assert not preview["admissible"]
            assert sentence in preview["text"]
    assert (await site.shown())["epoch"] == before["epoch"]


async def test_a_body_without_a_plan_is_a_problem(site: Site) -> None:
    for verb in ("run", "preview"):
        for body in BODIES_WITHOUT_A_PLAN:
            answer = await site.api.post(f"/v1/plans/tiny:{verb}", json=body)
            assert answer.status_code == 422
            assert answer.json()["type"].endswith("invalid-input")
    stranger = await site.api.post("/v1/plans/none:run", json={"shards": _moved(await site.shown(), "a")})
    assert stranger.status_code == 404


async def test_a_rollout_that_fails_leaves_the_plan_and_the_pin_as_they_were(site: Site) -> None:
    before = await site.shown()
    site.connections["b"].script = lambda message: AgentLostError("gone")
    answer = await site.api.post("/v1/plans/tiny:run", json={"shards": _moved(before, "b")})
    assert answer.status_code == 503
    assert "could not prepare" in answer.json()["detail"]
    assert (await site.shown())["epoch"] == before["epoch"]
    assert not site.controller.sla(TINY).pinned


async def test_a_preview_says_what_more_load_would_do_and_changes_nothing(site: Site) -> None:
    before = await site.shown()
    shards = _moved(before, "b")
    light, heavy = [
        (await site.api.post("/v1/plans/tiny:preview", json={"shards": shards, "rps": rps})).json()
        for rps in (1, 900_000)
    ]
    assert light["admissible"]
    assert "latency p50" in preview_lines(light)[1]
    assert "no known plan carries 900000 requests/s" in heavy["text"]
    assert heavy["prediction"]["p99_ms"] > light["prediction"]["p99_ms"]
    assert (await site.shown())["epoch"] == before["epoch"]
    for rps in (0, -1, "x", 1e9):
        wrong = await site.api.post("/v1/plans/tiny:preview", json={"shards": shards, "rps": rps})
        assert wrong.status_code == 422


def test_a_contract_that_no_plan_keeps_does_not_bind_the_operators_hands(seen: Snapshot) -> None:
    plan = candidates(seen, SIMULATED, 1)[0].plan
    assert judged(seen, SIMULATED, plan).plan is not None
    decision = judged(seen, SIMULATED, plan, 1e5)
    assert decision.plan is not None
    assert {reason.code for reason in decision.reasons} >= {"operator", "throughput"}


def test_what_is_shown_is_read_back_as_the_same_plan(seen: Snapshot) -> None:
    spec, models = seen.services[SIMULATED].spec, seen.models
    shapes = set()
    for entry in candidates(seen, SIMULATED, 12):
        shown = {"shards": [json.loads(shard.model_dump_json()) for shard in shards_out(entry.plan, models)]}
        read = plan_from(PlanIn.model_validate(copy.deepcopy(shown)), spec)
        assert read.layout() == entry.plan.layout()
        shapes |= {len(stage.lanes) for stage in read.stages}
    assert len(shapes) > 1, "split and unsplit stages were both read"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"no json", "is not JSON"),
        (b"[]", "holds 0"),
        (b'{"service_id": "x"}', "holds 0"),
        (b'[{"service_id": "x", "shards": []}, {"service_id": "y", "shards": []}]', "holds 2"),
        (b'{"shards": []}', "which service"),
    ],
)
def test_a_file_without_one_plan_is_refused_in_a_sentence(content: bytes, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        plan_of(content, "plan.json", None)


def test_a_file_with_several_plans_needs_the_service(tmp_path: Path) -> None:
    both = [{"service_id": "x", "shards": [1]}, {"service_id": "y", "shards": [2]}]
    assert plan_of(json.dumps(both).encode(), "plans.json", "y") == ("y", [2])


async def test_the_command_applies_what_plan_show_printed(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_api(site.controller, None), log_config=None, access_log=False, lifespan="off")
    server = EmbeddedServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url, file = f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path / "plan.json"

    async def said(*arguments: str, status: int = 0) -> str:
        site.report()
        assert await asyncio.to_thread(main, ("--url", url, *arguments)) == status
        return "".join(capsys.readouterr())

    try:
        file.write_text(await said("plan", "show", "tiny", "--json"))
        assert "latency p50" in await said("plan", "apply", str(file), "--preview", "--rps", "2")
        before = site.running.epoch
        assert f"runs this plan as plan {before + 1}" in await said("plan", "apply", str(file))
        assert site.controller.sla(TINY).pinned
        file.write_text(file.read_text().replace('"agent": "', '"agent": "not-'))
        assert "there is no agent not-" in await said("plan", "apply", str(file), status=2)
        assert "This plan is refused" in await said("plan", "apply", str(file), "--preview", status=1)
    finally:
        server.should_exit = True
        await serving


async def test_what_shards_took_teaches_the_snapshots_that_follow(site: Site, clock: Any) -> None:
    shard = site.running.shards()[0]
    before = site.controller.loop.snapshot()
    assert before.learned == Learned()
    modelled = CostModel(before).modelled_ms(shard.model, shard.agent, shard.blocks, 4.0)
    for _ in range(12):
        clock.advance(LEARN_EVERY_MS)
        ran = ShardReport(
            stage=shard.stage, blocks=shard.blocks, count=20, sum_ms=60 * modelled, sum_sq_ms=20 * (3 * modelled) ** 2,
            items=80, provider="emulated",
        )  # fmt: skip
        service = ServiceReport(
            service_id=TINY, epoch=site.running.epoch, ok=20, failed=0, fell_back=0, latency_buckets={}, shards=(ran,)
        )
        report = Report(
            sequence=1, cpu_saturation=0, memory_free_bytes=1, queue_depth=0, loaded_bytes=0, services=(service,)
        )
        site.controller.telemetry.fold(shard.agent, report, clock.now_ms())
        site.controller.loop.world.look()
    learned = site.controller.loop.snapshot().learned
    assert 0.3 < learned.models[shard.model] < 1.1, "three times the profile: the model's part of log 3"
    assert learned.run_variation is not None
    assert learned.run_variation < 0.1
