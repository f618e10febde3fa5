"""API keys that operators make for others: kept as hashes, with a role each."""

from __future__ import annotations

import hashlib
import secrets

from controller.auth import Keys, Role
from controller.records import ApiKeyRecord
from controller.state import State
from controller.views import KeyIn, KeyOut, NewKeyOut
from sla.errors import NotFoundError

ID_LENGTH = 12


class ApiKeys:
    """The keys of one installation. `keys` is what requests are checked against; it changes as keys are made and revoked."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._records: dict[str, ApiKeyRecord] = {}
        self.keys = Keys({})

    async def load(self) -> None:
        """Read the keys from the store."""
        self._records = await self._state.api_keys()
        self.keys.roles.update({digest: Role(record.role) for digest, record in self._records.items()})

    def add_admin(self, key: str) -> None:
        """The first administrator's key, which is the installation's own and not in the store."""
        self.keys.roles[_digest(key)] = Role.ADMIN

    async def create(self, wanted: KeyIn, now_s: float) -> NewKeyOut:
        """A new key, shown once."""
        key = f"tgk_{secrets.token_urlsafe(32)}"
        digest = _digest(key)
        record = ApiKeyRecord(role=Role[wanted.role.upper()], note=wanted.note, created_at_s=now_s)
        await self._state.put_api_key(digest, record)
        self._records[digest] = record
        self.keys.roles[digest] = Role(record.role)
        return NewKeyOut(key=key, **_out(digest, record).model_dump())

    def list(self) -> list[KeyOut]:
        """All keys that were made, newest last; never the keys themselves."""
        ordered = sorted(self._records.items(), key=lambda item: item[1].created_at_s)
        return [_out(digest, record) for digest, record in ordered]

    async def revoke(self, key_id: str) -> None:
        """Nobody may use it any more. Raises NotFoundError."""
        digest = next((d for d in self._records if len(key_id) >= ID_LENGTH and d.startswith(key_id)), None)
        if digest is None:
            raise NotFoundError(f"There is no API key {key_id!r}; list them with: tidegate key list")
        await self._state.delete_api_key(digest)
        del self._records[digest]
        self.keys.roles.pop(digest, None)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _out(digest: str, record: ApiKeyRecord) -> KeyOut:
    return KeyOut(
        id=digest[:ID_LENGTH], role=Role(record.role).name.lower(), note=record.note, created_at_s=record.created_at_s
    )
