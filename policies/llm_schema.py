"""JSON schemas of answers, for `response_format`; they are asked for and never trusted.

One form per action, so that a grammar made from it leaves a small model no room to ramble; every list and text is bounded, so that
an answer ends within its tokens. The root says that it is an object beside its forms, since some endpoints insist on that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_WISHES = 4
_NAME = {"type": "string", "maxLength": 8}
_RATIONALE = {"type": "string", "maxLength": 300}


def answer_schema(names: Sequence[str], *, stages: int, can_keep: bool = True) -> dict[str, object]:
    """Of an answer that may choose one of these candidates, or place so many stages."""
    said = {"rationale": _RATIONALE, "confidence": {"type": "number", "minimum": 0, "maximum": 1}}
    stage = _object({"stage": _NAME, "model": _NAME, "agent": _NAME})
    forms = [
        _object({"action": _only("select"), "candidate": {"type": "string", "enum": list(names)}, **said}),
        *([_object({"action": _only("keep"), **said})] if can_keep else []),
        _object({"action": _only("constrain"), "rules": _list(_rule(), MAX_WISHES), **said}),
        _object({"action": _only("place"), "stages": _list(stage, stages), **said}),
    ]
    return {"type": "object", "anyOf": forms}


def intent_schema() -> dict[str, object]:
    """Of what a model makes of an operator's sentence."""
    times = {name: {"type": "string", "maxLength": 5} for name in ("start", "until")}
    return {
        "type": "object",
        "anyOf": [
            _object({"action": _only("constrain"), "rules": _list(_rule(times), MAX_WISHES), "rationale": _RATIONALE}),
            _object({"action": _only("keep"), "rationale": _RATIONALE}),
        ],
    }


def _rule(more: Mapping[str, object] | None = None) -> dict[str, object]:
    properties = {
        "kind": {"type": "string", "enum": ["avoid", "prefer", "bound", "shift", "keep"]},
        "target": _NAME,
        "models": {"type": "array", "items": _NAME, "maxItems": 8},
        **{name: {"type": "number", "minimum": 0.5, "maximum": 1.5} for name in ("saturation", "jitter", "risk")},
        **{name: {"type": "number"} for name in ("low", "high")},
        "minutes": {"type": "integer", "minimum": 1, "maximum": 1440},
        **(more or {}),
    }
    return _object(properties, required=["kind"])


def _object(properties: Mapping[str, object], required: Sequence[str] | None = None) -> dict[str, object]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties if required is None else required),
        "additionalProperties": False,
    }


def _list(items: object, most: int) -> dict[str, object]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _only(value: str) -> dict[str, object]:
    return {"type": "string", "enum": [value]}
