"""The one error tree of Tidegate, sorted by what the caller can do.

TidegateError
├── RetryableError            the same call may succeed later; carries `retry_after_s`
│   ├── StoreUnavailableError the outcome of a write is unknown: read again
│   ├── AgentLostError        the peer is gone: try another one
│   ├── OverloadedError       the queue is full: come back later
│   └── DeadlineExceededError there was not enough time left
└── PermanentError            the same call will fail again
    ├── InvalidInputError     a value from outside is wrong; says where, what was found, what is accepted
    │   ├── ContractError     ... in an SLA document
    │   └── ModelError        ... in a model or a service
    ├── NotFoundError         there is no such thing
    ├── ConflictError         somebody was first: read the current version
    ├── RefusedError          the caller may not do this (token used up, identity unknown)
    ├── InfeasibleError       no plan keeps the contract on this fleet
    └── SettingsError         Tidegate was started with settings that cannot work
"""

from __future__ import annotations

from typing import ClassVar


class TidegateError(Exception):
    """Root of all errors that Tidegate raises on purpose; `str(error)` is one sentence for the user."""

    slug: ClassVar[str] = "error"
    """Stable last part of the problem `type` in HTTP answers and wire errors."""


class RetryableError(TidegateError):
    """The same call may succeed later."""

    slug = "retryable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreUnavailableError(RetryableError):
    """The store did not answer; whether a write took effect is unknown."""

    slug = "store-unavailable"


class AgentLostError(RetryableError):
    """The peer went away before it answered."""

    slug = "agent-lost"


class OverloadedError(RetryableError):
    """A bounded queue is full; nothing was started."""

    slug = "overloaded"


class DeadlineExceededError(RetryableError):
    """The request's deadline passed before an answer was there."""

    slug = "deadline-exceeded"


class PermanentError(TidegateError):
    """The same call will fail again."""

    slug = "permanent"


class InvalidInputError(PermanentError):
    """A value from outside is wrong.

    `pointer` is the JSON pointer (RFC 6901) of the field, `found` a short rendering of what was there,
    `accepted` what would be right.
    """

    slug = "invalid-input"

    def __init__(self, message: str, *, pointer: str = "", found: str = "", accepted: str = "") -> None:
        super().__init__(message)
        self.pointer = pointer
        self.found = found
        self.accepted = accepted


class ContractError(InvalidInputError):
    """An SLA document is wrong."""

    slug = "invalid-contract"


class ModelError(InvalidInputError):
    """A model or a service description is wrong."""

    slug = "invalid-model"


class NotFoundError(PermanentError):
    """There is no such thing."""

    slug = "not-found"


class ConflictError(PermanentError):
    """Somebody was first; `current_version` is what to read and edit."""

    slug = "conflict"

    def __init__(self, message: str, *, current_version: int | None = None) -> None:
        super().__init__(message)
        self.current_version = current_version


class RefusedError(PermanentError):
    """The caller may not do this."""

    slug = "refused"


class InfeasibleError(PermanentError):
    """No plan keeps the contract on this fleet; the message names the binding constraint."""

    slug = "infeasible"


class SettingsError(PermanentError):
    """Tidegate was started with settings that cannot work."""

    slug = "settings"
