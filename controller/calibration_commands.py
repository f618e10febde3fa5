"""`tidegate model calibration`: calibration sets are files, made and checked where the samples are; no controller is asked."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from controller.commands import show
from controller.models.calibration import CalibrationSet, load_set, make_set, save_set
from controller.models.sample_files import read_arrays, read_samples
from controller.models.sessions import Arrays
from sla.errors import InvalidInputError, ModelError

_ACCEPTED = "NAME=WEIGHT:PATH, e.g. indoor=0.4:samples/indoor"


def calibration_make(arguments: argparse.Namespace) -> int:
    samples: dict[str, list[Arrays]] = {}
    weights: dict[str, float] = {}
    for text in arguments.scene:
        name, weight, path = _scene(text)
        if name in samples:
            raise InvalidInputError(f"The scene {name} is given twice.", found=text, accepted=_ACCEPTED)
        samples[name], weights[name] = _samples(path), weight
    made = make_set(samples, weights, preprocessing=arguments.preprocessing)
    save_set(made, Path(arguments.out))
    return _tell(arguments, arguments.out, made)


def calibration_check(arguments: argparse.Namespace) -> int:
    return _tell(arguments, arguments.file, load_set(Path(arguments.file)))


def _tell(arguments: argparse.Namespace, path: str, calibration: CalibrationSet) -> int:
    counts = Counter(calibration.manifest.scene_of)
    inputs = {name: [str(array.dtype), list(array.shape)] for name, array in sorted(calibration.samples[0].items())}
    facts: dict[str, Any] = {
        "preprocessing": calibration.manifest.preprocessing, "samples": len(calibration.samples), "inputs": inputs,
        "scenes": [{"name": s.name, "weight": s.weight, "samples": counts[s.name]} for s in calibration.manifest.scenes],
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    each = ", ".join(f"{name} {kind} {shape}" for name, (kind, shape) in inputs.items())
    print(f"{path}: {facts['samples']} samples made by {facts['preprocessing']}, each {each}.")
    rows = [(scene["name"], f"{scene['weight']:g}", str(scene["samples"])) for scene in facts["scenes"]]
    return show(arguments, facts, ("scene", "weight", "samples"), rows)


def _scene(text: str) -> tuple[str, float, Path]:
    """Name, weight and path. Raises InvalidInputError."""
    name, equals, rest = text.partition("=")
    weight, colon, path = rest.partition(":")
    try:
        value = float(weight)
    except ValueError:
        value = -1.0
    if not (name and equals and colon and path and 0 < value <= 1):
        raise InvalidInputError(f"{text!r} is not a scene; accepted is {_ACCEPTED}.", found=text, accepted=_ACCEPTED)
    return name, value, Path(path)


def _samples(path: Path) -> list[Arrays]:
    """One .npz per sample in a directory; or one .npz, numbered or with the samples along axis 0. Raises ModelError."""
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise ModelError(f"{path} holds no .npz file.", found=str(path))
        return [sample for file in files for sample in read_samples(file)]
    found = read_samples(path)
    if len(found) > 1:
        return found
    arrays = read_arrays(path)
    counts = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
    if len(counts) != 1 or counts == {0}:
        raise ModelError(
            f"The arrays of {path.name} do not have one count of samples along their first axis; use a directory with one .npz per sample.",
            found=", ".join(f"{key} {list(array.shape)}" for key, array in arrays.items()),
        )  # fmt: skip
    return [{key: array[at : at + 1] for key, array in arrays.items()} for at in range(counts.pop())]
