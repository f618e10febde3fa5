"""The embedded server: what was acknowledged survives every kill, and a server is adopted, ended or restarted as it should."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from controller.embedded_store import EmbeddedStore, server_binary
from controller.store import Store
from sla.errors import SettingsError, StoreUnavailableError

_CONTROLLER = """
import asyncio, sys
from pathlib import Path
from controller.embedded_store import EmbeddedStore

async def main() -> None:
    server = EmbeddedStore(Path(sys.argv[1]))
    await server.start()
    store = await server.open()
    print(server.pid, flush=True)
    n = 0
    while True:
        await store.put(f"k{n}", b"%d" % n, expected_version=0)
        print(n, flush=True)
        n += 1

asyncio.run(main())
"""


async def _killed_controller(directory: Path) -> tuple[int, list[int]]:
    """Run a controller on `directory`, kill it while it writes; its server's pid and the writes it was told are done."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CONTROLLER, str(directory), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    lines = [await process.stdout.readline() for _ in range(30)]
    process.kill()
    rest = (await process.stdout.read()).splitlines(keepends=True)
    await process.wait()
    return pid, [int(line) for line in (*lines, *rest) if line.endswith(b"\n")]


async def _until_ready(store: Store) -> None:
    for _ in range(1000):
        if await store.ready():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the store did not come back")


def _lives(pid: int | None) -> bool:
    """Whether the process runs; an orphan may stay a zombie where nobody reaps it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _assert_all_there(store: Store, acknowledged: list[int]) -> None:
    found = await store.scan("k")
    assert {f"k{n}" for n in acknowledged} <= found.keys()


async def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    for generation in range(3):
        async with EmbeddedStore(tmp_path) as server:
            assert not server.adopted
            store = await server.open()
            assert len(await store.scan("")) == generation
            await store.put(f"k{generation}", b"", expected_version=0)
            await store.close()
            pid = server.pid
        assert server.pid is None
        assert pid is not None
        assert not _lives(pid)


async def test_the_server_of_a_killed_controller_is_adopted_and_then_stopped(tmp_path: Path) -> None:
    pid, acknowledged = await _killed_controller(tmp_path)
    async with EmbeddedStore(tmp_path) as server:
        assert server.adopted
        assert server.pid == pid
        store = await server.open()
        await _assert_all_there(store, acknowledged)
        await store.close()
    assert not _lives(pid)


async def test_nothing_is_lost_when_controller_and_server_are_killed(tmp_path: Path) -> None:
    pid, acknowledged = await _killed_controller(tmp_path)
    os.kill(pid, signal.SIGKILL)
    async with EmbeddedStore(tmp_path) as server:
        assert not server.adopted
        assert server.pid != pid
        store = await server.open()
        await _assert_all_there(store, acknowledged)
        await store.close()


async def test_a_server_killed_under_load_comes_back_with_every_acknowledged_write(tmp_path: Path) -> None:
    acknowledged: list[int] = []
    enough = asyncio.Semaphore(0)

    async def write(store: Store, first: int) -> None:
        for n in range(first, first + 40):
            with contextlib.suppress(StoreUnavailableError):
                if await store.put(f"k{n}", b"", expected_version=0):
                    acknowledged.append(n)
            if n == first + 10:
                enough.release()

    async with EmbeddedStore(tmp_path) as server:
        store = await server.open()
        for kill in range(3):
            writers = [asyncio.create_task(write(store, 1000 * kill + 100 * w)) for w in range(4)]
            for _ in writers:
                await enough.acquire()
            pid = server.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*writers)
            await _until_ready(store)
            assert server.pid != pid
            await _assert_all_there(store, acknowledged)
        await store.close()


async def test_a_live_server_whose_socket_was_removed_is_ended_and_replaced(tmp_path: Path) -> None:
    pid, acknowledged = await _killed_controller(tmp_path)
    (tmp_path / "valkey.sock").unlink()
    async with EmbeddedStore(tmp_path) as server:
        assert server.pid != pid
        assert not _lives(pid)
        store = await server.open()
        await _assert_all_there(store, acknowledged)
        await store.close()


async def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "valkey.sock"))
    async with EmbeddedStore(tmp_path) as server:
        store = await server.open()
        assert await store.ready()
        await store.close()


async def test_a_second_controller_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    async with EmbeddedStore(tmp_path) as server:
        with pytest.raises(SettingsError, match="Another controller"):
            await EmbeddedStore(tmp_path).start()
        store = await server.open()
        assert await store.ready()
        await store.close()


async def test_a_long_directory_gets_a_short_private_socket(tmp_path: Path) -> None:
    directory = tmp_path / ("long name " * 12).strip()
    async with EmbeddedStore(directory) as server:
        assert server.socket_path.parent != directory
        assert server.socket_path.parent.stat().st_mode & 0o777 == 0o700
        store = await server.open()
        await store.put("k", b"", expected_version=0)
        await store.close()
    async with EmbeddedStore(directory) as server:
        store = await server.open()
        assert list(await store.scan("")) == ["k"]
        await store.close()
    server.socket_path.parent.rmdir()


async def test_a_directory_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be used"):
        await EmbeddedStore(tmp_path / "file" / "store").start()


async def test_a_broken_log_is_one_sentence_that_says_where_to_look(tmp_path: Path) -> None:
    async with EmbeddedStore(tmp_path):
        pass
    for part in (tmp_path / "appendonlydir").glob("*.incr.aof"):
        part.write_bytes(b"this is no append-only file\r\n")
    with pytest.raises(SettingsError, match=r"valkey\.log"):
        await EmbeddedStore(tmp_path).start()
    again = EmbeddedStore(tmp_path)
    with pytest.raises(SettingsError, match=r"valkey\.log"):
        await again.start()
    assert again.pid is None


def test_a_platform_without_a_server_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SettingsError, match="--store redis://"):
        server_binary()
