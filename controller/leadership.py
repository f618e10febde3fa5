"""One controller leads: it holds a lease in the store, and everything it writes carries the lease's fencing token."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from pathlib import Path

from controller.state import State
from controller.store import Fence
from sla.errors import ConflictError, StoreUnavailableError

log = logging.getLogger(__name__)

LEASE = "leader"
TTL_MS = 10_000
RENEW_EVERY_S = 3.0


class Leadership:
    """Takes and keeps the lease. A controller that lost it stops deciding at once: its writes are fenced anyway."""

    def __init__(self, state: State, directory: Path) -> None:
        self._state = state
        # The same directory is the same controller, so a restart takes its own lease again without waiting.
        self._holder = _instance_id(directory)
        self._token: int | None = None

    @property
    def leads(self) -> bool:
        """True while the lease is ours."""
        return self._token is not None

    async def take(self, wait_s: float = 30.0) -> None:
        """Become the leader, waiting for another one's lease to end. Raises ConflictError when it does not."""
        held = await self._state.store.lease(LEASE)
        if held is not None and held.holder == self._holder:
            # Our own lease from before a crash. It is given back first, so that the new token fences a twin that only hung.
            await self._state.store.release(LEASE, held.token)
        for _ in range(int(wait_s / 0.5)):
            self._token = await self._state.store.acquire(LEASE, self._holder, TTL_MS)
            if self._token is not None:
                self._state.fence = Fence(LEASE, self._token)
                return
            await asyncio.sleep(0.5)
        raise ConflictError(
            "Another controller leads on this store; stop it first, or give this one a store of its own."
        )

    async def keep(self) -> None:
        """Renew for as long as this runs; exits the process when the lease is lost (a supervisor starts it again)."""
        while self._token is not None:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                kept = await self._state.store.renew(LEASE, self._token, TTL_MS)
            except StoreUnavailableError as error:
                log.warning("the lease could not be renewed: %s", error)
                continue
            if not kept:
                self._token = await self._state.store.acquire(LEASE, self._holder, TTL_MS)
                if self._token is None:
                    log.error("another controller leads now; this one stops")
                    os._exit(3)
                self._state.fence = Fence(LEASE, self._token)

    async def give_up(self) -> None:
        """Let another one lead."""
        if self._token is not None:
            await self._state.store.release(LEASE, self._token)
            self._token = None


def _instance_id(directory: Path) -> str:
    path = directory / "instance"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        name = f"controller-{secrets.token_hex(6)}"
        path.write_text(name + "\n")
        return name
