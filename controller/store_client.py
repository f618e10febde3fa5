"""Clients of a Redis-protocol server, and their errors in our words. Only `controller.store` uses this."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import redis.asyncio as aioredis
from redis import exceptions as redis_errors
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sla.errors import PermanentError, SettingsError, StoreUnavailableError

TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 16
_RETRYABLE_ANSWERS = (
    "LOADING",
    "READONLY",
    "MISCONF",
    "OOM",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "NOREPLICAS",
    "BUSY",
)
_CREDENTIALS = (redis_errors.AuthenticationError, redis_errors.AuthorizationError)

Persistence = Literal["aof", "none", "unknown"]


def client_at(socket_path: Path) -> aioredis.Redis:
    pool = aioredis.BlockingConnectionPool(
        connection_class=aioredis.UnixDomainSocketConnection, path=str(socket_path), **_pool_options()
    )
    return aioredis.Redis.from_pool(pool)


def client_for(url: str) -> aioredis.Redis:
    scheme = urlsplit(url).scheme
    if scheme not in ("redis", "rediss", "unix"):
        raise SettingsError(f"The store URL begins with {scheme!r}; accepted are redis://, rediss:// and unix://.")
    try:
        pool = aioredis.BlockingConnectionPool.from_url(url, **_pool_options())
    except (ValueError, TypeError) as error:
        # The URL may hold a password, so the message must not repeat it.
        raise SettingsError(f"The store URL is wrong: {type(error).__name__} while reading it.") from None
    return aioredis.Redis.from_pool(pool)


def _pool_options() -> dict[str, Any]:
    return {
        "max_connections": _MAX_CONNECTIONS,
        "timeout": TIMEOUT_S,
        "socket_timeout": TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }


async def cluster_client(url: str) -> RedisCluster:
    async with translated():
        client = RedisCluster.from_url(url, socket_timeout=TIMEOUT_S, protocol=2, retry=Retry(NoBackoff(), 0))
        await client.initialize()
        return client


async def persistence_of(client: Any) -> Persistence:
    enabled = await info_of(client, "persistence", "aof_enabled")
    return "unknown" if enabled is None else "aof" if enabled == "1" else "none"


async def version_of(client: Any) -> tuple[int, ...]:
    text = await info_of(client, "server", "redis_version") or "0"
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


async def info_of(client: Any, section: str, field: str) -> str | None:
    """One field of INFO; None where the operator's access rules do not allow to ask."""
    try:
        async with translated():
            answer: Mapping[str, object] = await client.info(section)
    except PermanentError:
        return None
    value = answer.get(field)
    if isinstance(value, Mapping):
        # A cluster client answers per node.
        value = next(iter(value.values()), None)
    return None if value is None else str(value)


@contextlib.asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Foreign errors become ours: unknown outcome, wrong settings, or a refusal that will be repeated."""
    task = asyncio.current_task()
    cancellations = task.cancelling() if task is not None else 0
    try:
        yield
        # The client sends through `asyncio.wait_for`, which in Python 3.11 may swallow a cancellation: a task would never end.
        if task is not None and task.cancelling() > cancellations:
            raise asyncio.CancelledError
    except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
        # What goes wrong while a connection is set up arrives wrapped.
        if isinstance(error, _CREDENTIALS) or isinstance(error.__cause__, _CREDENTIALS):
            raise SettingsError(f"The store refuses these credentials: {_one_line(error)}.") from None
        raise StoreUnavailableError(f"The store does not answer: {_one_line(error)}.") from error
    except redis_errors.NoPermissionError as error:
        raise SettingsError(f"The store's user may not do this: {_one_line(error)}.") from None
    except redis_errors.RedisError as error:
        text = _one_line(error)
        retryable = (redis_errors.ReadOnlyError, redis_errors.OutOfMemoryError, redis_errors.ClusterDownError)
        if isinstance(error, retryable) or text.startswith(_RETRYABLE_ANSWERS):
            raise StoreUnavailableError(f"The store cannot write now: {text}.") from error
        raise PermanentError(f"The store refused a command: {text}.") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
