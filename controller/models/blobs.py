"""Files named by the hash of their content. A blob that exists is complete; nothing is ever changed in place."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

from policies.ids import BlobHash

_HASH = re.compile(r"[0-9a-f]{64}")


def content_hash(content: bytes) -> BlobHash:
    """sha256 in hex."""
    return BlobHash(hashlib.sha256(content).hexdigest())


def write_atomically(path: Path, content: bytes) -> None:
    """`path` holds all of `content` or what it held before, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


class BlobStore:
    """A directory of blobs, safe for several threads and processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, content: bytes) -> BlobHash:
        """Keep `content`; does nothing if it is there already."""
        sha256 = content_hash(content)
        if self.path(sha256) is None:
            write_atomically(self._place(sha256), content)
        return sha256

    def remove(self, sha256: str) -> None:
        """Drop a blob that nobody needs any more; fine if it is not here."""
        if (path := self.path(sha256)) is not None:
            path.unlink(missing_ok=True)

    def path(self, sha256: str) -> Path | None:
        """Where the blob lies; None if it is not here or `sha256` is not a hash."""
        if _HASH.fullmatch(sha256) is None:
            return None
        path = self._place(sha256)
        return path if path.is_file() else None

    def _place(self, sha256: str) -> Path:
        return self._directory / sha256[:2] / sha256
