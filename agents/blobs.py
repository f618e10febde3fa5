"""Files by their content: fetched in chunks, resumable, verified by sha256, kept within a bound on disk."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from policies.ids import BlobHash
from sla.errors import InvalidInputError, ModelError, RetryableError

CHUNK_BYTES = 1 << 20
_HASH = re.compile(r"[0-9a-f]{64}")


class BlobSource(Protocol):
    """Where blobs come from."""

    async def fetch(self, sha256: BlobHash, offset: int, length: int) -> tuple[bytes, int]:
        """At most `length` bytes of the blob from `offset`, and its total size. Raises NotFoundError or RetryableError."""
        ...


class BlobCache:
    """A directory of verified blobs, at most `max_bytes` in total; the least recently used go first, pinned ones never."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        pinned: Callable[[], Collection[BlobHash]] = frozenset,
        fetch_attempts: int = 5,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._fetch_attempts = fetch_attempts
        self._locks: defaultdict[BlobHash, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.pinned = pinned
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, sha256: BlobHash) -> Path | None:
        """The verified file, or None if it is not here. Counts as a use."""
        path = self._directory / _checked(sha256)
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        return path

    def held(self) -> tuple[BlobHash, ...]:
        """The hashes of all verified blobs."""
        return tuple(sorted(BlobHash(entry.name) for entry in self._directory.iterdir() if _HASH.fullmatch(entry.name)))

    async def ensure(self, sha256: BlobHash, source: BlobSource | None) -> tuple[Path, int]:
        """The verified file and how many bytes were fetched for it (0 if it was here).

        A fetch that was interrupted goes on where it stopped, also after a restart. Raises ModelError if the content is not
        what the hash promises or is larger than the cache, RetryableError if the source cannot be reached.
        """
        async with self._locks[sha256]:
            found = self.path(sha256)
            if found is not None:
                return found, 0
            if source is None:
                raise RetryableError(
                    f"The file {sha256[:12]} is not in this agent's cache and there is no source to ask."
                )
            fetched = await self._fetch_verified(sha256, source)
            self._evict()
            return self._directory / sha256, fetched

    async def _fetch_verified(self, sha256: BlobHash, source: BlobSource) -> int:
        part = self._directory / f"{sha256}.part"
        fetched = 0
        # A part that an earlier life left behind may be damaged: one more try from nothing tells.
        for resumed in (part.exists(), False):
            fetched += await self._fetch(sha256, source, part)
            if await asyncio.to_thread(_sha256_of, part) == sha256:
                await asyncio.to_thread(_sync, part)
                part.replace(self._directory / sha256)
                return fetched
            part.unlink()
            if not resumed:
                break
        raise ModelError(f"The file that came for {sha256[:12]} has another content than its hash promises.")

    async def _fetch(self, sha256: BlobHash, source: BlobSource, part: Path) -> int:
        """Append to `part` until it is complete; the number of bytes that came."""
        came, failures = 0, 0
        while True:
            offset = part.stat().st_size if part.exists() else 0
            try:
                chunk, total = await source.fetch(sha256, offset, CHUNK_BYTES)
            except RetryableError as error:
                failures += 1
                if failures >= self._fetch_attempts:
                    raise
                await asyncio.sleep(min(error.retry_after_s, 0.2 * 2**failures))
                continue
            if total > self._max_bytes:
                raise ModelError(
                    f"The file {sha256[:12]} has {total} bytes; the cache of this agent holds {self._max_bytes}.",
                    found=str(total), accepted=f"at most {self._max_bytes}",
                )  # fmt: skip
            if offset + len(chunk) > total or len(chunk) > CHUNK_BYTES or (not chunk and offset < total):
                raise ModelError(f"The source answered {len(chunk)} bytes at {offset} of {total} for {sha256[:12]}.")
            with part.open("ab") as file:
                file.write(chunk)
            came += len(chunk)
            if offset + len(chunk) == total:
                return came

    def _evict(self) -> None:
        pinned = set(self.pinned())
        files = sorted(
            (entry for entry in self._directory.iterdir() if entry.is_file()), key=lambda e: e.stat().st_mtime
        )
        total = sum(entry.stat().st_size for entry in files)
        for entry in files[:-1]:  # the newest is what was just asked for
            if total <= self._max_bytes:
                return
            held = self._locks.get(BlobHash(entry.name.removesuffix(".part")))
            if entry.name in pinned or (held is not None and held.locked()):
                continue
            total -= entry.stat().st_size
            entry.unlink()


def _checked(sha256: str) -> str:
    if _HASH.fullmatch(sha256) is None:
        raise InvalidInputError(
            f"{sha256[:80]!r} is not the hash of a file.",
            found=sha256[:80],
            accepted="sha256 in 64 lower-case hex digits",
        )
    return sha256


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
