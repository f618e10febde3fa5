"""Errors as RFC 9457 problem details."""

from __future__ import annotations

from typing import Any

from sla.errors import (
    ConflictError,
    ContractError,
    DeadlineExceededError,
    InfeasibleError,
    InvalidInputError,
    ModelError,
    NotFoundError,
    OverloadedError,
    RefusedError,
    RetryableError,
    SettingsError,
    TidegateError,
)

TYPE_PREFIX = "https://tidegate.dev/problems/"
"""A name, not a place: problem types are compared as strings."""

_STATUS: tuple[tuple[type[TidegateError], int, str], ...] = (
    (ContractError, 422, "The SLA is wrong"),
    (ModelError, 422, "The model is wrong"),
    (InvalidInputError, 422, "The input is wrong"),
    (NotFoundError, 404, "Not found"),
    (ConflictError, 409, "Somebody was first"),
    (RefusedError, 403, "Refused"),
    (InfeasibleError, 409, "Infeasible"),
    (OverloadedError, 503, "Overloaded"),
    (DeadlineExceededError, 504, "Out of time"),
    (RetryableError, 503, "Try again"),
    (SettingsError, 500, "Wrong settings"),
)


def problem(error: TidegateError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """HTTP status, problem document and extra headers for an error."""
    status, title = next(((s, t) for kind, s, t in _STATUS if isinstance(error, kind)), (500, "Error"))
    document: dict[str, Any] = {
        "type": TYPE_PREFIX + error.slug,
        "title": title,
        "status": status,
        "detail": str(error),
    }
    headers: dict[str, str] = {}
    match error:
        case InvalidInputError(pointer=pointer, found=found, accepted=accepted):
            document |= {"pointer": pointer, "found": found, "accepted": accepted}
        case ConflictError(current_version=version):
            document["current_version"] = version
        case RetryableError(retry_after_s=retry_after_s):
            document["retry_after_s"] = retry_after_s
            headers["Retry-After"] = str(max(1, round(retry_after_s)))
    return status, document, headers


def plain_problem(status: int, slug: str, title: str, detail: str) -> dict[str, Any]:
    """A problem that has no error class of ours behind it."""
    return {"type": TYPE_PREFIX + slug, "title": title, "status": status, "detail": detail}
