"""Whole agents against a small real door: enrollment, orders, reports, requests over HTTP, restart without a controller."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import pytest

from agents.agent import Agent, main
from agents.messages import (
    Activate,
    Address,
    BlobChunk,
    Ca,
    Done,
    Enroll,
    Enrolled,
    FetchBlob,
    GetCa,
    Hello,
    Leave,
    Message,
    Prepare,
    Prepared,
    Release,
    Report,
    ShapeLink,
    ThrottleDevice,
    Welcome,
)
from agents.peers import PeerSettings
from agents.routes import files_for
from agents.settings import AgentSettings, DeviceSettings, JoinSettings
from agents.tls import unverified_context
from agents.wire import Connection, Tensors, WireServer, connect, serve
from controller.pki import CertificateAuthority
from policies.ids import AgentId
from policies.platforms import platform
from sla.errors import AgentLostError, InvalidInputError, RefusedError, SettingsError


@dataclass
class Door:
    """The controller's side of the agents' door, without the rest of a controller."""

    ca: CertificateAuthority
    blobs: dict[str, bytes]
    server: WireServer | None = None
    connections: dict[str, Connection] = field(default_factory=dict)
    hellos: list[Hello] = field(default_factory=list)
    reports: dict[str, list[Report]] = field(default_factory=dict)
    count: int = 0
    port: int = 0

    async def open(self) -> None:
        self.server = await serve(self.handle, "127.0.0.1", self.port, self.ca.server_context())
        self.port = self.server.port

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()
            await self.server.wait_closed()

    async def handle(
        self, connection: Connection, message: Message, tensors: Tensors
    ) -> tuple[Message, Tensors] | None:
        match message:
            case GetCa():
                return Ca(ca_pem=self.ca.ca_pem), {}
            case Enroll(token="good", csr_pem=csr):
                self.count += 1
                agent = AgentId(f"{message.facts.hostname}-{self.count}")
                pem = self.ca.sign_agent(csr, agent, now_s=time.time())
                return Enrolled(agent_id=agent, certificate_pem=pem, ca_pem=self.ca.ca_pem), {}
            case Enroll():
                raise RefusedError("The join token is used up.")
            case Hello():
                assert connection.peer_id is not None
                self.connections[connection.peer_id] = connection
                self.hellos.append(message)
                return Welcome(agent_id=connection.peer_id, report_every_ms=100), {}
            case Report():
                self.reports.setdefault(str(connection.peer_id), []).append(message)
                return None
            case FetchBlob():
                data = self.blobs[message.sha256]
                chunk = np.frombuffer(data[message.offset : message.offset + message.length], np.uint8)
                return BlobChunk(total_bytes=len(data)), {"data": chunk}
        raise AssertionError(message)

    async def ask(self, agent: str, message: Message) -> Message:
        answer, _ = await self.connections[agent].call(message, timeout_s=20)
        return answer


class Lab:
    """A door and agents, all in this process."""

    def __init__(self, door: Door, directory: Path) -> None:
        self.door = door
        self.directory = directory
        self.running: dict[str, tuple[Agent, asyncio.Task[None]]] = {}

    def settings(self, name: str, **device: object) -> AgentSettings:
        return AgentSettings(
            join=JoinSettings(host="127.0.0.1", port=self.door.port, token="good", ca_fingerprint=self.door.ca.fingerprint),
            device=DeviceSettings(platform=platform("ascend310p"), emulate=True, name=name, **device),
            directory=self.directory / name,
            peers=PeerSettings(probe_every_s=0.05, bandwidth_probe_every_s=0.1),
        )  # fmt: skip

    async def start(self, name: str, *, settings: AgentSettings | None = None) -> Agent:
        agent = Agent(settings or self.settings(name))
        task = asyncio.create_task(agent.run())
        ready = asyncio.create_task(agent.ready.wait())
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            ready.cancel()
            await task
        self.running[name] = (agent, task)
        return agent

    async def stop(self, name: str) -> None:
        agent, task = self.running.pop(name)
        await agent.stop(grace_s=1.0)
        await task

    def facts(self, agent: Agent):
        return next(h.facts for h in reversed(self.door.hellos) if agent.agent_id.startswith(h.facts.hostname))


@pytest.fixture
async def lab(ca: CertificateAuthority, tiny, tmp_path: Path) -> AsyncIterator[Lab]:
    door = Door(ca, tiny.source.blobs)
    await door.open()
    lab = Lab(door, tmp_path)
    yield lab
    for name in list(lab.running):
        await lab.stop(name)
    await door.close()


def _route(fleet_route, lab: Lab, agents: list[Agent]):
    """The route of `Fleet.route` with the agents' real names and addresses."""
    import msgspec

    addresses = {a.agent_id: Address("127.0.0.1", lab.facts(a).peer_port) for a in agents}
    return msgspec.structs.replace(fleet_route, addresses=addresses)


async def _infer(port: int, x: np.ndarray) -> httpx.Response:
    body = {"inputs": [{"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.reshape(-1).tolist()}]}
    async with httpx.AsyncClient() as client:
        return await client.post(f"http://127.0.0.1:{port}/v2/models/tiny-service/infer", json=body, timeout=20)


async def _serve_over_two(lab: Lab, fleet, until, epoch: int = 1) -> tuple[Agent, Agent]:
    one, two = await lab.start("one"), await lab.start("two")
    await until(lambda: {one.agent_id, two.agent_id} <= lab.door.connections.keys())
    chain = [(one.agent_id, 0, 1), (two.agent_id, 1, 2)]
    route = _route(fleet.route(chain, fallback=(one.agent_id,), epoch=epoch), lab, [one, two])
    for agent in (one, two):
        files = files_for(route, agent.agent_id)
        answer = await lab.door.ask(agent.agent_id, Prepare(service_id="tiny-service", epoch=epoch, files=files))
        assert isinstance(answer, Prepared)
        assert {shard.provider for shard in answer.shards} == {"emulated"}
        assert all(shard.golden_error < 1e-5 for shard in answer.shards)
    for agent in (one, two):
        assert isinstance(await lab.door.ask(agent.agent_id, Activate(route=route)), Done)
    return one, two


async def test_two_agents_enroll_serve_and_report(lab, fleet, items, until):
    one, two = await _serve_over_two(lab, fleet, until)
    response = await _infer(lab.facts(one).ingress_port, items(3))
    assert response.status_code == 200
    assert (response.headers["x-tidegate-epoch"], response.headers["x-tidegate-fallback"]) == ("1", "false")
    found = np.array(response.json()["outputs"][0]["data"], np.float32).reshape(3, 3)
    np.testing.assert_allclose(found, fleet.tiny.expected(items(3)), rtol=1e-5)
    reports = lab.door.reports
    await until(lambda: any(s.ok == 1 for r in reports[one.agent_id] for s in r.services))
    await until(lambda: any(s.shards for r in reports[two.agent_id] for s in r.services))
    await until(
        lambda: any(
            p.peer == two.agent_id and p.bandwidth_bytes_per_s > 0 for r in reports[one.agent_id] for p in r.peers
        )
    )
    assert any(r.cached for r in reports[one.agent_id])
    assert all(0 <= r.cpu_saturation <= 1 and r.loaded_bytes >= 0 for r in reports[one.agent_id])


async def test_agents_go_on_serving_while_the_controller_is_away_and_find_it_again(lab, fleet, items, until):
    one, _ = await _serve_over_two(lab, fleet, until)
    await lab.door.close()
    assert (await _infer(lab.facts(one).ingress_port, items(2))).status_code == 200
    hellos = len(lab.door.hellos)
    await lab.door.open()
    await until(lambda: len(lab.door.hellos) >= hellos + 2)
    assert lab.door.hellos[-1].epochs == {"tiny-service": 1}


async def test_an_agent_that_restarts_without_its_controller_serves_from_its_disk(lab, fleet, items, until):
    one, _ = await _serve_over_two(lab, fleet, until)
    await lab.stop("two")
    await lab.stop("one")
    await lab.door.close()
    again = await lab.start("one")
    assert again.agent_id == one.agent_id
    await until(lambda: len(again._engine.loaded()) == 2)
    result = await again.infer("tiny-service", {"x": items(2)}, 10_000)
    np.testing.assert_allclose(result.tensors["y"], fleet.tiny.expected(items(2)), rtol=1e-5)
    assert result.fell_back


async def test_release_unloads_what_only_older_epochs_needed(lab, fleet, until):
    one, _ = await _serve_over_two(lab, fleet, until, epoch=3)
    await lab.door.ask(one.agent_id, Release(service_id="tiny-service", below_epoch=3))
    assert len(one._engine.loaded()) == 2
    await lab.door.ask(one.agent_id, Release(service_id="tiny-service", below_epoch=4))
    assert one._engine.loaded() == frozenset()
    assert one.models() == {}


async def test_a_device_is_calibrated_once_and_says_so_at_every_hello(lab, until):
    one = await lab.start("one")
    reports = lab.door.reports
    await until(lambda: any(r.calibration is not None for r in reports.get(one.agent_id, [])), within_s=60)
    found = next(r.calibration for r in reports[one.agent_id] if r.calibration is not None)
    assert found.provider == "emulated", "it is measured as what it is"
    assert (lab.facts(one).device_type.rsplit("-", 1)[0], lab.facts(one).calibration) == ("ascend310p-emulated", None)
    await lab.stop("one")
    again = await lab.start("one")
    await until(lambda: lab.facts(again).calibration is not None)
    assert lab.facts(again).calibration == found, "a restart does not measure again"


async def test_only_emulated_links_can_be_shaped(lab, fleet, until):
    one, two = await _serve_over_two(lab, fleet, until)
    await lab.door.ask(one.agent_id, ShapeLink(peer=two.agent_id, delay_ms=40.0))
    reports = lab.door.reports[one.agent_id]
    await until(lambda: any(p.rtt_ms > 20 for p in reports[-1].peers))
    await lab.door.ask(one.agent_id, ShapeLink(peer=two.agent_id))
    await until(lambda: all(p.rtt_ms < 20 for p in reports[-1].peers))
    one._peers._emulated = False
    with pytest.raises(RefusedError, match="this device is real"):
        await lab.door.ask(one.agent_id, ShapeLink(peer=None, delay_ms=40.0))


async def test_only_an_emulated_device_can_be_throttled(lab, until):
    one = await lab.start("one")
    await until(lambda: one.agent_id in lab.door.connections)
    await lab.door.ask(one.agent_id, ThrottleDevice(factor=4.0))
    assert one._throttled == 4.0
    for bad in (0.5, 1e9, float("nan")):
        with pytest.raises(InvalidInputError, match="by a factor"):
            await lab.door.ask(one.agent_id, ThrottleDevice(factor=bad))
    one._settings = dataclasses.replace(one._settings, device=dataclasses.replace(one._settings.device, emulate=False))
    with pytest.raises(RefusedError, match="this device is real"):
        await lab.door.ask(one.agent_id, ThrottleDevice(factor=4.0))


async def test_leave_ends_the_agent(lab, until):
    one = await lab.start("one")
    await until(lambda: one.agent_id in lab.door.connections)
    await lab.door.ask(one.agent_id, Leave(grace_s=1.0))
    _, task = lab.running.pop("one")
    await asyncio.wait_for(task, 10)


async def test_an_agent_that_waits_for_its_controller_can_be_stopped(lab):
    join = JoinSettings(host="127.0.0.1", port=1, token="good", ca_fingerprint=lab.door.ca.fingerprint)
    agent = Agent(
        AgentSettings(join=join, device=DeviceSettings(platform=platform("x86")), directory=lab.directory / "early")
    )
    task = asyncio.create_task(agent.run())
    await asyncio.sleep(0.05)
    await agent.stop()
    await task
    assert agent.agent_id == ""


async def test_a_token_that_is_used_up_is_said_in_one_sentence(lab):
    join = JoinSettings(host="127.0.0.1", port=lab.door.port, token="bad", ca_fingerprint=lab.door.ca.fingerprint)
    settings = AgentSettings(
        join=join, device=DeviceSettings(platform=platform("x86")), directory=lab.directory / "bad"
    )
    with pytest.raises(RefusedError, match="used up"):
        await lab.start("bad", settings=settings)


async def test_an_agent_without_token_and_certificate_cannot_start(lab):
    settings = AgentSettings(
        join=JoinSettings(host="127.0.0.1", port=1), device=DeviceSettings(platform=platform("x86")), directory=lab.directory / "none",
    )  # fmt: skip
    with pytest.raises(SettingsError, match="not enrolled yet"):
        await lab.start("none", settings=settings)


async def test_strangers_are_not_let_in(lab, until):
    one = await lab.start("one")
    await until(lambda: one.agent_id in lab.door.connections)
    with pytest.raises((RefusedError, AgentLostError)):
        await connect("127.0.0.1", lab.facts(one).peer_port, unverified_context())


def test_wrong_settings_are_one_sentence_and_status_2(capsys):
    assert main(["--controller", "http://", "--platform", "x86"]) == 2
    assert main(["--controller", "localhost:1", "--platform", "toaster"]) == 2
    assert main(["--controller", "localhost:1", "--ingress-host", "0.0.0.0"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert "'toaster' is not a platform" in lines[1]
    assert "without TLS" in lines[2]
