"""A model's blocks as an SVG picture: time and weights of each, and what crosses the cut behind it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

_ROW, _LEFT, _BAR, _WIDTH = 30, 300, 330, 960
_TIME, _WEIGHTS, _CUT = "#2f6f9f", "#c9d8e4", "#b4552d"


def draw_model(model: Mapping[str, Any], where: str = "one core") -> str:
    """`model` as the API describes it (`views.ModelOut`), with the times of the device that `where` names; a complete SVG document."""
    blocks: Sequence[Mapping[str, Any]] = model["blocks"]
    times = [block["fixed_ms"] + block["per_item_ms"] for block in blocks]
    most_ms = max([*times, 1e-9])
    most_bytes = max([*(block["cut_bytes_per_item"] for block in blocks), 1])
    most_weights = max([*(block["param_bytes"] for block in blocks), 1])
    height = 70 + _ROW * len(blocks)
    axis = model.get("split_axis")
    title = f"{model['name']}: {len(blocks)} blocks, {sum(times):.1f} ms for one item on {where}"
    title += f", items may be split ({axis} axis)" if axis else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="46" fill="{_TIME}">time (dark), weights in memory (light)</text>',
        f'<text x="{_LEFT + _BAR + 20}" y="46" fill="{_CUT}">bytes that cross the cut behind it, per item</text>',
    ]
    for row, (block, ms) in enumerate(zip(blocks, times, strict=True)):
        top = 56 + row * _ROW
        time_width = max(1.0, _BAR * ms / most_ms)
        weight_width = max(1.0, _BAR * block["param_bytes"] / most_weights)
        cut_width = max(1.0, 180 * block["cut_bytes_per_item"] / most_bytes)
        cut_left = _LEFT + _BAR + 20
        parts += [
            f'<text x="12" y="{top + 16}">{row}  {escape(str(block["name"])[:44])}</text>',
            f'<rect x="{_LEFT}" y="{top}" width="{weight_width:.1f}" height="22" fill="{_WEIGHTS}"/>',
            f'<rect x="{_LEFT}" y="{top + 6}" width="{time_width:.1f}" height="10" fill="{_TIME}"/>',
            f'<text x="{_LEFT + 6}" y="{top + 15}" fill="black" font-size="10">{ms:.2f} ms, {block["param_bytes"] / 1e6:.1f} MB</text>',
            f'<rect x="{cut_left}" y="{top + 6}" width="{cut_width:.1f}" height="10" fill="{_CUT}"/>',
            f'<text x="{cut_left + cut_width + 6:.1f}" y="{top + 15}" font-size="10">{_size(block["cut_bytes_per_item"])}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.2f} MB" if n_bytes >= 1_000_000 else f"{n_bytes / 1e3:.1f} KB"
