"""What `tidegate model add` shows while the controller works."""

from __future__ import annotations

import time
from typing import Any

import pytest

from controller.model_commands import with_progress
from sla.errors import ModelError


class Narrator:
    """An API that says one more sentence at each look."""

    def __init__(self) -> None:
        self.looks = 0

    def get(self, path: str) -> list[dict[str, Any]]:
        self.looks += 1
        sentences = [
            {"kind": "model", "service": "m", "at_s": float(at), "text": f"step {at}"} for at in range(self.looks)
        ]
        return [*sentences, {"kind": "model", "service": "other", "at_s": 0.5, "text": "elsewhere"}]


def test_sentences_about_this_model_are_shown_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    narrator = Narrator()
    assert with_progress(narrator, "m", lambda: time.sleep(0.7) or "done") == "done"  # type: ignore[arg-type, func-returns-value]
    lines = capsys.readouterr().err.split("\n")[:-1]
    assert lines == [f"  step {at}" for at in range(1, narrator.looks)]


def test_an_error_of_the_work_comes_through() -> None:
    def fail() -> None:
        raise ModelError("No.")

    with pytest.raises(ModelError):
        with_progress(Narrator(), "m", fail)  # type: ignore[arg-type]
