"""Files in pieces: they go on where they stopped, are what their hash says, and are bounded."""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.client import ApiClient
from controller.models.uploads import KEEP_S, MAX_PIECE_BYTES, Uploads
from controller.uploading import upload
from sla.errors import ConflictError, InvalidInputError, NotFoundError, RetryableError

CONTENT = bytes(range(256)) * 40
NAME = hashlib.sha256(CONTENT).hexdigest()


async def test_an_upload_goes_on_where_it_stopped(api: httpx.AsyncClient) -> None:
    size = len(CONTENT)
    assert (await api.get(f"/v1/uploads/{NAME}")).json()["held_bytes"] == 0
    first = await api.put(f"/v1/uploads/{NAME}", params={"offset": 0, "size": size}, content=CONTENT[:1000])
    assert (first.json()["held_bytes"], first.json()["is_whole"]) == (1000, False)
    wrong = await api.put(f"/v1/uploads/{NAME}", params={"offset": 900, "size": size}, content=CONTENT[900:])
    assert wrong.status_code == 409
    assert wrong.json()["current_version"] == 1000
    last = await api.put(f"/v1/uploads/{NAME}", params={"offset": 1000, "size": size}, content=CONTENT[1000:])
    assert last.json()["is_whole"]
    again = await api.put(f"/v1/uploads/{NAME}", params={"offset": 0, "size": size}, content=CONTENT[:10])
    assert (again.json()["held_bytes"], again.json()["is_whole"]) == (size, True)


async def test_what_is_not_what_its_hash_says_is_thrown_away(api: httpx.AsyncClient) -> None:
    response = await api.put(f"/v1/uploads/{NAME}", params={"offset": 0, "size": 5}, content=b"wrong")
    assert response.status_code == 422
    assert "nothing of it is kept" in response.json()["detail"]
    assert (await api.get(f"/v1/uploads/{NAME}")).json()["held_bytes"] == 0


@pytest.mark.parametrize(
    ("name", "params", "content"),
    [
        ("abc", {"offset": 0, "size": 5}, b"12345"),
        (NAME.upper(), {"offset": 0, "size": 5}, b"12345"),
        (NAME, {"offset": 0, "size": 4}, b"12345"),
        (NAME, {"offset": 0, "size": 5}, b""),
        (NAME, {"offset": 0, "size": 0}, b"1"),
        (NAME, {"offset": -1, "size": 5}, b"1"),
        (NAME, {"offset": 0, "size": 1 << 41}, b"1"),
        (NAME, {"offset": 0}, b"1"),
    ],
)
async def test_pieces_that_make_no_sense_are_refused(
    api: httpx.AsyncClient, name: str, params: dict[str, int], content: bytes
) -> None:
    response = await api.put(f"/v1/uploads/{name}", params=params, content=content)
    assert response.status_code == 422
    assert response.json()["detail"]


async def test_a_path_is_no_hash(api: httpx.AsyncClient) -> None:
    response = await api.get("/v1/uploads/..%2F..%2Fstore")
    assert response.status_code in (404, 422)


@given(cuts=st.lists(st.integers(1, len(CONTENT) - 1), max_size=5, unique=True))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cutting_into_pieces_gives_the_file(tmp_path: Path, cuts: list[int]) -> None:
    uploads = Uploads(tmp_path)
    (tmp_path / NAME).unlink(missing_ok=True)
    bounds = [0, *sorted(cuts), len(CONTENT)]
    for start, stop in itertools.pairwise(bounds):
        uploads.append(NAME, start, len(CONTENT), CONTENT[start:stop])
    assert uploads.path(NAME).read_bytes() == CONTENT


def test_a_piece_is_bounded_and_old_leftovers_are_removed(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    with pytest.raises(InvalidInputError, match="A piece must have"):
        uploads.append(NAME, 0, 1 << 30, bytes(MAX_PIECE_BYTES + 1))
    uploads.append(NAME, 0, len(CONTENT), CONTENT[:10])
    with pytest.raises(NotFoundError, match="upload it"):
        uploads.path(NAME)
    part = next(tmp_path.glob("*.part"))
    os.utime(part, (part.stat().st_mtime - KEEP_S - 10,) * 2)
    other = hashlib.sha256(b"other").hexdigest()
    uploads.append(other, 0, 5, b"other")
    assert [path.name for path in tmp_path.iterdir()] == [other]


class FlakyApi:
    """An API in front of real uploads that loses every second answer and takes small pieces only."""

    def __init__(self, uploads: Uploads) -> None:
        self.uploads = uploads
        self.calls = 0

    def get(self, path: str) -> dict[str, Any]:
        state = self.uploads.state(path.rpartition("/")[2])
        return {"held_bytes": state.held_bytes, "is_whole": state.is_whole, "max_piece_bytes": 3000}

    def put(self, path: str, *, body: bytes, timeout_s: float) -> dict[str, Any]:
        url = httpx.URL(path)
        name = url.path.rpartition("/")[2]
        self.uploads.append(name, int(url.params["offset"]), int(url.params["size"]), body)
        self.calls += 1
        if self.calls % 2:
            raise RetryableError("the link broke")
        return self.get(url.path)


def test_the_client_goes_on_after_a_broken_link(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(CONTENT)
    api = FlakyApi(Uploads(tmp_path / "uploads"))
    assert upload(api, path) == NAME  # type: ignore[arg-type]
    assert api.uploads.path(NAME).read_bytes() == CONTENT
    assert api.calls == 4


def test_what_cannot_be_sent_is_one_sentence(tmp_path: Path) -> None:
    api = ApiClient("http://127.0.0.1:9")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(InvalidInputError, match="is empty"):
        upload(api, tmp_path / "empty")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        upload(api, tmp_path / "missing")
    api.close()


def test_a_second_writer_is_told_where_to_go_on(tmp_path: Path) -> None:
    uploads = Uploads(tmp_path)
    uploads.append(NAME, 0, len(CONTENT), CONTENT[:10])
    with pytest.raises(ConflictError, match="10 bytes of"):
        uploads.append(NAME, 0, len(CONTENT), CONTENT[:10])
