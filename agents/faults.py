"""How an error crosses the wire: a Fault names a class of `sla.errors`, and the caller raises that class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from agents.messages import Fault
from sla.errors import RetryableError, TidegateError

_MAX_MESSAGE_LENGTH: Final = 2000


def _tree(root: type[TidegateError]) -> Iterator[type[TidegateError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_CLASSES: Final = {cls.slug: cls for cls in _tree(TidegateError) if cls.__module__ == TidegateError.__module__}


def fault_of(error: TidegateError) -> Fault:
    """The message that `error_of` turns back into the same class."""
    message = str(error)[:_MAX_MESSAGE_LENGTH]
    if isinstance(error, RetryableError):
        return Fault(slug=error.slug, message=message, retry_after_s=error.retry_after_s)
    return Fault(slug=error.slug, message=message)


def error_of(fault: Fault) -> TidegateError:
    """The error to raise; a slug that is not known here becomes the root of the tree."""
    cls = _CLASSES.get(fault.slug, TidegateError)
    message = fault.message[:_MAX_MESSAGE_LENGTH]
    if issubclass(cls, RetryableError):
        return cls(message, retry_after_s=fault.retry_after_s)
    return cls(message)
