"""Rendered office documents with known answers: the test pictures of the document reader.

Everything follows from the seed: the same call gives the same bytes with the same versions of Pillow and NumPy.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from controller.services.document_kinds import KINDS

PAGE_WIDTH_PX = 352
PAGE_HEIGHT_PX = 480
_FIELDS = 6
_FONT_PX = 19
_TITLE_PX = 28
_LEFT_PX = 26
_TOP_PX = 34
_LINE_PITCH_PX = 56


@dataclass(frozen=True, slots=True)
class Document:
    """One picture and what is written on it."""

    png_bytes: bytes
    questions: tuple[tuple[str, str], ...]
    """(question in natural language, the value that answers it), one per field."""
    lines: tuple[str, ...]
    """Title first, then the "key: value" lines, top to bottom."""


def render(
    seed: int,
    *,
    upside_down: bool = False,
    tilt_deg: float = 2.0,
    noise: float = 4.0,
    scale: float = 1.0,
    darkness: float = 0.0,
) -> Document:
    """A document with a title and six fields.

    `tilt_deg` turns the page counter-clockwise, `noise` is the standard deviation of the grey values (of 255), `scale`
    sizes the picture (1.0: 352 x 480 pixels), `darkness` in [0, 1) dims it.
    """
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    written = [(field, field.value(rng)) for field in rng.sample(kind.fields, _FIELDS)]
    lines = (kind.title, *(f"{field.key}: {value}" for field, value in written))
    shade = rng.randint(236, 250)
    paper = (shade, shade, shade - 6)
    page = _draw(lines, rng, scale, paper).rotate(tilt_deg, resample=Image.Resampling.BICUBIC, fillcolor=paper)
    if upside_down:
        page = page.transpose(Image.Transpose.ROTATE_180)
    return Document(
        png_bytes=_png(_photograph(page, rng, noise, darkness)),
        questions=tuple((field.question, value) for field, value in written),
        lines=lines,
    )


@lru_cache(maxsize=16)
def _font(size_px: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size_px)  # decoding it takes longer than drawing a page with it


def _draw(lines: tuple[str, ...], rng: random.Random, scale: float, paper: tuple[int, int, int]) -> Image.Image:
    page = Image.new("RGB", (round(PAGE_WIDTH_PX * scale), round(PAGE_HEIGHT_PX * scale)), paper)
    draw = ImageDraw.Draw(page)
    ink = rng.choice(((20, 20, 24), (28, 32, 70), (52, 40, 34)))
    indent_px = rng.randint(-6, 10)
    for number, text in enumerate(lines):
        font = _font((_TITLE_PX if number == 0 else _FONT_PX) * scale)
        at = ((_LEFT_PX + indent_px) * scale, (_TOP_PX + number * _LINE_PITCH_PX + rng.randint(-3, 3)) * scale)
        draw.text(at, text, font=font, fill=ink)
    return page


def _photograph(page: Image.Image, rng: random.Random, noise: float, darkness: float) -> np.ndarray:
    """Grey noise and less light, as uint8 [H, W, 3]."""
    pixels = np.asarray(page, np.float32) * (1.0 - darkness)
    grain = np.random.default_rng(rng.getrandbits(32)).normal(0.0, noise, pixels.shape[:2])
    return np.clip(pixels + grain[:, :, None], 0, 255).astype(np.uint8)


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


_CONDITIONS: tuple[Callable[[int], Document], ...] = (
    render,
    partial(render, upside_down=True),
    partial(render, scale=0.75, noise=12.0, darkness=0.5),
    partial(render, scale=0.75, noise=10.0, darkness=0.65),
    partial(render, tilt_deg=-3.0, noise=20.0),
)


def reference_document(seed: int) -> Document:
    """A document as users photograph them, for measuring accuracy: one of five conditions, by the seed.

    Clean; upside down; small and dim; small and dark; tilted the other way with much grain.
    """
    return _CONDITIONS[seed % len(_CONDITIONS)](seed)
