"""The agent's two connections to its controller: control (hello, reports, orders) and bulk (shard files).

The agent dials both, again and again, for ever: it serves by what it was last told while the controller is away.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable

from agents.enroll import renew
from agents.identity import CONTROLLER_ID, Identity
from agents.messages import BlobChunk, FetchBlob, Hello, Report, Welcome
from agents.wire import Connection, Handler, connect
from policies.ids import BlobHash
from sla.errors import InvalidInputError, PermanentError, RetryableError, TidegateError

log = logging.getLogger("tidegate.control")
REDIAL_BASE_S, REDIAL_CAP_S = 0.25, 10.0
RENEWAL_RETRY_S = 60.0


class ControlLink:
    """Keeps the control connection alive and sends reports over it."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        identity: Identity,
        handler: Handler,
        hello: Callable[[], Hello],
        report: Callable[[int], Report],
        rng: random.Random | None = None,
    ) -> None:
        """`report(sequence)` is called only when the report can be sent."""
        self._host, self._port = host, port
        self._identity = identity
        self._context = identity.client_context()
        self._handler = handler
        self._hello = hello
        self._report = report
        self._random = rng or random.Random()
        self._sequence = 0
        self._renew_not_before_s = 0.0

    async def run(self) -> None:
        """Dial, report until the connection ends, dial again; returns only by cancellation."""
        failures = 0
        while True:
            began_s = time.monotonic()
            try:
                await self._one_connection()
                log.info("the control connection ended; this agent goes on serving")
            except PermanentError as error:
                log.warning("the controller does not take this agent: %s", error)
                failures = max(failures, 5)
            except TidegateError as error:
                log.info("no control connection: %s", error)
            failures = 0 if time.monotonic() - began_s > REDIAL_CAP_S else failures + 1
            delay_s = min(REDIAL_CAP_S, REDIAL_BASE_S * 2 ** min(failures, 8))
            await asyncio.sleep(delay_s * self._random.uniform(0.5, 1.0))

    async def _one_connection(self) -> None:
        connection = await connect(self._host, self._port, self._context, self._handler, expect_peer=CONTROLLER_ID)
        try:
            welcome, _ = await connection.call(self._hello(), timeout_s=10.0)
            if not isinstance(welcome, Welcome):
                raise InvalidInputError(f"The controller answered a hello with {type(welcome).__name__}.")
            log.info("connected with the controller at %s:%d as %s", self._host, self._port, welcome.agent_id)
            every_s = min(10.0, max(0.1, welcome.report_every_ms / 1000))
            while not connection.closed:
                self._sequence += 1
                await connection.send(self._report(self._sequence))
                await self._renew_if_due(connection)
                await asyncio.sleep(every_s)
        finally:
            await connection.close()

    async def _renew_if_due(self, connection: Connection) -> None:
        now_s = time.monotonic()
        if self._identity.renew_in_s(time.time()) > 0 or now_s < self._renew_not_before_s:
            return
        self._renew_not_before_s = now_s + RENEWAL_RETRY_S
        try:
            await renew(connection, self._identity)
            log.info("the certificate was renewed")
        except TidegateError as error:
            log.warning("the certificate could not be renewed: %s", error)


class ControllerBlobs:
    """Shard files from the controller, over a connection of their own, so that a push never delays a report."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, *, timeout_s: float = 30.0) -> None:
        self._host, self._port, self._context = host, port, context
        self._timeout_s = timeout_s
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def fetch(self, sha256: BlobHash, offset: int, length: int) -> tuple[bytes, int]:
        """See `agents.blobs.BlobSource`."""
        connection = await self._dial()
        message = FetchBlob(sha256=sha256, offset=offset, length=length)
        answer, tensors = await connection.call(message, timeout_s=self._timeout_s)
        data = tensors.get("data")
        if not isinstance(answer, BlobChunk) or data is None:
            raise RetryableError(f"The controller answered a fetch with {type(answer).__name__}.")
        return data.tobytes(), answer.total_bytes

    async def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            await self._connection.close()

    async def _dial(self) -> Connection:
        async with self._lock:
            if self._connection is None or self._connection.closed:
                self._connection = await connect(self._host, self._port, self._context, expect_peer=CONTROLLER_ID)
            return self._connection
