"""Knobs that are turned while requests run: how far the accuracy floor lets them go, and how they follow the memory bandwidth. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from policies.ids import ModelName
from policies.plan import Plan
from policies.pruning import keep_ratio, next_strength
from policies.service import Knob, ModelProfile, OnnxStage, ServiceSpec
from sla.errors import InvalidInputError

Points = Sequence[tuple[float, float]]
"""(value, share of the accuracy that is kept), as measured."""


_DIGITS = 6
"""Values that differ by less are the same: between points closer than that a curve would be steeper than floats can tell."""


def knob_key(stage: str, knob: str) -> str:
    """How a knob of a service is named: `decode.keep`."""
    return f"{stage}.{knob}"


def knobs_of(spec: ServiceSpec) -> Iterator[tuple[str, OnnxStage, Knob]]:
    """Key, stage and knob of everything in a service that can be turned."""
    for stage in spec.onnx_stages():
        for knob in stage.knobs:
            yield knob_key(stage.name, knob.name), stage, knob


def bounded(knob: Knob, value: float) -> float:
    """The value within the knob's bounds; the default for what is no number."""
    return min(knob.high, max(knob.low, value)) if math.isfinite(value) else knob.default


def best(knob: Knob) -> float:
    """The end at which the model is most accurate."""
    return knob.high if knob.better == "high" else knob.low


def kept_accuracy(knob: Knob, points: Points, value: float) -> float:
    """Share of the accuracy that is kept at `value`, in [0, 1]: linear between measured points, and never rising where the knob goes down.

    Nothing is known beyond the worst measured point, so nothing is kept there; all is kept at the best end.
    """
    if value == best(knob):
        return 1.0
    curve = _curve(knob, points)
    at = _cost(knob, value)
    for (left, high), (right, low) in itertools.pairwise(curve):
        if left <= at <= right:
            share = (at - left) / (right - left) if right > left else 1.0
            return high + share * (low - high)
    return 0.0


def worst_allowed(knob: Knob, points: Points, needed: float) -> float:
    """The value farthest from the best end at which `needed` of the accuracy is kept; the best end if nothing else keeps it.

    Without measured points no accuracy may be spent: the best end, unless nothing is needed.
    """
    if needed <= 0.0:
        return knob.low if knob.better == "high" else knob.high
    curve = _curve(knob, points)
    reached = 0.0
    for (left, high), (right, low) in itertools.pairwise(curve):
        if high < needed:
            break
        if low >= needed:
            reached = right
        else:
            reached = left + (right - left) * (high - needed) / (high - low)
            reached = math.floor(reached * 10**_DIGITS) / 10**_DIGITS  # Toward the best end.
            break
    return bounded(knob, knob.high - reached if knob.better == "high" else knob.low + reached)


def _cost(knob: Knob, value: float) -> float:
    """Distance from the best end."""
    return round(knob.high - value if knob.better == "high" else value - knob.low, _DIGITS)


def _curve(knob: Knob, points: Points) -> list[tuple[float, float]]:
    """(distance from the best end, share kept), from the best end on, never rising."""
    curve = [(0.0, 1.0)]
    for value, share in sorted(points, key=lambda point: _cost(knob, point[0])):
        if _cost(knob, value) > 0.0:
            curve.append((_cost(knob, value), min(curve[-1][1], max(0.0, share))))
    return curve


def limit_of(
    spec: ServiceSpec, plan: Plan | None, models: Mapping[ModelName, ModelProfile], floor: float | None, key: str,
    values: Mapping[str, float],
) -> float:  # fmt: skip
    """How far the knob `key` may go under the accuracy floor, given the plan's models and what the other knobs (`values`) cost.

    Before there is a plan, with the least accurate variants. Raises InvalidInputError for a knob that the service does not have.
    """
    knob: Knob | None = None
    points: Points = ()
    left = 1.0
    for name, stage, each in knobs_of(spec):
        known = _points(stage, each, plan, models)
        if name == key:
            knob, points = each, known
        else:
            left *= kept_accuracy(each, known, bounded(each, values.get(name, each.default)))
    if knob is None:
        known_keys = ", ".join(name for name, _, _ in knobs_of(spec)) or "none"
        raise InvalidInputError(f"{spec.id} has no knob {key!r}.", found=key, accepted=known_keys)
    if floor is None:
        return worst_allowed(knob, points, 0.0)
    for stage in spec.onnx_stages():
        left *= min((stage.accuracy(model) for model in _models(stage, plan, models)), default=1.0)
    return worst_allowed(knob, points, min(1.0, floor / left) if left > 0 else 1.0)


def within(knob: Knob, value: float, limit: float) -> float:
    """The value, but not beyond the limit."""
    value = bounded(knob, value)
    return max(value, limit) if knob.better == "high" else min(value, limit)


def follow_bandwidth(knob: Knob, value: float, limit: float, bandwidth_use: float) -> float:
    """What a knob of pruning becomes after one look at the use of the memory bandwidth (see `policies.pruning`); never beyond the limit."""
    strength = 1.0 - value if knob.better == "high" else value
    if not math.isfinite(bandwidth_use):
        return within(knob, value, limit)
    after = next_strength(strength, bandwidth_use)
    return within(knob, round(keep_ratio(after) if knob.better == "high" else after, 4), limit)


def _models(stage: OnnxStage, plan: Plan | None, models: Mapping[ModelName, ModelProfile]) -> list[ModelProfile]:
    planned = [] if plan is None else [each.model for each in plan.stages if each.stage == stage.name]
    return [models[name] for name in planned or stage.variants if name in models]


def _points(stage: OnnxStage, knob: Knob, plan: Plan | None, models: Mapping[ModelName, ModelProfile]) -> Points:
    """Measured points of the model that runs; of several, those of the first that has none count as not measured."""
    found = [model.knobs.get(knob.input, ()) for model in _models(stage, plan, models)]
    return min(found, key=len, default=())
