"""One tensor hop: a call with a tensor and a tiny reply, over our connection (mutual TLS, and without TLS), against a bare
blocking TCP socket that moves the same bytes. Two processes; the three ways take turns, so that noise meets all of them alike.
"""

from __future__ import annotations

import asyncio
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Final

import numpy as np

from agents.identity import Identity
from agents.messages import Done, Message, Probe
from agents.wire import Connection, Tensors, connect, serve
from benchmarks.common import Row
from controller.pki import CertificateAuthority
from policies.ids import AgentId

SIZES_BYTES: Final = {"150 KB": 150_000, "600 KB": 600_000, "5 MB": 5_000_000}
_REPLY: Final = b"\x00" * 16
_TIMEOUT_S: Final = 10.0

Hop = Callable[[], Awaitable[float]]
"""Moves one tensor and returns the seconds it took."""


def run(quick: bool) -> list[Row]:
    """Medians of the three ways for each size, and the ratios to the bare socket."""
    rounds = {"150 KB": 200, "600 KB": 100, "5 MB": 40} if not quick else {"150 KB": 40, "600 KB": 20, "5 MB": 8}
    with tempfile.TemporaryDirectory() as directory:
        enroll_both(Path(directory))
        pipe, other = get_context("spawn").Pipe()
        receiver = get_context("spawn").Process(target=_receive, args=(directory, other), daemon=True)
        receiver.start()
        try:
            return _with_loop(_measure(Path(directory), pipe.recv(), rounds))
        finally:
            pipe.send(None)
            receiver.join(timeout=5)
            receiver.kill()


def enroll_both(directory: Path) -> None:
    """An identity for either side, by one CA."""
    ca = CertificateAuthority(directory / "ca")
    for name in ("sender", "receiver"):
        identity = Identity(directory / name)
        identity.save_certificate(ca.sign_agent(identity.csr_pem(), AgentId(name), now_s=time.time()), ca.ca_pem)


def _with_loop(main: Awaitable[list[Row]]) -> list[Row]:
    async def call() -> list[Row]:
        return await main

    if platform.system() == "Linux":
        import uvloop

        return uvloop.run(call())  # type: ignore[no-any-return]
    return asyncio.run(call())


def _receive(directory: str, pipe: Pipe) -> None:
    """The other process: all three doors, until the pipe says stop."""
    bare = socket.create_server(("127.0.0.1", 0))

    async def handle(_: Connection, message: Message, tensors: dict[str, np.ndarray]) -> tuple[Message, Tensors]:
        return Done(), {}

    async def main() -> list[Row]:
        async with AsyncExitStack() as stack:
            context = Identity(Path(directory) / "receiver").server_context()
            secure = await stack.enter_async_context(await serve(handle, "127.0.0.1", 0, context))
            plain = await stack.enter_async_context(await serve(handle, "127.0.0.1", 0, None))
            pipe.send((bare.getsockname()[1], secure.port, plain.port))
            await asyncio.gather(asyncio.to_thread(_serve_bare, bare), asyncio.to_thread(pipe.recv))
        return []

    _with_loop(main())


def _serve_bare(listener: socket.socket) -> None:
    """Takes frames of a size that the connection's first eight bytes say, and answers each with sixteen bytes."""
    for _ in SIZES_BYTES:
        client, _address = listener.accept()
        with client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            size = int.from_bytes(client.recv(8, socket.MSG_WAITALL), "little")
            buffer = memoryview(bytearray(size))
            while _fill(client, buffer):
                client.sendall(_REPLY)
    listener.close()


def _fill(client: socket.socket, buffer: memoryview) -> bool:
    """False at the end of the stream."""
    filled = 0
    while filled < len(buffer):
        count = client.recv_into(buffer[filled:])
        if count == 0:
            return False
        filled += count
    return True


async def _measure(directory: Path, ports: tuple[int, int, int], rounds: dict[str, int]) -> list[Row]:
    bare_port, secure_port, plain_port = ports
    context = Identity(directory / "sender").client_context()
    secure = await connect("127.0.0.1", secure_port, context)
    plain = await connect("127.0.0.1", plain_port, None)
    rows: list[Row] = []
    for label, size in SIZES_BYTES.items():
        tensor = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
        with socket.create_connection(("127.0.0.1", bare_port)) as bare:
            bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            bare.sendall(size.to_bytes(8, "little"))
            hops: dict[str, Hop] = {
                "bare": _bare_hop(bare, tensor),
                "plain": _wire_hop(plain, tensor),
                "tls": _wire_hop(secure, tensor),
            }
            rows += _rows(label, await _take_turns(hops, rounds[label]))
    await secure.close()
    await plain.close()
    return rows


def _bare_hop(client: socket.socket, tensor: np.ndarray) -> Hop:
    async def hop() -> float:
        began_s = time.perf_counter()
        client.sendall(tensor.data)
        client.recv(len(_REPLY), socket.MSG_WAITALL)
        return time.perf_counter() - began_s

    return hop


def _wire_hop(connection: Connection, tensor: np.ndarray) -> Hop:
    async def hop() -> float:
        began_s = time.perf_counter()
        await connection.call(Probe(), {"x": tensor}, timeout_s=_TIMEOUT_S)
        return time.perf_counter() - began_s

    return hop


async def _take_turns(hops: dict[str, Hop], rounds: int) -> dict[str, list[float]]:
    """Seconds of every hop; a few unmeasured rounds first."""
    seconds: dict[str, list[float]] = {name: [] for name in hops}
    for turn in range(rounds + 3):
        for name, hop in hops.items():
            elapsed_s = await hop()
            if turn >= 3:
                seconds[name].append(elapsed_s)
    return seconds


def _rows(label: str, seconds: dict[str, list[float]]) -> list[Row]:
    medians_us = {name: statistics.median(times) * 1e6 for name, times in seconds.items()}
    runs = len(seconds["bare"])
    names = {"bare": "bare blocking TCP", "plain": "wire, no TLS", "tls": "wire, mutual TLS 1.3"}
    rows = [
        Row(name=f"hop {label}, {names[way]}", value=value, unit="us", goal=None, holds=None, runs=runs, note="")
        for way, value in medians_us.items()
    ]
    note = "two processes, loopback, in turns"
    for way in ("plain", "tls"):
        ratio = medians_us[way] / medians_us["bare"]
        name = f"hop {label}, {names[way]} / bare"
        rows.append(Row(name=name, value=ratio, unit="ratio", goal=None, holds=None, runs=runs, note=note))
    return rows
