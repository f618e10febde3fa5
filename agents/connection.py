"""Requests and replies over one stream of frames: symmetric, either side may ask at any time; ids count per direction."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from agents import frames
from agents.faults import error_of, fault_of
from agents.frames import Array, Frame, FrameLimits, Tensors
from agents.messages import AnyMessage, Done, Fault, Message
from agents.shaping import Shaper
from agents.stream import FrameStream
from agents.tls import verified_peer
from policies.ids import AgentId
from sla.errors import (
    AgentLostError,
    DeadlineExceededError,
    InvalidInputError,
    OverloadedError,
    RefusedError,
    TidegateError,
)

log = logging.getLogger(__name__)

_decoder: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(AnyMessage)
_CLOSE_GRACE_S: Final = 1.0

Answer = tuple[Message, dict[str, Array]]
Handler = Callable[["Connection", Message, dict[str, Array]], Awaitable[tuple[Message, Tensors] | None]]
"""Answers one message; None means Done. A TidegateError becomes a Fault, any other error a Fault that says little, and a log line."""
OnConnect = Callable[["Connection"], Awaitable[None]]
"""Sees a connection before its first message; a TidegateError turns the peer away with that error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """What one connection may cost."""

    frame: FrameLimits = frames.DEFAULT_LIMITS
    in_flight: int = 64
    """Requests that wait for an answer, per direction."""
    in_flight_bytes: int = 512 << 20
    """Tensors of the requests that are being worked on."""
    connections: int = 4096
    """Of one server."""


DEFAULT_LIMITS: Final = WireLimits()


class Connection:
    """One peer at the other end of a stream. Not thread-safe: use it on its event loop."""

    def __init__(
        self,
        handler: Handler | None,
        limits: WireLimits = DEFAULT_LIMITS,
        opened: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        """For `agents.wire`, which opens the stream; `opened` is called when it is."""
        self.shaper: Shaper | None = None
        """Slows down what this side sends (emulated links)."""
        self.peer_id: AgentId | None = None
        """Common name of the peer's verified certificate."""
        self.peer_expires_s: float | None = None
        """When that certificate ends, Unix time."""
        self.late_replies = 0
        """Replies that came after their call had given up."""
        self.dropped_one_way = 0
        """One-way messages that were not handled because too much was going on."""
        self._handler = handler
        self._opened = opened
        self._limits = limits
        self.stream = FrameStream(self, limits.frame)
        self._next_id = 0
        self._pending: dict[int, asyncio.Future[Answer | TidegateError]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._working: dict[int, asyncio.Task[None]] = {}
        """The peer's requests that are being worked on, by their ids."""
        self._held_bytes = 0
        self._close_callbacks: list[Callable[[], object]] = []
        self._is_admitted = False
        self._closed = False
        self.ready: asyncio.Future[TidegateError | None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        return f"<Connection with {self.peer_name}{' (closed)' if self.closed else ''}>"

    @property
    def peer_host(self) -> str:
        """The address the peer is seen at."""
        return self.stream.peer_host

    @property
    def peer_name(self) -> str:
        """For sentences: the peer's id, or its address."""
        return self.peer_id or self.peer_host or "the peer"

    @property
    def closed(self) -> bool:
        return self._closed or not self.stream.is_open

    def on_close(self, callback: Callable[[], object]) -> None:
        """`callback()` runs once when the connection ends, at once if it has."""
        if self._closed:
            callback()
        else:
            self._close_callbacks.append(callback)

    async def call(
        self, message: Message, tensors: Tensors | None = None, *, timeout_s: float, take_back: bool = False
    ) -> Answer:
        """The peer's answer. With `take_back` a call that is cancelled or timed out is cancelled at the peer too.

        Raises the error that a Fault names, AgentLostError as soon as the connection is lost, DeadlineExceededError after
        `timeout_s`, OverloadedError if too many calls wait already, InvalidInputError for tensors that cannot travel.
        """
        if len(self._pending) >= self._limits.in_flight:
            raise OverloadedError(f"{self._limits.in_flight} calls to {self.peer_name} wait for an answer already.")
        call_id = self._next_id
        self._next_id += 1
        answer: asyncio.Future[Answer | TidegateError] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(frames.REQUEST, call_id, message, tensors or {})
                outcome = await answer
        except TimeoutError:
            raise DeadlineExceededError(f"{self.peer_name} did not answer within {timeout_s:g} s.") from None
        finally:
            self._pending.pop(call_id, None)
            # Whoever is cancelled while it waits for a future cancels that too.
            if take_back and not self.closed and (not answer.done() or answer.cancelled()):
                self._spawn(self._cancel_at_peer(call_id), 0)
        if isinstance(outcome, TidegateError):
            raise outcome
        return outcome

    async def _cancel_at_peer(self, call_id: int) -> None:
        try:
            await self._write(frames.ONE_WAY, call_id, None, {})
        except AgentLostError:
            log.debug("%s went away before it could be told that nobody waits.", self.peer_name)

    async def send(self, message: Message, tensors: Tensors | None = None) -> None:
        """Hand over a message that has no answer; it may be lost. Raises AgentLostError if the connection is."""
        await self._write(frames.ONE_WAY, 0, message, tensors or {})

    async def close(self) -> None:
        """Cancel the handlers, fail the calls that wait, send what was written, close. May be called twice."""
        self._end(AgentLostError(f"The connection with {self.peer_name} was closed."))
        await self.stream.close(_CLOSE_GRACE_S)

    def abort(self) -> None:
        """Close at once; what was not sent is lost."""
        self.stream.abort()

    async def _write(self, kind: int, frame_id: int, body: Message | None, tensors: Tensors) -> None:
        if self.closed:
            raise AgentLostError(f"The connection with {self.peer_name} is closed.")
        pieces = frames.encode_frame(kind, frame_id, body, tensors, self._limits.frame)
        if self.shaper is not None:
            await self.shaper.delay(sum(len(piece) for piece in pieces))
        await self.stream.write(pieces)

    # What the stream tells.

    def stream_opened(self) -> None:
        """See `StreamOwner`."""
        self._opened(self)

    def frame_received(self, frame: Frame) -> None:
        """See `StreamOwner`."""
        if frame.kind == frames.READY and not self.ready.done():
            self.ready.set_result(_refusal(frame))
            self._is_admitted = True
        elif not self._is_admitted or frame.kind not in (frames.REQUEST, frames.REPLY, frames.ONE_WAY):
            raise InvalidInputError("A frame came out of turn.")
        elif frame.kind == frames.REPLY:
            self._take_reply(frame)
        elif frame.kind == frames.ONE_WAY and frame.id:
            if (task := self._working.get(frame.id)) is not None:
                task.cancel()
        else:
            self._take_request(frame)

    def stream_lost(self, reason: Exception | None) -> None:
        """See `StreamOwner`."""
        if self.ready.done() or self.stream.tls is None:
            sentence = f"The connection with {self.peer_name} was lost."
        else:
            # Event loops do not send the TLS alert that would tell why, so that this is all one can know.
            sentence = f"{self.peer_name} hung up after the handshake; it may not accept this side's certificate."
        self._end(AgentLostError(sentence))

    def _end(self, error: AgentLostError) -> None:
        if self._closed:
            return
        self._closed = True
        if not self.ready.done():
            self.ready.set_result(error)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_result(AgentLostError(str(error)))
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for callback in self._close_callbacks:
            try:
                callback()
            except Exception:
                log.exception("A callback failed when the connection with %s ended.", self.peer_name)

    def _take_reply(self, frame: Frame) -> None:
        answer = self._pending.pop(frame.id, None)
        if answer is None or answer.done():
            self.late_replies += 1
            return
        try:
            message = _decoder.decode(frame.body)
        except msgspec.DecodeError as error:
            answer.set_result(InvalidInputError(f"{self.peer_name} answered in words that are not known here: {error}"))
            return
        answer.set_result(error_of(message) if isinstance(message, Fault) else (message, frame.tensors))

    def _take_request(self, frame: Frame) -> None:
        busy = len(self._tasks) >= self._limits.in_flight
        full = self._held_bytes + frame.payload_bytes > self._limits.in_flight_bytes
        if not (busy or full):
            self._held_bytes += frame.payload_bytes
            task = self._spawn(self._work(frame), frame.payload_bytes)
            if frame.kind == frames.REQUEST:
                self._working[frame.id] = task
                task.add_done_callback(lambda _: self._working.pop(frame.id, None))
        elif frame.kind == frames.REQUEST:
            overload = OverloadedError("The peer works on as much as it can hold for this connection already.")
            self._spawn(self._reply(frame.id, fault_of(overload), {}), 0)
        else:
            self.dropped_one_way += 1

    def _spawn(self, work: Coroutine[Any, Any, None], held_bytes: int) -> asyncio.Task[None]:
        def finished(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._held_bytes -= held_bytes
            if len(self._tasks) <= self._limits.in_flight:
                self.stream.set_reading(True)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("Answering %s failed.", self.peer_name, exc_info=error)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(finished)
        # Only a peer that asks and never reads its refusals comes this far.
        if len(self._tasks) >= 2 * self._limits.in_flight:
            self.stream.set_reading(False)
        return task

    async def _work(self, frame: Frame) -> None:
        message, tensors = await self._answer(frame)
        if frame.kind == frames.REQUEST:
            await self._reply(frame.id, message, tensors)

    async def _answer(self, frame: Frame) -> tuple[Message, Tensors]:
        try:
            message = _decoder.decode(frame.body)
        except msgspec.DecodeError as error:
            log.warning("%s sent a message that is not known here: %s", self.peer_name, error)
            return fault_of(InvalidInputError(f"The message is not known here: {error}")), {}
        try:
            if self._handler is None:
                raise RefusedError("This side takes no requests.")
            return await self._handler(self, message, frame.tensors) or (Done(), {})
        except TidegateError as error:
            return fault_of(error), {}
        except Exception as error:
            log.exception("Handling %s from %s failed.", type(message).__name__, self.peer_name)
            name, kind = type(message).__name__, type(error).__name__
            return Fault(slug=TidegateError.slug, message=f"{name} failed inside the peer ({kind})."), {}

    async def _reply(self, frame_id: int, message: Message, tensors: Tensors) -> None:
        try:
            await self._write(frames.REPLY, frame_id, message, tensors)
        except InvalidInputError as error:
            await self._write(frames.REPLY, frame_id, fault_of(error), {})
        except AgentLostError:
            log.debug("%s went away before its answer was there.", self.peer_name)

    # How a connection begins.

    def identify(self, expected: AgentId | None = None) -> None:
        peer = verified_peer(self.stream.tls)
        if peer is not None:
            self.peer_id, self.peer_expires_s = peer.name, peer.expires_s
        if expected is not None and self.peer_id != expected:
            raise RefusedError(f"{self.peer_host} is {self.peer_id or 'nobody we know'}, not {expected}.")

    async def admit(self, on_connect: OnConnect | None) -> None:
        """The accepting side's beginning."""
        try:
            self.identify()
            if on_connect is not None:
                await on_connect(self)
        except TidegateError as error:
            await self._turn_away(error)
            return
        except Exception:
            log.exception("Admitting %s failed.", self.peer_name)
            await self._turn_away(TidegateError("The peer failed while it looked at this connection."))
            return
        self._is_admitted = True
        await self._say_ready(None)

    async def _turn_away(self, error: TidegateError) -> None:
        log.info("Turned %s away: %s", self.peer_name, error)
        await self._say_ready(fault_of(error))
        await self.close()

    async def _say_ready(self, body: Message | None) -> None:
        try:
            await self._write(frames.READY, 0, body, {})
        except AgentLostError:
            log.debug("%s went away before it was admitted.", self.peer_name)


def _refusal(frame: Frame) -> TidegateError | None:
    try:
        message = msgspec.msgpack.decode(frame.body, type=Fault | None)
    except msgspec.DecodeError as error:
        raise InvalidInputError(f"The first frame is damaged: {error}") from error
    return error_of(message) if message is not None else None


def tls_words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
