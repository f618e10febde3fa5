"""The plan's picture, values in and text out."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from controller.dashboard.plan_picture import agent_colours, plan_picture, short_name
from controller.views import AgentOut, ShardOut

_SVG = "{http://www.w3.org/2000/svg}"


def _agent(
    name: str, *, at: int = 0, platform: str = "rk3588", evidence: str = "emulated", cloud: bool = False
) -> AgentOut:
    return AgentOut(
        id=name, platform=platform, evidence=evidence, state="live", zone="z", is_cloud=cloud, age_ms=1, cpu_saturation=0,
        memory_budget_bytes=1, loaded_bytes=0, queue_depth=0, temperature_c=None, slowdown=1, peer_address="", seen_host="",
        claimed_host="", ingress_url=None, enrolled_at_s=float(at), enrolled_in_ms=None, versions={}, providers=[], links=[],
        faults=[],
    )  # fmt: skip


def _shard(stage: str, agent: str, blocks: tuple[int, int] = (0, 8), **more: Any) -> ShardOut:
    whole = (0, 1000)
    return ShardOut(
        stage=stage, model=f"{stage}-base", agent=agent, blocks=blocks, block_count=8, patch=more.get("patch", whole),
        token=more.get("token", whole), role=more.get("role", "serving"),
    )  # fmt: skip


def _groups(picture: str, css: str) -> list[ElementTree.Element]:
    return [group for group in ElementTree.fromstring(picture).iter(f"{_SVG}g") if group.get("class") == css]


def _texts(group: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in group.iter(f"{_SVG}text")]


def _rect(group: ElementTree.Element) -> tuple[float, float, float, float]:
    rect = group.find(f"{_SVG}rect")
    assert rect is not None
    x, y, width, height = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
    return x, y, width, height


def test_a_shard_says_who_which_blocks_and_which_share() -> None:
    shards = [
        _shard("detect", "a", (0, 4)),
        _shard("detect", "b", (4, 8)),
        _shard("read", "a", patch=(0, 600)),
        _shard("read", "b", patch=(600, 1000)),
    ]
    boxes = _groups(plan_picture(shards, []), "tg-shard")
    assert [_texts(box) for box in boxes] == [
        ["a", "blocks 0-3 of 8", "all items"],
        ["b", "blocks 4-7 of 8", "all items"],
        ["a", "blocks 0-7 of 8", "60% of patches"],
        ["b", "blocks 0-7 of 8", "40% of patches"],
    ]


def test_one_block_is_not_a_range() -> None:
    (box,) = _groups(plan_picture([_shard("embed", "a", (2, 3), token=(0, 500))], []), "tg-shard")
    assert _texts(box) == ["a", "block 2 of 8", "50% of tokens"]


def test_blocks_go_right_lanes_go_down_and_stages_go_right() -> None:
    shards = [
        _shard("one", "a", (0, 4)),
        _shard("one", "b", (4, 8)),
        _shard("two", "a", patch=(0, 800)),
        _shard("two", "b", patch=(800, 1000)),
    ]
    first, second, upper, lower = (_rect(box) for box in _groups(plan_picture(shards, []), "tg-shard"))
    assert first[0] + first[2] < second[0] < second[0] + second[2] < upper[0]
    assert first[1] == second[1]
    assert upper[0] == lower[0]
    assert upper[1] + upper[3] < lower[1]
    assert upper[3] > lower[3]


def test_arrows_join_only_different_agents() -> None:
    shards = [
        _shard("one", "a"),
        _shard("two", "a", patch=(0, 500)),
        _shard("two", "b", patch=(500, 1000)),
        _shard("three", "b"),
    ]
    picture = plan_picture(shards, [])
    assert len(_groups(picture, "tg-hop")) == 2
    assert picture.count('class="tg-stay"') == 2


def test_fallbacks_are_outlined_chips_and_belong_to_the_legend() -> None:
    shards = [_shard("one", "a"), _shard("one", "spare", role="fallback")]
    picture = plan_picture(shards, [_agent("a"), _agent("spare", platform="ray", evidence="measured", cloud=True)])
    (chip,) = _groups(picture, "tg-fallback")
    assert _texts(chip) == ["spare"]
    legend = ["".join(group.itertext()) for group in _groups(picture, "tg-key")]
    assert legend == ["ark3588 · emulated", "spareray · cloud"]


def test_an_agent_that_left_is_drawn_and_named_as_gone() -> None:
    picture = plan_picture([_shard("one", "gone")], [])
    assert "not enrolled any more" in picture


def test_nothing_serving_is_no_picture() -> None:
    assert plan_picture([], []) == ""
    assert plan_picture([_shard("one", "a", role="fallback")], []) == ""


def test_a_newcomer_recolours_nobody() -> None:
    before = agent_colours([_agent("m", at=1), _agent("z", at=2)])
    after = agent_colours([_agent("a", at=3), _agent("z", at=2), _agent("m", at=1)])
    assert before.items() <= after.items()
    assert len(set(after.values())) == 3


def test_short_names_keep_both_ends() -> None:
    assert short_name("short", 16) == "short"
    assert short_name("ascend310p-4be012ff", 12) == "ascend31…2ff"
    assert all(len(short_name("x" * 200, length)) == length for length in range(4, 40))


_names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)


@given(stage=_names, agent=_names, platform=_names)
def test_any_name_gives_well_formed_text_and_never_markup(stage: str, agent: str, platform: str) -> None:
    picture = plan_picture(
        [_shard(stage, agent), _shard(stage, f"{agent}2", role="fallback")], [_agent(agent, platform=platform)]
    )
    tags = {element.tag.removeprefix(_SVG) for element in ElementTree.fromstring(picture).iter()}
    assert tags <= {"svg", "title", "g", "path", "rect", "text", "tspan"}


@given(cuts=st.lists(st.integers(1, 999), max_size=8, unique=True))
def test_everything_lies_inside_the_picture(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 1000]
    shards = [_shard("read", f"agent-{at}", patch=span) for at, span in enumerate(pairwise(edges))]
    picture = plan_picture(shards, [])
    root = ElementTree.fromstring(picture)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for x, y, w, h in (_rect(group) for css in ("tg-shard", "tg-key") for group in _groups(picture, css)):
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    assert re.fullmatch(r"[\d.]+", root.get("width", ""))
