"""What the benchmarks share."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import NAMES, main
from benchmarks.common import Row, at_most, median_ratio, rows_as_json, side_by_side
from benchmarks.cutting import even_spans
from policies.ids import BlobHash, ModelName
from policies.plan import Span
from policies.service import BlockProfile, ModelProfile


def test_rows_have_the_stable_keys() -> None:
    rows = [Row(name="a", value=1.5, unit="ms"), at_most("b", 1.2, "ratio", 1.05, runs=3)]
    assert json.loads(rows_as_json(rows)) == [
        {"name": "a", "value": 1.5, "unit": "ms", "goal": None, "holds": None, "runs": 1, "note": ""},
        {"name": "b", "value": 1.2, "unit": "ratio", "goal": "<= 1.05", "holds": False, "runs": 3, "note": ""},
    ]


def test_ways_take_turns_in_a_rotating_order() -> None:
    order: list[str] = []
    times = side_by_side({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}


def test_the_ratio_is_taken_within_each_round() -> None:
    assert median_ratio([2.0, 4.0, 40.0], [1.0, 2.0, 10.0]) == 2.0


@given(costs=st.lists(st.floats(0, 100), min_size=1, max_size=8), shards=st.integers(1, 8))
def test_even_spans_tile_the_blocks(costs: list[float], shards: int) -> None:
    blocks = tuple(
        BlockProfile(name="", fixed_ms=0, per_item_ms=cost, param_bytes=0, cut_bytes_per_item=0) for cost in costs
    )
    profile = ModelProfile(name=ModelName("m"), sha256=BlobHash(""), blocks=blocks, input_bytes_per_item=0)
    spans = even_spans(profile, shards)
    assert len(spans) == min(shards, len(costs))
    assert all(len(span) > 0 for span in spans)
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1] == Span(spans[-1].start, len(costs))


def test_of_fair_spans_those_with_the_leanest_cuts_are_taken() -> None:
    def spans(costs: list[float], sent: list[int]) -> list[int]:
        blocks = tuple(
            BlockProfile(name="", fixed_ms=0, per_item_ms=cost, param_bytes=0, cut_bytes_per_item=size)
            for cost, size in zip(costs, sent, strict=True)
        )
        profile = ModelProfile(name=ModelName("m"), sha256=BlobHash(""), blocks=blocks, input_bytes_per_item=0)
        return [span.stop for span in even_spans(profile, 2)]

    assert spans([10, 1, 10, 1], [900, 100, 900, 0]) == [2, 4]  # 11 and 11
    assert spans([10, 1, 10, 1], [100, 900, 900, 0]) == [1, 4]  # 10 and 12 is within a tenth, and sends less
    assert spans([10, 3, 10, 3], [100, 900, 900, 0]) == [2, 4]  # 10 and 16 is not


def test_an_unknown_benchmark_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["nothing"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "no benchmark named 'nothing'" in said
    assert all(name in said for name in NAMES)
