"""Records of one type in the store, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from controller.records import decode, encode
from controller.store import Fence, Store
from sla.errors import StoreUnavailableError

T = TypeVar("T", bound=msgspec.Struct)

_MAX_TRIES = 100


class Table(Generic[T]):
    """Records of one type, by name."""

    def __init__(self, store: Store, kind: str, record_type: type[T]) -> None:
        self._store = store
        self._kind = kind
        self._type = record_type

    def key(self, name: str) -> str:
        return f"{self._kind}/{name}"

    async def get(self, name: str) -> T | None:
        held = await self._store.get(self.key(name))
        return None if held is None else decode(held.value, self._type, self.key(name))

    async def put(self, name: str, record: T, *, fence: Fence | None = None) -> None:
        await self._store.put(self.key(name), encode(record), expected_version=None, fence=fence)

    async def update(self, name: str, change: Callable[[T | None], T], *, fence: Fence | None = None) -> T:
        """Put `change(current)`; again with what is current then, when somebody else was first."""
        for _ in range(_MAX_TRIES):
            held = await self._store.get(self.key(name))
            current = None if held is None else decode(held.value, self._type, self.key(name))
            changed = change(current)
            if changed == current:
                return changed
            version = 0 if held is None else held.version
            if await self._store.put(self.key(name), encode(changed), expected_version=version, fence=fence):
                return changed
        raise StoreUnavailableError(f"Too many others change {self.key(name)!r} at the same time.")

    async def all(self) -> dict[str, T]:
        prefix = self.key("")
        found = await self._store.scan(prefix)
        return {key.removeprefix(prefix): decode(held.value, self._type, key) for key, held in found.items()}

    async def delete(self, name: str) -> bool:
        return await self._store.delete(self.key(name))
