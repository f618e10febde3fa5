"""Calibration sets: the inputs from which static quantisation learns the ranges of activations.

A set records its scenes with the weight of each (e.g. indoor 0.4, outdoor 0.6), which preprocessing made the inputs, and its samples, at least
`MIN_SAMPLES`. On disk it is one uncompressed `.npz` without pickled objects: `manifest` is JSON, the arrays are `SAMPLE/INPUT`.
Samples must have gone through the very preprocessing that inference uses; `preprocessing` names it so that a mismatch is refused.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from controller.models.blobs import write_atomically
from controller.models.sample_files import read_arrays
from controller.models.sessions import Arrays
from sla.errors import ModelError

MIN_SAMPLES = 256
_MAX_BYTES = 4 << 30


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of input, and how much it counts."""

    name: str
    weight: float
    """Share of the calibration in (0, 1]; the weights of a set sum to 1."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the arrays."""

    preprocessing: str
    """Names what made the inputs, e.g. a step of the service with its version."""
    scenes: tuple[Scene, ...]
    scene_of: tuple[str, ...]
    """Scene of each sample."""


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    """A checked set; see the module."""

    manifest: Manifest
    samples: tuple[Arrays, ...]

    def weighted(self) -> Iterator[Arrays]:
        """Samples such that each scene has its weight: as many as there are, those of scenes with few samples again and again."""
        count = len(self.samples)
        for scene in self.manifest.scenes:
            own = [sample for sample, of in zip(self.samples, self.manifest.scene_of, strict=True) if of == scene.name]
            yield from itertools.islice(itertools.cycle(own), max(1, round(count * scene.weight)))


def make_set(
    samples: Mapping[str, list[Arrays]], weights: Mapping[str, float], *, preprocessing: str, least: int = MIN_SAMPLES
) -> CalibrationSet:
    """A set from samples by scene. Raises ModelError if it is too small, or if scenes and weights do not match."""
    pairs = [(scene, sample) for scene, of_scene in samples.items() for sample in of_scene]
    manifest = Manifest(
        preprocessing=preprocessing,
        scenes=tuple(Scene(name=name, weight=weight) for name, weight in weights.items()),
        scene_of=tuple(scene for scene, _ in pairs),
    )
    made = CalibrationSet(manifest, tuple(sample for _, sample in pairs))
    _check(made, least)
    return made


def save_set(calibration: CalibrationSet, path: Path) -> None:
    """Write the set to `path`, whole or not at all."""
    packed = io.BytesIO()
    arrays: dict[str, np.ndarray[Any, Any]] = {
        f"{at}/{name}": array for at, sample in enumerate(calibration.samples) for name, array in sample.items()
    }
    manifest = np.frombuffer(msgspec.json.encode(calibration.manifest), np.uint8)
    np.savez(packed, allow_pickle=False, manifest=manifest, **arrays)
    write_atomically(path, packed.getvalue())


def load_set(path: Path, *, least: int = MIN_SAMPLES) -> CalibrationSet:
    """The set in a file. Raises ModelError with one sentence if it is none, or not one that may be used."""
    try:
        arrays = read_arrays(path, at_most=_MAX_BYTES)
        manifest = msgspec.json.decode(arrays.pop("manifest").tobytes(), type=Manifest)
        samples: list[Arrays] = [{} for _ in manifest.scene_of]
        for key, array in arrays.items():
            number, _, name = key.partition("/")
            samples[int(number)][name] = array
    except (ValueError, KeyError, IndexError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path.name} is not a calibration set: {type(error).__name__}.", found=path.name) from error
    except ModelError as error:
        raise ModelError(f"{path.name} is not a calibration set: {error}", found=path.name) from error
    found = CalibrationSet(manifest, tuple(samples))
    _check(found, least)
    return found


def _check(calibration: CalibrationSet, least: int) -> None:
    scenes = {scene.name: scene.weight for scene in calibration.manifest.scenes}
    if len(calibration.samples) < least:
        raise ModelError(
            f"A calibration set needs at least {least} samples, not {len(calibration.samples)}.",
            found=str(len(calibration.samples)), accepted=f">= {least}",
        )  # fmt: skip
    if set(calibration.manifest.scene_of) != set(scenes):
        raise ModelError(
            f"The scenes with samples ({', '.join(sorted(set(calibration.manifest.scene_of)))}) are not those with weights ({', '.join(sorted(scenes))})."
        )
    if any(not weight > 0 for weight in scenes.values()) or abs(sum(scenes.values()) - 1) > 1e-6:
        raise ModelError(
            "The weights of a calibration set's scenes must be positive and sum to 1.", found=str(sum(scenes.values()))
        )
    names = set(calibration.samples[0])
    if not names or any(set(sample) != names for sample in calibration.samples):
        raise ModelError("All samples of a calibration set must have the same inputs.")
