"""The contract: one JSON document that says what a service must deliver. What violates what is in `docs/sla.md`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from sla.errors import ContractError
from sla.refusals import ACCEPTED, first_refusal, kind_of, pointer_to, rendered, shorten

MAX_DOCUMENT_BYTES = 64 * 1024
MAX_OBJECTIVES = 16

Privacy = Literal["raw-stays-on-edge", "features-may-leave", "any"]
Percentile = Literal["p50", "p95", "p99"]
Metric = Literal["latency", "time-to-first-token", "inter-token"]

SHARE_OF: dict[Percentile, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
"""Share of requests that an objective of this percentile asks to be quick enough."""


def _fraction(value: object) -> object:
    """`"99.95%"` and `0.9995` as a fraction; anything else is left for pydantic to refuse."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*", value, re.ASCII)
        if match is None:
            raise ValueError(f"accepted is {ACCEPTED['availability_sla']}")
        return float(match.group(1)) / 100
    if isinstance(value, bool):
        raise ValueError(f"accepted is {ACCEPTED['availability_sla']}")
    if isinstance(value, (int, float)) and 1 < value <= 100:
        raise ValueError(f'did you mean "{value:g}%"? Without the percent sign a fraction between 0 and 1 is accepted')
    return value


_PositiveFloat = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False, strict=True)]
_Fraction = Annotated[
    float,
    BeforeValidator(_fraction),
    Field(gt=0, lt=1, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^\s*\d{1,3}(\.\d{1,6})?\s*%\s*$"},
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            ]
        }
    ),
]
_Zone = Annotated[str, Field(min_length=1, max_length=63, strict=True)]


class Objective(BaseModel):
    """One more promise about times, beside `latency_p99_ms`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    percentile: Percentile
    """Which share of requests must be within `at_most_ms`: `p50` half of them, `p95` 95 %, `p99` 99 %."""
    at_most_ms: _PositiveFloat
    """Milliseconds."""
    metric: Metric = "latency"
    """`latency`: until the whole answer is there; `time-to-first-token`: until its first part is (for a service that answers
    in one piece the same as `latency`); `inter-token`: between two parts of a streamed answer. Default: `latency`."""

    @property
    def name(self) -> str:
        """Names the objective within its contract, e.g. `latency-p95`."""
        return f"{self.metric}-{self.percentile}"


class Contract(BaseModel):
    """What one service must deliver; see `docs/sla.md` for what violates what."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    service_id: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$", strict=True)]
    """Names the contract: lower-case letters, digits, dots and dashes; at most 63 characters."""
    latency_p99_ms: _PositiveFloat
    """99 % of the answered requests in the window answer within this many milliseconds."""
    throughput_rps: _PositiveFloat
    """Requests per second that must be carried when they are offered."""
    availability_sla: _Fraction
    """Share of requests that must be answered: `"99.95%"` or `0.9995`."""
    model: Annotated[str, Field(min_length=1, max_length=128, strict=True)] | None = None
    """The registered service that this contract is for. Default: the one named like `service_id`."""
    modality: Literal["vision", "speech", "text", "multimodal"] = "multimodal"
    """What the requests carry. Default: `multimodal`."""
    priority: Annotated[int, Field(ge=0, le=9, strict=True)] = 5
    """0 to 9; higher goes first when not all contracts can be kept. Default: 5."""
    accuracy_floor: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)] | None = None
    """Share of reference answers that must be right, 0 to 1. Default: no floor."""
    energy_j_per_request: _PositiveFloat | None = None
    """Joules that one request may take, over all devices. Default: no limit."""
    cost_per_1k_requests: _PositiveFloat | None = None
    """What 1,000 requests may cost, in the currency of the controller's prices. Default: no limit."""
    privacy: Privacy = "any"
    """`raw-stays-on-edge`: no stage runs in the cloud; `features-may-leave`: raw inputs stay on the edge, what a model's
    first block made of them may leave; `any`: no limit. Default: `any`."""
    zones: Annotated[tuple[_Zone, ...], Field(max_length=64)] = ()
    """Where shards may run; empty means anywhere. Default: empty."""
    intent: Annotated[str, Field(max_length=500, strict=True)] = ""
    """Free text for the LLM in the control loop, at most 500 characters. Default: empty."""
    window_days: Annotated[int, Field(ge=1, le=90, strict=True)] = 7
    """Length of the rolling window in which the promises are judged, days. Default: 7."""
    objectives: Annotated[tuple[Objective, ...], Field(max_length=MAX_OBJECTIVES)] = ()
    """More promises about times; the p99 of the latency is `latency_p99_ms`. Default: none."""

    @property
    def service_name(self) -> str:
        """The registered service that this contract speaks of."""
        return self.model or self.service_id

    def latency_objectives(self) -> tuple[Objective, ...]:
        """Every promise about times, the p99 of the latency first."""
        return (Objective(percentile="p99", at_most_ms=self.latency_p99_ms), *self.objectives)


class _Object(dict[str, Any]):
    """A JSON object that remembers which key stood in it twice."""

    doubled: str | None = None


def parse_contract(document: bytes | str) -> Contract:
    """The contract in a JSON document (UTF-8).

    Raises ContractError that names the field (JSON pointer), what was found and what is accepted.
    """
    return contract_from(parse_json(document))


def parse_json(document: bytes | str) -> Any:
    """A JSON value in which no object names a key twice. Raises ContractError as `parse_contract` does."""
    raw = document.encode(errors="replace") if isinstance(document, str) else document
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise ContractError(
            f"The SLA document has {len(raw)} bytes; at most {MAX_DOCUMENT_BYTES} are accepted.",
            found=f"{len(raw)} bytes", accepted=f"at most {MAX_DOCUMENT_BYTES} bytes",
        )  # fmt: skip
    try:
        data = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ContractError(
            f"The SLA is not a JSON document: {shorten(error)}.",
            found=shorten(raw.decode(errors="replace")),
            accepted="a JSON object",
        ) from None
    for path, value in _walk(data):
        if isinstance(value, _Object) and value.doubled is not None:
            raise ContractError(
                f"The SLA names {shorten(rendered(value.doubled))} twice; each field is accepted once.",
                pointer=pointer_to((*path, value.doubled)),
                found="two values",
                accepted="one value",
            )
    return data


def contract_from(data: Any) -> Contract:
    """The contract in an already decoded JSON value. Raises ContractError."""
    if not isinstance(data, dict):
        raise ContractError(
            f"The SLA must be a JSON object, not {kind_of(data)}.", found=kind_of(data), accepted="a JSON object"
        )
    try:
        contract = Contract.model_validate(data)
    except ValidationError as error:
        raise first_refusal(error, {(): tuple(Contract.model_fields), ("objectives",): tuple(Objective.model_fields)}) from None  # fmt: skip
    _check_objectives(contract)
    return contract


def _check_objectives(contract: Contract) -> None:
    """Objectives must be different ones, and a higher percentile cannot be quicker than a lower one."""
    seen = {"latency-p99": "/latency_p99_ms"}
    for at, objective in enumerate(contract.objectives):
        if objective.name in seen:
            raise ContractError(
                f"The SLA promises the {objective.percentile} of the {objective.metric} twice; it stands at {seen[objective.name]} already.",
                pointer=f"/objectives/{at}", found=objective.name, accepted="each percentile of a metric once",
            )  # fmt: skip
        seen[objective.name] = f"/objectives/{at}"
    for at, low in enumerate(contract.objectives):
        for high in contract.latency_objectives():
            if (
                low.metric == high.metric
                and SHARE_OF[low.percentile] < SHARE_OF[high.percentile]
                and low.at_most_ms > high.at_most_ms
            ):
                raise ContractError(
                    f"The {low.percentile} may take {low.at_most_ms:g} ms but the {high.percentile} only {high.at_most_ms:g} ms; "
                    f"a lower percentile is never slower.",
                    pointer=f"/objectives/{at}/at_most_ms", found=f"{low.at_most_ms:g}", accepted=f"at most {high.at_most_ms:g}",
                )  # fmt: skip


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object()
    for key, value in pairs:
        if key in found and found.doubled is None:
            found.doubled = key
        found[key] = value
    return found


def _walk(data: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value with its path; without recursion, since the document may be as deep as JSON allows."""
    waiting: list[tuple[tuple[str | int, ...], Any]] = [((), data)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if isinstance(value, dict):
            waiting += [((*path, key), inner) for key, inner in value.items() if isinstance(inner, (dict, list))]
        elif isinstance(value, list):
            waiting += [((*path, at), inner) for at, inner in enumerate(value) if isinstance(inner, (dict, list))]


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def percent(share: float) -> str:
    """A share as it may be written in a contract, without loss: `0.9995` as `99.95%`."""
    for digits in range(7):
        text = f"{100 * share:.{digits}f}"
        if math.isclose(float(text) / 100, share, rel_tol=1e-12):
            return f"{text}%"
    return repr(share)
