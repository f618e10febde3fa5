"""Knobs: never beyond what the accuracy floor leaves, whatever was measured and whatever the bandwidth says."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.ids import ModelName, StageName
from policies.knobs import best, bounded, follow_bandwidth, kept_accuracy, knobs_of, limit_of, within, worst_allowed
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.service import Knob
from sla.errors import InvalidInputError
from tests.policies.conftest import MODELS, READER, SPEC, onnx_stage

KEEP = Knob(name="keep", input="keep_ratio", default=1.0, low=0.05, high=1.0)
DROP = Knob(name="drop", input="drop_ratio", default=0.0, low=0.0, high=0.9, better="low")
CURVE = ((0.9, 0.99), (0.7, 0.95), (0.5, 0.8))

shares = st.floats(0.0, 1.0)
knobs = st.sampled_from([KEEP, DROP])
curves = st.lists(st.tuples(shares, shares), max_size=6).map(tuple)
uses = st.one_of(st.floats(0.0, 1.0), st.just(math.nan))


def test_accuracy_is_interpolated_and_unknown_beyond_what_was_measured():
    assert kept_accuracy(KEEP, CURVE, 1.0) == 1.0
    assert kept_accuracy(KEEP, CURVE, 0.8) == pytest.approx(0.97)
    assert kept_accuracy(KEEP, CURVE, 0.49) == 0.0
    assert kept_accuracy(KEEP, (), 0.99) == 0.0
    lucky = ((0.8, 0.9), (0.6, 0.95))
    assert kept_accuracy(KEEP, lucky, 0.6) == pytest.approx(0.9), "pruning more is not believed to be better"


def test_the_worst_value_that_is_allowed():
    assert worst_allowed(KEEP, CURVE, 0.0) == KEEP.low
    assert worst_allowed(KEEP, CURVE, 0.97) == pytest.approx(0.8)
    assert worst_allowed(KEEP, CURVE, 0.5) == pytest.approx(0.5), "nothing is known below"
    assert worst_allowed(KEEP, (), 0.5) == 1.0
    assert worst_allowed(DROP, ((0.5, 0.9),), 0.95) == pytest.approx(0.25)


@given(knob=knobs, points=curves, left=shares, right=shares)
def test_going_away_from_the_best_end_never_gains_accuracy(knob, points, left, right):
    near, far = sorted((bounded(knob, left), bounded(knob, right)), key=lambda value: abs(value - best(knob)))
    assert kept_accuracy(knob, points, far) <= kept_accuracy(knob, points, near) + 1e-12


@example(knob=KEEP, points=((0.9999999999999999, 0.0),), needed=0.25, value=0.0)
@given(knob=knobs, points=curves, needed=st.floats(0.001, 1.0), value=shares)
def test_what_is_allowed_keeps_the_accuracy(knob, points, needed, value):
    limit = worst_allowed(knob, points, needed)
    assert knob.low <= limit <= knob.high
    assert kept_accuracy(knob, points, limit) >= needed - 1e-6 or limit == best(knob)
    assert kept_accuracy(knob, points, within(knob, value, limit)) >= needed - 1e-6 or limit == best(knob)


@given(knob=knobs, value=shares, limit=shares, looks=st.lists(uses, max_size=12))
def test_auto_stays_within_its_limit(knob, value, limit, looks):
    value, limit = bounded(knob, value), bounded(knob, limit)
    for use in looks:
        value = follow_bandwidth(knob, value, limit, use)
        assert knob.low <= value <= knob.high
        assert value >= limit if knob.better == "high" else value <= limit


def test_auto_prunes_by_the_printed_rule():
    assert follow_bandwidth(KEEP, 0.8, 0.05, 0.9) == pytest.approx(1 - 0.2 * 0.6)
    assert follow_bandwidth(KEEP, 0.8, 0.05, 0.2) == pytest.approx(1 - 0.2 * 1.3)
    assert follow_bandwidth(KEEP, 0.8, 0.05, 0.5) == pytest.approx(0.8)
    assert follow_bandwidth(KEEP, 0.8, 0.05, math.nan) == 0.8
    assert follow_bandwidth(DROP, 0.2, 0.9, 0.2) == pytest.approx(0.2 * 1.3)


def test_the_limit_counts_the_plans_models_and_the_other_knobs():
    measured = {"keep_ratio": CURVE, "drop_ratio": ((0.5, 0.9),)}
    models = {
        name: msgspec.structs.replace(MODELS[name], knobs=measured)
        for name in map(ModelName, ("det-base", "det-small"))
    }
    stage = msgspec.structs.replace(onnx_stage("detect", *models), knobs=(KEEP, DROP))
    spec = msgspec.structs.replace(SPEC, stages=(stage,))

    def plan(model: str) -> Plan:
        lane = make_lane(stage.name, ModelName(model), None, WHOLE_AXIS, (("a", Span(0, 8)),))
        planned = StagePlan(stage=StageName("detect"), model=ModelName(model), axis=None, lanes=(lane,))
        return Plan(service_id=READER, epoch=1, stages=(planned,))

    def limit(running: Plan | None, floor: float | None, **values: float) -> float:
        return limit_of(
            spec, running, models, floor, "detect.keep", {f"detect.{key}": value for key, value in values.items()}
        )

    assert [key for key, _, _ in knobs_of(spec)] == ["detect.keep", "detect.drop"]
    assert limit(plan("det-small"), None) == KEEP.low
    assert limit(plan("det-small"), 0.9) == pytest.approx(worst_allowed(KEEP, CURVE, 0.9))
    assert limit(plan("det-base"), 0.9) == pytest.approx(worst_allowed(KEEP, CURVE, 0.9 / 0.95))
    assert limit(None, 0.9) == limit(plan("det-base"), 0.9), "before there is a plan, the least accurate variant counts"
    assert limit(plan("det-small"), 0.9, drop=0.25) == pytest.approx(worst_allowed(KEEP, CURVE, 0.9 / 0.95))
    assert limit(plan("det-small"), 1.0) == 1.0
    with pytest.raises(InvalidInputError, match="has no knob"):
        limit_of(spec, None, models, 0.9, "detect.other", {})
