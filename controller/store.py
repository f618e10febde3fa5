"""The one store: versioned records, counters, bounded logs and leases over the Redis protocol.

Every call has three outcomes: done (a value), lost the race (`None`, `False`), and unknown (`StoreUnavailableError`: read again before
deciding anything). Nothing is ever sent twice on our own account: a repeated compare-and-set would report its own success as a lost race.
A write that returned is on the server's disk when the server keeps an append-only file; `persistence()` says whether it does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import redis.asyncio as aioredis
from redis.asyncio.cluster import RedisCluster

from controller import store_scripts as scripts
from controller.store_client import (
    TIMEOUT_S,
    Persistence,
    client_at,
    client_for,
    cluster_client,
    info_of,
    persistence_of,
    translated,
    version_of,
)
from sla.errors import InvalidInputError, RefusedError, SettingsError, StoreUnavailableError

MAX_VALUE_BYTES = 16 << 20
_SCAN_PAGE = 200
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

Claim = Literal["joined", "already", "full", "gone"]


class Versioned(NamedTuple):
    """A value and the version under which it was written."""

    value: bytes
    version: int


class Fence(NamedTuple):
    """Proof of leadership: a write that carries it is refused once the lease `name` was given to somebody newer."""

    name: str
    token: int


class Entry(NamedTuple):
    """One entry of a log; ids grow."""

    id: str
    value: bytes


class Lease(NamedTuple):
    """Who holds a lease now."""

    holder: str
    token: int
    remaining_ms: int


class Store:
    """Versioned records and their kin in one namespace. Made by `open_store`, or over a client of one's own."""

    def __init__(self, client: aioredis.Redis | RedisCluster, namespace: str, *, waits_for_disk: bool = False) -> None:
        """`waits_for_disk`: each durable write asks the server to confirm its sync (for servers that sync by the second)."""
        if _NAMESPACE.fullmatch(namespace) is None:
            raise SettingsError(
                f"The store namespace {namespace!r} is wrong; use lower-case letters, digits and dashes, at most 63."
            )
        # Both client classes speak the same commands, but share no typed base that says so.
        self._client: Any = client
        # The braces are a hash tag: on a cluster all keys of a namespace live in one slot, so scripts may touch several.
        self._prefix = f"tidegate:{{{namespace}}}:"
        self._waits_for_disk = waits_for_disk

    # --- records

    async def get(self, key: str) -> Versioned | None:
        """The record, or None if there is none."""
        async with translated():
            held = await self._client.hget(self._name("records"), key)
        return None if held is None else _unpack(held)

    async def put(
        self, key: str, value: bytes, *, expected_version: int | None, fence: Fence | None = None
    ) -> int | None:
        """The new version; None if the record no longer has `expected_version`.

        `expected_version=0`: it must not exist; None: whatever is there is replaced. Raises RefusedError when `fence` is outdated.
        """
        if len(value) > MAX_VALUE_BYTES:
            raise InvalidInputError(
                f"The record {key!r} has {len(value)} bytes; at most {MAX_VALUE_BYTES} are stored.",
                found=f"{len(value)} bytes", accepted=f"at most {MAX_VALUE_BYTES} bytes",
            )  # fmt: skip
        expected = -1 if expected_version is None else expected_version
        keys = self._names("records", "index", "counters", "fences")
        status, version = await self._durably(scripts.PUT, keys, key, value, expected, *_fence_args(fence))
        _check_fence(status, fence)
        return int(version) if status == 1 else None

    async def delete(self, key: str, expected_version: int | None = None, *, fence: Fence | None = None) -> bool:
        """True if it was deleted; False if it was not there or no longer has `expected_version`."""
        expected = -1 if expected_version is None else expected_version
        keys = self._names("records", "index", "fences")
        status = await self._durably(scripts.DELETE, keys, key, expected, *_fence_args(fence))
        _check_fence(status, fence)
        return bool(status == 1)

    async def scan(self, prefix: str) -> dict[str, Versioned]:
        """All records whose key begins with `prefix`, in key order. Pages are read one by one: it is no snapshot."""
        found: dict[str, Versioned] = {}
        start = b"[" + prefix.encode()
        while True:
            stop = b"[" + prefix.encode() + b"\xff"
            names, values = await self._eval(scripts.SCAN, self._names("records", "index"), start, stop, _SCAN_PAGE)
            found.update({n.decode(): _unpack(v) for n, v in zip(names, values, strict=True) if v is not None})
            if len(names) < _SCAN_PAGE:
                return found
            start = b"(" + names[-1]

    # --- counters

    async def increment(self, name: str, by: int = 1, *, fence: Fence | None = None) -> int:
        """The counter's new value; it starts at 0. A value is never given twice, though one may be skipped after an error."""
        keys = self._names("counters", "fences")
        status, value = await self._durably(scripts.INCREMENT, keys, name, by, *_fence_args(fence))
        _check_fence(status, fence)
        return int(value)

    # --- bounded logs

    async def append(
        self, stream: str, value: bytes, max_len: int, *, attachment: bytes | None = None, fence: Fence | None = None
    ) -> str:
        """The id of the new entry; the oldest go when there are more than `max_len`.

        An attachment is kept beside the entry and read by its own call, so that listing stays cheap.
        """
        keys = self._names(f"stream:{stream}", f"attach:{stream}", "streams", "fences")
        has, data = ("0", b"") if attachment is None else ("1", attachment)
        id_ = await self._durably(scripts.APPEND, keys, stream, value, max_len, has, data, *_fence_args(fence))
        _check_fence(-1 if id_ == b"" else 1, fence)
        return cast(str, id_.decode())

    async def tail(self, stream: str, count: int) -> list[Entry]:
        """The newest `count` entries, oldest first."""
        async with translated():
            rows = await self._client.xrevrange(self._name(f"stream:{stream}"), count=count)
        return [Entry(id_.decode(), fields[b"v"]) for id_, fields in reversed(rows)]

    async def entry(self, stream: str, id_: str) -> Entry | None:
        """One entry by its id."""
        value = await self._entry_value(f"stream:{stream}", id_)
        return None if value is None else Entry(id_, value)

    async def attachment(self, stream: str, id_: str) -> bytes | None:
        """What was attached to an entry."""
        return await self._entry_value(f"attach:{stream}", id_)

    async def streams(self) -> frozenset[str]:
        """The names of all logs that were ever appended to."""
        async with translated():
            return frozenset(name.decode() for name in await self._client.smembers(self._name("streams")))

    # --- bounded sets

    async def claim(self, name: str, member: str, *, limit: int, while_key: str) -> Claim:
        """Let `member` into a set that holds at most `limit`, as long as the record `while_key` exists.

        `already`: it was in, and nothing was spent; `full`, `gone`: it is not in.
        """
        keys = self._names(f"set:{name}", "records")
        word = await self._durably(scripts.CLAIM, keys, member, limit, while_key)
        return cast(Claim, word.decode())

    async def members(self, name: str) -> frozenset[str]:
        """Who claimed a place."""
        async with translated():
            return frozenset(member.decode() for member in await self._client.smembers(self._name(f"set:{name}")))

    async def forget_members(self, name: str) -> None:
        """Empty the set."""
        async with translated():
            await self._client.delete(self._name(f"set:{name}"))

    # --- leases

    async def acquire(self, name: str, holder: str, ttl_ms: int) -> int | None:
        """The fencing token, larger than any before; None while somebody else holds the lease.

        The holder itself gets its running token again with a fresh time to live. The clock is the server's.
        """
        keys = self._names(f"lease:{name}", "fences")
        return int(await self._durably(scripts.ACQUIRE, keys, name, holder, ttl_ms)) or None

    async def renew(self, name: str, token: int, ttl_ms: int) -> bool:
        """False if the lease ran out or went to somebody else: whoever leads by it must stop."""
        return bool(await self._eval(scripts.RENEW, self._names(f"lease:{name}"), token, max(1, ttl_ms)))

    async def release(self, name: str, token: int) -> bool:
        """Give the lease back; False if it was not ours any more."""
        return bool(await self._eval(scripts.RENEW, self._names(f"lease:{name}"), token, 0))

    async def lease(self, name: str) -> Lease | None:
        """Who holds the lease now."""
        key = self._name(f"lease:{name}")
        async with translated():
            held = await self._client.hgetall(key)
            remaining_ms = await self._client.pttl(key)
        if not held or remaining_ms < 0:
            return None
        return Lease(held[b"holder"].decode(), int(held[b"token"]), int(remaining_ms))

    # --- the server

    async def ready(self) -> bool:
        """True if the server answers."""
        try:
            async with translated():
                await self._client.ping()
        except StoreUnavailableError:
            return False
        return True

    async def persistence(self) -> Persistence:
        """`aof`: acknowledged writes survive a crash of the server; `none`: they do not, and an operator must be told."""
        return await persistence_of(self._client)

    async def close(self) -> None:
        """Close all connections; the server goes on."""
        await self._client.aclose()

    def _name(self, name: str) -> str:
        return self._prefix + name

    def _names(self, *names: str) -> list[str]:
        return [self._prefix + name for name in names]

    async def _entry_value(self, name: str, id_: str) -> bytes | None:
        if re.fullmatch(r"\d{1,20}-\d{1,20}", id_) is None:
            return None
        async with translated():
            rows = await self._client.xrange(self._name(name), id_, id_)
        return cast(bytes, rows[0][1][b"v"]) if rows else None

    async def _eval(self, script: str, keys: list[str], *args: str | bytes | int) -> Any:
        # EVAL with the text, not by its hash: a server that restarted or failed over has an empty script cache.
        async with translated():
            return await self._client.eval(script, len(keys), *keys, *args)

    async def _durably(self, script: str, keys: list[str], *args: str | bytes | int) -> Any:
        """Like `_eval`, and returns only when the server has what it wrote on its disk."""
        if not self._waits_for_disk:
            return await self._eval(script, keys, *args)
        # WAITAOF speaks of what its own connection wrote, hence one pipeline.
        async with translated(), self._client.pipeline(transaction=False) as pipe:
            pipe.eval(script, len(keys), *keys, *args)
            pipe.execute_command("WAITAOF", 1, 0, int(TIMEOUT_S * 800))
            answer, (synced, _) = await pipe.execute()
        if synced < 1:
            raise StoreUnavailableError("The store did not confirm in time that the write is on its disk.")
        return answer


async def open_store(target: str | Path, namespace: str = "default") -> Store:
    """A store behind a unix socket (a Path) or a URL (`redis://`, `rediss://`, `unix://`); a cluster is recognised.

    Raises SettingsError for a URL that cannot work, StoreUnavailableError when nobody answers.
    """
    if isinstance(target, Path):
        # Tidegate's own server: it syncs on every write, so there is nothing to wait for.
        return Store(client_at(target), namespace)
    client = client_for(target)
    try:
        async with translated():
            await client.ping()
        clustered = await info_of(client, "cluster", "cluster_enabled") == "1"
        waits = await persistence_of(client) == "aof" and await version_of(client) >= (7, 2)
    except BaseException:
        await client.aclose()
        raise
    if not clustered:
        return Store(client, namespace, waits_for_disk=waits)
    await client.aclose()
    # On a cluster WAITAOF cannot be tied to the connection of the write: set `appendfsync always` there.
    return Store(await cluster_client(target), namespace)


def _fence_args(fence: Fence | None) -> tuple[str, int]:
    return ("", 0) if fence is None else (fence.name, fence.token)


def _check_fence(status: int, fence: Fence | None) -> None:
    if status == -1 and fence is not None:
        raise RefusedError(f"This controller no longer holds the lease {fence.name!r}; a newer one leads.")


def _unpack(held: bytes) -> Versioned:
    return Versioned(held[scripts.VERSION_DIGITS :], int(held[: scripts.VERSION_DIGITS]))
