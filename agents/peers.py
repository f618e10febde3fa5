"""The other agents, as this one reaches them: connections dialled on demand, probed all the time, and known to be broken at once.

Each peer has one connection for tensors and one for probes, so that a probe never waits behind bulk data.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median, pstdev

import numpy as np

from agents.messages import Address, Message, PeerReport, Probe, ShapeLink
from agents.shaping import LinkShaper
from agents.wire import Connection, connect
from policies.ids import AgentId
from sla.errors import AgentLostError, DeadlineExceededError, InvalidInputError, RefusedError, TidegateError

log = logging.getLogger("tidegate.peers")
Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """How peers are dialled and probed."""

    probe_every_s: float = 0.5
    bandwidth_probe_every_s: float = 5.0
    bandwidth_probe_bytes: int = 128 << 10
    bandwidth_probe_most_bytes: int = 1 << 20
    """Where round trips vary, a probe carries more, so that its bytes take longer than a round trip is off."""
    dial_timeout_s: float = 2.0
    silence_s: float = 3.0
    """A peer that leaves a probe unanswered for this long is taken for broken until it answers again."""
    redial_base_s: float = 0.2
    redial_cap_s: float = 5.0


NEWEST = 9
"""Round trips that count for the usual one; those of some five seconds."""
BULKS_KEPT = 12
ODD = 2.0
"""A bulk probe that took less than one over so much of what the others say, or more than so much, is odd."""
SURE_OF = 5.0
"""The bytes of a bulk probe should take so many times the jitter of a round trip ..."""
LONGEST_MS = 250.0
"""... but no longer: a twentieth of the link."""


@dataclass(slots=True)
class LinkMeter:
    """Round trips and bandwidth of one link, from probes; pure arithmetic."""

    recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    bulks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=BULKS_KEPT))
    """(milliseconds per byte, bytes) of the recent bulk probes."""
    odd: tuple[float, int] | None = None
    """The newest bulk probe, if it was odd: the next one tells whether that was chance or the link changed."""

    def round_trip(self, ms: float) -> None:
        """One small probe was answered after `ms`."""
        self.recent_ms.append(ms)

    @property
    def rtt_ms(self) -> float | None:
        """The median of the newest: a process that was late once is no slow link. None before the first."""
        return median(list(self.recent_ms)[-NEWEST:]) if self.recent_ms else None

    def bulk(self, n_bytes: int, ms: float) -> None:
        """A probe that carried `n_bytes` was answered after `ms`: what it took beyond a usual round trip is the bytes' time."""
        usual_ms = median(self.recent_ms) if self.recent_ms else 0.0
        sample = (max(ms - usual_ms, 0.01) / n_bytes, n_bytes)
        side = self._side(sample)
        before, self.odd = self.odd, None
        if before is not None and side and side == self._side(before):
            self.bulks.clear()
        elif side and before is None:
            self.odd = sample
            return
        self.bulks.extend([sample] if before is None else [before, sample])

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """What half of the bytes of the recent bulk probes were carried at or above; 0 before the first.

        One probe says little: its round trip was longer or shorter than usual, or one of the two machines was busy.
        """
        per_byte_ms = self._per_byte_ms()
        return 0.0 if per_byte_ms is None else min(1000.0 / per_byte_ms, 12.5e9)

    def bulk_bytes(self, least: int, most: int) -> int:
        """What the next bulk probe should carry, within these bounds."""
        wanted = self.bandwidth_bytes_per_s * min(SURE_OF * self.jitter_ms, LONGEST_MS) / 1000.0
        return int(min(max(least, wanted), most))

    def _side(self, sample: tuple[float, int]) -> int:
        """1 for a probe that was oddly slow, -1 for one that was oddly quick, else 0."""
        usual = self._per_byte_ms()
        return 0 if usual is None else (sample[0] > ODD * usual) - (sample[0] * ODD < usual)

    def _per_byte_ms(self) -> float | None:
        left = sum(n_bytes for _, n_bytes in self.bulks) / 2.0
        for per_byte_ms, n_bytes in sorted(self.bulks):
            left -= n_bytes
            if left <= 0.0:
                return per_byte_ms
        return None

    @property
    def jitter_ms(self) -> float:
        """Standard deviation of the recent round trips."""
        return pstdev(self.recent_ms) if len(self.recent_ms) > 1 else 0.0


class _Peer:
    """One peer: where it is, the two connections, and how it was lately."""

    def __init__(self, agent: AgentId, address: Address) -> None:
        self.agent = agent
        self.address = address
        self.meter = LinkMeter()
        self.connections: dict[str, Connection] = {}
        self.locks = {"data": asyncio.Lock(), "probe": asyncio.Lock()}
        self.is_broken = False
        self.failures = 0
        self.not_before_s = 0.0
        self.prober: asyncio.Task[None] | None = None


class PeerPool:
    """Outgoing connections to all peers, and the shaping of what is sent to them."""

    def __init__(
        self,
        agent_id: AgentId,
        client_context: Callable[[], ssl.SSLContext],
        *,
        emulated: bool = False,
        settings: PeerSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self._agent_id = agent_id
        self._client_context = client_context
        self._emulated = emulated
        self._settings = settings or PeerSettings()
        self._clock = clock
        self._random = random.Random(seed)
        self._peers: dict[AgentId, _Peer] = {}
        self._inbound: set[Connection] = set()
        self._shapes: dict[AgentId | None, ShapeLink] = {}
        self._closed = False

    def is_broken(self, agent: AgentId) -> bool:
        """True if the last that was heard of the peer is that it is gone."""
        peer = self._peers.get(agent)
        return peer is not None and peer.is_broken

    def watch(self, addresses: Mapping[AgentId, Address]) -> None:
        """Probe exactly these peers from now on, and reach them at these addresses."""
        wanted = {agent: address for agent, address in addresses.items() if agent != self._agent_id}
        for agent in self._peers.keys() - wanted.keys():
            self._forget(self._peers.pop(agent))
        for agent, address in wanted.items():
            peer = self._peer(agent, address)
            if peer.prober is None:
                peer.prober = asyncio.create_task(self._probe_forever(peer), name=f"probe {agent}")

    async def call(
        self, agent: AgentId, address: Address, message: Message, tensors: Tensors, *, timeout_s: float
    ) -> tuple[Message, dict[str, np.ndarray]]:
        """The peer's answer; a call that is cancelled or timed out is cancelled there too.

        Raises AgentLostError if it cannot be reached or goes away, DeadlineExceededError after `timeout_s`, and the error that
        the peer answered.
        """
        known = self._peers.get(agent)
        peer = known if known is not None and known.prober is not None else self._peer(agent, address)
        began_s = self._clock()
        connection = await self._connection(peer, "data", timeout_s)
        left_s = max(timeout_s - (self._clock() - began_s), 0.001)
        return await connection.call(message, tensors, timeout_s=left_s, take_back=True)

    async def adopt(self, connection: Connection) -> None:
        """A peer dialled this agent: what is sent back over that connection is shaped too."""
        if connection.peer_id is None:
            raise RefusedError("The peer door needs a certificate of this fleet.")
        self._inbound.add(connection)
        connection.on_close(lambda: self._inbound.discard(connection))
        connection.shaper = self._shaper(connection.peer_id)

    def shape(self, message: ShapeLink) -> None:
        """Slow down what is sent to a peer, or to all. Raises RefusedError if this device is real."""
        if not self._emulated:
            raise RefusedError("Only links of emulated devices can be shaped; this device is real.")
        if not (0 <= message.delay_ms <= 60_000 and 0 <= message.jitter_ms <= 60_000):
            raise InvalidInputError(
                "A link's delay and jitter must be within a minute.", found=f"{message.delay_ms} ms, {message.jitter_ms} ms",
                accepted="0 to 60000 ms",
            )  # fmt: skip
        if message.bandwidth_bytes_per_s is not None and not message.bandwidth_bytes_per_s >= 1000:
            raise InvalidInputError("A link's bandwidth must be at least 1000 bytes per second.")
        is_free = message.delay_ms == 0 and message.jitter_ms == 0 and message.bandwidth_bytes_per_s is None
        if message.peer is None:
            self._shapes.clear()
        self._shapes.pop(message.peer, None)
        if not is_free:
            self._shapes[message.peer] = message
        outgoing = [(peer.agent, c) for peer in self._peers.values() for c in peer.connections.values()]
        for agent, connection in [*outgoing, *((c.peer_id, c) for c in self._inbound if c.peer_id is not None)]:
            connection.shaper = self._shaper(agent)

    def reports(self) -> tuple[PeerReport, ...]:
        """What was measured towards each watched peer that ever answered, or is broken."""
        return tuple(
            PeerReport(
                peer=peer.agent, rtt_ms=peer.meter.rtt_ms or 0.0, jitter_ms=peer.meter.jitter_ms,
                bandwidth_bytes_per_s=peer.meter.bandwidth_bytes_per_s, broken=peer.is_broken,
            )
            for peer in self._peers.values()
            if peer.prober is not None and (peer.meter.rtt_ms is not None or peer.is_broken)
        )  # fmt: skip

    async def close(self) -> None:
        """Close all connections and stop probing."""
        self._closed = True
        probers = [peer.prober for peer in self._peers.values() if peer.prober is not None]
        connections = [connection for peer in self._peers.values() for connection in peer.connections.values()]
        for prober in probers:
            prober.cancel()
        await asyncio.gather(*probers, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in connections), return_exceptions=True)
        self._peers.clear()

    # Connections

    def _peer(self, agent: AgentId, address: Address) -> _Peer:
        peer = self._peers.get(agent)
        if peer is None:
            peer = self._peers[agent] = _Peer(agent, address)
        elif peer.address != address:
            # It came back elsewhere: what is known of the old address is void.
            for connection in peer.connections.values():
                connection.abort()
            peer.address, peer.failures, peer.not_before_s, peer.is_broken = address, 0, 0.0, False
        return peer

    def _forget(self, peer: _Peer) -> None:
        if peer.prober is not None:
            peer.prober.cancel()
        for connection in peer.connections.values():
            connection.abort()

    async def _connection(self, peer: _Peer, kind: str, timeout_s: float) -> Connection:
        async with peer.locks[kind]:
            held = peer.connections.get(kind)
            if held is not None and not held.closed:
                return held
            wait_s = peer.not_before_s - self._clock()
            if wait_s > 0:
                raise AgentLostError(
                    f"{peer.agent} cannot be reached and is tried again in {wait_s:.1f} s.", retry_after_s=wait_s
                )
            try:
                connection = await connect(
                    peer.address.host, peer.address.port, self._client_context(), expect_peer=peer.agent,
                    timeout_s=min(timeout_s, self._settings.dial_timeout_s),
                )  # fmt: skip
            except TidegateError as error:
                self._dial_failed(peer)
                raise AgentLostError(f"{peer.agent} cannot be reached: {error}") from error
            if self._closed:
                connection.abort()
                raise AgentLostError("This agent is closing.")
            peer.failures, peer.is_broken = 0, False
            peer.connections[kind] = connection
            connection.shaper = self._shaper(peer.agent)
            connection.on_close(lambda: self._dropped(peer, connection))
            return connection

    def _dial_failed(self, peer: _Peer) -> None:
        settings = self._settings
        delay_s = min(settings.redial_cap_s, settings.redial_base_s * 2 ** min(peer.failures, 10))
        peer.failures += 1
        peer.not_before_s = self._clock() + delay_s * self._random.uniform(0.5, 1.0)
        peer.is_broken = True

    def _dropped(self, peer: _Peer, connection: Connection) -> None:
        if self._closed or self._peers.get(peer.agent) is not peer or connection not in peer.connections.values():
            return
        peer.connections = {kind: each for kind, each in peer.connections.items() if each is not connection}
        if not peer.is_broken:
            log.info("the link to %s dropped", peer.agent)
        peer.is_broken = True

    def _shaper(self, agent: AgentId) -> LinkShaper | None:
        """The emulated link for one connection.

        Each connection queues by itself, so that probes pass beside data as a small flow does beside a bulk one on a real link:
        a full link must look slow, not dead (kubeedge issue 6184).
        """
        shape = self._shapes.get(agent) or self._shapes.get(None)
        if shape is None:
            return None
        rng = random.Random(self._random.random())
        return LinkShaper(shape.delay_ms, shape.jitter_ms, shape.bandwidth_bytes_per_s, rng)

    # Probes

    async def _probe_forever(self, peer: _Peer) -> None:
        settings = self._settings
        next_bulk_s = self._clock() + self._random.uniform(0.5, 1.0) * min(2.0, settings.bandwidth_probe_every_s)
        while True:
            try:
                await self._probe(peer, 64)
                if self._clock() >= next_bulk_s:
                    next_bulk_s = self._clock() + settings.bandwidth_probe_every_s * self._random.uniform(0.8, 1.2)
                    await self._bulk_probe(peer)
                    if peer.meter.odd is not None:
                        next_bulk_s = self._clock()  # Asked again at once.
            except DeadlineExceededError:
                self._fell_silent(peer)
            except TidegateError as error:
                log.debug("probe of %s: %s", peer.agent, error)
            await asyncio.sleep(settings.probe_every_s * self._random.uniform(0.9, 1.1))

    async def _probe(self, peer: _Peer, n_bytes: int) -> None:
        connection = await self._connection(peer, "probe", self._settings.dial_timeout_s)
        payload = {"probe": np.zeros(n_bytes, np.uint8)}
        began_s = self._clock()
        await connection.call(Probe(), payload, timeout_s=self._settings.silence_s)
        ms = (self._clock() - began_s) * 1000
        peer.is_broken = False
        if n_bytes <= 64:
            peer.meter.round_trip(ms)
        else:
            peer.meter.bulk(n_bytes, ms)

    async def _bulk_probe(self, peer: _Peer) -> None:
        """A bulk probe that takes too long says that the link is slow, not that the peer is gone."""
        settings = self._settings
        n_bytes = peer.meter.bulk_bytes(settings.bandwidth_probe_bytes, settings.bandwidth_probe_most_bytes)
        try:
            await self._probe(peer, n_bytes)
        except DeadlineExceededError:
            peer.meter.bulk(n_bytes, settings.silence_s * 1000)

    def _fell_silent(self, peer: _Peer) -> None:
        """The peer hangs: what waits for it is told now, and new work goes elsewhere until it answers again."""
        log.info("%s does not answer probes", peer.agent)
        peer.is_broken = True
        data = peer.connections.get("data")
        if data is not None:
            data.abort()
