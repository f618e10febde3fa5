"""The files of a model that is more than one file: an ONNX graph and its weights, laid out as the graph names them."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from sla.errors import ModelError

MAX_FILES = 4096
MAX_DEPTH = 8
MAX_NAME_CHARACTERS = 255


def check_member(name: str) -> PurePosixPath:
    """A relative path below the model's directory. Raises ModelError for anything that could lead out of it."""
    path = PurePosixPath(name)
    is_plain = (
        bool(name) and name.isprintable() and not set(name) & {"\\", ":", "\0"} and len(name) <= MAX_NAME_CHARACTERS
    )
    if (
        not is_plain
        or path.is_absolute()
        or ".." in path.parts
        or not 0 < len(path.parts) <= MAX_DEPTH
        or str(path) != name
    ):
        raise ModelError(
            f"{name[:80]!r} cannot name a file of a model.", pointer="/files", found=name[:80],
            accepted="a relative path below the model's directory, without '..'",
        )  # fmt: skip
    return path


class Folders:
    """Directories of files below one directory that belongs to this object; safe for several threads.

    `used` tells the directories that registered models need; others are removed as soon as nobody works on them.
    """

    def __init__(self, directory: Path, used: Callable[[], set[Path]]) -> None:
        self._directory = directory
        self._used = used
        self._lock = threading.Lock()
        self._held: Counter[Path] = Counter()

    @contextmanager
    def laid_out(self, files: Mapping[str, Path], hashes: Mapping[str, str]) -> Iterator[Path]:
        """A directory with the files under their names, linked where the disk can do that; the same files give the same directory.

        Raises ModelError for names that lead out or collide.
        """
        members = _checked(files)
        listing = "\n".join(f"{name}\0{hashes[name]}" for name in sorted(files))
        place = self._directory / hashlib.sha256(listing.encode()).hexdigest()[:32]
        with self._lock:
            self._held[place] += 1
            for name, member in members.items():
                _put(files[name], place / member)
        try:
            yield place
        finally:
            with self._lock:
                self._held[place] -= 1
                self._tidy()

    def tidy(self) -> None:
        """Remove what no model uses any more."""
        with self._lock:
            self._tidy()

    def _tidy(self) -> None:
        used = self._used()
        kept = used | {above for path in used for above in path.parents}
        kept |= {place for place, count in self._held.items() if count > 0}
        for place in self._directory.iterdir() if self._directory.is_dir() else ():
            if place not in kept:
                shutil.rmtree(place)


def _checked(files: Mapping[str, Path]) -> dict[str, PurePosixPath]:
    if not 0 < len(files) <= MAX_FILES:
        raise ModelError(f"A model may have 1 to {MAX_FILES} files, not {len(files)}.", pointer="/files")
    members = {name: check_member(name) for name in files}
    folders = {str(parent) for path in members.values() for parent in path.parents}
    if clash := sorted(folders & members.keys()):
        raise ModelError(f"{clash[0]!r} cannot be a file and a directory at once.", pointer="/files", found=clash[0])
    return members


def _put(source: Path, target: Path) -> None:
    if target.is_file() and target.stat().st_size == source.stat().st_size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        scratch = target.with_name(f".{target.name}.new")
        shutil.copyfile(source, scratch)
        os.replace(scratch, target)
