"""The fleet as it is now: who is enrolled, who is connected, who is suspected or lost."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from agents.calibration import is_sound
from agents.messages import Address, DeviceFacts
from agents.wire import Connection
from controller.clock import Clock
from controller.events import EventLog
from controller.records import AgentRecord
from controller.settings import SuspicionSettings
from controller.telemetry import Telemetry
from policies.fleet import AgentState, AgentView, Fleet
from policies.ids import AgentId
from policies.platforms import PLATFORMS
from policies.roofline import DeviceCalibration

STALE_MS = float("inf")


@dataclass(slots=True)
class Member:
    """One enrolled agent. `connection` is its control connection while there is one."""

    record: AgentRecord
    facts: DeviceFacts
    state: AgentState = "lost"
    connection: Connection | None = None
    address: Address | None = None
    """Where peers reach it: the claimed address if it answered, else the one that was seen."""
    cached: frozenset[str] = frozenset()
    """Hashes of the blobs that it has on disk."""
    is_draining: bool = False
    """An operator drained it; it gets no work, whether it is connected or not."""
    faults: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    up_ms: float = 0.0
    known_ms: float = 0.0


class FleetRegistry:
    """Members and their states. Owned by the event loop; `look` is the only place where a state changes by silence."""

    def __init__(
        self, telemetry: Telemetry, clock: Clock, events: EventLog, settings: SuspicionSettings,
        file_keys: Callable[[Iterable[str]], frozenset[str]] = lambda _: frozenset(),
    ) -> None:  # fmt: skip
        self.members: dict[AgentId, Member] = {}
        self.changes = 0
        """How often the members, or what they are, changed: whoever keeps an index of them builds it anew then."""
        self._calibrated: dict[str, DeviceCalibration] = {}
        self._calibrated_at = -1
        self._telemetry = telemetry
        self._clock = clock
        self._events = events
        self._settings = settings
        self._file_keys = file_keys
        """Which shard files of registered models are among an agent's cached blobs."""
        self._looked_ms: float | None = None
        self._restored_ms = float("-inf")

    def restore(self, records: list[AgentRecord]) -> None:
        """Members known from the store. They get no work before they say hello, but a restart is no reason to give them up."""
        self._restored_ms = self._clock.now_ms()
        self.changes += 1
        for record in records:
            if not record.revoked:
                self.members[record.id] = Member(record=record, facts=record.facts, state="suspect")

    def admit(self, record: AgentRecord) -> Member:
        """A newly enrolled (or re-enrolled) agent."""
        member = self.members.get(record.id) or Member(record=record, facts=record.facts)
        member.record = record
        member.facts = record.facts
        self.members[record.id] = member
        self.changes += 1
        return member

    def remove(self, agent: AgentId) -> None:
        """It is not enrolled any more."""
        self.members.pop(agent, None)
        self.changes += 1

    def connected(self, agent: AgentId, connection: Connection, facts: DeviceFacts, address: Address) -> None:
        """The agent said hello on a fresh control connection."""
        member = self.members[agent]
        member.connection = connection
        self.changes += member.facts != facts
        member.facts = facts
        member.address = address
        member.state = "draining" if member.is_draining else "live"
        self._telemetry.heard(agent, self._clock.now_ms())
        self._events.add("agent-live", f"{agent} ({facts.platform}, {facts.evidence}) is live.", agent=agent)

    def calibrated(self, agent: AgentId, calibration: DeviceCalibration) -> None:
        """The agent measured what its device does; numbers that no device can have are dropped and counted."""
        if is_sound(calibration):
            member = self.members[agent]
            member.facts = msgspec.structs.replace(member.facts, calibration=calibration)
            self.changes += 1
        else:
            self._telemetry.dropped += 1

    def disconnected(self, agent: AgentId, connection: Connection) -> None:
        """A control connection closed; it counts only if it is the newest one."""
        member = self.members.get(agent)
        if member is not None and member.connection is connection:
            member.connection = None
            self._telemetry.closed(agent, self._clock.now_ms())

    def drain(self, agent: AgentId) -> None:
        """Give the agent no work from now on."""
        self.members[agent].is_draining = True
        self.members[agent].state = "draining"
        self._events.add("agent-draining", f"{agent} is being drained.", agent=agent)

    def undrain(self, agent: AgentId) -> None:
        """Let the agent have work again."""
        member = self.members[agent]
        member.is_draining = False
        if member.state == "draining":
            member.state = "live"
        self._events.add("agent-live", f"{agent} may have work again.", agent=agent)

    def look(self) -> list[AgentId]:
        """Update states by silence; the agents that became lost just now."""
        now_ms = self._clock.now_ms()
        elapsed_ms = now_ms - (self._looked_ms if self._looked_ms is not None else now_ms)
        self._looked_ms = now_ms
        suspicion = self._telemetry.suspicion(now_ms, self._settings.suspect_phi)
        lost = []
        for agent, member in self.members.items():
            member.known_ms += elapsed_ms
            if member.state == "lost":
                continue
            member.up_ms += elapsed_ms
            if member.connection is not None and agent not in suspicion and member.state != "suspect":
                continue  # The usual case, thousands of times a second.
            if self._is_lost(agent, member, suspicion.get(agent, 0.0), now_ms):
                member.state = "lost"
                lost.append(agent)
                if member.connection is not None:
                    member.connection.abort()  # It comes back by saying hello, which brings it up to date.
                self._events.add("agent-lost", f"{agent} is lost.", agent=agent)
            elif member.state == "live" and suspicion.get(agent, 0.0) >= self._settings.suspect_phi:
                member.state = "suspect"
                self._events.add("agent-suspect", f"{agent} is late with its reports.", agent=agent)
            elif (
                member.state == "suspect"
                and member.connection
                and suspicion.get(agent, 0.0) < self._settings.suspect_phi
            ):
                member.state = "live"
        return lost

    def _is_lost(self, agent: AgentId, member: Member, suspicion: float, now_ms: float) -> bool:
        if member.connection is None:
            if agent not in self._telemetry.agents:
                return now_ms - self._restored_ms >= self._settings.restart_grace_ms
            # A broken connection that a peer confirms is a dead process; one that nobody confirms may be our own link.
            silent_ms = now_ms - self._telemetry.agents.get(agent, "closed_ms")
            confirmed = self._telemetry.broken_towards(agent, now_ms)
            return confirmed or silent_ms >= self._settings.reconnect_grace_ms
        silent_ms = now_ms - self._telemetry.agents.get(agent, "seen_ms")
        return suspicion >= self._settings.lost_phi and silent_ms >= self._settings.lost_silence_ms

    def connection(self, agent: AgentId) -> Connection | None:
        """The control connection, if there is one that is open."""
        member = self.members.get(agent)
        return member.connection if member else None

    def addresses(self, among: Collection[AgentId] | None = None) -> dict[AgentId, Address]:
        """Where peers reach each connected agent: all of them, or these."""
        names = self.members.keys() if among is None else among
        members = ((agent, self.members.get(agent)) for agent in names)
        return {agent: member.address for agent, member in members if member is not None and member.address is not None}

    def view(self, only: Collection[AgentId] | None = None) -> Fleet:
        """The fleet as policies see it: all of it, or these agents and the links between them."""
        now_ms = self._clock.now_ms()
        calibrations = self._calibrations()
        if only is None:
            some = list(self.members.items())
        else:
            some = [(agent, self.members[agent]) for agent in only if agent in self.members]
        agents = {agent: self._agent_view(agent, member, calibrations, now_ms) for agent, member in some}
        links = {
            key: link
            for key, link in self._telemetry.link_views(now_ms, only).items()
            if link.src in agents and link.dst in agents
        }
        return Fleet(agents=agents, links=links)

    def _calibrations(self) -> dict[str, DeviceCalibration]:
        """The tightest calibration of each type of device: devices of one type shall not look different by noise.

        What one of them is really slower by (heat, a tired fan) shows in the times of its shards.
        """
        if self._calibrated_at == self.changes:
            return self._calibrated
        best: dict[str, DeviceCalibration] = {}
        for member in self.members.values():
            kind, found = member.facts.device_type, member.facts.calibration
            if kind and found is not None and (kind not in best or found.spread < best[kind].spread):
                best[kind] = found
        self._calibrated, self._calibrated_at = best, self.changes
        return best

    def _agent_view(
        self, agent: AgentId, member: Member, calibrations: Mapping[str, DeviceCalibration], now_ms: float
    ) -> AgentView:
        facts = member.facts
        table = self._telemetry.agents
        heard = agent in table
        age_ms = now_ms - table.get(agent, "seen_ms") if heard else STALE_MS
        foreign = table.get(agent, "foreign") if heard else 0.0
        # A Beta(99, 1) prior keeps a newcomer from looking either perfect or hopeless; one unit is ten minutes.
        unit_ms = 600_000.0
        availability = (99 * unit_ms + member.up_ms) / (100 * unit_ms + member.known_ms)
        return AgentView(
            id=agent,
            platform=facts.platform,
            evidence=facts.evidence,
            zone=facts.zone,
            is_cloud=facts.is_cloud,
            state=member.state,
            host=member.address.host if member.address else "",
            port=member.address.port if member.address else 0,
            ingress_port=facts.ingress_port,
            slowdown=facts.slowdown,
            memory_budget_bytes=facts.memory_budget_bytes,
            cpu_saturation=0.0 if math.isnan(foreign) else foreign,
            availability=availability,
            power_w=PLATFORMS[facts.platform].power_w if facts.platform in PLATFORMS else 10.0,
            age_ms=age_ms,
            warmed=self._file_keys(member.cached),
            device_type=facts.device_type,
            calibration=calibrations.get(facts.device_type),
        )
