"""Pictures from outside: bounded, and refused in one sentence."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agents.steps.images import MAX_FILE_BYTES, MAX_PAGE_SIDE_PX, read_page
from sla.errors import InvalidInputError


def file_of(picture: Image.Image, form: str = "PNG", **options: Any) -> np.ndarray:
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def png_header(width_px: int, height_px: int) -> np.ndarray:
    """A PNG that claims a size and holds no pixels."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    ends = struct.pack(">I", zlib.crc32(body))
    return np.frombuffer(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + ends, np.uint8)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_files_are_decoded_to_rgb(form: str) -> None:
    page = read_page(file_of(Image.new("RGB", (40, 30), (200, 10, 20)), form))
    assert page.shape == (30, 40, 3)
    assert page[15, 20].tolist() == pytest.approx([200, 10, 20], abs=4)


def test_pixels_are_taken_as_they_are() -> None:
    pixels = np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)
    assert np.array_equal(read_page(pixels), pixels)


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "LA", "I;16"])
def test_other_pixel_formats_become_rgb(mode: str) -> None:
    assert read_page(file_of(Image.new(mode, (32, 32)))).shape == (32, 32, 3)


def test_transparent_paper_is_white() -> None:
    assert read_page(file_of(Image.new("RGBA", (32, 32), (0, 0, 0, 0)))).min() == 255


def test_large_pages_are_shrunk() -> None:
    assert read_page(file_of(Image.new("L", (3200, 1600)))).shape == (MAX_PAGE_SIDE_PX // 2, MAX_PAGE_SIDE_PX, 3)
    assert max(read_page(file_of(Image.new("L", (4000, 3000)), "JPEG")).shape) == MAX_PAGE_SIDE_PX


def test_the_turn_that_a_camera_notes_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert read_page(file_of(Image.new("L", (64, 32)), "JPEG", exif=exif)).shape == (64, 32, 3)


WHOLE = file_of(Image.effect_noise((64, 64), 50))
BROKEN = {
    "empty": np.zeros(0, np.uint8),
    "no image": np.frombuffer(b"%PDF-1.7 and so on", np.uint8),
    "cut short": WHOLE[: len(WHOLE) // 2],
    "only a header": png_header(64, 64),
    "an animated format": file_of(Image.new("L", (32, 32)), "GIF"),
    "a bomb of 30000 x 30000 pixels": png_header(30_000, 30_000),
    "a bomb of 12000 x 10000 pixels": png_header(12_000, 10_000),
    "slightly too many pixels": png_header(8000, 5001),
    "too small": file_of(Image.new("L", (400, 8))),
    "too long a file": np.zeros(MAX_FILE_BYTES + 1, np.uint8),
    "pixels without channels": np.zeros((32, 32), np.uint8),
    "four channels": np.zeros((32, 32, 4), np.uint8),
    "no bytes": np.zeros((32, 32, 3), np.float32),
}


@pytest.mark.parametrize("image", BROKEN.values(), ids=BROKEN.keys())
def test_a_wrong_image_is_one_sentence(image: np.ndarray) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_page(image)
    message = str(caught.value)
    assert message.startswith("The image")
    assert message.endswith(".")
    assert caught.value.pointer == "/image"
    assert caught.value.accepted


def test_no_damaged_file_escapes_the_error_tree() -> None:
    rng = np.random.default_rng(7)
    for whole in (WHOLE, file_of(Image.effect_noise((48, 48), 50), "JPEG")):
        for _ in range(150):
            damaged = whole.copy()
            damaged[rng.integers(8, len(damaged), 4)] = rng.integers(0, 256, 4)
            with contextlib.suppress(InvalidInputError):
                assert read_page(damaged).dtype == np.uint8
