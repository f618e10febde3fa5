"""One TCP or TLS connection as a stream of frames: receiving without copies, sending with back-pressure."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Final, Protocol, cast

from agents.frames import Frame, FrameAssembler, FrameLimits
from sla.errors import AgentLostError, InvalidInputError

log = logging.getLogger(__name__)

_SLICE_BYTES: Final = 256 * 1024
"""Written at a time: the kernel sends one slice while the next is encrypted, and the other side decrypts meanwhile."""
_JOIN_BELOW_BYTES: Final = 64 * 1024
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 12_000}
"""A peer that vanished without a word is noticed within about twelve seconds (milliseconds for the last)."""


class StreamOwner(Protocol):
    """Who is told what happens on a stream; called on the event loop's thread."""

    def stream_opened(self) -> None: ...

    def frame_received(self, frame: Frame) -> None:
        """May raise InvalidInputError: the connection is then closed."""
        ...

    def stream_lost(self, reason: Exception | None) -> None: ...


class FrameStream(asyncio.BufferedProtocol):
    """The protocol object of one connection."""

    def __init__(self, owner: StreamOwner, limits: FrameLimits) -> None:
        self._owner = owner
        self._assembler = FrameAssembler(owner.frame_received, limits)
        self._transport: asyncio.Transport | None = None
        self._turn = asyncio.Lock()
        self._writable = asyncio.Event()
        self._lost = asyncio.Event()
        self._broken = False
        """Set after a frame that was refused; what still arrives is thrown away."""
        self.peer_host = ""
        self.peer_port = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._lost.is_set() and not self._transport.is_closing()

    @property
    def is_writable(self) -> bool:
        """False while the network takes no more."""
        return self._writable.is_set()

    @property
    def is_reading(self) -> bool:
        """False while bytes are left in the network, see `set_reading`."""
        return self._transport is not None and self._transport.is_reading()

    @property
    def tls(self) -> ssl.SSLObject | None:
        """The TLS state, if there is one."""
        tls: ssl.SSLObject | None = self._transport.get_extra_info("ssl_object") if self._transport else None
        return tls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's transports are not subclasses.
        self._transport = transport = cast(asyncio.Transport, transport)
        self._writable.set()
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self.peer_host, self.peer_port = str(peer[0]), int(peer[1])
        _set_options(transport.get_extra_info("socket"))
        self._owner.stream_opened()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(bytearray(4096)) if self._broken else self._assembler.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._broken:
            return
        try:
            self._assembler.advance(nbytes)
        except InvalidInputError as error:
            log.warning("Closing the connection with %s: %s", self.peer_host, error)
            self._broken = True
            self.abort()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        self._writable.set()
        self._owner.stream_lost(exc)

    async def write(self, pieces: list[bytes | memoryview]) -> None:
        """Hand one frame to the transport when earlier ones have mostly left. Raises AgentLostError if the stream is closed.

        A frame is written whole or not at all, however the caller is cancelled.
        """
        async with self._turn:
            await self._writable.wait()
            if self._transport is None or not self.is_open:
                raise AgentLostError(f"The connection with {self.peer_host} is closed.")
            _write_now(self._transport, pieces)

    def set_reading(self, wanted: bool) -> None:
        """Stop or go on taking bytes from the network."""
        if self._transport is None or not self.is_open or self._transport.is_reading() == wanted:
            return
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        if self._transport is not None:
            self._transport.abort()

    async def close(self, grace_s: float) -> None:
        """Send what was written, then close; after `grace_s` close anyway."""
        if self._transport is None:
            return
        self._transport.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._lost.wait()
        except TimeoutError:
            self.abort()


def _write_now(transport: asyncio.Transport, pieces: list[bytes | memoryview]) -> None:
    if sum(len(piece) for piece in pieces) <= _JOIN_BELOW_BYTES:
        transport.write(b"".join(pieces))
        return
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _SLICE_BYTES):
            transport.write(view[start : start + _SLICE_BYTES])


def _set_options(sock: socket.socket | None) -> None:
    """Small messages leave at once, and a silent death is noticed. Buffers are left to the kernel, which tunes them better."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)  # macOS lacks some
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
