"""A real Valkey server for all tests of this package, and a fresh namespace in it for each test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from controller.embedded_store import EmbeddedStore
from controller.store import Store, open_store

_numbers = itertools.count(1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def valkey_socket(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """The socket of a server that runs for the whole session."""
    async with EmbeddedStore(tmp_path_factory.mktemp("valkey")) as server:
        yield server.socket_path


@pytest_asyncio.fixture
async def valkey_store(valkey_socket: Path) -> AsyncIterator[Store]:
    """A store with a namespace of its own."""
    store = await open_store(valkey_socket, f"test-{next(_numbers)}")
    yield store
    await store.close()
