"""Connections between Tidegate's processes: dialling out and listening, under mutual TLS.

The side that accepted a connection first says that it is willing (a READY frame, or a Fault), so that `connect` returns a
connection that works, or says why there is none. Arrays that are handed over are sent without a copy: do not change them afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from typing import Final

from agents.connection import DEFAULT_LIMITS, Connection, Handler, OnConnect, WireLimits, tls_words
from agents.frames import Tensors, decode_tensors, encode_tensors
from agents.stream import FrameStream
from policies.ids import AgentId
from sla.errors import AgentLostError, RefusedError, SettingsError

__all__ = [
    "Connection",
    "Handler",
    "OnConnect",
    "Tensors",
    "WireLimits",
    "WireServer",
    "connect",
    "decode_tensors",
    "encode_tensors",
    "serve",
]

log = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S: Final = 10.0


async def connect(
    host: str,
    port: int,
    ssl_context: ssl.SSLContext | None,
    handler: Handler | None = None,
    *,
    timeout_s: float = 5.0,
    expect_peer: AgentId | None = None,
    limits: WireLimits = DEFAULT_LIMITS,
) -> Connection:
    """A connection that the other side is willing to serve. Without a context nothing is encrypted: loopback only.

    Raises AgentLostError if nobody answers within `timeout_s`, RefusedError if either side does not accept the other's
    certificate or the peer is not `expect_peer`, and whatever error the other side turns us away with.
    """
    connection = Connection(handler, limits)
    try:
        async with asyncio.timeout(timeout_s):
            await _open(connection, host, port, ssl_context)
            connection.identify(expect_peer)
            refusal = await connection.ready
        if refusal is not None:
            raise refusal
    except TimeoutError:
        connection.abort()
        raise AgentLostError(f"{host}:{port} did not answer within {timeout_s:g} s.") from None
    except BaseException:
        connection.abort()
        raise
    return connection


async def _open(connection: Connection, host: str, port: int, ssl_context: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    try:
        await loop.create_connection(lambda: connection.stream, host, port, ssl=ssl_context)
    except ssl.SSLCertVerificationError as error:
        raise RefusedError(f"The certificate of {host}:{port} is not accepted: {error.verify_message}.") from error
    except ssl.SSLError as error:
        raise RefusedError(f"No secure connection with {host}:{port} is possible: {tls_words(error)}.") from error
    except TimeoutError:
        raise
    except OSError as error:
        raise AgentLostError(f"{host}:{port} cannot be reached: {error.strerror or error}.") from error


class WireServer:
    """A listening door and the connections that came through it."""

    def __init__(self, limits: WireLimits) -> None:
        self.connections: set[Connection] = set()
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._admissions: set[asyncio.Task[None]] = set()

    async def _listen(
        self,
        handler: Handler,
        host: str,
        port: int,
        ssl_context: ssl.SSLContext | None,
        on_connect: OnConnect | None,
    ) -> None:
        def accept() -> FrameStream:
            return Connection(handler, self._limits, lambda connection: self._welcome(connection, on_connect)).stream

        timeout_s = _HANDSHAKE_TIMEOUT_S if ssl_context is not None else None
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                accept, host, port, ssl=ssl_context, ssl_handshake_timeout=timeout_s, backlog=256
            )
        except OSError as error:
            raise SettingsError(
                f"Cannot listen on {host}:{port}: {error.strerror or error}; choose another address or a free port."
            ) from error

    def _welcome(self, connection: Connection, on_connect: OnConnect | None) -> None:
        if len(self.connections) >= self._limits.connections:
            log.warning("Turned %s away: %d connections are open.", connection.peer_host, len(self.connections))
            connection.abort()
            return
        self.connections.add(connection)
        connection.on_close(lambda: self.connections.discard(connection))
        admission = asyncio.get_running_loop().create_task(connection.admit(on_connect))
        self._admissions.add(admission)
        admission.add_done_callback(self._admissions.discard)

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """As of `asyncio.Server`."""
        return self._server.sockets if self._server is not None else ()

    @property
    def port(self) -> int:
        """Where it listens; of interest when it was started with port 0."""
        return int(self.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening and close every connection, at once."""
        if self._server is not None:
            self._server.close()
        for admission in self._admissions:
            admission.cancel()
        for connection in list(self.connections):
            connection.abort()

    async def wait_closed(self) -> None:
        """Returns when nothing is open any more."""
        for connection in list(self.connections):
            await connection.close()
        if self._server is not None:
            await self._server.wait_closed()

    async def __aenter__(self) -> WireServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await self.wait_closed()


async def serve(
    handler: Handler,
    host: str,
    port: int,
    ssl_context: ssl.SSLContext | None,
    *,
    on_connect: OnConnect | None = None,
    limits: WireLimits = DEFAULT_LIMITS,
) -> WireServer:
    """Listen, and answer every peer with `handler`. Raises SettingsError if the address cannot be used."""
    server = WireServer(limits)
    await server._listen(handler, host, port, ssl_context, on_connect)
    return server
