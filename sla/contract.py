"""The contract: one JSON document that says what a service must deliver."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sla.errors import ContractError

MAX_DOCUMENT_BYTES = 64 * 1024

Privacy = Literal["raw-stays-on-edge", "features-may-leave", "any"]
Percentile = Literal["p50", "p95", "p99"]


def _fraction(value: object) -> object:
    """`"99.95%"` and `0.9995` as a fraction; anything else is left for pydantic to refuse."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*", value)
        if match is None:
            raise ValueError('accepted is a percentage such as "99.95%" or a fraction such as 0.9995')
        return float(match.group(1)) / 100
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 1:
        raise ValueError(
            f'did you mean "{value:g}%"? accepted is a percentage with its sign or a fraction between 0 and 1'
        )
    return value


_PositiveFloat = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False, strict=True)]
_Fraction = Annotated[float, BeforeValidator(_fraction), Field(gt=0, lt=1, allow_inf_nan=False)]


class Contract(BaseModel):
    """What one service must deliver; see `docs/sla.md` for what violates what."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    service_id: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", strict=True)]
    """Lower-case letters, digits, dots and dashes; at most 63 characters."""
    latency_p99_ms: _PositiveFloat
    """99 % of requests in the window answer within this many milliseconds."""
    throughput_rps: _PositiveFloat
    """Requests per second that must be carried when they are offered."""
    availability_sla: _Fraction
    """Share of requests that must be answered, e.g. 0.9995."""
    model: Annotated[str, Field(min_length=1, max_length=128, strict=True)] | None = None
    """The registered service that this contract is for; default: the one named like `service_id`."""
    modality: Literal["vision", "speech", "text", "multimodal"] = "multimodal"
    priority: Annotated[int, Field(ge=0, le=9, strict=True)] = 5
    """Higher goes first when not all contracts can be kept."""
    accuracy_floor: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)] | None = None
    """Share of reference answers that must be right."""
    energy_j_per_request: _PositiveFloat | None = None
    cost_per_1k_requests: _PositiveFloat | None = None
    privacy: Privacy = "any"
    """`raw-stays-on-edge`: no stage runs in the cloud; `features-may-leave`: raw inputs stay on the edge, what a model's
    first block made of them may leave; `any`: no limit."""
    zones: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=63)], ...], Field(max_length=64)] = ()
    """Where shards may run; empty means anywhere."""
    intent: Annotated[str, Field(max_length=500)] = ""
    """Free text for the LLM in the control loop."""
    window_days: Annotated[int, Field(ge=1, le=90, strict=True)] = 7

    @property
    def service_name(self) -> str:
        """The registered service that this contract speaks of."""
        return self.model or self.service_id


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def parse_contract(document: bytes | str) -> Contract:
    """The contract in a JSON document.

    Raises ContractError that names the field (JSON pointer), what was found and what is accepted.
    """
    raw = document.encode() if isinstance(document, str) else document
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise ContractError(
            f"The SLA document has {len(raw)} bytes; at most {MAX_DOCUMENT_BYTES} are accepted.",
            found=f"{len(raw)} bytes", accepted=f"at most {MAX_DOCUMENT_BYTES} bytes",
        )  # fmt: skip
    try:
        data = json.loads(raw, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except _DuplicateKeyError as error:
        raise ContractError(
            f"The SLA names {error.key!r} twice; each field is accepted once.", pointer=f"/{_escape(error.key)}",
            found="two values", accepted="one value",
        ) from None  # fmt: skip
    except (ValueError, RecursionError) as error:
        raise ContractError(
            f"The SLA is not a JSON document: {_shorten(error)}.",
            found=_shorten(raw.decode(errors="replace")),
            accepted="a JSON object",
        ) from None
    return contract_from(data)


def contract_from(data: Any) -> Contract:
    """The contract in an already decoded JSON value. Raises ContractError."""
    if not isinstance(data, dict):
        raise ContractError(
            f"The SLA must be a JSON object, not {_kind(data)}.", found=_kind(data), accepted="a JSON object"
        )
    try:
        return Contract.model_validate(data)
    except ValidationError as error:
        raise _first_fault(error) from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise _DuplicateKeyError(key)
        seen[key] = value
    return seen


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _first_fault(error: ValidationError) -> ContractError:
    fault = min(error.errors(include_url=False), key=lambda e: (e["type"] != "extra_forbidden", e["type"] != "missing"))
    name = "/".join(_escape(str(part)) for part in fault["loc"])
    pointer = f"/{name}"
    match fault["type"]:
        case "missing":
            found, accepted = "nothing", _accepted(name)
        case "extra_forbidden":
            found, accepted = _shorten(repr(fault["input"])), f"one of {', '.join(Contract.model_fields)}"
            return ContractError(
                f"The SLA has a field {name!r} that is not known; accepted is {accepted}.",
                pointer=pointer,
                found=found,
                accepted=accepted,
            )
        case _:
            found = _shorten(repr(fault["input"]))
            accepted = fault["msg"].removeprefix("Value error, ")
    return ContractError(
        f"The SLA field {name!r} is wrong: found {found}; {accepted}.", pointer=pointer, found=found, accepted=accepted
    )


def _accepted(name: str) -> str:
    field = Contract.model_fields.get(name)
    examples = {
        "service_id": 'a name such as "document-reader"',
        "latency_p99_ms": "a number of milliseconds such as 150",
        "throughput_rps": "a number of requests per second such as 20",
        "availability_sla": 'a share such as "99.95%"',
    }
    return f"accepted is {examples.get(name, str(field.annotation) if field else 'a value')}"


def _escape(token: str) -> str:
    return token.replace("~", "~0").replace("/", "~1")


def _shorten(value: object, limit: int = 80) -> str:
    text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _kind(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return {
        list: "a list",
        str: "a string",
        int: "a number",
        float: "a number",
        bool: "a boolean",
        type(None): "null",
    }.get(type(value), type(value).__name__)
