"""One tolerant reader for replies of language models: prose, code fences and thinking aloud are fine, ambiguity is not.

A reply must contain exactly one answer. Duplicate keys, not-a-number, contradicting objects, cut-off text and candidates that
were not offered are refused with a sentence that a repair round can send back.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal

import msgspec

from sla.errors import PermanentError

MAX_REPLY_CHARS = 65_536
MAX_OBJECTS = 64
MAX_RATIONALE = 300


class Malformed(PermanentError):  # noqa: N818 - names what the reply is
    """A reply that cannot be used; the text says why, without quoting it at length."""

    slug = "malformed-reply"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a model decided."""

    action: Literal["select", "keep"]
    candidate: str = ""
    """One of the offered names; empty for `keep`."""
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
    if any((other.action, other.candidate) != (first.action, first.candidate) for other in answers[1:]):
        raise Malformed("it contains several answers that contradict each other.")
    return first


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
    if action != "select":
        raise Malformed('its \'action\' must be "select" or "keep".')
    return Answer(
        action="select",
        candidate=_candidate(found.get("candidate"), offered),
        rationale=rationale,
        confidence=confidence,
    )


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
