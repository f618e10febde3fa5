"""Connections over real sockets on loopback, on both event loops, mostly with mutual TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents import tls
from agents.connection import Connection, WireLimits
from agents.frames import MAGIC, ONE_WAY, READY, REQUEST, FrameLimits, Tensors, encode_frame
from agents.identity import Identity
from agents.messages import BlobChunk, Done, FetchBlob, GetCa, Leave, Message, Probe
from agents.wire import WireServer, connect, serve
from controller.pki import CertificateAuthority
from policies.ids import AgentId, BlobHash
from sla.errors import (
    AgentLostError,
    ConflictError,
    DeadlineExceededError,
    InvalidInputError,
    OverloadedError,
    RefusedError,
    SettingsError,
    TidegateError,
)

LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def new_identity(ca: CertificateAuthority, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Identity]:
    def make(name: str, now_s: float | None = None, lifetime_s: float = 3600.0) -> Identity:
        identity = Identity(tmp_path_factory.mktemp(name))
        pem = ca.sign_agent(identity.csr_pem(), AgentId(name), now_s=now_s or time.time(), lifetime_s=lifetime_s)
        identity.save_certificate(pem, ca.ca_pem)
        return identity

    return make


@pytest.fixture(scope="module")
def alice(new_identity: Callable[..., Identity]) -> Identity:
    return new_identity("alice")


@pytest.fixture(scope="module")
def bob(new_identity: Callable[..., Identity]) -> Identity:
    return new_identity("bob")


@dataclass
class Peer:
    """A handler that does what the message says; `gate` holds back answers to Leave."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[Message] = field(default_factory=list)
    cancelled: int = 0

    async def handle(self, connection: Connection, message: Message, tensors: dict[str, np.ndarray]) -> Any:
        self.seen.append(message)
        match message:
            case Probe():
                return Done(), tensors
            case FetchBlob():
                return BlobChunk(total_bytes=message.offset), {"data": np.zeros(message.length, dtype=np.uint8)}
            case Leave():
                try:
                    await self.gate.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
        return None


@dataclass
class Pair:
    peer: Peer
    server: WireServer
    client: Connection

    @property
    def accepted(self) -> Connection:
        return next(iter(self.server.connections))


@pytest.fixture
async def pair(alice: Identity, bob: Identity) -> AsyncIterator[Pair]:
    peer = Peer()
    async with await serve(peer.handle, LOOPBACK, 0, bob.server_context()) as server:
        client = await connect(LOOPBACK, server.port, alice.client_context(), expect_peer=AgentId("bob"))
        yield Pair(peer, server, client)
        await client.close()


async def eventually(condition: Callable[[], bool]) -> None:
    """For what another task does on its own; the time limit is only there to end a broken test."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_call_carries_tensors_both_ways(pair: Pair) -> None:
    sent: dict[str, np.ndarray] = {
        "a": np.arange(10, dtype=np.int64),
        "b": np.random.default_rng(0).random((3, 50, 7), dtype=np.float32),
    }
    message, received = await pair.client.call(Probe(), sent, timeout_s=10)
    assert message == Done()
    for name, array in sent.items():
        np.testing.assert_array_equal(received[name], array)
        assert received[name].flags.writeable


async def test_both_sides_know_each_other(pair: Pair) -> None:
    assert pair.client.peer_id == "bob"
    assert pair.accepted.peer_id == "alice"
    assert pair.accepted.peer_host == LOOPBACK
    assert pair.accepted.peer_expires_s is not None
    assert pair.accepted.peer_expires_s > time.time()


async def test_fifty_calls_at_once_each_get_their_own_answer(pair: Pair) -> None:
    async def one(number: int) -> None:
        message, tensors = await pair.client.call(
            FetchBlob(sha256=BlobHash(""), offset=number, length=number), timeout_s=20
        )
        assert message == BlobChunk(total_bytes=number)
        assert tensors["data"].shape == (number,)

    await asyncio.gather(*(one(number) for number in range(50)))


async def test_the_accepting_side_may_ask_too(alice: Identity, bob: Identity) -> None:
    dialling = Peer()
    async with await serve(Peer().handle, LOOPBACK, 0, bob.server_context()) as server:
        client = await connect(LOOPBACK, server.port, alice.client_context(), dialling.handle)
        accepted = next(iter(server.connections))
        _, tensors = await accepted.call(Probe(), {"x": np.ones(4)}, timeout_s=10)
        assert tensors["x"].sum() == 4
        await client.close()


async def test_large_tensors_are_held_back_by_a_reader_that_is_slow(pair: Pair) -> None:
    tensor = np.random.default_rng(1).integers(0, 255, 5_000_000, dtype=np.uint8)

    async def one(number: int) -> None:
        _, tensors = await pair.client.call(Probe(), {"x": tensor, "n": np.array(number)}, timeout_s=60)
        assert tensors["n"] == number
        np.testing.assert_array_equal(tensors["x"], tensor)

    pair.accepted.stream.set_reading(False)
    calls = [asyncio.create_task(one(number)) for number in range(6)]
    await eventually(lambda: not pair.client.stream.is_writable)
    assert pair.peer.seen == []
    pair.accepted.stream.set_reading(True)
    await asyncio.gather(*calls)
    assert len(pair.peer.seen) == 6


async def test_a_one_way_message_arrives(pair: Pair) -> None:
    await pair.client.send(GetCa())
    await eventually(lambda: pair.peer.seen == [GetCa()])


async def test_a_timed_out_call_says_so_and_its_late_reply_is_counted(pair: Pair) -> None:
    with pytest.raises(DeadlineExceededError, match=r"bob did not answer within 0\.05 s"):
        await pair.client.call(Leave(), timeout_s=0.05)
    pair.peer.gate.set()
    await eventually(lambda: pair.client.late_replies == 1)
    assert (await pair.client.call(Probe(), timeout_s=10))[0] == Done()


@pytest.mark.parametrize("size", [0, 5_000_000])
async def test_a_lost_connection_fails_every_call_that_waits(pair: Pair, size: int) -> None:
    tensors = {"x": np.zeros(size, dtype=np.uint8)}
    calls = [asyncio.create_task(pair.client.call(Leave(), tensors, timeout_s=60)) for _ in range(5)]
    await eventually(lambda: len(pair.peer.seen) == 5)
    closed: list[bool] = []
    pair.client.on_close(lambda: closed.append(True))
    pair.accepted.abort()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {AgentLostError}
    assert pair.client.closed
    assert closed == [True]
    with pytest.raises(AgentLostError):
        await pair.client.call(Probe(), timeout_s=1)
    with pytest.raises(AgentLostError):
        await pair.client.send(Probe())
    await eventually(lambda: pair.peer.cancelled == 5)


async def test_calls_that_wait_for_a_slow_link_fail_when_it_is_lost(pair: Pair) -> None:
    tensors = {"x": np.zeros(5_000_000, dtype=np.uint8)}
    pair.accepted.stream.set_reading(False)
    calls = [asyncio.create_task(pair.client.call(Probe(), tensors, timeout_s=60)) for _ in range(5)]
    await eventually(lambda: not pair.client.stream.is_writable)
    pair.client.abort()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {AgentLostError}


async def test_closing_cancels_handlers_and_is_safe_twice(pair: Pair) -> None:
    call = asyncio.create_task(pair.client.call(Leave(), timeout_s=60))
    await eventually(lambda: pair.peer.seen == [Leave()])
    accepted = pair.accepted
    await accepted.close()
    await accepted.close()
    with pytest.raises(AgentLostError):
        await call
    assert pair.peer.cancelled == 1
    called: list[bool] = []
    accepted.on_close(lambda: called.append(True))
    assert called == [True]


async def test_closing_the_server_ends_its_connections(pair: Pair) -> None:
    pair.server.close()
    await pair.server.wait_closed()
    await eventually(lambda: pair.client.closed)
    with pytest.raises(AgentLostError, match="cannot be reached"):
        await connect(LOOPBACK, 1, None)


@pytest.fixture
async def open_pair() -> AsyncIterator[Callable[..., Awaitable[tuple[WireServer, Connection]]]]:
    """Servers and clients without TLS."""
    async with AsyncExitStack() as stack:

        async def make(handler: Any, **options: Any) -> tuple[WireServer, Connection]:
            server = await stack.enter_async_context(await serve(handler, LOOPBACK, 0, None, **options))
            client = await connect(LOOPBACK, server.port, None)
            stack.push_async_callback(client.close)
            return server, client

        yield make


async def test_errors_cross_the_wire_as_what_they_are(open_pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception] = [
        OverloadedError("The queue is full.", retry_after_s=7.5),
        InvalidInputError("The shape is wrong."),
        ConflictError("Somebody was first."),
        TidegateError("Odd."),
        ZeroDivisionError("secret detail"),
    ]

    async def fail(connection: Connection, message: Message, tensors: dict[str, np.ndarray]) -> None:
        raise errors.pop(0)

    _, client = await open_pair(fail)
    with pytest.raises(OverloadedError, match="The queue is full") as caught:
        await client.call(Probe(), timeout_s=10)
    assert caught.value.retry_after_s == 7.5
    for kind, sentence in [
        (InvalidInputError, "The shape is wrong"),
        (ConflictError, "Somebody was first"),
        (TidegateError, "Odd"),
    ]:
        with pytest.raises(kind, match=sentence):
            await client.call(Probe(), timeout_s=10)
    with pytest.raises(TidegateError, match=r"Probe failed inside the peer \(ZeroDivisionError\)"):
        await client.call(Probe(), timeout_s=10)
    assert "secret detail" in caplog.text


async def test_a_reply_that_cannot_travel_is_a_fault(open_pair: Any) -> None:
    async def answer(*_: Any) -> tuple[Message, Tensors]:
        return Done(), {"x": np.array(["text"])}

    _, client = await open_pair(answer)
    with pytest.raises(InvalidInputError, match="does not travel"):
        await client.call(Probe(), timeout_s=10)


async def test_a_client_without_a_handler_takes_no_requests(open_pair: Any) -> None:
    server, _ = await open_pair(Peer().handle)
    with pytest.raises(RefusedError, match="takes no requests"):
        await next(iter(server.connections)).call(Probe(), timeout_s=10)


async def test_the_caller_is_told_when_too_much_waits(open_pair: Any) -> None:
    peer = Peer()
    server, client = await open_pair(peer.handle, limits=WireLimits(in_flight=2))
    calls = [asyncio.create_task(client.call(Leave(), timeout_s=60)) for _ in range(2)]
    await eventually(lambda: len(peer.seen) == 2)
    with pytest.raises(OverloadedError, match="as much as it can hold"):
        await client.call(Probe(), timeout_s=10)
    await client.send(Probe())
    accepted = next(iter(server.connections))
    await eventually(lambda: accepted.dropped_one_way == 1)
    peer.gate.set()
    await asyncio.gather(*calls)
    assert (await client.call(Probe(), timeout_s=10))[0] == Done()
    assert peer.seen.count(Probe()) == 1


async def test_tensors_of_requests_are_bounded_together(open_pair: Any) -> None:
    peer = Peer()
    _, client = await open_pair(peer.handle, limits=WireLimits(in_flight_bytes=1500))
    first = asyncio.create_task(client.call(Leave(), {"x": np.zeros(1000, dtype=np.uint8)}, timeout_s=60))
    await eventually(lambda: len(peer.seen) == 1)
    with pytest.raises(OverloadedError):
        await client.call(Probe(), {"x": np.zeros(1000, dtype=np.uint8)}, timeout_s=10)
    peer.gate.set()
    await first
    await client.call(Probe(), {"x": np.zeros(1000, dtype=np.uint8)}, timeout_s=10)


async def test_calls_in_flight_are_bounded_on_this_side_too(alice: Identity, bob: Identity) -> None:
    peer = Peer()
    async with await serve(peer.handle, LOOPBACK, 0, bob.server_context()) as server:
        client = await connect(LOOPBACK, server.port, alice.client_context(), limits=WireLimits(in_flight=1))
        call = asyncio.create_task(client.call(Leave(), timeout_s=60))
        await eventually(lambda: len(peer.seen) == 1)
        with pytest.raises(OverloadedError, match="1 calls to bob wait"):
            await client.call(Probe(), timeout_s=10)
        peer.gate.set()
        await call
        await client.close()


async def test_a_shaper_is_asked_before_every_frame(open_pair: Any) -> None:
    class Counting:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        async def delay(self, n_bytes: int) -> None:
            self.sizes.append(n_bytes)

    _, client = await open_pair(Peer().handle)
    client.shaper = shaper = Counting()
    await client.call(Probe(), {"x": np.zeros(1000, dtype=np.uint8)}, timeout_s=10)
    await client.send(Probe())
    assert len(shaper.sizes) == 2
    assert 1000 < shaper.sizes[0] < 1200
    assert shaper.sizes[1] < 100


# Who may come in.


async def test_a_peer_with_another_name_is_refused(alice: Identity, bob: Identity) -> None:
    async with await serve(Peer().handle, LOOPBACK, 0, bob.server_context()) as server:
        with pytest.raises(RefusedError, match=r"127\.0\.0\.1 is bob, not carol"):
            await connect(LOOPBACK, server.port, alice.client_context(), expect_peer=AgentId("carol"))


async def test_no_certificate_is_refused_at_a_mutual_door(ca: CertificateAuthority, bob: Identity) -> None:
    async with await serve(Peer().handle, LOOPBACK, 0, bob.server_context()) as server:
        with pytest.raises(AgentLostError, match="may not accept this side's certificate"):
            await connect(LOOPBACK, server.port, tls.client_context(ca.ca_pem, lambda: 0.0))
        assert server.connections == set()


async def test_a_certificate_of_another_ca_is_refused_by_either_side(
    ca: CertificateAuthority, bob: Identity, tmp_path: Path
) -> None:
    other_ca = CertificateAuthority(tmp_path / "ca")
    mallory = Identity(tmp_path / "mallory")
    pem = other_ca.sign_agent(mallory.csr_pem(), AgentId("bob"), now_s=time.time())
    mallory.save_certificate(pem, other_ca.ca_pem)
    async with await serve(Peer().handle, LOOPBACK, 0, bob.server_context()) as server:
        with pytest.raises(RefusedError, match="is not accepted"):
            await connect(LOOPBACK, server.port, mallory.client_context())
        context = tls.client_context(ca.ca_pem, lambda: 0.0)
        tls.load_own_certificate(context, mallory.directory / "certificate.pem", mallory.directory / "key.pem")
        with pytest.raises(AgentLostError, match="may not accept this side's certificate"):
            await connect(LOOPBACK, server.port, context)


async def test_where_certificates_are_optional_a_stranger_has_no_name(bob: Identity) -> None:
    async with await serve(Peer().handle, LOOPBACK, 0, bob.server_context("optional")) as server:
        client = await connect(LOOPBACK, server.port, tls.unverified_context())
        assert client.peer_id is None
        assert next(iter(server.connections)).peer_id is None
        await client.close()


async def test_certificates_from_years_ago_work_where_all_clocks_are_wrong(
    new_identity: Callable[..., Identity],
) -> None:
    then_s = time.time() - 6 * 365 * 86_400
    old, older = new_identity("old", then_s, 86_400), new_identity("older", then_s - 3600, 86_400)
    async with await serve(Peer().handle, LOOPBACK, 0, old.server_context()) as server:
        client = await connect(LOOPBACK, server.port, older.client_context())
        assert client.peer_id == "old"
        await client.close()


async def test_certificates_from_the_future_work_where_the_clock_is_behind(
    new_identity: Callable[..., Identity],
) -> None:
    then_s = time.time() + 5 * 365 * 86_400
    left, right = new_identity("left", then_s), new_identity("right", then_s)
    async with await serve(Peer().handle, LOOPBACK, 0, left.server_context()) as server:
        client = await connect(LOOPBACK, server.port, right.client_context())
        assert client.peer_id == "left"
        await client.close()


async def test_a_certificate_that_certainly_ended_is_refused_by_either_side(
    alice: Identity, new_identity: Callable[..., Identity]
) -> None:
    ended = new_identity("ended", time.time() - 10 * 86_400, 86_400)
    async with await serve(Peer().handle, LOOPBACK, 0, alice.server_context()) as server:
        with pytest.raises(RefusedError, match="The certificate of ended ended on"):
            await connect(LOOPBACK, server.port, ended.client_context())
        await eventually(lambda: server.connections == set())
    async with await serve(Peer().handle, LOOPBACK, 0, ended.server_context()) as server:
        with pytest.raises(RefusedError, match="The certificate of ended ended on"):
            await connect(LOOPBACK, server.port, alice.client_context())


async def test_the_door_may_turn_a_peer_away_with_its_own_words(alice: Identity, bob: Identity) -> None:
    async def only_carol(connection: Connection) -> None:
        if connection.peer_id != "carol":
            raise RefusedError(f"{connection.peer_id} was revoked; enroll it again.")

    async with await serve(Peer().handle, LOOPBACK, 0, bob.server_context(), on_connect=only_carol) as server:
        with pytest.raises(RefusedError, match="alice was revoked; enroll it again"):
            await connect(LOOPBACK, server.port, alice.client_context())
        await eventually(lambda: server.connections == set())


# What else may be at the other end.


async def test_nobody_answers_in_time(alice: Identity) -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(AgentLostError, match=r"did not answer within 0\.1 s"):
            await connect(LOOPBACK, port, alice.client_context(), timeout_s=0.1)
        with pytest.raises(AgentLostError, match=r"did not answer within 0\.1 s"):
            await connect(LOOPBACK, port, None, timeout_s=0.1)


async def test_a_name_that_does_not_resolve_is_one_sentence() -> None:
    with pytest.raises(AgentLostError, match=r"no-such-host\.invalid:1 cannot be reached: "):
        await connect("no-such-host.invalid", 1, None)


async def test_a_server_that_is_not_ours_is_refused(alice: Identity) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(http, LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(RefusedError, match="No secure connection"):
        await connect(LOOPBACK, port, alice.client_context())
    with pytest.raises(AgentLostError):
        await connect(LOOPBACK, port, None)
    server.close()
    await server.wait_closed()


async def test_a_port_in_use_is_one_sentence(pair: Pair) -> None:
    with pytest.raises(SettingsError, match=rf"Cannot listen on 127\.0\.0\.1:{pair.server.port}: .*free port"):
        await serve(Peer().handle, LOOPBACK, pair.server.port, None)


async def read_until_closed(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    writer.write(data)
    received = b""
    try:
        async with asyncio.timeout(20):
            received = await reader.read()
    except ConnectionResetError:
        pass
    writer.close()
    return received


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "does not speak Tidegate's protocol"),
        (struct.pack("<4sIQ", MAGIC, 2**32 - 1, 0), "4294967295 bytes; 1048576 are accepted"),
        (struct.pack("<4sIQ", MAGIC, 10, 2**60), "payload has 1152921504606846976 bytes"),
        (struct.pack("<4sIQ", MAGIC, 5, 0) + b"\xc1\xc1\xc1\xc1\xc1", "header is damaged"),
        (b"".join(encode_frame(READY, 0, None, {})) * 2, "out of turn"),
        (b"".join(encode_frame(4, 0, None, {})), "out of turn"),
    ],
)
async def test_garbage_closes_the_connection_with_one_logged_sentence(
    open_pair: Any, caplog: pytest.LogCaptureFixture, data: bytes, sentence: str
) -> None:
    server, client = await open_pair(Peer().handle)
    with caplog.at_level(logging.WARNING):
        await read_until_closed(server.port, data)
    records = [record for record in caplog.records if record.name.startswith("agents.")]
    assert len(records) == 1
    assert sentence in records[0].getMessage()
    assert (await client.call(Probe(), timeout_s=10))[0] == Done()


async def test_a_message_that_is_not_known_is_a_fault_and_not_the_end(open_pair: Any) -> None:
    class Strange(Message, frozen=True, kw_only=True, tag="strange"):
        pass

    _, client = await open_pair(Peer().handle)
    with pytest.raises(InvalidInputError, match="The message is not known here"):
        await client.call(Strange(), timeout_s=10)
    await client.send(Strange())
    assert (await client.call(Probe(), timeout_s=10))[0] == Done()


async def test_an_answer_that_is_not_known_fails_that_call_alone(open_pair: Any) -> None:
    class Strange(Message, frozen=True, kw_only=True, tag="strange"):
        pass

    async def answer(connection: Connection, message: Message, tensors: Any) -> Any:
        return (Strange() if isinstance(message, GetCa) else Done()), {}

    _, client = await open_pair(answer)
    with pytest.raises(InvalidInputError, match="answered in words that are not known"):
        await client.call(GetCa(), timeout_s=10)
    assert (await client.call(Probe(), timeout_s=10))[0] == Done()


async def test_a_peer_that_asks_and_never_reads_is_not_read_any_more(open_pair: Any) -> None:
    peer = Peer()
    limits = WireLimits(in_flight=4, frame=FrameLimits(header_bytes=1000, payload_bytes=1000))
    server, _ = await open_pair(peer.handle, limits=limits)
    reader, writer = await asyncio.open_connection(LOOPBACK, server.port)
    await eventually(lambda: len(server.connections) == 2)
    flooded = next(c for c in server.connections if c.stream.peer_port == writer.get_extra_info("sockname")[1])

    class Stuck:
        async def delay(self, n_bytes: int) -> None:
            await asyncio.Event().wait()

    await reader.readexactly(16)
    flooded.shaper = Stuck()
    writer.write(b"".join(b"".join(encode_frame(REQUEST, i, Probe(), {})) for i in range(8)))
    await eventually(lambda: not flooded.stream.is_reading)
    writer.write(b"".join(encode_frame(ONE_WAY, 0, GetCa(), {})))
    assert GetCa() not in peer.seen
    writer.close()
    flooded.abort()


async def test_more_connections_than_allowed_are_turned_away(open_pair: Any) -> None:
    server, _ = await open_pair(Peer().handle, limits=WireLimits(connections=1))
    with pytest.raises(AgentLostError):
        await connect(LOOPBACK, server.port, None)
    assert len(server.connections) == 1


async def test_a_call_that_is_given_up_is_cancelled_at_the_peer_if_it_wants_that(pair: Pair) -> None:
    with pytest.raises(DeadlineExceededError):
        await pair.client.call(Leave(), timeout_s=0.05)
    assert pair.peer.cancelled == 0
    with pytest.raises(DeadlineExceededError):
        await pair.client.call(Leave(), timeout_s=0.05, take_back=True)
    await eventually(lambda: pair.peer.cancelled == 1)
    waiting = asyncio.create_task(pair.client.call(Leave(), timeout_s=20.0, take_back=True))
    await eventually(lambda: len(pair.peer.seen) == 3)
    waiting.cancel()
    await eventually(lambda: pair.peer.cancelled == 2)
    assert (await pair.client.call(Probe(), timeout_s=20.0))[0] == Done()


async def test_nothing_is_cancelled_for_a_call_that_was_answered(pair: Pair) -> None:
    pair.peer.gate.set()
    await pair.client.call(Leave(), timeout_s=20.0, take_back=True)
    await pair.client.call(Probe(), timeout_s=20.0, take_back=True)
    assert pair.peer.cancelled == 0
    assert pair.client.late_replies == 0
