"""A decoder whose cache goes out and comes back with each request, served by real agents over real sockets, with its keep ratio turned meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from agents.agent import Agent
from agents.messages import Report
from agents.settings import AgentSettings, DeviceSettings, JoinSettings
from benchmarks.cached_decoder import build_decoder
from controller.api import create_api
from controller.core import Controller
from controller.llm_views import IntentIn, RuleIn
from controller.models.cache_accuracy import KEEP_KNOB
from controller.models.cache_variants import pruned_cache
from controller.services.single import Given, single_stage_service
from controller.settings import LoopSettings
from controller.views import TokenIn
from policies.decision import Decision
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.knobs import kept_accuracy
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.platforms import platform
from sla.errors import InvalidInputError, NotFoundError

DECODER = build_decoder()
SERVICE = ServiceId("decoder.cache")
KNOB = "model.keep"
AGENT = AgentId("one-1")
PAST = 24


def samples(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    return [
        {**DECODER.filled(PAST, seed=at), "x": rng.standard_normal((1, 1, 64)).astype(np.float32)}
        for at in range(count)
    ]


async def register(controller: Controller) -> None:
    """The pruned decoder with its measured keep ratios, as a service."""
    registry = controller.registry
    registry.add("decoder", DECODER.model.SerializeToString(), samples=samples(1)[0])
    pruned = pruned_cache(registry, "decoder", samples(2), keep=0.5, protect=1)
    given = Given(pruned.sample, None, 1.0, pruned.knobs)
    spec, _, models = single_stage_service(registry, ModelName(SERVICE), pruned.content, given=given)
    await controller.desired.put_service(spec, models)


class Fleet:
    """Whole agents in this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.agents: list[Agent] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def join(self, controller: Controller, *names: str) -> None:
        for name in names:
            offer = await controller.create_token(TokenIn(uses=1, ttl_s=600, note=""))
            join = JoinSettings(
                host="127.0.0.1", port=controller.door.port, token=offer.token, ca_fingerprint=offer.ca_fingerprint
            )
            device = DeviceSettings(platform=platform("x86"), emulate=True, name=name)
            agent = Agent(AgentSettings(join=join, device=device, directory=self.directory / name))
            self.agents.append(agent)
            self.tasks.append(asyncio.create_task(agent.run()))

    async def stop(self) -> None:
        await asyncio.gather(*(agent.stop(grace_s=1.0) for agent in self.agents))
        await asyncio.gather(*self.tasks)


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    await fleet.stop()


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 (the other side is a whole controller)
            await asyncio.sleep(0.02)


async def client(controller: Controller, infer: Callable[..., Awaitable[Any]], stop: asyncio.Event) -> list[int]:
    """Decodes step by step, the cache going out and coming back; the number of cache entries after each step."""
    rng = np.random.default_rng(3)
    cache, lengths, left = DECODER.filled(PAST), [], 8
    while left:
        left -= stop.is_set()
        result = await infer(SERVICE, {"x": rng.standard_normal((1, 1, 64)).astype(np.float32), **cache}, 10_000.0)
        assert not result.fell_back
        cache = {taken: result.tensors[given] for given, taken in DECODER.past.items()}
        lengths.append(cache["past.key.0"].shape[2])
        assert result.tensors["kept_entries"].shape == (1, lengths[-1])
    return lengths


async def test_a_keep_ratio_is_turned_while_requests_run(make_controller: Any, make_sla: Any, fleet: Fleet) -> None:
    controller: Controller = make_controller(loop=LoopSettings(look_every_ms=50.0))
    await controller.start()
    await fleet.join(controller, "one", "two")
    await register(controller)
    await controller.apply_contract(make_sla(SERVICE, latency_p99_ms=5000, throughput_rps=1), None)
    await until(
        lambda: controller.gateway.is_ready and all(agent.ready.is_set() and agent.models() for agent in fleet.agents)
    )
    # Clients that never pause leave no room for the least urgent work, which is measuring the device.
    await until(lambda: all(member.facts.calibration is not None for member in controller.fleet.members.values()))
    (listed,) = [service for service in controller.service_list() if service.id == SERVICE]
    assert [(knob.key, knob.value, knob.auto) for knob in listed.knobs] == [(KNOB, 1.0, False)]
    assert "keep_ratio" not in {tensor["name"] for tensor in listed.inputs}

    epoch = controller.desired.book(SERVICE).running_epoch
    before = [dict(agent._engine._loaded) for agent in fleet.agents]
    assert any(before)
    stop = asyncio.Event()
    ways = [controller.gateway.infer, fleet.agents[0].infer, fleet.agents[1].infer]
    clients = [asyncio.create_task(client(controller, way, stop)) for way in ways]
    for value in (0.5, 0.8, 0.5):
        await controller.tune(SERVICE, {KNOB: value})
        assert controller.service_knobs(SERVICE)[0].value == value
        for way in ways:
            probe = await way(SERVICE, {"x": np.ones((1, 1, 64), np.float32), **DECODER.filled(19)}, 10_000.0)
            assert probe.tensors["key.0"].shape[2] == round(20 * value), "told before the order was answered"
    await until(lambda: controller.service_knobs(SERVICE)[0].bandwidth_use is not None)
    stop.set()
    lengths = [await each for each in clients]
    # A step adds one entry and pruning takes the rest: a cache stays at n where n = ceil((n + 1) / 2).
    assert all(max(each[-3:]) <= 2 for each in lengths)
    assert controller.desired.book(SERVICE).running_epoch == epoch
    for agent, held in zip(fleet.agents, before, strict=True):
        now = agent._engine._loaded
        assert now.keys() == held.keys()
        assert all(now[key].backend is shard.backend for key, shard in held.items()), "no session was opened again"

    (noted,) = [r for r in await controller.decisions(SERVICE, 50) if f"{KNOB}=0.8" in r.sentence]
    assert [reason.code for reason in noted.reasons] == ["knob"]
    assert any(event.kind == "knob" and "0.8" in event.text for event in controller.recent_events(100))


async def planned(controller: Controller, make_sla: Any) -> float:
    """The service with a contract and a plan on an agent that never joins; the accuracy that is left at a keep ratio of 0.6."""
    await register(controller)
    await controller.apply_contract(make_sla(SERVICE), None)
    blocks = Span(0, len(controller.registry.profile(SERVICE).blocks))
    lane = make_lane(StageName("model"), ModelName(SERVICE), None, WHOLE_AXIS, ((AGENT, blocks),))
    stage = StagePlan(stage=StageName("model"), model=ModelName(SERVICE), axis=None, lanes=(lane,))
    plan = Plan(service_id=SERVICE, epoch=1, stages=(stage,))
    decision = Decision(service_id=SERVICE, trigger="start", proposer="solver", plan=plan, reasons=())
    await controller.desired.add_plan(SERVICE, plan, decision, 0.0)
    await controller.desired.set_running(SERVICE, 1, previous_was_good=False)
    return kept_accuracy(KEEP_KNOB, controller.registry.profile(SERVICE).knobs["keep_ratio"], 0.6)


async def test_an_intent_bounds_a_knob_and_the_accuracy_floor_stands_above_it(
    make_controller: Any, make_sla: Any, clock: Any
) -> None:
    controller: Controller = make_controller(loop=LoopSettings(look_every_ms=3_600_000.0))
    await controller.start()
    floor = await planned(controller, make_sla)

    def value() -> float:
        return controller.service_knobs(SERVICE)[0].value

    async def bound(low: float, high: float) -> str:
        rule = RuleIn(kind="bound", knob=KNOB, low=low, high=high)
        intent = await controller.llm.propose(IntentIn(service_id=SERVICE, rules=[rule], lasts_s=600.0))
        before = value()
        assert intent.rules[0].text.startswith(f"knob {KNOB} stays between {low:g} and {high:g}")
        assert value() == before, "nothing before it is confirmed"
        await controller.llm.confirm(intent.id)
        return intent.id

    await controller.tune(SERVICE, {KNOB: 0.3})
    first = await bound(0.7, 0.9)
    assert value() == 0.7
    await controller.llm.revoke(first)
    assert value() == 0.3
    await controller.apply_contract(make_sla(SERVICE, accuracy_floor=floor), None)
    await bound(0.2, 0.5)
    assert value() == pytest.approx(0.6), "the floor is above all wishes"
    clock.advance(600_000)
    assert value() == pytest.approx(0.6)
    unknown = IntentIn(service_id=SERVICE, rules=[RuleIn(kind="bound", knob="model.nothing", low=0, high=1)])
    with pytest.raises(InvalidInputError, match="no knob"):
        await controller.llm.propose(unknown)


def reports(controller: Controller, use: float | None) -> None:
    report = Report(
        sequence=1, cpu_saturation=0, memory_free_bytes=1, queue_depth=0, loaded_bytes=0, memory_bandwidth_use=use
    )
    controller.telemetry.fold(AGENT, report, controller.clock.now_ms())


async def test_auto_follows_the_bandwidth_and_stops_at_the_accuracy_floor(
    make_controller: Any, make_sla: Any, clock: Any
) -> None:
    controller: Controller = make_controller(loop=LoopSettings(look_every_ms=3_600_000.0))
    await controller.start()
    floor = await planned(controller, make_sla)
    assert 0.3 < floor < 1.0
    assert controller.service_knobs(SERVICE)[0].limit == KEEP_KNOB.low
    await controller.apply_contract(make_sla(SERVICE, accuracy_floor=floor), None)
    assert controller.service_knobs(SERVICE)[0].limit == pytest.approx(0.6)

    (auto,) = await controller.tune(SERVICE, {KNOB: "auto"})
    assert (auto.value, auto.auto) == (1.0, True)
    await controller.knobs.look()
    assert controller.service_knobs(SERVICE)[0].value == 1.0, "nobody reported a bandwidth yet"

    async def after(use: float | None) -> float:
        reports(controller, use)
        await controller.knobs.look()
        return controller.service_knobs(SERVICE)[0].value

    assert await after(0.5) == pytest.approx(0.95), "the least strength of pruning"
    assert await after(0.1) == pytest.approx(1 - 0.05 * 1.3)
    assert await after(0.5) == pytest.approx(1 - 0.05 * 1.3), "between the thresholds it stays"
    for _ in range(20):
        lowest = await after(0.1)
    assert lowest == pytest.approx(0.6), "and the floor holds"
    assert await after(0.9) == pytest.approx(1 - (1 - lowest) * 0.6, abs=1e-3)
    stood = await after(None)
    clock.advance(60_000)
    await controller.knobs.look()
    assert controller.service_knobs(SERVICE)[0].value == stood, "an old report turns nothing"
    said = [decision for decision in await controller.decisions(SERVICE, 100) if decision.trigger == "bandwidth"]
    assert "% of its memory bandwidth (estimated)" in said[-1].reasons[0].text
    assert len(said) < 15, "what changes nothing is not noted"

    again: Controller = make_controller()
    await controller.stop()
    await again.start()
    (restored,) = again.service_knobs(SERVICE)
    assert (restored.value, restored.auto) == (stood, True)


async def test_what_cannot_be_set_is_refused_and_changes_nothing(make_controller: Any, make_sla: Any) -> None:
    controller: Controller = make_controller(loop=LoopSettings(look_every_ms=3_600_000.0))
    await controller.start()
    floor = await planned(controller, make_sla)
    await controller.apply_contract(make_sla(SERVICE, accuracy_floor=floor), None)
    for value, why in (
        (0.1, "the accuracy floor allows"),
        (1.5, "goes from 0.05 to 1"),
        (float("nan"), "cannot be"),
        ("off", "cannot be"),
    ):
        with pytest.raises(InvalidInputError, match=why):
            await controller.tune(SERVICE, {KNOB: value})
    with pytest.raises(InvalidInputError, match="has no knob"):
        await controller.tune(SERVICE, {"model.nothing": 0.5})
    with pytest.raises(NotFoundError, match="no service 'nobody'"):
        await controller.tune("nobody", {KNOB: 0.9})
    assert controller.service_knobs(SERVICE)[0].value == 1.0

    # A wish that was allowed once is kept, but not fed where the contract has become stricter.
    await controller.apply_contract(make_sla(SERVICE), None)
    await controller.tune(SERVICE, {KNOB: 0.1})
    assert controller.service_knobs(SERVICE)[0].value == 0.1
    await controller.apply_contract(make_sla(SERVICE, accuracy_floor=floor), None)
    (held,) = controller.service_knobs(SERVICE)
    assert held.value == held.limit == pytest.approx(0.6)


async def test_knobs_over_http(make_controller: Any, make_sla: Any) -> None:
    controller: Controller = make_controller(loop=LoopSettings(look_every_ms=3_600_000.0))
    await controller.start()
    await planned(controller, make_sla)
    transport = httpx.ASGITransport(create_api(controller, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        tuned = await http.post(f"/v1/services/{SERVICE}:tune", json={KNOB: 0.6})
        assert tuned.status_code == 200
        assert tuned.json()[0] | {"bandwidth_use": None} == (await http.get(f"/v1/services/{SERVICE}/knobs")).json()[0]
        assert tuned.json()[0]["value"] == 0.6
        assert (await http.post(f"/v1/services/{SERVICE}:tune", json={KNOB: "auto"})).json()[0]["auto"] is True
        for wrong in ({}, {KNOB: "much"}, {KNOB: None}, {"model.other": 1}, [1]):
            refused = await http.post(f"/v1/services/{SERVICE}:tune", json=wrong)
            assert refused.status_code in (400, 422), wrong
            assert refused.headers["content-type"] == "application/problem+json"


async def test_a_service_that_is_registered_again_begins_with_its_defaults(make_controller: Any, make_sla: Any) -> None:
    controller: Controller = make_controller(loop=LoopSettings(look_every_ms=3_600_000.0))
    await controller.start()
    await register(controller)
    await controller.tune(SERVICE, {KNOB: 0.4})
    spec = controller.desired.specs[SERVICE]
    await controller.knobs.look()
    assert controller.service_knobs(SERVICE)[0].value == 0.4
    await controller.desired.remove_service(SERVICE)
    await controller.knobs.look()
    assert await controller.state.knob_books() == {}
    await controller.desired.put_service(spec, {})
    assert controller.service_knobs(SERVICE)[0].value == 1.0
