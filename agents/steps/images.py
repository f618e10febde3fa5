"""From what a client sent to a page of pixels, within bounds."""

from __future__ import annotations

import io

import cv2
import numpy as np
from PIL import Image, ImageOps

from sla.errors import InvalidInputError

MAX_FILE_BYTES = 16 * 1024 * 1024
MAX_PIXELS = 40_000_000
MIN_SIDE_PX = 16
MAX_PAGE_SIDE_PX = 1600
"""Larger pages are shrunk to this: more pixels make no text easier to read, and every later step pays for them."""

ACCEPTED = "a PNG or JPEG file, or an UINT8 tensor [height, width, 3]"

# Never let OpenCV start a pool of spinning threads next to the ingress.
cv2.setNumThreads(1)


def read_page(image: np.ndarray) -> np.ndarray:
    """The page in tensor `image` as RGB uint8 [H, W, 3], longest side at most `MAX_PAGE_SIDE_PX`.

    `image` is a file (uint8 [n]) or pixels (uint8 [H, W, 3]). Raises InvalidInputError.
    """
    if image.dtype != np.uint8:
        raise _wrong(f"The image has the type {image.dtype}", found=str(image.dtype))
    if image.ndim == 1:
        return _bounded(_decode(image.tobytes()))
    if image.ndim == 3 and image.shape[2] == 3:
        _check_size(image.shape[1], image.shape[0])
        return _bounded(np.ascontiguousarray(image))
    raise _wrong(f"The image has the shape {list(image.shape)}", found=str(list(image.shape)))


def _decode(file: bytes) -> np.ndarray:
    if len(file) > MAX_FILE_BYTES:
        raise InvalidInputError(
            f"The image file has {len(file)} bytes; at most {MAX_FILE_BYTES} are accepted.", pointer="/image",
            found=f"{len(file)} bytes", accepted=f"at most {MAX_FILE_BYTES} bytes",
        )  # fmt: skip
    try:
        picture = Image.open(io.BytesIO(file), formats=("PNG", "JPEG"))
        _check_size(*picture.size)
        # A JPEG can be decoded at a fraction of its size, which is several times cheaper for a photo; a PNG ignores this.
        picture.draft("RGB", (MAX_PAGE_SIDE_PX, MAX_PAGE_SIDE_PX))
        upright = ImageOps.exif_transpose(picture)
        return np.asarray(_on_white(upright).convert("RGB"))
    except InvalidInputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(f"more than {Image.MAX_IMAGE_PIXELS} pixels") from None
    except (OSError, ValueError, SyntaxError, EOFError, ArithmeticError, LookupError, TypeError) as error:
        # Pillow's decoders raise all of these for broken files.
        raise _wrong("The image cannot be decoded", found=type(error).__name__) from None


def _on_white(picture: Image.Image) -> Image.Image:
    """Transparent parts of a page show white paper, not the black that lies under them."""
    if "A" not in picture.getbands() and "transparency" not in picture.info:
        return picture
    layered = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered)


def _check_size(width_px: int, height_px: int) -> None:
    if width_px * height_px > MAX_PIXELS:
        raise _too_large(f"{width_px} x {height_px} pixels")
    if min(width_px, height_px) < MIN_SIDE_PX:
        raise InvalidInputError(
            f"The image has {width_px} x {height_px} pixels; each side needs at least {MIN_SIDE_PX}.",
            pointer="/image", found=f"{width_px} x {height_px} pixels", accepted=f"sides of at least {MIN_SIDE_PX} pixels",
        )  # fmt: skip


def _bounded(page: np.ndarray) -> np.ndarray:
    factor = MAX_PAGE_SIDE_PX / max(page.shape[:2])
    if factor >= 1:
        return page
    height, width = (max(MIN_SIDE_PX, round(side * factor)) for side in page.shape[:2])
    return np.asarray(cv2.resize(page, (width, height), interpolation=cv2.INTER_AREA))


def _too_large(found: str) -> InvalidInputError:
    accepted = f"at most {MAX_PIXELS // 1_000_000} million pixels"
    return InvalidInputError(
        f"The image has {found}; {accepted} are accepted.", pointer="/image", found=found, accepted=accepted
    )


def _wrong(what: str, *, found: str) -> InvalidInputError:
    return InvalidInputError(f"{what}; accepted is {ACCEPTED}.", pointer="/image", found=found, accepted=ACCEPTED)
