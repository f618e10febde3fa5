"""Every error of the tree as an RFC 9457 problem."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from controller.problems import TYPE_PREFIX, problem
from controller.rollout import RolloutError
from sla import errors
from sla.errors import ConflictError, ContractError, InvalidInputError, OverloadedError, RetryableError, TidegateError

EXPECTED = {
    "invalid-contract": 422, "invalid-model": 422, "invalid-input": 422, "not-found": 404, "conflict": 409, "refused": 403,
    "infeasible": 409, "overloaded": 503, "deadline-exceeded": 504, "store-unavailable": 503, "agent-lost": 503, "retryable": 503,
    "settings": 500, "permanent": 500, "error": 500,
}  # fmt: skip


def _tree(kind: type[TidegateError]) -> Iterator[type[TidegateError]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _tree(below)


@pytest.mark.parametrize("kind", list(_tree(TidegateError)), ids=lambda kind: kind.slug)
def test_each_kind_has_its_status_and_says_its_sentence(kind: type[TidegateError]) -> None:
    status, document, headers = problem(kind("One sentence."))
    assert status == document["status"] == EXPECTED[kind.slug]
    assert document["type"] == TYPE_PREFIX + kind.slug
    assert document["detail"] == "One sentence."
    assert document["title"]
    assert ("Retry-After" in headers) is issubclass(kind, RetryableError)


def test_what_helps_the_caller_travels_along() -> None:
    wrong = InvalidInputError("No.", pointer="/uses", found="0", accepted="1 or more")
    assert problem(wrong)[1].items() >= {"pointer": "/uses", "found": "0", "accepted": "1 or more"}.items()
    assert problem(ContractError("No.", pointer="/zones"))[1]["pointer"] == "/zones"
    assert problem(ConflictError("No.", current_version=7))[1]["current_version"] == 7
    assert problem(OverloadedError("No.", retry_after_s=0.2))[2] == {"Retry-After": "1"}
    assert problem(OverloadedError("No.", retry_after_s=12.4))[2] == {"Retry-After": "12"}


def test_a_rollout_that_failed_may_be_tried_again() -> None:
    status, document, _ = problem(RolloutError("a is not connected"))
    assert (status, document["type"]) == (503, TYPE_PREFIX + "rollout-failed")
