"""A picture of a simulation: load, the way to the cloud, plans and violated minutes over time, one band per policy. SVG by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from policies.scenario import World
from policies.simulate_results import Result

WIDTH, LEFT, BAND, GAP = 1000.0, 150.0, 60.0, 14.0
_LATE, _GOOD, _LINE, _TEXT = "#c0392b", "#d5e8d4", "#2c5f8a", "#333333"


def draw(world: World, results: Mapping[str, Result]) -> str:
    """The SVG document."""
    minutes = max(1, len(next(iter(results.values())).minutes))
    some = next(iter(results.values())).minutes
    parts = [
        _curve("requests/min", [float(m.requests) for m in some], GAP),
        _curve("round trip, ms", [m.rtt_ms for m in some], GAP + (BAND + GAP)),
    ]
    top = GAP + 2 * (BAND + GAP)
    for name, result in results.items():
        parts.append(_strip(name, result, minutes, world.contract.latency_p99_ms, top))
        top += BAND + GAP
    parts.append(_hours(world.seconds / 3600.0, top))
    height = top + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 20:.0f} {height:.0f}" '
        f'font-family="sans-serif" font-size="12" fill="{_TEXT}"><title>{escape(world.scenario.name)}</title>'
        f"{''.join(parts)}</svg>\n"
    )


def _curve(label: str, values: Sequence[float], top: float) -> str:
    most = max([*values, 1e-9])
    step = WIDTH / max(1, len(values) - 1)
    points = " ".join(f"{LEFT + step * at:.1f},{top + BAND * (1 - v / most):.1f}" for at, v in enumerate(values))
    return (
        f'<text x="4" y="{top + 14:.0f}">{escape(label)}</text><text x="4" y="{top + 30:.0f}">up to {most:.4g}</text>'
        f'<polyline fill="none" stroke="{_LINE}" points="{points}"/>'
    )


def _strip(name: str, result: Result, minutes: int, limit_ms: float, top: float) -> str:
    """Green where the promise was kept, red where it was not; a bar where a new plan took over; and the worst latency of each minute."""
    step = WIDTH / minutes
    boxes = "".join(
        f'<rect x="{LEFT + step * at:.1f}" y="{top:.0f}" width="{step + 0.2:.2f}" height="{BAND:.0f}" '
        f'fill="{_LATE if minute.is_violated else _GOOD}"/>'
        for at, minute in enumerate(result.minutes)
    )
    worst = np.minimum([m.worst_ms / limit_ms for m in result.minutes], 2.0)
    points = " ".join(f"{LEFT + step * (at + 0.5):.1f},{top + BAND * (1 - w / 2):.1f}" for at, w in enumerate(worst))
    moves = "".join(
        f'<line x1="{LEFT + step * at:.1f}" x2="{LEFT + step * at:.1f}" y1="{top - 6:.0f}" y2="{top + BAND:.0f}" stroke="{_LINE}" '
        f'stroke-width="2"><title>plan {after.plan}</title></line>'
        for at, (before, after) in enumerate(itertools.pairwise(result.minutes), start=1)
        if before.plan != after.plan
    )
    return (
        f'{boxes}{moves}<text x="4" y="{top + 14:.0f}">{escape(name)}</text>'
        f'<text x="4" y="{top + 30:.0f}">{result.violation_minutes} min, {result.moves} moves</text>'
        f'<polyline fill="none" stroke="{_TEXT}" points="{points}"/>'
        f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{top + BAND / 2}" y2="{top + BAND / 2}" stroke="{_TEXT}" stroke-dasharray="3 3"/>'
    )


def _hours(hours: float, top: float) -> str:
    marks = [hours * at / 6 for at in range(7)]
    return "".join(
        f'<text x="{LEFT + WIDTH * at / hours:.0f}" y="{top + 12:.0f}" text-anchor="middle">{at:.3g} h</text>'
        for at in marks
    )  # fmt: skip
