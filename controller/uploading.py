"""Sending files to the controller in pieces, going on where an earlier attempt stopped."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from controller.client import ApiClient
from sla.errors import ConflictError, InvalidInputError, RetryableError

_CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 16 << 20
_ATTEMPTS = 5
_WORTH_TELLING_BYTES = 64 << 20


def upload(api: ApiClient, path: Path) -> str:
    """The hash under which the controller holds the file; sends only what it lacks. Raises TidegateError."""
    sha256, size = _hash_of(path)
    held = _state(api, sha256)
    failures = 0
    while not held["is_whole"]:
        piece = _read(path, held["held_bytes"], min(_PIECE_BYTES, held["max_piece_bytes"]))
        if not piece:
            raise InvalidInputError(f"{path} changed while it was sent; send it again.")
        try:
            held = api.put(f"/v1/uploads/{sha256}?offset={held['held_bytes']}&size={size}", body=piece, timeout_s=300)
        except (RetryableError, ConflictError):
            failures += 1
            if failures == _ATTEMPTS:
                raise
            held = _state(api, sha256)
        if size >= _WORTH_TELLING_BYTES:
            print(f"  {path.name}: {100 * held['held_bytes'] // size} % sent", file=sys.stderr)
    return sha256


def _state(api: ApiClient, sha256: str) -> dict[str, int]:
    state: dict[str, int] = api.get(f"/v1/uploads/{sha256}")
    return state


def _hash_of(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.", found=str(path)) from None
    if size == 0:
        raise InvalidInputError(f"{path} is empty.", found=str(path))
    return digest.hexdigest(), size


def _read(path: Path, offset: int, length: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.", found=str(path)) from None
