"""How a wrong document is refused: the JSON pointer of the field, what was found there, what is accepted."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from sla.errors import ContractError

ACCEPTED: dict[str, str] = {
    "service_id": 'a name of lower-case letters, digits, dots and dashes, at most 63 long, such as "document-reader"',
    "latency_p99_ms": "a number of milliseconds above 0, such as 150",
    "throughput_rps": "a number of requests per second above 0, such as 20",
    "availability_sla": 'a percentage with its sign such as "99.95%", or a fraction between 0 and 1 such as 0.9995',
    "model": "the name of a registered service, 1 to 128 characters",
    "modality": 'one of "vision", "speech", "text", "multimodal"',
    "priority": "a whole number from 0 to 9",
    "accuracy_floor": "a number from 0 to 1",
    "energy_j_per_request": "a number of joules above 0",
    "cost_per_1k_requests": "a number above 0",
    "privacy": 'one of "raw-stays-on-edge", "features-may-leave", "any"',
    "zones": "a list of at most 64 zone names of 1 to 63 characters",
    "intent": "a text of at most 500 characters",
    "window_days": "a whole number of days from 1 to 90",
    "objectives": 'a list of at most 16 objectives such as {"percentile": "p95", "at_most_ms": 100}',
    "objectives/percentile": 'one of "p50", "p95", "p99"',
    "objectives/at_most_ms": "a number of milliseconds above 0, such as 100",
    "objectives/metric": 'one of "latency", "time-to-first-token", "inter-token"',
}
"""What each field takes, by its path without list positions."""

Path = tuple[str | int, ...]


def first_refusal(error: ValidationError, known: Mapping[tuple[str, ...], tuple[str, ...]]) -> ContractError:
    """The fault that helps most: a field that is not known, then one that is missing, then the first wrong one.

    `known` are the fields of each object, by its path without list positions.
    """
    faults = error.errors(include_url=False)
    fault = min(faults, key=lambda f: (f["type"] != "extra_forbidden", f["type"] != "missing"))
    path: Path = fault["loc"]
    is_unknown = fault["type"] == "extra_forbidden"
    if fault["type"] == "string_unicode" and _names(path) in known:
        path, is_unknown = (*path, fault["input"]), True  # A key that UTF-8 cannot say; no field has such a name.
    name = shorten("/".join(_safe(str(part)) for part in path))
    pointer = pointer_to(path)
    if is_unknown:
        return _unknown(name, pointer, fault["input"], str(path[-1]), known.get(_names(path[:-1]), ()))
    accepted = ACCEPTED.get("/".join(_names(path)), _safe(fault["msg"]))
    if fault["type"] == "missing":
        text = f"The SLA does not have the field {name!r}; accepted is {accepted}."
        return ContractError(text, pointer=pointer, found="nothing", accepted=accepted)
    found = rendered(fault["input"])
    hint = fault["msg"].removeprefix("Value error, ") if fault["type"] == "value_error" else f"accepted is {accepted}"
    return ContractError(
        f"The SLA field {name!r} is wrong: found {found}; {_safe(hint)}.",
        pointer=pointer,
        found=found,
        accepted=accepted,
    )


def pointer_to(path: Path) -> str:
    """The JSON pointer (RFC 6901) of a path; overlong names, which no contract has, are cut."""
    return "".join("/" + _safe(str(part)[:200]).replace("~", "~0").replace("/", "~1") for part in path)


def rendered(value: object) -> str:
    """A JSON value as text that fits into a sentence."""
    if isinstance(value, (dict, list)):
        return f"{kind_of(value)} of {len(value)}"
    if isinstance(value, str):
        return shorten(json.dumps(value[:200]))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"a number of {value.bit_length()} bits"
    return shorten(json.dumps(value, default=str))


def shorten(value: object, limit: int = 80) -> str:
    """At most `limit` characters that every encoding can carry."""
    text = _safe(str(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def kind_of(value: object) -> str:
    """What a JSON value is, in words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    kinds: tuple[tuple[type, str], ...] = (
        (dict, "an object"), (list, "a list"), (str, "a string"), (bool, "a boolean"), (int, "a number"), (float, "a number"),
    )  # fmt: skip
    return next(
        (name for kind, name in kinds if isinstance(value, kind)), "null" if value is None else "something else"
    )


def _unknown(name: str, pointer: str, value: Any, key: str, fields: Iterable[str]) -> ContractError:
    names = ", ".join(fields)
    near = difflib.get_close_matches(key[:64], tuple(fields), n=1, cutoff=0.7)
    hint = f"did you mean {near[0]!r}? Accepted" if near else "accepted"
    return ContractError(
        f"The SLA has a field {name!r} that is not known; {hint} are {names}.",
        pointer=pointer,
        found=rendered(value),
        accepted=f"one of {names}",
    )


def _names(path: Path) -> tuple[str, ...]:
    return tuple(part for part in path if isinstance(part, str))


def _safe(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="backslashreplace").decode()
