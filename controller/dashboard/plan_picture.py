"""A plan as an SVG picture. Pure: the same plan and agents give the same text.

Stages are columns from left to right. A stage's lanes are stacked, as high as their share of the items; a lane's shards
stand side by side in block order. What crosses from one agent to another is an arrow, what stays is a faint line.
Colours that depend on the page's theme are CSS variables with a fallback, so that the picture also stands alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise, product

from controller.views import AgentOut, ShardOut

BOX_WIDTH = 172
BOX_GAP = 30
STAGE_GAP = 42
LANE_GAP = 10
LANE_MIN_HEIGHT = 62
LANES_HEIGHT = 132
"""Height that the lanes of a stage share out, unless they need more."""
HEADER_HEIGHT = 46
CHIP_HEIGHT = 22
MIN_SCALE = 0.8
"""A page may shrink the picture to this scale to fit it in; below, its text could not be read, and the page scrolls it."""
MARGIN = 2
"""Room for the lines of the outermost boxes."""
_GRAIN = 1000
_LETTER_WIDTH = 7.0
"""Width of an average letter of the legend, pixels; generous, as fonts differ."""

_INK = "var(--tg-ink, #1b2430)"
_MUTED = "var(--tg-muted, #5d6b7c)"
_PALETTE = (
    "#3b82f6", "#f59e0b", "#14b8a6", "#a855f7", "#f43f5e", "#22c55e", "#06b6d4", "#ea580c", "#ec4899", "#84a016",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Box:
    shard: ShardOut
    x: float
    y: float
    width: float
    height: float

    @property
    def middle_y(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class _Column:
    stage: str
    model: str
    x: float
    width: float
    lanes: list[list[_Box]]
    fallbacks: list[str]


def plan_picture(shards: Sequence[ShardOut], agents: Sequence[AgentOut]) -> str:
    """The picture of a plan's shards, as one `<svg>` element; empty when there are no serving shards.

    `agents` gives the legend its platforms and the colours their order (as enrolled, so that a newcomer recolours nobody);
    agents of the plan that are not among them are drawn all the same.
    """
    columns = _columns(shards)
    if not columns:
        return ""
    names = _in_order({shard.agent for shard in shards}, agents)
    colours = _colours(names, agents)
    width = max(columns[-1].x + columns[-1].width + MARGIN, 320)
    lanes_bottom = max(box.y + box.height for column in columns for lane in column.lanes for box in lane)
    chips = max(len(column.fallbacks) for column in columns)
    chips_bottom = lanes_bottom + (26 + chips * (CHIP_HEIGHT + 4) if chips else 0)
    legend, bottom = _legend(names, agents, colours, width, chips_bottom + 18)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tg-plan" role="img" width="{width:g}" height="{bottom:g}" '
        f'viewBox="0 0 {width:g} {bottom:g}" style="min-width:{width * MIN_SCALE:.0f}px" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(_in_words(columns))}</title>",
        *_links(columns),
        *(part for column in columns for part in _header(column)),
        *(_shard(box, colours) for column in columns for lane in column.lanes for box in lane),
        *(part for column in columns for part in _fallbacks(column, lanes_bottom + 12, colours)),
        *legend,
        "</svg>",
    ]
    return "".join(parts)


def short_name(name: str, length: int = 16) -> str:
    """`name`, with its middle left out where it is longer than `length`: beginnings and ends tell names apart."""
    if len(name) <= length:
        return name
    tail = (length - 1) // 3
    return f"{name[: length - 1 - tail]}…{name[-tail:]}"


def agent_colours(agents: Sequence[AgentOut]) -> dict[str, str]:
    """The colour of each agent, the same here and in the agents' table."""
    return _colours(_in_order({agent.id for agent in agents}, agents), agents)


def _in_order(names: set[str], agents: Sequence[AgentOut]) -> list[str]:
    enrolled = {agent.id: agent.enrolled_at_s for agent in agents}
    return sorted(names, key=lambda name: (enrolled.get(name, float("inf")), name))


def _colours(names: Sequence[str], agents: Sequence[AgentOut]) -> dict[str, str]:
    everyone = _in_order({agent.id for agent in agents} | set(names), agents)
    return {name: _PALETTE[at % len(_PALETTE)] for at, name in enumerate(everyone)}


def _columns(shards: Sequence[ShardOut]) -> list[_Column]:
    by_stage: dict[str, list[ShardOut]] = {}
    for shard in shards:
        by_stage.setdefault(shard.stage, []).append(shard)
    serving = {
        stage: [s for s in members if s.role == "serving"]
        for stage, members in by_stage.items()
        if any(s.role == "serving" for s in members)
    }
    grouped = {stage: _lanes(members) for stage, members in serving.items()}
    tallest = max((_lanes_height(lanes) for lanes in grouped.values()), default=0.0)
    columns, x = [], float(MARGIN)
    for stage, lanes in grouped.items():
        longest = max(len(lane) for lane in lanes)
        width = longest * BOX_WIDTH + (longest - 1) * BOX_GAP
        top = HEADER_HEIGHT + (tallest - _lanes_height(lanes)) / 2
        fallbacks = list(dict.fromkeys(s.agent for s in by_stage[stage] if s.role == "fallback"))
        models = ", ".join(dict.fromkeys(s.model for s in serving[stage]))
        columns.append(_Column(stage, models, x, width, _boxes(lanes, x, top, width), fallbacks))
        x += width + STAGE_GAP
    return columns


def _lanes(shards: Iterable[ShardOut]) -> list[list[ShardOut]]:
    ordered = sorted(shards, key=lambda s: (s.patch, s.token, s.blocks))
    return [list(lane) for _, lane in groupby(ordered, key=lambda s: (s.patch, s.token))]


def _share(shard: ShardOut) -> float:
    (patch_start, patch_stop), (token_start, token_stop) = shard.patch, shard.token
    return (patch_stop - patch_start) * (token_stop - token_start) / (_GRAIN * _GRAIN)


def _lane_height(lane: list[ShardOut]) -> float:
    return max(float(LANE_MIN_HEIGHT), _share(lane[0]) * LANES_HEIGHT)


def _lanes_height(lanes: list[list[ShardOut]]) -> float:
    return sum(_lane_height(lane) for lane in lanes) + LANE_GAP * (len(lanes) - 1)


def _boxes(lanes: list[list[ShardOut]], left: float, top: float, width: float) -> list[list[_Box]]:
    boxes, y = [], top
    for lane in lanes:
        height = _lane_height(lane)
        box_width = (width - BOX_GAP * (len(lane) - 1)) / len(lane)
        boxes.append([_Box(s, left + at * (box_width + BOX_GAP), y, box_width, height) for at, s in enumerate(lane)])
        y += height + LANE_GAP
    return boxes


def _header(column: _Column) -> list[str]:
    letters = int(column.width / 8.5)
    return [
        _text(column.x, 16, short_name(column.stage, letters), size=13, weight=600),
        _text(column.x, 33, short_name(column.model, letters), colour=_MUTED),
    ]


def _shard(box: _Box, colours: dict[str, str]) -> str:
    shard, colour = box.shard, colours[box.shard.agent]
    x, y = box.x + 8, box.middle_y
    about = f"{shard.stage}: {shard.model} on {shard.agent}, {_blocks(shard)}, {_items(shard)}"
    return (
        f'<g class="tg-shard" data-agent="{escape(shard.agent)}"><title>{escape(about)}</title>'
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="7" '
        f'fill="{colour}" fill-opacity="0.15" stroke="{colour}" stroke-width="1.5"/>'
        + _text(x, y - 13, short_name(shard.agent, int((box.width - 14) / 8.3)), size=12.5, weight=600)
        + _text(x, y + 5, _blocks(shard))
        + _text(x, y + 21, _items(shard), colour=_MUTED)
        + "</g>"
    )


def _blocks(shard: ShardOut) -> str:
    start, stop = shard.blocks
    span = f"block {start}" if stop - start == 1 else f"blocks {start}-{stop - 1}"
    return f"{span} of {shard.block_count}"


def _items(shard: ShardOut) -> str:
    for word, (start, stop) in (("patches", shard.patch), ("tokens", shard.token)):
        if (start, stop) != (0, _GRAIN):
            return f"{(stop - start) / _GRAIN:.0%} of {word}"
    return "all items"


def _fallbacks(column: _Column, top: float, colours: dict[str, str]) -> list[str]:
    if not column.fallbacks:
        return []
    parts, y = [_text(column.x, top + 6, "if one fails", size=11, colour=_MUTED)], top + 14
    for agent in column.fallbacks:
        colour = colours[agent]
        parts.append(
            f'<g class="tg-fallback" data-agent="{escape(agent)}"><title>fallback of {escape(column.stage)}: '
            f'{escape(agent)}</title><rect x="{column.x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{CHIP_HEIGHT}" '
            f'rx="{CHIP_HEIGHT / 2:g}" fill="none" stroke="{colour}" stroke-dasharray="4 3"/>'
            + _text(column.x + 11, y + 15, short_name(agent, 21), size=11)
            + "</g>"
        )
        y += CHIP_HEIGHT + 4
    return parts


def _links(columns: list[_Column]) -> list[str]:
    """Within lanes from shard to shard, and between stages from each lane's end to each lane's beginning."""
    pairs = [pair for column in columns for lane in column.lanes for pair in pairwise(lane)]
    for here, there in pairwise(columns):
        pairs += [(a[-1], b[0]) for a, b in product(here.lanes, there.lanes)]
    # Arrows last, so that the faint lines never cover them.
    pairs.sort(key=lambda pair: pair[0].shard.agent != pair[1].shard.agent)
    return [_link(a, b) for a, b in pairs]


def _link(a: _Box, b: _Box) -> str:
    x1, y1, x2, y2 = a.x + a.width, a.middle_y, b.x, b.middle_y
    bend = (x2 - x1) / 2
    if a.shard.agent == b.shard.agent:
        path = f"M{x1:g} {y1:g}C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
        return f'<path class="tg-stay" d="{path}" fill="none" stroke="{_MUTED}" stroke-opacity="0.3" stroke-dasharray="2 4"/>'
    tip = x2 - 7
    path = f"M{x1 + 2:g} {y1:g}C{x1 + bend:g} {y1:g} {tip - bend:g} {y2:g} {tip:g} {y2:g}"
    head = f"M{x2 - 2:g} {y2:g}l-8 -4.5v9z"
    return (
        f'<g class="tg-hop"><path d="{path}" fill="none" stroke="{_MUTED}" stroke-width="1.4"/>'
        f'<path d="{head}" fill="{_MUTED}"/></g>'
    )


def _legend(
    names: Sequence[str], agents: Sequence[AgentOut], colours: dict[str, str], width: float, top: float
) -> tuple[list[str], float]:
    by_id = {agent.id: agent for agent in agents}
    parts, x, y = [], float(MARGIN), top
    for name in names:
        agent = by_id.get(name)
        about = " · ".join(_about(agent)) if agent else "not enrolled any more"
        shown = short_name(name, 24)
        item_width = 24 + (len(shown) + len(about) + 2) * _LETTER_WIDTH
        if x > MARGIN and x + item_width > width:
            x, y = float(MARGIN), y + 22
        parts.append(
            f'<g class="tg-key" data-agent="{escape(name)}"><rect x="{x:g}" y="{y:g}" width="12" height="12" rx="3" '
            f'fill="{colours[name]}" fill-opacity="0.35" stroke="{colours[name]}"/>'
            f'<text x="{x + 18:g}" y="{y + 10.5:g}" fill="{_INK}"><tspan font-weight="600">{escape(shown)}</tspan>'
            f'<tspan dx="7" fill="{_MUTED}">{escape(about)}</tspan></text></g>'
        )
        x += item_width + 14
    return parts, y + 16 + MARGIN


def _about(agent: AgentOut) -> list[str]:
    about = [agent.platform]
    if agent.is_cloud:
        about.append("cloud")
    if agent.evidence == "emulated":
        about.append("emulated")
    return about


def _in_words(columns: list[_Column]) -> str:
    stages = []
    for column in columns:
        on = dict.fromkeys(box.shard.agent for lane in column.lanes for box in lane)
        stages.append(f"{column.stage} on {' and '.join(on)}")
    return "; ".join(stages)


def _text(x: float, y: float, text: str, *, size: float = 12, weight: int = 400, colour: str = _INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
