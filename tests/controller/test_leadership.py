"""One controller leads, and what the others write is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controller.leadership import Leadership
from controller.state import State
from controller.store import Store
from sla.errors import ConflictError, RefusedError


async def test_the_second_controller_waits_and_then_says_why_it_does_not_lead(
    valkey_store: Store, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first, second = Leadership(State(valkey_store), tmp_path / "one"), Leadership(State(valkey_store), tmp_path / "two")
    await first.take()
    with pytest.raises(ConflictError, match="Another controller leads"):
        await second.take(wait_s=0.5)
    assert (first.leads, second.leads) == (True, False)
    await first.give_up()
    assert not first.leads
    await second.take(wait_s=0.5)
    assert second.leads


async def test_a_restart_takes_its_own_lease_again_at_once(valkey_store: Store, tmp_path: Path) -> None:
    before = State(valkey_store)
    await Leadership(before, tmp_path).take()
    assert await before.next_epoch("reader") == 1
    after = State(valkey_store)
    await Leadership(after, tmp_path).take(wait_s=0.5)
    assert await after.next_epoch("reader") == 2
    with pytest.raises(RefusedError):
        await before.next_epoch("reader")  # a twin that only hung is fenced


async def test_what_a_controller_that_lost_its_lease_writes_is_refused(valkey_store: Store, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    old, new = State(valkey_store), State(valkey_store)
    leader = Leadership(old, tmp_path / "one")
    await leader.take()
    fence = old.fence
    await leader.give_up()
    await Leadership(new, tmp_path / "two").take(wait_s=0.5)
    old.fence = fence
    with pytest.raises(RefusedError):
        await old.next_epoch("reader")
    assert await new.next_epoch("reader") == 1


@pytest.mark.parametrize("steps", range(12))
async def test_whoever_waits_for_the_store_can_be_cancelled_at_any_moment(valkey_store: Store, steps: int) -> None:
    async def renew_for_ever() -> None:
        token = await valkey_store.acquire("lease", "me", 10_000)
        assert token is not None
        started.set()
        while True:
            await valkey_store.renew("lease", token, 10_000)

    started = asyncio.Event()
    task = asyncio.create_task(renew_for_ever())
    await started.wait()
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
