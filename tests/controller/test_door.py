"""The agents' door on real sockets: enrollment, hello, reports, shard files; and everybody who must stay outside."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from agents.enroll import enroll
from agents.identity import Identity
from agents.messages import (
    PROTOCOL_VERSION,
    BlobChunk,
    Done,
    Enroll,
    Enrolled,
    FetchBlob,
    GetCa,
    Hello,
    Leave,
    Message,
    PeerReport,
    Renew,
    Report,
    ServiceReport,
    Welcome,
)
from agents.tls import client_context
from agents.wire import Connection, connect, serve
from controller.door import AgentDoor
from controller.events import EventLog
from controller.fleet import FleetRegistry
from controller.pki import CertificateAuthority
from controller.settings import SuspicionSettings
from controller.state import State
from controller.store import Store
from controller.telemetry import Telemetry
from policies.ids import AgentId, BlobHash, ServiceId
from policies.roofline import DeviceCalibration
from sla.errors import AgentLostError, InvalidInputError, NotFoundError, RefusedError

BLOB = bytes(range(256)) * 4096
BLOB_HASH = BlobHash(hashlib.sha256(BLOB).hexdigest())


CALIBRATION = DeviceCalibration(
    matmul_flops_per_s=6e10, conv_flops_per_s=5e10, copy_bytes_per_s=1e10, launch_ms=0.05, spread=0.04
)


class Blobs:
    """One file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(BLOB)

    def blob_path(self, sha256: str) -> Path | None:
        return self.path if sha256 == BLOB_HASH else None


class Centre:
    """A door with everything behind it, as the controller would build it."""

    def __init__(self, store: Store, directory: Path, clock: Any, make_facts: Any) -> None:
        self.directory, self.clock, self.make_facts = directory, clock, make_facts
        self.state = State(store)
        self.ca = CertificateAuthority(directory / "ca")
        self.telemetry = Telemetry()
        self.events = EventLog(clock)
        self.fleet = FleetRegistry(self.telemetry, clock, self.events, SuspicionSettings())
        self.hellos: list[AgentId] = []
        self.reports: list[Report] = []
        self.heard = asyncio.Event()
        self.door = AgentDoor(
            state=self.state, ca=self.ca, blobs=Blobs(directory / "blob"), fleet=self.fleet, telemetry=self.telemetry,
            clock=clock, events=self.events, on_hello=lambda agent, _: self.hellos.append(agent), on_report=self._on_report,
        )  # fmt: skip
        self.connections: list[Connection] = []

    def _on_report(self, agent: AgentId, report: Report) -> None:
        self.reports.append(report)
        self.heard.set()

    async def token(self, uses: int = 1) -> str:
        return await self.state.create_token(ttl_s=600, uses=uses, now_s=self.clock.wall_s())

    def device(self, name: str) -> Identity:
        return Identity(self.directory / name)

    async def enroll(self, device: Identity, token: str, **facts: Any) -> AgentId:
        """As a device does it."""
        return await enroll(
            "127.0.0.1", self.door.port, token, self.ca.fingerprint, device, self.make_facts(**facts), sleep=_no_sleep
        )

    async def joined(self, name: str = "device") -> Identity:
        device = self.device(name)
        await self.enroll(device, await self.token())
        return device

    async def dial(self, device: Identity) -> Connection:
        connection = await connect("127.0.0.1", self.door.port, device.client_context(), _obey)
        self.connections.append(connection)
        return connection

    async def hello(self, device: Identity, **facts: Any) -> Connection:
        connection = await self.dial(device)
        answer, _ = await connection.call(Hello(protocol=PROTOCOL_VERSION, facts=self.make_facts(**facts)), timeout_s=5)
        assert isinstance(answer, Welcome)
        return connection

    async def report(self, connection: Connection, **changed: Any) -> None:
        self.heard.clear()
        plain = {"sequence": 1, "cpu_saturation": 0.2, "memory_free_bytes": 1, "queue_depth": 0, "loaded_bytes": 0}
        await connection.send(Report(**(plain | changed)))
        await asyncio.wait_for(self.heard.wait(), 5)

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()
        await self.door.close()


async def _no_sleep(_: float) -> None:
    await asyncio.sleep(0)


async def _obey(connection: Connection, message: Message, tensors: Any) -> tuple[Message, dict[str, Any]]:
    return Done(), {}


@pytest_asyncio.fixture
async def centre(valkey_store: Store, tmp_path: Path, clock: Any, make_facts: Any) -> AsyncIterator[Centre]:
    centre = Centre(valkey_store, tmp_path, clock, make_facts)
    await centre.door.open("127.0.0.1", 0)
    yield centre
    await centre.close()


# --- enrollment


async def test_a_device_enrolls_with_a_token_and_is_durable_before_it_is_told(centre: Centre) -> None:
    device = centre.device("device")
    agent = await centre.enroll(device, await centre.token())
    assert agent == device.agent_id
    stored = await centre.state.agent(agent)
    assert stored is not None
    assert stored.public_key_fingerprint == device.public_key_fingerprint()
    assert stored.seen_host == "127.0.0.1"
    assert centre.fleet.members[agent].facts.platform == "rk3588"
    assert [event.kind for event in centre.events.tail()] == ["agent-enrolled"]


async def test_the_same_key_may_finish_what_it_began_and_keeps_its_name(centre: Centre) -> None:
    token = await centre.token(uses=1)
    device = centre.device("device")
    first = await centre.enroll(device, token)
    assert await centre.enroll(device, token) == first, "the link dropped before the answer came"
    assert len(centre.fleet.members) == 1
    with pytest.raises(RefusedError, match="used up"):
        await centre.enroll(centre.device("another"), token)


async def test_an_enrollment_that_was_cut_off_leaves_no_second_name_behind(centre: Centre) -> None:
    """spiffe/spire issue 2454: what was stored and what the device holds after its retry must be the same agent."""
    token, device = await centre.token(), centre.device("device")
    message = Enroll(token=token, csr_pem=device.csr_pem(), facts=centre.make_facts())

    async def one_try() -> object:
        connection = await connect("127.0.0.1", centre.door.port, client_context(centre.ca.ca_pem, lambda: 0.0))
        centre.connections.append(connection)
        return await connection.call(message, timeout_s=5)

    answers = await asyncio.gather(one_try(), one_try(), one_try())
    names = {answer[0].agent_id for answer in answers if isinstance(answer, tuple) and isinstance(answer[0], Enrolled)}
    assert len(names) == 1
    assert [record.id for record in await centre.state.agents()] == list(names)


async def test_a_revoked_key_that_gets_a_new_token_comes_back_under_a_new_name(centre: Centre) -> None:
    device = await centre.joined()
    before = device.agent_id
    assert before is not None
    await centre.state.revoke_agent(before)
    centre.fleet.members.pop(before)
    with pytest.raises(RefusedError, match="not enrolled here any more"):
        await centre.hello(device)
    after = await centre.enroll(device, await centre.token())
    assert after != before
    await centre.hello(device)


async def test_an_unknown_and_an_expired_token_are_refused_in_a_sentence(centre: Centre) -> None:
    with pytest.raises(RefusedError, match="not known here"):
        await centre.enroll(centre.device("a"), "tgj_nonsense")
    token = await centre.token()
    centre.clock.advance(601_000)
    with pytest.raises(RefusedError, match="expired"):
        await centre.enroll(centre.device("b"), token)
    assert centre.fleet.members == {}


@pytest.mark.parametrize(
    "facts",
    [
        {"platform": "quantum"},
        {"hostname": "bad name\n"},
        {"hostname": "good\n"},
        {"zone": "../.."},
        {"slowdown": float("nan")},
        {"slowdown": 0.0},
        {"device_type": "a b"},
        {"device_type": "x" * 64},
        {"calibration": msgspec.structs.replace(CALIBRATION, conv_flops_per_s=0.0)},
        {"calibration": msgspec.structs.replace(CALIBRATION, launch_ms=float("nan"))},
        {"memory_budget_bytes": -1},
        {"memory_budget_bytes": 1 << 60},
        {"peer_port": 70_000},
        {"ingress_port": -1},
        {"claimed_host": "x" * 300},
        {"claimed_host": "http://evil/"},
        {"versions": {"a": "x" * 5000}},
        {"versions": {str(n): "1" for n in range(60)}},
        {"fingerprint": "x" * 500},
    ],
)
async def test_facts_out_of_bounds_are_refused_and_spend_no_token(centre: Centre, facts: dict[str, Any]) -> None:
    token = await centre.token(uses=1)
    with pytest.raises(InvalidInputError):
        await centre.enroll(centre.device("device"), token, **facts)
    assert await centre.state.agents() == []
    await centre.enroll(centre.device("device"), token)


# --- who may pass


@pytest.mark.parametrize(
    "message",
    [
        Hello(protocol=PROTOCOL_VERSION, facts=None),  # type: ignore[arg-type]
        FetchBlob(sha256=BLOB_HASH, offset=0, length=10),
        Renew(csr_pem=""),
    ],
)
async def test_without_a_certificate_only_enrollment_is_answered(
    centre: Centre, message: Message, make_facts: Any
) -> None:
    if isinstance(message, Hello):
        message = Hello(protocol=PROTOCOL_VERSION, facts=make_facts())
    connection = await connect("127.0.0.1", centre.door.port, client_context(centre.ca.ca_pem, lambda: 0.0))
    centre.connections.append(connection)
    with pytest.raises(RefusedError, match="enroll first"):
        await connection.call(message, timeout_s=5)
    await connection.call(GetCa(), timeout_s=5)


async def test_a_certificate_of_another_cluster_does_not_open_the_door(centre: Centre, tmp_path: Path) -> None:
    stranger, other = Identity(tmp_path / "stranger"), CertificateAuthority(tmp_path / "other-ca")
    pem = other.sign_agent(stranger.csr_pem(), AgentId("stranger"), now_s=centre.clock.wall_s())
    stranger.save_certificate(pem, other.ca_pem)
    context = client_context(centre.ca.ca_pem, lambda: 0.0)
    context.load_cert_chain(stranger.directory / "certificate.pem", stranger.directory / "key.pem")
    with pytest.raises((RefusedError, AgentLostError), match="certificate"):
        await connect("127.0.0.1", centre.door.port, context)


async def test_an_older_protocol_is_refused_with_both_versions(centre: Centre) -> None:
    connection = await centre.dial(await centre.joined())
    with pytest.raises(RefusedError, match=f"protocol 0, this controller {PROTOCOL_VERSION}"):
        await connection.call(Hello(protocol=0, facts=centre.make_facts()), timeout_s=5)
    assert centre.hellos == []


async def test_a_message_for_agents_is_no_message_for_the_centre(centre: Centre) -> None:
    connection = await centre.hello(await centre.joined())
    with pytest.raises(InvalidInputError, match="does not take the message Leave"):
        await connection.call(Leave(), timeout_s=5)


async def test_a_cloned_disk_is_told_apart_and_refused_while_the_first_one_works_on(centre: Centre) -> None:
    device = await centre.joined()
    first = await centre.hello(device)
    with pytest.raises(RefusedError, match="clone"):
        await centre.hello(device, fingerprint="other-hardware")
    assert not first.closed
    await centre.report(first)
    assert len(centre.hellos) == 1


async def test_of_two_clones_that_dial_at_once_exactly_one_gets_in(centre: Centre) -> None:
    device = await centre.joined()
    results = await asyncio.gather(
        centre.hello(device, fingerprint="one"), centre.hello(device, fingerprint="two"), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == ["Connection", "RefusedError"]


async def test_the_same_device_on_a_new_connection_replaces_its_old_one(centre: Centre) -> None:
    device = await centre.joined()
    old = await centre.hello(device)
    new = await centre.hello(device)
    await _until(lambda: old.closed)
    agent = device.agent_id
    assert agent is not None
    connection = centre.fleet.connection(agent)
    assert connection is not None
    await connection.call(Leave(), timeout_s=5)
    await centre.report(new)
    assert centre.fleet.members[agent].state == "live"


async def test_a_lost_link_is_noticed_at_once(centre: Centre) -> None:
    device = await centre.joined()
    connection = await centre.hello(device)
    agent = device.agent_id
    assert agent is not None
    connection.abort()
    await _until(lambda: centre.fleet.connection(agent) is None)
    centre.clock.advance(5000)
    assert centre.fleet.look() == [agent]


# --- addresses


async def test_the_claimed_address_is_used_if_it_answers_and_both_are_kept(centre: Centre) -> None:
    server = await serve(_obey, "127.0.0.1", 0, None)
    device = await centre.joined()
    await centre.hello(device, claimed_host="localhost", peer_port=server.port)
    agent = device.agent_id
    assert agent is not None
    member = centre.fleet.members[agent]
    assert member.address is not None
    assert (member.address.host, member.address.port) == ("localhost", server.port)
    assert (member.facts.claimed_host, member.record.seen_host) == ("localhost", "127.0.0.1")
    server.close()


async def test_the_address_that_was_seen_is_used_when_the_claimed_one_is_of_the_wrong_card(centre: Centre) -> None:
    """kubeedge/kubeedge issue 6027."""
    server = await serve(_obey, "127.0.0.1", 0, None)
    device = await centre.joined()
    await centre.hello(device, claimed_host="host.invalid", peer_port=server.port)
    agent = device.agent_id
    assert agent is not None
    address = centre.fleet.members[agent].address
    assert address is not None
    assert (address.host, address.port) == ("127.0.0.1", server.port)
    server.close()


# --- reports


async def test_a_report_reaches_telemetry_and_its_unsound_parts_do_not(centre: Centre) -> None:
    device = await centre.joined()
    connection = await centre.hello(device)
    agent = device.agent_id
    assert agent is not None
    good = ServiceReport(service_id=ServiceId("s"), epoch=1, ok=1, failed=0, fell_back=0, latency_buckets={100: 1})
    bad = ServiceReport(service_id=ServiceId("s"), epoch=2, ok=-7, failed=0, fell_back=0, latency_buckets={})
    ghost = PeerReport(peer=AgentId("ghost"), rtt_ms=1, jitter_ms=0, bandwidth_bytes_per_s=1e6)
    await centre.report(
        connection, cpu_saturation=17.0, services=(bad, good), peers=(ghost,), faults=("x" * 1000,), cached=(BLOB_HASH,)
    )
    assert centre.reports[0].services == (good,)
    assert centre.telemetry.dropped == 2
    assert centre.telemetry.link_views(0.0) == {}
    assert centre.fleet.members[agent].cached == {BLOB_HASH}
    assert [len(fault) for fault in centre.fleet.members[agent].faults] == [300]


async def test_a_calibration_comes_with_the_hello_or_later_and_an_impossible_one_is_dropped(centre: Centre) -> None:
    device = await centre.joined()
    connection = await centre.hello(device, device_type="rk3588-1", calibration=CALIBRATION)
    agent = device.agent_id
    assert agent is not None
    assert centre.fleet.view().agents[agent].calibration == CALIBRATION
    finer = msgspec.structs.replace(CALIBRATION, spread=0.01, conv_flops_per_s=4e10)
    await centre.report(connection, calibration=finer)
    assert centre.fleet.view().agents[agent].calibration == finer
    centre.heard.clear()
    await centre.report(connection, calibration=msgspec.structs.replace(finer, copy_bytes_per_s=-1.0))
    assert centre.fleet.view().agents[agent].calibration == finer
    assert centre.telemetry.dropped == 1


async def test_reports_pass_while_a_bulk_transfer_fills_its_own_connection(centre: Centre) -> None:
    """kubeedge/kubeedge issue 6184: a model push must not make a live agent look lost."""
    device = await centre.joined()
    control, bulk = await centre.hello(device), await centre.dial(device)
    agent = device.agent_id
    assert agent is not None
    stop = asyncio.Event()

    async def push() -> int:
        fetched = 0
        while not stop.is_set():
            _, tensors = await bulk.call(FetchBlob(sha256=BLOB_HASH, offset=0, length=4 << 20), timeout_s=10)
            fetched += tensors["data"].nbytes
        return fetched

    pushes = [asyncio.create_task(push()) for _ in range(4)]
    for sequence in range(20):
        centre.clock.advance(500)
        await centre.report(control, sequence=sequence)
        assert centre.fleet.look() == []
    stop.set()
    assert all(fetched > 0 for fetched in await asyncio.gather(*pushes))
    assert centre.fleet.members[agent].state == "live"


# --- files


async def test_a_file_comes_in_pieces_from_any_offset(centre: Centre) -> None:
    bulk = await centre.dial(await centre.joined())
    found = b""
    while len(found) < len(BLOB):
        answer, tensors = await bulk.call(FetchBlob(sha256=BLOB_HASH, offset=len(found), length=300_000), timeout_s=5)
        assert isinstance(answer, BlobChunk)
        assert answer.total_bytes == len(BLOB)
        found += tensors["data"].tobytes()
    assert hashlib.sha256(found).hexdigest() == BLOB_HASH


@pytest.mark.parametrize(("offset", "length"), [(-1, 10), (len(BLOB) + 1, 10), (0, 0), (0, -5)])
async def test_a_piece_outside_the_file_is_refused(centre: Centre, offset: int, length: int) -> None:
    bulk = await centre.dial(await centre.joined())
    with pytest.raises(InvalidInputError, match="outside the file"):
        await bulk.call(FetchBlob(sha256=BLOB_HASH, offset=offset, length=length), timeout_s=5)


@pytest.mark.parametrize("name", ["0" * 64, "../ca/ca-key.pem", ""])
async def test_there_is_no_file_but_by_its_hash(centre: Centre, name: str) -> None:
    bulk = await centre.dial(await centre.joined())
    with pytest.raises(NotFoundError):
        await bulk.call(FetchBlob(sha256=BlobHash(name), offset=0, length=10), timeout_s=5)


# --- certificates


async def test_a_certificate_is_renewed_for_the_key_it_was_made_for_only(centre: Centre, tmp_path: Path) -> None:
    device = await centre.joined()
    connection = await centre.hello(device)
    answer, _ = await connection.call(Renew(csr_pem=device.csr_pem()), timeout_s=5)
    assert isinstance(answer, Enrolled)
    assert answer.agent_id == device.agent_id
    with pytest.raises(RefusedError, match="only renew the key"):
        await connection.call(Renew(csr_pem=Identity(tmp_path / "thief").csr_pem()), timeout_s=5)


async def _until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen within 5 s")
