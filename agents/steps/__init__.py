"""The trusted Python steps of services: what runs at the ingress between two models.

A step is imported when it is first used, so that an agent that serves no documents never loads OpenCV, Pillow or
tokenizers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sla.errors import ModelError, SettingsError


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step may know besides the request's tensors."""

    assets: Mapping[str, Path] = field(default_factory=dict)
    """The service's files by name (see `ServiceSpec.assets`), as they lie on this machine."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Stage name -> the model variant that ran for this request."""

    def asset(self, name: str) -> Path:
        """The file of an asset. Raises ModelError if the service has none of that name."""
        path = self.assets.get(name)
        if path is None:
            raise ModelError(
                f"The service has no asset {name!r}.", found=name, accepted=", ".join(sorted(self.assets)) or "no asset"
            )
        return path


Tensors = Mapping[str, np.ndarray]
Step = Callable[[Tensors, StepContext], dict[str, np.ndarray]]
"""Takes all tensors of the request so far and returns the new ones; raises `InvalidInputError` for a bad request."""


def _lazy(name: str, module: str, function: str) -> Step:
    def step(tensors: Tensors, context: StepContext) -> dict[str, np.ndarray]:
        try:
            run: Step = getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"Step {name} needs the package {error.name!r}: install tidegate[document] on this machine."
            ) from error
        return run(tensors, context)

    return step


STEPS: dict[str, Step] = {
    f"document.{function}": _lazy(f"document.{function}", "agents.steps.document", function)
    for function in ("prepare", "upright", "crops", "decode", "answer")
} | {
    f"tiling.{function}": _lazy(f"tiling.{function}", "agents.steps.tiling", function)
    for function in ("split", "merge")
}


def run_step(name: str, tensors: Tensors, context: StepContext) -> dict[str, np.ndarray]:
    """The new tensors of step `name`. Raises ModelError if there is no such step, and what the step raises."""
    step = STEPS.get(name)
    if step is None:
        known = ", ".join(sorted(STEPS))
        raise ModelError(f"There is no step {name!r}; known are {known}.", found=name, accepted=known)
    return step(tensors, context)
