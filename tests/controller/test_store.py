"""The store's promises, against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
import redis.asyncio as aioredis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry as SyncRetry

from controller.embedded_store import EmbeddedStore, server_binary
from controller.store import MAX_VALUE_BYTES, Fence, Store, open_store
from sla.errors import InvalidInputError, RefusedError, SettingsError, StoreUnavailableError


async def test_a_record_is_read_back_as_it_was_written(valkey_store: Store) -> None:
    value = bytes(range(256))
    version = await valkey_store.put("a/b", value, expected_version=0)
    assert version is not None
    assert await valkey_store.get("a/b") == (value, version)
    assert await valkey_store.get("a/c") is None


async def test_a_put_loses_the_race_unless_the_version_is_the_expected_one(valkey_store: Store) -> None:
    first = await valkey_store.put("k", b"1", expected_version=0)
    assert await valkey_store.put("k", b"2", expected_version=0) is None
    second = await valkey_store.put("k", b"2", expected_version=first)
    assert first is not None
    assert second is not None
    assert second > first
    assert await valkey_store.put("k", b"3", expected_version=first) is None
    assert await valkey_store.get("k") == (b"2", second)
    assert await valkey_store.put("k", b"4", expected_version=None) is not None


async def test_one_of_twenty_concurrent_writers_wins_each_version(valkey_store: Store) -> None:
    version = await valkey_store.put("k", b"", expected_version=0)
    for _ in range(5):
        outcomes = await asyncio.gather(
            *(valkey_store.put("k", b"%d" % writer, expected_version=version) for writer in range(20))
        )
        winners = [writer for writer, outcome in enumerate(outcomes) if outcome is not None]
        assert len(winners) == 1
        version = outcomes[winners[0]]
        assert await valkey_store.get("k") == (b"%d" % winners[0], version)


async def test_a_key_made_again_never_gets_a_version_back_that_somebody_remembers(valkey_store: Store) -> None:
    remembered = await valkey_store.put("k", b"old", expected_version=0)
    assert await valkey_store.delete("k", remembered)
    assert await valkey_store.put("k", b"new", expected_version=0) != remembered
    assert await valkey_store.put("k", b"mine", expected_version=remembered) is None


async def test_delete_wants_the_version_and_something_to_delete(valkey_store: Store) -> None:
    version = await valkey_store.put("k", b"", expected_version=0)
    assert version is not None
    assert not await valkey_store.delete("k", version + 1)
    assert await valkey_store.delete("k", version)
    assert not await valkey_store.delete("k")
    assert await valkey_store.scan("k") == {}


async def test_scan_pages_through_all_keys_of_a_prefix_and_no_others(valkey_store: Store) -> None:
    names = [f"p/{n:04d}" for n in range(450)]
    for name in [*names, "p", "o/1", "q/1", "p0"]:
        await valkey_store.put(name, name.encode(), expected_version=0)
    found = await valkey_store.scan("p/")
    assert list(found) == names
    assert all(held.value.decode() == name for name, held in found.items())
    assert len(await valkey_store.scan("")) == 454


async def test_namespaces_do_not_see_each_other(valkey_store: Store, valkey_socket: Path) -> None:
    await valkey_store.put("k", b"mine", expected_version=0)
    other = await open_store(valkey_socket, "another-tenant")
    assert await other.get("k") is None
    await other.close()


async def test_a_value_is_bounded(valkey_store: Store) -> None:
    with pytest.raises(InvalidInputError, match="at most"):
        await valkey_store.put("k", bytes(MAX_VALUE_BYTES + 1), expected_version=None)


async def test_concurrent_increments_never_give_a_value_twice(valkey_store: Store) -> None:
    values = await asyncio.gather(*(valkey_store.increment("epoch") for _ in range(50)))
    assert sorted(values) == list(range(1, 51))


async def test_a_log_keeps_its_newest_entries_and_their_attachments(valkey_store: Store) -> None:
    ids = [await valkey_store.append("log", b"%d" % n, 5, attachment=b"a%d" % n) for n in range(12)]
    assert [entry.value for entry in await valkey_store.tail("log", 100)] == [b"7", b"8", b"9", b"10", b"11"]
    assert [entry.id for entry in await valkey_store.tail("log", 2)] == ids[-2:]
    assert await valkey_store.attachment("log", ids[-1]) == b"a11"
    assert await valkey_store.attachment("log", ids[0]) is None
    assert await valkey_store.entry("log", ids[-1]) == (ids[-1], b"11")
    assert await valkey_store.entry("log", "no id") is None
    assert await valkey_store.streams() == {"log"}


async def test_a_claim_is_idempotent_bounded_and_bound_to_a_record(valkey_store: Store) -> None:
    assert await valkey_store.claim("set", "a", limit=1, while_key="owner") == "gone"
    await valkey_store.put("owner", b"", expected_version=0)
    assert await valkey_store.claim("set", "a", limit=1, while_key="owner") == "joined"
    assert await valkey_store.claim("set", "a", limit=1, while_key="owner") == "already"
    assert await valkey_store.claim("set", "b", limit=1, while_key="owner") == "full"
    assert await valkey_store.members("set") == {"a"}


async def test_a_lease_has_one_holder_and_growing_tokens(valkey_store: Store) -> None:
    token = await valkey_store.acquire("leader", "a", 60_000)
    assert token is not None
    assert await valkey_store.acquire("leader", "b", 60_000) is None
    assert await valkey_store.acquire("leader", "a", 60_000) == token, "its holder gets the running token again"
    held = await valkey_store.lease("leader")
    assert held is not None
    assert (held.holder, held.token) == ("a", token)
    assert await valkey_store.renew("leader", token, 60_000)
    assert await valkey_store.release("leader", token)
    assert await valkey_store.lease("leader") is None
    newer = await valkey_store.acquire("leader", "b", 60_000)
    assert newer is not None
    assert newer > token
    assert not await valkey_store.renew("leader", token, 60_000)
    assert not await valkey_store.release("leader", token)


async def test_one_of_twenty_concurrent_candidates_leads(valkey_store: Store) -> None:
    tokens = await asyncio.gather(*(valkey_store.acquire("leader", f"c{n}", 60_000) for n in range(20)))
    assert len([token for token in tokens if token is not None]) == 1


async def test_a_leader_whose_lease_ran_out_writes_nothing_once_a_newer_one_leads(
    valkey_store: Store, valkey_socket: Path
) -> None:
    token = await valkey_store.acquire("leader", "a", 60_000)
    assert token is not None
    old = Fence("leader", token)
    assert await valkey_store.put("k", b"a", expected_version=None, fence=old) is not None
    async with aioredis.Redis(unix_socket_path=str(valkey_socket)) as raw:
        assert await raw.pexpire(valkey_store._name("lease:leader"), 0)
    newer = await valkey_store.acquire("leader", "b", 60_000)
    assert newer is not None
    for write in (
        valkey_store.put("k", b"late", expected_version=None, fence=old),
        valkey_store.delete("k", fence=old),
        valkey_store.increment("n", fence=old),
        valkey_store.append("log", b"late", 5, fence=old),
    ):
        with pytest.raises(RefusedError, match="newer one leads"):
            await write
    assert await valkey_store.put("k", b"b", expected_version=None, fence=Fence("leader", newer)) is not None
    assert await valkey_store.increment("n") == 1
    assert await valkey_store.tail("log", 5) == []


async def test_a_cancelled_call_never_gives_its_answer_to_another(valkey_store: Store) -> None:
    for n in range(20):
        await valkey_store.put(f"k{n}", b"%d" % n, expected_version=0)
    for yields in range(12):
        doomed = [asyncio.create_task(valkey_store.get(f"k{n}")) for n in range(20)]
        for _ in range(yields):
            await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        held = await asyncio.gather(*(valkey_store.get(f"k{n}") for n in range(20)))
        assert [h.value for h in held if h is not None] == [b"%d" % n for n in range(20)]


async def test_a_server_that_is_gone_means_an_unknown_outcome(tmp_path: Path) -> None:
    async with EmbeddedStore(tmp_path) as server:
        store = await server.open()
        await store.put("k", b"", expected_version=0)
        assert await store.ready()
    assert not await store.ready()
    for call in (
        store.get("k"),
        store.put("k", b"", expected_version=None),
        store.scan(""),
        store.acquire("leader", "a", 1000),
        store.append("log", b"", 5),
    ):
        with pytest.raises(StoreUnavailableError):
            await call
    with pytest.raises(StoreUnavailableError):
        await open_store(f"unix://{server.socket_path}")
    await store.close()


@pytest.mark.parametrize("url", ["http://:secret@host/", "host:6379", "redis://:secret@host:port/0"])
async def test_a_url_that_cannot_work_is_refused_in_a_sentence_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError, match="store URL") as refused:
        await open_store(url)
    assert "secret" not in str(refused.value)


async def test_a_namespace_is_checked(valkey_socket: Path) -> None:
    with pytest.raises(SettingsError, match="namespace"):
        await open_store(valkey_socket, "No Braces{}")


async def test_an_operators_server_is_asked_to_confirm_the_disk_and_says_if_it_cannot(tmp_path: Path) -> None:
    async with EmbeddedStore(tmp_path) as server, aioredis.Redis(unix_socket_path=str(server.socket_path)) as raw:
        await raw.config_set("appendfsync", "everysec")
        store = await open_store(f"unix://{server.socket_path}")
        assert await store.persistence() == "aof"
        await store.put("k", b"1", expected_version=0)
        local = (await raw.info("persistence"))["aof_pending_bio_fsync"]
        assert local == 0
        await store.close()
        await raw.config_set("appendonly", "no")
        store = await open_store(f"unix://{server.socket_path}")
        assert await store.persistence() == "none"
        assert await store.put("k", b"2", expected_version=None)
        await store.close()
        await raw.config_set("requirepass", "right")
        with pytest.raises(SettingsError, match="credentials"):
            await open_store(f"unix://:wrong@{server.socket_path}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def _cluster_of_one(directory: Path) -> AsyncIterator[str]:
    """A cluster with one node that owns all slots."""
    port = _free_port()
    options = {"port": port, "bind": "127.0.0.1", "dir": directory, "cluster-enabled": "yes", "save": ""}
    options |= {"cluster-port": _free_port(), "cluster-node-timeout": 500, "logfile": directory / "log"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    process = await asyncio.to_thread(subprocess.Popen, [str(server_binary()), *words])
    try:
        await asyncio.to_thread(_give_all_slots, port)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


def _give_all_slots(port: int) -> None:
    with redis.Redis(port=port, retry=SyncRetry(ExponentialBackoff(), 10)) as raw:
        raw.ping()
        raw.cluster("ADDSLOTSRANGE", 0, 16383)
        while raw.cluster("INFO")["cluster_state"] != "ok":
            time.sleep(0.05)


async def test_everything_works_on_a_cluster(tmp_path: Path) -> None:
    async with _cluster_of_one(tmp_path) as url:
        store = await open_store(url, "clustered")
        version = await store.put("k", b"1", expected_version=0)
        assert await store.put("k", b"2", expected_version=version)
        assert list(await store.scan("")) == ["k"]
        assert await store.increment("n") == 1
        id_ = await store.append("log", b"v", 5, attachment=b"a")
        assert await store.attachment("log", id_) == b"a"
        assert [entry.value for entry in await store.tail("log", 5)] == [b"v"]
        token = await store.acquire("leader", "a", 60_000)
        assert token is not None
        assert await store.claim("set", "m", limit=1, while_key="k") == "joined"
        assert await store.put("k", b"3", expected_version=None, fence=Fence("leader", token))
        assert await store.delete("k")
        assert await store.ready()
        assert await store.persistence() == "none"
        await store.close()
