"""Profiles by type of device: one idle agent of each type is asked, over real sockets, and what it found is kept and used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from agents.agent import Agent
from agents.calibration import CalibrationSettings
from agents.messages import Address, BlocksProfiled, BlockTiming, Message, ProfileBlocks
from agents.settings import AgentSettings, DeviceSettings, JoinSettings
from controller.cli import build_parser
from controller.core import Controller
from controller.device_profiles import content_key
from controller.model_commands import on_device
from controller.records import AgentRecord
from controller.settings import ProfileSettings, SuspicionSettings
from controller.views import TokenIn
from policies.costs import CostModel
from policies.ids import AgentId, ModelName, StageName
from policies.platforms import platform
from sla.errors import InvalidInputError, NotFoundError, OverloadedError

TINY = ModelName("tiny")
QUICK = ProfileSettings(budget_s=0.05, settle_s=20.0, look_every_s=3600.0)
PATIENT = SuspicionSettings(suspect_phi=1e6, lost_phi=1e9, lost_silence_ms=1e12)
"""Tests advance the controller's clock by more than real agents report in the meantime."""


class Site:
    """A controller, and agents of this process that joined it over sockets."""

    def __init__(self, make_controller: Any, directory: Path) -> None:
        self._make, self._directory = make_controller, directory
        self._running: list[tuple[Agent, asyncio.Task[None]]] = []
        self.controller: Controller = make_controller(profiles=QUICK, suspicion=PATIENT)

    async def join(self, name: str, kind: str = "rk3588", **device: Any) -> Agent:
        token = await self.controller.create_token(TokenIn())
        settings = AgentSettings(
            join=JoinSettings(
                host="127.0.0.1", port=self.controller.door.port, token=token.token, ca_fingerprint=token.ca_fingerprint
            ),
            device=DeviceSettings(platform=platform(kind), emulate=True, name=name, **device),
            directory=self._directory / name,
            calibration=CalibrationSettings(first_s=0.01, budget_s=0.01),
        )
        agent = Agent(settings)
        self._running.append((agent, asyncio.create_task(agent.run())))
        async with asyncio.timeout(20):
            await agent.ready.wait()
            while self.controller.fleet.connection(agent.agent_id) is None:  # noqa: ASYNC110 (another task's doing)
                await asyncio.sleep(0.01)
        return agent

    async def stop_agents(self) -> None:
        for agent, task in self._running:
            await agent.stop(grace_s=0.5)
            await task
        self._running.clear()

    def asked(self) -> list[str]:
        """Which models were timed on which agents, in order."""
        texts = [event.text for event in self.controller.events.tail() if event.kind == "model"]
        return [text for text in texts if text.startswith("timing ")]

    def devices(self, name: str = "tiny") -> list[Any]:
        return next(model for model in self.controller.models() if model.name == name).devices


@pytest_asyncio.fixture
async def site(make_controller: Any, tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(make_controller, tmp_path / "agents")
    await site.controller.start()
    yield site
    await site.stop_agents()


async def test_a_model_is_timed_on_one_agent_of_each_type_and_plans_are_predicted_from_that(
    site: Site, tiny_onnx: bytes
) -> None:
    one, _, other = await site.join("a"), await site.join("b"), await site.join("c", "ascend310p")
    added = await site.controller.model_service.add_bytes("tiny", tiny_onnx)
    assert len(added.devices) == len(site.asked()) == 2, "two of the three are alike"
    kinds = {site.controller.fleet.members[agent.agent_id].facts.device_type for agent in (one, other)}
    assert {device.device_type for device in added.devices} == kinds
    snapshot = site.controller.loop.snapshot()
    costs = CostModel(snapshot)
    for agent in snapshot.fleet.agents.values():
        profile = snapshot.device_profiles[TINY][agent.device_type]
        assert profile.provider == "emulated"
        expected = sum(block.fixed_ms + 2.0 * block.per_item_ms for block in profile.blocks)
        whole = costs.sums(TINY).whole
        assert costs.run_ms(StageName("model"), TINY, agent.id, whole, 2.0) == pytest.approx(expected)


async def test_it_survives_a_restart_and_is_used_again_for_the_same_content(
    site: Site, make_controller: Any, tiny_onnx: bytes
) -> None:
    await site.join("a")
    await site.controller.model_service.add_bytes("tiny", tiny_onnx)
    before = site.devices()
    await site.stop_agents()
    await site.controller.stop()
    site.controller = make_controller(profiles=QUICK, suspicion=PATIENT)
    await site.controller.start()
    assert site.devices() == before
    await site.join("b")
    await site.controller.model_service.add_bytes("again", tiny_onnx)
    assert site.asked() == [], "neither for another device of the type nor for the same content under another name"
    assert site.devices("again") == before


async def test_a_new_type_is_timed_in_the_background_once_the_fleet_has_settled(
    site: Site, tiny_onnx: bytes, clock: Any
) -> None:
    await site.controller.model_service.add_bytes("tiny", tiny_onnx)
    agent = await site.join("a")
    assert not await site.controller.profiles.look()
    assert site.devices() == [], "not while agents come and go"
    clock.advance(1000.0 * QUICK.settle_s)
    assert await site.controller.profiles.look(), "so the next look comes without a pause"
    assert [device.agent for device in site.devices()] == [agent.agent_id]
    assert not await site.controller.profiles.look(), "nothing is left"


async def test_emulated_devices_wait_for_the_end_of_all_traffic(site: Site, tiny_onnx: bytes, clock: Any) -> None:
    await site.controller.model_service.add_bytes("tiny", tiny_onnx)
    await site.join("a")
    clock.advance(1000.0 * QUICK.settle_s)
    telemetry = site.controller.telemetry
    telemetry.offered_rps = lambda service, now_ms, window_ms=15_000.0: 1.0  # type: ignore[method-assign]
    await site.controller.profiles.look()
    assert site.devices() == []
    del telemetry.offered_rps  # type: ignore[method-assign]
    await site.controller.profiles.look()
    assert len(site.devices()) == 1


class Scripted:
    """An agent at the other end of a fake connection that answers profiles as it is told."""

    def __init__(self, site: Site, make_connection: Any, make_facts: Any, name: str = "a") -> None:
        self.answers: list[Any] = []
        self.id = AgentId(name)
        facts = make_facts(device_type="rk3588-x", evidence="measured")
        fleet = site.controller.fleet
        fleet.admit(AgentRecord(id=self.id, facts=facts, public_key_fingerprint=name, enrolled_at_s=0.0))
        self.connection = make_connection(self._answer)
        fleet.connected(self.id, self.connection, facts, Address("10.0.0.1", 1))

    def _answer(self, message: Message) -> Any:
        assert isinstance(message, ProfileBlocks)
        return self.answers.pop(0)


def profiled(count: int, **changed: Any) -> BlocksProfiled:
    timing = BlockTiming(one_ms=2.0, many_ms=5.0, runs=4, spread=0.01)
    answer = BlocksProfiled(blocks=(timing,) * count, provider="CPU", peak_bytes=1000)
    return msgspec.structs.replace(answer, **changed)


async def test_a_busy_agent_is_asked_again_when_it_says_so_and_another_one_meanwhile(
    site: Site, tiny_onnx: bytes, clock: Any, make_connection: Any, make_facts: Any
) -> None:
    agent = Scripted(site, make_connection, make_facts)
    agent.answers.append(OverloadedError("This agent serves requests.", retry_after_s=5.0))
    added = await site.controller.model_service.add_bytes("tiny", tiny_onnx)
    assert added.devices == []
    assert "could not be timed on rk3588-x now: This agent serves requests." in site.controller.events.tail()[-1].text
    clock.advance(1000.0 * QUICK.settle_s)
    agent.answers.append(profiled(len(added.blocks)))
    await site.controller.profiles.look()
    (device,) = site.devices()
    assert (device.blocks[0].fixed_ms, device.blocks[0].per_item_ms) == (1.0, 1.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"blocks": ()},
        {"provider": "x" * 101},
        {"peak_bytes": -1},
        {"blocks": (BlockTiming(one_ms=float("nan"), many_ms=1.0, runs=1, spread=0.0),)},
        {"blocks": (BlockTiming(one_ms=1.0, many_ms=None, runs=1, spread=0.0),)},
        {"blocks": (BlockTiming(one_ms=1.0, many_ms=2.0, runs=0, spread=0.0),)},
    ],
)
async def test_times_that_cannot_be_are_refused_and_asked_for_ever_more_rarely(
    changed: dict[str, Any], site: Site, tiny_onnx: bytes, clock: Any, make_connection: Any, make_facts: Any
) -> None:
    count = len((await site.controller.model_service.add_bytes("tiny", tiny_onnx)).blocks)
    agent = Scripted(site, make_connection, make_facts)
    if changed.get("blocks"):
        changed = {"blocks": changed["blocks"] * count}
    clock.advance(1000.0 * QUICK.settle_s)
    waits = []
    for _ in range(3):
        agent.answers.append(profiled(count, **changed))
        await site.controller.profiles.look()
        assert site.devices() == []
        seconds = 0
        while not site.controller.profiles._missing():
            clock.advance(1000.0)
            seconds += 1
        waits.append(seconds)
    assert waits == [60, 120, 240]


async def test_content_that_is_cut_otherwise_is_another_content(site: Site, tiny_onnx: bytes) -> None:
    await site.controller.model_service.add_bytes("tiny", tiny_onnx)
    model = site.controller.desired.models[TINY]
    assert content_key(model) == content_key(msgspec.structs.replace(model, name=ModelName("other"), accuracy=0.5))
    assert content_key(model) != content_key(msgspec.structs.replace(model, blocks=model.blocks * 2))


MODEL: dict[str, Any] = {
    "name": "m", "blocks": [{"name": "b0", "fixed_ms": 1.0, "per_item_ms": 2.0, "param_bytes": 1 << 20, "cut_bytes_per_item": 2048}],
    "split_axis": None,
    "devices": [
        {"device_type": kind, "blocks": [{"fixed_ms": 10.0, "per_item_ms": at}], "provider": "emulated", "agent": "a-1",
         "measured_at_s": 0.0, "runs": 3, "spread": 0.02, "peak_bytes": 5 << 20}
        for at, kind in enumerate(("rk3588-emulated-aa", "rk3588-emulated-ab", "imx93-emulated-cc"), start=40)
    ],
}  # fmt: skip


class Api:
    """What the commands need of an `ApiClient`."""

    def get(self, path: str) -> list[dict[str, Any]]:
        return [MODEL]

    def close(self) -> None:
        """Nothing to close."""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    arguments = build_parser().parse_args(["model", "show", "m", *words])
    arguments.client = Api()
    assert arguments.run(arguments) == 0
    return capsys.readouterr().out


def test_the_types_of_devices_are_printed_below_the_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys)
    assert "1.00" in out
    assert all(device["device_type"] in out for device in MODEL["devices"])
    shown = printed(capsys, "--device", "imx93")
    assert "42.00" in shown
    assert "rk3588" not in shown
    assert json.loads(printed(capsys, "--json", "--device", "imx93"))["blocks"][0]["per_item_ms"] == 42


def test_the_picture_is_of_the_device_that_was_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed(capsys, "--device", "imx93", "--svg", str(tmp_path / "m.svg"))
    assert "52.0 ms for one item on imx93-emulated-cc" in (tmp_path / "m.svg").read_text()


def test_a_type_must_be_named_well_enough() -> None:
    with pytest.raises(NotFoundError, match=r"'x86'.*rk3588-emulated-aa"):
        on_device(MODEL, "x86")
    with pytest.raises(InvalidInputError, match="several types"):
        on_device(MODEL, "rk3588")
    assert on_device(MODEL, "rk3588-emulated-ab")["blocks"][0]["per_item_ms"] == 41
