"""A PNG of a simulation: load, the way to the cloud, and for each policy its plans and the minutes that broke the promise, over time.

Drawn with Pillow at twice the size and scaled down, which makes lines smooth; at most 64 colours, which keeps files small.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from policies.scenario import World
from policies.simulate_results import Result

SCALE = 2
WIDTH, LEFT, RIGHT, TOP = 1100, 180, 30, 40
CURVE, BAND, GAP, FOOT = 72, 58, 14, 30
COLOURS = 64
BACK, TEXT, FAINT, GRID = "#ffffff", "#24292f", "#6e7781", "#e6e9ec"
LOAD, LINK, LATE, KEPT, WORST, MOVE = "#8250df", "#0969da", "#d1242f", "#dff3e4", "#57606a", "#0a3069"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A picture in the making; all positions are in final pixels."""

    image: Image.Image
    pen: ImageDraw.ImageDraw

    def box(self, x0: float, y0: float, x1: float, y1: float, colour: str) -> None:
        self.pen.rectangle((SCALE * x0, SCALE * y0, SCALE * x1, SCALE * y1), fill=colour)

    def path(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.2) -> None:
        scaled = [(SCALE * x, SCALE * y) for x, y in points]
        self.pen.line(scaled, fill=colour, width=max(1, round(SCALE * width)), joint="curve")

    def text(self, x: float, y: float, words: str, colour: str = TEXT, size: int = 13, anchor: str = "ls") -> None:
        font = ImageFont.load_default(SCALE * size)
        self.pen.text((SCALE * x, SCALE * y), words, fill=colour, font=font, anchor=anchor)


def picture(world: World, results: Mapping[str, Result]) -> bytes:
    """The PNG file."""
    some = next(iter(results.values())).minutes
    height = TOP + 2 * (CURVE + GAP) + len(results) * (BAND + GAP) + FOOT
    image = Image.new("RGB", (SCALE * WIDTH, SCALE * height), BACK)
    sheet = Sheet(image, ImageDraw.Draw(image))
    across = _across(len(some))
    sheet.text(16, 24, world.scenario.name, size=17)
    promise = (
        f"p99 of {world.contract.latency_p99_ms:g} ms promised; red: minutes in which it was broken; bars: new plans"
    )
    sheet.text(WIDTH - RIGHT, 24, promise, FAINT, 12, "rs")
    _hours(sheet, world.seconds / 3600.0, across, len(some), height)
    _curve(sheet, "requests per minute", [float(m.requests) for m in some], across, TOP, LOAD)
    _curve(sheet, "round trip to cloud", [m.rtt_ms for m in some], across, TOP + CURVE + GAP, LINK, " ms")
    top = TOP + 2 * (CURVE + GAP)
    for name, result in results.items():
        _band(sheet, name, result, across, top, world.contract.latency_p99_ms)
        top += BAND + GAP
    small = image.resize((WIDTH, height), Image.Resampling.LANCZOS).quantize(COLOURS, dither=Image.Dither.NONE)
    file = io.BytesIO()
    small.save(file, "PNG", optimize=True)
    return file.getvalue()


def _across(minutes: int) -> Callable[[float], float]:
    """Where a minute is drawn."""
    return lambda minute: LEFT + (WIDTH - LEFT - RIGHT) * minute / max(1, minutes)


def _curve(
    sheet: Sheet, label: str, values: Sequence[float], across: Callable[[float], float], top: float, colour: str, unit: str = ""
) -> None:  # fmt: skip
    """Up to a little above its 99.5th percentile: one outlier must not flatten the rest."""
    ranked = sorted(values)
    most = max(1e-9, ranked[min(len(ranked) - 1, math.ceil(0.995 * len(ranked)))])
    sheet.text(16, top + 16, label)
    sheet.text(16, top + 34, f"median {ranked[len(ranked) // 2]:.0f}{unit}", FAINT, 12)
    sheet.text(16, top + 50, f"scale 0 to {most:.0f}{unit}", FAINT, 12)
    heights = [(across(at + 0.5), top + CURVE * (1.0 - min(1.0, value / most))) for at, value in enumerate(values)]
    sheet.path([(across(0), top + CURVE), (across(len(values)), top + CURVE)], GRID)
    if len(heights) > 1:
        sheet.path(heights, colour, 1.4)


def _band(
    sheet: Sheet, name: str, result: Result, across: Callable[[float], float], top: float, limit_ms: float
) -> None:  # fmt: skip
    """Green where the promise was kept and red where it was not, the worst request of each minute, and a bar per new plan."""
    minutes = result.minutes
    sheet.text(16, top + 16, name)
    sheet.text(16, top + 34, f"{result.violation_minutes} of {len(minutes)} min broken", FAINT, 12)
    sheet.text(16, top + 50, f"{result.moves_per_hour:.1f} moves/h, p99 {result.p99_ms:.0f} ms", FAINT, 12)
    sheet.box(across(0), top, across(len(minutes)), top + BAND, KEPT)
    for at, minute in enumerate(minutes):
        if minute.is_violated:
            sheet.box(across(at), top, max(across(at) + 1.0, across(at + 1)), top + BAND, LATE)
    middle = top + BAND / 2
    sheet.path([(across(0), middle), (across(len(minutes)), middle)], "#b7c4bb", 0.6)
    worst = [
        (across(at + 0.5), top + BAND * (1.0 - min(1.0, m.worst_ms / limit_ms / 2))) for at, m in enumerate(minutes)
    ]
    if len(worst) > 1:
        sheet.path(worst, WORST, 0.9)
    for at, (before, after) in enumerate(itertools.pairwise(minutes), start=1):
        if before.plan != after.plan:
            sheet.box(across(at) - 1.0, top - 6, across(at) + 1.0, top + 8, MOVE)


def _hours(sheet: Sheet, hours: float, across: Callable[[float], float], minutes: int, height: int) -> None:
    step = next(s for s in (1 / 12, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 24.0, 48.0) if hours / s <= 12 or s == 48.0)
    for number in range(int(hours / step) + 1):
        x = across(minutes * number * step / hours)
        sheet.path([(x, TOP), (x, height - FOOT)], GRID, 0.6)
        words = f"{number * step:g} h" if step >= 1 else f"{60 * number * step:.0f} min"
        sheet.text(x, height - 12, words, FAINT, 12, "ms")
