"""The step registry: imported when used, clear when wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agents.steps import STEPS, StepContext, run_step
from sla.errors import ModelError


def test_an_unknown_step_is_refused_with_the_known_names() -> None:
    with pytest.raises(ModelError, match=r"no step 'document\.guess'.*document\.answer.*document\.prepare"):
        run_step("document.guess", {}, StepContext())


def test_every_registered_step_can_be_imported() -> None:
    for name in STEPS:
        with pytest.raises((ModelError, Exception)) as caught:
            run_step(name, {}, StepContext())
        assert not isinstance(caught.value, (ImportError, AttributeError)), name


def test_the_registry_loads_no_document_library() -> None:
    probe = "import sys, agents.steps; print([m for m in ('cv2', 'PIL', 'tokenizers') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"


def test_a_missing_asset_is_named() -> None:
    with pytest.raises(ModelError, match="no asset 'tokenizer'"):
        StepContext().asset("tokenizer")
