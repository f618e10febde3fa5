"""Join tokens: one-time secrets that let a limited number of devices in for a limited time.

A token is spent per public key, not per attempt: a device whose link dropped in the middle finishes with the same key at no cost.
"""

from __future__ import annotations

import hashlib
import secrets

from controller.records import TokenRecord, TokenView
from controller.store import Store
from controller.table import Table
from sla.errors import InvalidInputError, RefusedError

_MAX_TTL_S = 31 * 86_400
_MAX_USES = 100_000
_KEEP_EXPIRED_S = 7 * 86_400


class JoinTokens:
    """The tokens of one namespace; of each secret only the hash is stored."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._table = Table(store, "token", TokenRecord)

    async def create(self, *, ttl_s: float, uses: int, now_s: float, note: str = "") -> str:
        """The secret of a new join token for `uses` devices; it is stored nowhere, only its hash is."""
        _check("ttl_s", 1 <= ttl_s <= _MAX_TTL_S, ttl_s, f"seconds from 1 to {_MAX_TTL_S}")
        _check("uses", 1 <= uses <= _MAX_USES, uses, f"a number from 1 to {_MAX_USES}")
        _check("note", len(note) <= 200, f"{len(note)} characters", "at most 200 characters")
        await self._drop_old(now_s)
        secret = f"tgj_{secrets.token_urlsafe(24)}"
        record = TokenRecord(created_at_s=now_s, expires_at_s=now_s + ttl_s, uses=uses, note=note)
        await self._table.put(_hash(secret), record)
        return secret

    async def spend(self, secret: str, public_key_fingerprint: str, *, now_s: float) -> None:
        """Let one device in. A key that was let in before may finish what it began, even after the token expired.

        Raises RefusedError when the token is unknown, expired or used up; the number of uses is never exceeded.
        """
        name = _hash(secret.strip())
        record = await self._table.get(name)
        if record is None:
            raise _unknown_token()
        if now_s >= record.expires_at_s:
            if public_key_fingerprint in await self._store.members(f"spent/{name}"):
                return
            raise RefusedError(
                f"The join token expired {_ago(now_s - record.expires_at_s)} ago; ask for a new one (tidegate token create)."
            )
        claim = await self._store.claim(
            f"spent/{name}", public_key_fingerprint, limit=record.uses, while_key=self._table.key(name)
        )
        if claim == "gone":
            raise _unknown_token()
        if claim == "full":
            raise RefusedError(
                f"The join token is used up (it was for {record.uses} {'device' if record.uses == 1 else 'devices'});"
                " ask for a new one (tidegate token create)."
            )

    async def views(self) -> list[TokenView]:
        """All join tokens, newest first; without their secrets."""
        views = [
            TokenView(
                id=name[:12],
                note=record.note,
                created_at_s=record.created_at_s,
                expires_at_s=record.expires_at_s,
                uses=record.uses,
                used=len(await self._store.members(f"spent/{name}")),
            )
            for name, record in (await self._table.all()).items()
        ]
        return sorted(views, key=lambda view: view.created_at_s, reverse=True)

    async def revoke(self, token_id: str) -> bool:
        """Nobody joins with it any more; False if there is no such token. Devices that joined stay."""
        names = [name for name in await self._table.all() if len(token_id) >= 12 and name.startswith(token_id)]
        for name in names:
            await self._delete(name)
        return bool(names)

    async def _drop_old(self, now_s: float) -> None:
        for name, record in (await self._table.all()).items():
            if now_s - record.expires_at_s > _KEEP_EXPIRED_S:
                await self._delete(name)

    async def _delete(self, name: str) -> None:
        await self._table.delete(name)
        await self._store.forget_members(f"spent/{name}")


def _check(field: str, ok: bool, found: object, accepted: str) -> None:
    if not ok:
        raise InvalidInputError(
            f"The join token's {field} is wrong: found {found}; accepted is {accepted}.",
            pointer=f"/{field}", found=str(found), accepted=accepted,
        )  # fmt: skip


def _unknown_token() -> RefusedError:
    return RefusedError("The join token is not known here; ask for a new one (tidegate token create).")


def _hash(secret: str) -> str:
    # The secret is random and long, so a plain hash cannot be guessed back.
    return hashlib.sha256(secret.encode()).hexdigest()


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
