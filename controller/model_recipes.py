"""How a variant that was asked for is made of its base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.model_views import FileIn, PrecisionIn, PruneTokensIn
from controller.models.calibration import load_set
from controller.models.graph import build_graph, read_file, read_model
from controller.models.precision import Precision, at_precision
from controller.models.pruning import layer_outputs, prune_tokens
from sla.errors import ModelError

_PRECISIONS: dict[str, Precision] = {"fp16": "fp16", "int8": "int8-dynamic", "int8-static": "int8-static"}


def recipe_of(
    how: PrecisionIn | PruneTokensIn | FileIn, base: str, step_before: str, upload: Callable[[str], Path]
) -> Callable[[Any], Any]:
    """A function from the base's graph to the variant's.

    `step_before` names what makes the inputs of inference, if a step of the service does. Raises ModelError, also when it is called.
    """
    match how:
        case PrecisionIn(precision="int8-static"):
            if how.calibration is None:
                raise ModelError("Static int8 needs a calibration set.", pointer="/how/calibration")
            preprocessing = how.preprocessing or step_before
            if not preprocessing:
                raise ModelError(
                    f"Say what makes the inputs of {base} at inference, so that it can be compared with the calibration set.",
                    pointer="/how/preprocessing", accepted="the name of a preprocessing",
                )  # fmt: skip
            calibration = load_set(upload(how.calibration))
            return lambda model: at_precision(model, "int8-static", calibration, preprocessing)
        case PrecisionIn():
            return lambda model: at_precision(model, _PRECISIONS[how.precision])
        case PruneTokensIn():
            return lambda model: _pruned(model, base, how)
        case FileIn():
            return lambda _: read_model(read_file(upload(how.file)), f"the variant of {base}")[0]


def _pruned(model: Any, base: str, how: PruneTokensIn) -> Any:
    layers = layer_outputs(build_graph(model, base))
    after = _value(how.after, layers, base, "/how/after") if how.after else _early(layers, base)
    restore = _value(how.restore, layers, base, "/how/restore") if how.restore else None
    return prune_tokens(model, after=after, keep=how.keep, protect=how.protect, restore=restore)


def _early(layers: tuple[str, ...], base: str) -> str:
    """The layer a quarter of the way: early enough to save, late enough to know what matters."""
    if not layers:
        raise ModelError(
            f"The graph of {base} does not tell its layers; name the value behind which its tokens are pruned.",
            pointer="/how/after", accepted="the name of a value [items, tokens, width]",
        )  # fmt: skip
    return layers[max(0, len(layers) // 4 - 1)]


def _value(text: str, layers: tuple[str, ...], base: str, pointer: str) -> str:
    """A number of a layer as the value that leaves it; any other text is the name of a value already."""
    if not text.isdigit():
        return text
    if int(text) >= len(layers):
        raise ModelError(
            f"{base} has {len(layers)} layers that its graph tells; {text} is none of them.",
            pointer=pointer, found=text, accepted=f"0 to {len(layers) - 1}" if layers else "the name of a value",
        )  # fmt: skip
    return layers[int(text)]
