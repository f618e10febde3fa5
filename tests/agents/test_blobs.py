"""The blob cache: fetched once, resumed where it stopped, never believed without its hash, never larger than its bound."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from agents.blobs import CHUNK_BYTES, BlobCache
from sla.errors import AgentLostError, InvalidInputError, ModelError, NotFoundError, RetryableError

BIG = bytes(range(256)) * (CHUNK_BYTES // 256 * 2) + b"tail"


@pytest.fixture
def source(memory_source):
    return memory_source()


@pytest.fixture
def cache(tmp_path: Path) -> BlobCache:
    return BlobCache(tmp_path / "blobs", max_bytes=4 * CHUNK_BYTES)


async def test_a_blob_is_fetched_once_in_chunks(cache, source):
    wanted = source.add(BIG)
    path, fetched = await cache.ensure(wanted, source)
    assert (path.read_bytes() == BIG, fetched, source.offsets) == (True, len(BIG), [0, CHUNK_BYTES, 2 * CHUNK_BYTES])
    assert await cache.ensure(wanted, None) == (path, 0)
    assert cache.held() == (wanted,)


async def test_two_who_want_the_same_blob_fetch_it_once(cache, source):
    wanted = source.add(b"small")
    results = await asyncio.gather(*(cache.ensure(wanted, source) for _ in range(5)))
    assert sorted(fetched for _, fetched in results) == [0, 0, 0, 0, 5]


async def test_a_fetch_goes_on_where_it_stopped_also_in_another_life(tmp_path, source):
    wanted = source.add(BIG)
    first = BlobCache(tmp_path, max_bytes=1 << 30, fetch_attempts=1)
    (tmp_path / f"{wanted}.part").write_bytes(BIG[:1000])
    source.fail_next = [AgentLostError("gone")]
    with pytest.raises(AgentLostError):
        await first.ensure(wanted, source)
    second = BlobCache(tmp_path, max_bytes=1 << 30)
    path, fetched = await second.ensure(wanted, source)
    assert (path.read_bytes() == BIG, fetched, source.offsets[1]) == (True, len(BIG) - 1000, 1000)


async def test_a_link_that_drops_is_tried_again(cache, source):
    wanted = source.add(b"content")
    source.fail_next = [AgentLostError("gone", retry_after_s=0.0), RetryableError("again", retry_after_s=0.0)]
    path, _ = await cache.ensure(wanted, source)
    assert path.read_bytes() == b"content"


async def test_a_part_that_was_damaged_on_disk_is_fetched_anew(tmp_path, source):
    wanted = source.add(BIG)
    (tmp_path / f"{wanted}.part").write_bytes(b"damaged" * 10)
    path, _ = await BlobCache(tmp_path, max_bytes=1 << 30).ensure(wanted, source)
    assert path.read_bytes() == BIG


async def test_a_source_that_lies_is_not_believed(cache, source):
    wanted = source.add(b"right")
    source.blobs[wanted] = b"wrong"
    with pytest.raises(ModelError, match="another content"):
        await cache.ensure(wanted, source)
    assert cache.path(wanted) is None
    assert cache.held() == ()


async def test_what_no_cache_could_hold_is_refused_before_it_is_fetched(tmp_path, source):
    wanted = source.add(BIG)
    with pytest.raises(ModelError, match="the cache of this agent holds 1000"):
        await BlobCache(tmp_path, max_bytes=1000).ensure(wanted, source)


async def test_the_least_recently_used_go_first_and_the_pinned_never(tmp_path, source):
    blobs = [source.add(bytes([n]) * 300) for n in range(4)]
    cache = BlobCache(tmp_path, max_bytes=1000, pinned=lambda: {blobs[0]})
    for age, blob in zip((40, 30, 20), blobs, strict=False):
        path, _ = await cache.ensure(blob, source)
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - age))
    await cache.ensure(blobs[3], source)
    assert set(cache.held()) == {blobs[0], blobs[2], blobs[3]}


async def test_names_that_are_no_hashes_never_become_paths(cache, source):
    with pytest.raises(InvalidInputError, match="not the hash"):
        await cache.ensure("../../etc/passwd", source)


async def test_what_is_nowhere_says_so(cache, source):
    missing = "0" * 64
    with pytest.raises(RetryableError, match="no source"):
        await cache.ensure(missing, None)
    with pytest.raises(NotFoundError):
        await cache.ensure(missing, source)
