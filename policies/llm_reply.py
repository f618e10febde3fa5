"""One tolerant reader for replies of language models: prose, code fences and thinking aloud are fine, ambiguity is not.

A reply must contain exactly one answer. Duplicate keys, not-a-number, contradicting objects, cut-off text and candidates that
were not offered are refused with a sentence that a repair round can send back.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal, get_args

import msgspec

from sla.errors import PermanentError

MAX_REPLY_CHARS = 65_536
MAX_OBJECTS = 64
MAX_RATIONALE = 300
MAX_RULES = 4
MAX_STAGES = 32
MAX_LANES = 8
MAX_SHARDS = 8
MAX_MINUTES = 24 * 60

Action = Literal["select", "constrain", "place", "keep"]
RuleKind = Literal["avoid", "prefer", "bound", "shift", "keep"]


class Malformed(PermanentError):  # noqa: N818 - names what the reply is
    """A reply that cannot be used; the text says why, without quoting it at length."""

    slug = "malformed-reply"


class SaidRule(msgspec.Struct, frozen=True, kw_only=True):
    """A wish as the model put it, in the prompt's short names."""

    kind: RuleKind
    target: str = ""
    """A1 or Z1 for `avoid` and `prefer`, S1 or K1 for `bound`."""
    models: tuple[str, ...] = ()
    saturation: float = 1.0
    jitter: float = 1.0
    risk: float = 1.0
    low: float | None = None
    high: float | None = None
    """Ends of a knob, K1."""
    minutes: float | None = None
    start: str = ""
    """HH:MM; empty for now."""
    until: str = ""


class SaidShard(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks [start, stop) on an agent; `stop` None means to the last one."""

    agent: str
    start: int = 0
    stop: int | None = None


class SaidLane(msgspec.Struct, frozen=True, kw_only=True):
    """A share of a stage's items, in percent, through a chain of shards."""

    percent: float
    shards: tuple[SaidShard, ...]


class SaidStage(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model puts one stage."""

    stage: str
    model: str
    lanes: tuple[SaidLane, ...]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a model decided."""

    action: Action
    candidate: str = ""
    """One of the offered names, for `select`."""
    rules: tuple[SaidRule, ...] = ()
    """For `constrain`."""
    stages: tuple[SaidStage, ...] = ()
    """For `place`; stages that are not named stay as they are."""
    rationale: str = ""
    confidence: float | None = None


def parse_reply(reply: str, offered: tuple[str, ...]) -> Answer:
    """The one answer in a reply. Raises Malformed."""
    if not isinstance(reply, str) or not reply.strip():
        raise Malformed("the reply is empty.")
    if len(reply) > MAX_REPLY_CHARS:
        raise Malformed(f"the reply has {len(reply)} characters; at most {MAX_REPLY_CHARS} are read.")
    text = re.sub(r"(?s)^.*</think(?:ing)?>", "", reply)
    answers = [_answer(found, offered) for found in _objects(text)]
    if not answers:
        raise Malformed("it contains no complete JSON object with an 'action'.")
    first = answers[0]
    if any(_said(other) != _said(first) for other in answers[1:]):
        raise Malformed("it contains several answers that contradict each other.")
    return first


def _said(answer: Answer) -> Answer:
    """The answer without its reasons."""
    return msgspec.structs.replace(answer, rationale="", confidence=None)


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects with an action that stand in the text, outermost ones only."""
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
    found: list[dict[str, Any]] = []
    at = tries = 0
    while (at := text.find("{", at)) >= 0 and tries < MAX_OBJECTS:
        tries += 1
        try:
            value, end = decoder.raw_decode(text, at)
        except Malformed:
            raise
        except (ValueError, RecursionError):
            at += 1
            continue
        at = end
        if (answer := _with_action(value)) is not None:
            found.append(answer)
    return found


def _with_action(value: object) -> dict[str, Any] | None:
    """The object itself, or the one it wraps ({"answer": {...}})."""
    if not isinstance(value, dict):
        return None
    lowered = {str(key).strip().lower(): item for key, item in value.items()}
    if len(lowered) != len(value):
        raise Malformed("an object names the same key twice.")
    if "action" in lowered:
        return lowered
    inner = [item for item in value.values() if isinstance(item, dict)]
    return _with_action(inner[0]) if len(value) == 1 and inner else None


def _answer(found: dict[str, Any], offered: tuple[str, ...]) -> Answer:
    action = found["action"].strip().lower() if isinstance(found["action"], str) else None
    rationale, confidence = _rationale(found.get("rationale")), _confidence(found.get("confidence"))
    if action == "keep":
        return Answer(action="keep", rationale=rationale, confidence=confidence)
    if action == "select":
        name = _candidate(found.get("candidate"), offered)
        return Answer(action="select", candidate=name, rationale=rationale, confidence=confidence)
    if action == "constrain":
        rules = tuple(_rule(each) for each in _list(found.get("rules"), "rules", MAX_RULES))
        return Answer(action="constrain", rules=rules, rationale=rationale, confidence=confidence)
    if action == "place":
        stages = tuple(_stage(each) for each in _list(found.get("stages"), "stages", MAX_STAGES))
        if len({stage.stage for stage in stages}) != len(stages):
            raise Malformed("it places a stage twice.")
        return Answer(action="place", stages=stages, rationale=rationale, confidence=confidence)
    raise Malformed('its \'action\' must be "select", "constrain", "place" or "keep".')


def _list(value: object, name: str, most: int) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 1 <= len(value) <= most or not all(isinstance(v, dict) for v in value):
        raise Malformed(f"its '{name}' must be a list of 1 to {most} objects.")
    return value


def _rule(found: dict[str, Any]) -> SaidRule:
    kind = _word(found.get("kind"))
    if kind not in get_args(RuleKind):
        raise Malformed(f"the 'kind' of a rule must be one of {', '.join(get_args(RuleKind))}.")
    models = found.get("models") or []
    if not isinstance(models, list) or len(models) > MAX_STAGES:
        raise Malformed("the 'models' of a rule must be a list of names.")
    factors = {name: _number(found.get(name), 1.0, 0.5, 1.5, name) for name in ("saturation", "jitter", "risk")}
    minutes = found.get("minutes")
    return SaidRule(
        kind=kind,  # type: ignore[arg-type]
        target=_name(found.get("target")),
        models=tuple(_name(model) for model in models),
        low=_end(found.get("low"), "low"),
        high=_end(found.get("high"), "high"),
        minutes=None if minutes is None or minutes == "" else _number(minutes, 0.0, 0.0, MAX_MINUTES, "minutes"),
        start=_clock(found.get("start"), "start"),
        until=_clock(found.get("until"), "until"),
        **factors,
    )


def _stage(found: dict[str, Any]) -> SaidStage:
    name, model = _name(found.get("stage")), _name(found.get("model"))
    if "lanes" not in found and "agent" in found:
        lanes: tuple[SaidLane, ...] = (SaidLane(percent=100.0, shards=(SaidShard(agent=_name(found["agent"])),)),)
    else:
        lanes = tuple(_lane(each) for each in _list(found.get("lanes"), "lanes", MAX_LANES))
    return SaidStage(stage=name, model=model, lanes=lanes)


def _lane(found: dict[str, Any]) -> SaidLane:
    shards = tuple(_shard(each) for each in _list(found.get("shards"), "shards", MAX_SHARDS))
    return SaidLane(percent=_number(found.get("percent"), 100.0, 0.1, 100.0, "percent"), shards=shards)


def _shard(found: dict[str, Any]) -> SaidShard:
    stop = found.get("to")
    return SaidShard(
        agent=_name(found.get("agent")),
        start=int(_number(found.get("from"), 0.0, 0.0, 10_000.0, "from")),
        stop=None if stop is None else int(_number(stop, 0.0, 0.0, 10_000.0, "to")),
    )


def _word(value: object) -> str:
    return value.strip().lower() if isinstance(value, str) else ""


def _name(value: object) -> str:
    """One of the prompt's short names, or nothing that could be one."""
    match = re.fullmatch(r"\s*([akmsz]\d{1,4})\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    return match.group(1).upper() if match else ""


def _number(value: object, default: float, low: float, high: float, name: str) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise Malformed(f"its '{name}' must be a number between {low:g} and {high:g}.")
    return float(value)


def _end(value: object, name: str) -> float | None:
    return None if value is None else _number(value, 0.0, -1e9, 1e9, name)


def _clock(value: object, name: str) -> str:
    """A time of day; anything that is not one is refused, since a wish at the wrong time is worse than none."""
    if value is None or value == "":
        return ""
    match = re.fullmatch(r"\s*([01]?\d|2[0-3]):([0-5]\d)\s*", value) if isinstance(value, str) else None
    if match is None:
        raise Malformed(f"its '{name}' must be a time of day such as 18:00.")
    return f"{int(match.group(1)):02}:{match.group(2)}"


def _candidate(value: object, offered: tuple[str, ...]) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"C{value}"
    match = re.fullmatch(r"\s*(?:candidate\s+)?(c\d{1,4})\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    name = match.group(1).upper() if match else ""
    if name not in offered:
        raise Malformed(f"its 'candidate' must be one of {', '.join(offered)}.")
    return name


def _rationale(value: object) -> str:
    if not isinstance(value, str):
        return ""
    return re.sub(r"[\x00-\x1f\x7f\u2028\u2029]+", " ", value)[:MAX_RATIONALE].strip()


def _confidence(value: object) -> float | None:
    """A share in [0, 1]; percentages are understood, anything else is as good as not given."""
    if isinstance(value, str):
        try:
            value = float(value.strip().rstrip("%"))
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    share = value / 100.0 if 1.0 < value <= 100.0 else float(value)
    return share if 0.0 <= share <= 1.0 else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise Malformed(f"an object names {key[:40]!r} twice.")
        seen[key] = value
    return seen


def _no_constant(name: str) -> float:
    raise Malformed(f"{name} is not a JSON number.")
