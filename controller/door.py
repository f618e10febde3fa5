"""The agents' door: enrollment, the control connection of each agent, and the bulk connection for shard files."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from agents.calibration import is_sound
from agents.messages import (
    PROTOCOL_VERSION,
    Address,
    BlobChunk,
    Ca,
    DeviceFacts,
    Enroll,
    Enrolled,
    FetchBlob,
    GetCa,
    Hello,
    Message,
    Renew,
    Report,
    Welcome,
)
from agents.wire import Connection, Tensors, WireServer, serve
from controller.clock import Clock
from controller.events import EventLog
from controller.fleet import FleetRegistry
from controller.pki import CertificateAuthority, public_key_fingerprint
from controller.records import AgentRecord
from controller.state import State
from controller.telemetry import Telemetry
from policies.ids import AgentId
from policies.platforms import platform
from sla.errors import InvalidInputError, NotFoundError, RefusedError

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 4 << 20
MAX_MEMORY_BYTES = 1 << 50
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST = re.compile(r"[A-Za-z0-9:.%_-]{0,253}")


class BlobFiles(Protocol):
    """Files by content hash."""

    def blob_path(self, sha256: str) -> Path | None:
        """Where the file lies, None if there is no such file."""
        ...


class AgentDoor:
    """Answers everything that agents send to the centre. One instance per controller."""

    def __init__(
        self, *, state: State, ca: CertificateAuthority, blobs: BlobFiles, fleet: FleetRegistry, telemetry: Telemetry,
        clock: Clock, events: EventLog, on_hello: Callable[[AgentId, Hello], None], on_report: Callable[[AgentId, Report], None],
    ) -> None:  # fmt: skip
        self._state = state
        self._ca = ca
        self._blobs = blobs
        self._fleet = fleet
        self._telemetry = telemetry
        self._clock = clock
        self._events = events
        self._on_hello = on_hello
        self._on_report = on_report
        self._server: WireServer | None = None
        self.port = 0

    async def open(self, host: str, port: int) -> None:
        """Listen. Raises OSError when the port is in use."""
        context = self._ca.server_context(client_certs="optional")
        self._server = await serve(self._handle, host, port, context)
        self.port = self._server.port

    async def close(self) -> None:
        """Stop listening; open connections end with the process."""
        if self._server is not None:
            self._server.close()

    async def _handle(
        self, connection: Connection, message: Message, tensors: dict[str, np.ndarray]
    ) -> tuple[Message, Tensors] | None:
        match message:
            case GetCa():
                return Ca(ca_pem=self._ca.ca_pem), {}
            case Enroll():
                return await self._enroll(connection, message), {}
        agent = self._known(connection)
        match message:
            case Report():
                self._fold(agent, connection, message)
                return None
            case Hello():
                return await self._hello(agent, connection, message), {}
            case FetchBlob():
                return await asyncio.to_thread(self._chunk, message)
            case Renew():
                return await self._renew(agent, message), {}
        raise InvalidInputError(f"The agents' door does not take the message {type(message).__name__}.")

    def _known(self, connection: Connection) -> AgentId:
        agent = connection.peer_id
        if agent is None:
            raise RefusedError("This door needs a client certificate; enroll first with a join token.")
        if agent not in self._fleet.members:
            raise RefusedError(f"{agent} is not enrolled here any more; enroll again with a new join token.")
        return agent

    async def _enroll(self, connection: Connection, message: Enroll) -> Enrolled:
        facts = _checked(message.facts)
        began_ms = self._clock.now_ms()
        key = public_key_fingerprint(message.csr_pem)
        await self._state.spend_token(message.token, key, now_s=self._clock.wall_s())
        known = next((m.record for m in self._fleet.members.values() if m.record.public_key_fingerprint == key), None)
        agent = known.id if known else await self._name_for(facts.hostname, key)
        certificate = self._ca.sign_agent(message.csr_pem, agent, now_s=self._clock.wall_s())
        record = AgentRecord(
            id=agent,
            facts=facts,
            public_key_fingerprint=key,
            enrolled_at_s=self._clock.wall_s(),
            seen_host=connection.peer_host,
            enrolled_in_ms=self._clock.now_ms() - began_ms,
        )
        self._fleet.admit(await self._state.put_agent(record))
        self._events.add("agent-enrolled", f"{agent} ({facts.platform}, {facts.evidence}) enrolled.", agent=agent)
        return Enrolled(agent_id=agent, certificate_pem=certificate, ca_pem=self._ca.ca_pem)

    async def _name_for(self, hostname: str, key: str) -> AgentId:
        """The name of a new agent. It follows from the key, so that an enrollment that was cut off leaves no second name behind."""
        for digits in (6, 16, len(key)):
            agent = AgentId(f"{_slug(hostname)}-{key[:digits]}"[:63])
            there = await self._state.agent(agent)
            if there is None or (there.public_key_fingerprint == key and not there.revoked):
                return agent
        return AgentId(f"{_slug(hostname)}-{secrets.token_hex(6)}")  # A key that was revoked and may come back anew.

    async def _renew(self, agent: AgentId, message: Renew) -> Enrolled:
        record = self._fleet.members[agent].record
        if public_key_fingerprint(message.csr_pem) != record.public_key_fingerprint:
            raise RefusedError(f"{agent} may only renew the key it enrolled with.")
        certificate = self._ca.sign_agent(message.csr_pem, agent, now_s=self._clock.wall_s())
        return Enrolled(agent_id=agent, certificate_pem=certificate, ca_pem=self._ca.ca_pem)

    async def _hello(self, agent: AgentId, connection: Connection, message: Hello) -> Welcome:
        if message.protocol != PROTOCOL_VERSION:
            raise RefusedError(
                f"{agent} speaks protocol {message.protocol}, this controller {PROTOCOL_VERSION}; install the same version."
            )
        facts = _checked(message.facts)
        address = await _reachable(facts, connection.peer_host)
        # From here to `connected` nothing is awaited: of two clones that dial at once, one is first.
        member = self._fleet.members.get(agent)
        if member is None:
            raise RefusedError(f"{agent} is not enrolled here any more; enroll again with a new join token.")
        other = member.connection
        if other is not None and other is not connection and not other.closed:
            if member.facts.fingerprint != facts.fingerprint:
                raise RefusedError(
                    f"{agent} is already connected from other hardware: this disk is a clone; enroll it anew."
                )
            other.abort()
        member.cached = frozenset(message.cached)
        self._fleet.connected(agent, connection, facts, address)
        connection.on_close(lambda: self._fleet.disconnected(agent, connection))
        self._on_hello(agent, message)
        return Welcome(agent_id=agent)

    def _fold(self, agent: AgentId, connection: Connection, report: Report) -> None:
        member = self._fleet.members[agent]
        if member.connection is not connection:
            return  # A report that overtook its hello, or one from a connection that was replaced.
        if report.cached is not None:
            member.cached = frozenset(report.cached)
        for fault in report.faults[:20]:
            member.faults.append(fault[:300])
            self._events.add("agent-fault", f"{agent}: {fault[:300]}", agent=agent)
        if report.calibration is not None:
            self._fleet.calibrated(agent, report.calibration)
        known = tuple(peer for peer in report.peers if peer.peer in self._fleet.members)
        report = msgspec.structs.replace(report, peers=known)
        taken = self._telemetry.fold(agent, report, self._clock.now_ms())
        self._on_report(agent, msgspec.structs.replace(report, services=taken))

    def _chunk(self, message: FetchBlob) -> tuple[Message, Tensors]:
        path = self._blobs.blob_path(message.sha256)
        if path is None:
            raise NotFoundError(f"There is no file with hash {message.sha256[:16]}.")
        total = path.stat().st_size
        if not 0 <= message.offset <= total or message.length <= 0:
            raise InvalidInputError(f"Offset {message.offset} is outside the file of {total} bytes.")
        with path.open("rb") as file:
            file.seek(message.offset)
            data = file.read(min(message.length, MAX_CHUNK_BYTES))
        return BlobChunk(total_bytes=total), {"data": np.frombuffer(data, dtype=np.uint8)}


async def _reachable(facts: DeviceFacts, seen_host: str) -> Address:
    """The claimed address if it answers, else the one that was seen (kubeedge issue 6027: the wrong network card)."""
    for host in dict.fromkeys((facts.claimed_host, seen_host)):
        if not host:
            continue
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, facts.peer_port), timeout=2.0)
        except (OSError, TimeoutError):
            continue
        writer.close()
        return Address(host, facts.peer_port)
    return Address(seen_host, facts.peer_port)


def _checked(facts: DeviceFacts) -> DeviceFacts:
    """Facts whose every string and number is in bounds. Raises InvalidInputError."""
    platform(facts.platform)
    if not _NAME.fullmatch(facts.hostname):
        raise InvalidInputError(f"{facts.hostname[:80]!r} is not a host name.", pointer="/facts/hostname")
    if not _NAME.fullmatch(facts.zone):
        raise InvalidInputError(f"{facts.zone[:80]!r} is not a zone name.", pointer="/facts/zone")
    if not 0.01 <= facts.slowdown <= 1000:
        raise InvalidInputError(
            f"A slowdown of {facts.slowdown} is not plausible; accepted is 0.01 to 1000.", pointer="/facts/slowdown"
        )
    if not _HOST.fullmatch(facts.claimed_host):
        raise InvalidInputError(f"{facts.claimed_host[:80]!r} is not an address.", pointer="/facts/claimed_host")
    if (
        not 0 <= facts.memory_budget_bytes <= MAX_MEMORY_BYTES
        or not 0 <= facts.peer_port <= 65535
        or not 0 <= facts.ingress_port <= 65535
    ):
        raise InvalidInputError("Memory and ports of a device must not be negative or too large.", pointer="/facts")
    if facts.device_type and not _NAME.fullmatch(facts.device_type):
        raise InvalidInputError(f"{facts.device_type[:80]!r} is not a type of device.", pointer="/facts/device_type")
    if facts.calibration is not None and not is_sound(facts.calibration):
        raise InvalidInputError("The rates of a calibration must be plausible.", pointer="/facts/calibration")
    if len(facts.versions) > 50 or len(facts.providers) > 50 or len(facts.fingerprint) > 200:
        raise InvalidInputError("A device may name at most 50 versions and 50 providers.", pointer="/facts")
    if any(len(text) > 200 for text in (*facts.versions, *facts.versions.values(), *facts.providers)):
        raise InvalidInputError("Versions and providers of a device have at most 200 characters.", pointer="/facts")
    return facts


def _slug(hostname: str) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", hostname.lower()).strip("-")[:40] or "agent"
