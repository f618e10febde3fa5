"""Files that come in pieces: named by their hash before the first byte is sent, so that an upload goes on where it stopped.

On disk, a file that is not whole yet is `HASH.part`, a whole and checked one is `HASH`. Whatever nobody finished or used for a day is removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from sla.errors import ConflictError, InvalidInputError, NotFoundError, OverloadedError

MAX_PIECE_BYTES = 64 << 20
MAX_FILE_BYTES = 1 << 40
KEEP_S = 86_400.0
LEFT_FREE_BYTES = 1 << 30
"""An upload may not fill the disk on which the controller keeps its state."""
_HASH = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Upload:
    """How far one file is."""

    sha256: str
    held_bytes: int
    is_whole: bool


class Uploads:
    """See the module; `directory` belongs to it alone. Every method may be called from several threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()

    def state(self, sha256: str) -> Upload:
        """How much of a file is here; nothing of it is no error. Raises InvalidInputError for what is no hash."""
        whole, part = self._paths(sha256)
        if whole.is_file():
            return Upload(sha256, whole.stat().st_size, True)
        return Upload(sha256, part.stat().st_size if part.is_file() else 0, False)

    def append(self, sha256: str, offset: int, size: int, piece: bytes) -> Upload:
        """Add the bytes from `offset` on of a file with `size` bytes; with the last of them the hash is checked.

        Raises ConflictError that names where to go on when `offset` is elsewhere, InvalidInputError when the whole file has
        another hash (nothing is kept of it then), OverloadedError when the disk has no room.
        """
        with self._lock:
            held = self.state(sha256)
            if held.is_whole:
                return held
            if offset != held.held_bytes:
                raise ConflictError(
                    f"{held.held_bytes} bytes of {sha256[:12]} are here; go on from there, not from {offset}.",
                    current_version=held.held_bytes,
                )
            self._check_size(sha256, offset, size, len(piece))
            if offset == 0:
                self._tidy()
            whole, part = self._paths(sha256)
            self._directory.mkdir(parents=True, exist_ok=True)
            with part.open("ab") as file:
                file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            if offset + len(piece) == size:
                self._finish(sha256, part, whole)
        return self.state(sha256)

    def path(self, sha256: str) -> Path:
        """Where a whole file lies; it is kept for another day. Raises NotFoundError if it is not whole."""
        whole, _ = self._paths(sha256)
        if not whole.is_file():
            raise NotFoundError(f"There is no file {sha256[:12]} here; upload it to /v1/uploads/{sha256} first.")
        os.utime(whole)
        return whole

    def _finish(self, sha256: str, part: Path, whole: Path) -> None:
        digest = hashlib.sha256()
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        if digest.hexdigest() != sha256:
            part.unlink()
            raise InvalidInputError(
                f"What was sent has sha256 {digest.hexdigest()[:12]}, not {sha256[:12]}; nothing of it is kept.",
                found=digest.hexdigest(), accepted=sha256,
            )  # fmt: skip
        os.replace(part, whole)

    def _check_size(self, sha256: str, offset: int, size: int, piece_bytes: int) -> None:
        if not 0 < size <= MAX_FILE_BYTES:
            raise InvalidInputError(f"A file may have 1 to {MAX_FILE_BYTES} bytes, not {size}.", found=str(size))
        if not 0 < piece_bytes <= min(MAX_PIECE_BYTES, size - offset):
            raise InvalidInputError(
                f"A piece must have 1 to {MAX_PIECE_BYTES} bytes and end within the {size} bytes of the file, not {piece_bytes} from {offset}.",
                found=str(piece_bytes), accepted=f"1 to {min(MAX_PIECE_BYTES, size - offset)}",
            )  # fmt: skip
        self._directory.mkdir(parents=True, exist_ok=True)
        if size - offset > shutil.disk_usage(self._directory).free - LEFT_FREE_BYTES:
            raise OverloadedError(
                f"The disk of the controller has no room for the {size} bytes of {sha256[:12]}.", retry_after_s=60
            )

    def _tidy(self) -> None:
        """Remove what nobody touched for a day."""
        oldest_s = time.time() - KEEP_S
        for path in self._directory.iterdir() if self._directory.is_dir() else ():
            if path.stat().st_mtime < oldest_s:
                path.unlink(missing_ok=True)

    def _paths(self, sha256: str) -> tuple[Path, Path]:
        if _HASH.fullmatch(sha256) is None:
            raise InvalidInputError(
                f"{sha256[:80]!r} is not a sha256 in hex.", found=sha256[:80], accepted="64 digits 0-9a-f"
            )
        return self._directory / sha256, self._directory / f"{sha256}.part"
