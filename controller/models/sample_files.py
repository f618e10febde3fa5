"""Samples and labels in `.npz` files that come from outside: bounded, without pickled objects, checked.

One sample is `INPUT` -> array, with the very shapes that the model reads. Several samples are `NUMBER/INPUT`, as in a calibration set, which
can therefore be given as samples too. Labels are one array `labels`: the right class of each item of all samples, in their order.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from controller.models.sessions import Arrays
from sla.errors import ModelError

MAX_SAMPLES_BYTES = 1 << 30
MAX_MEMBERS = 16_384
LABELS = "labels"
_MANIFEST = "manifest"


def read_arrays(path: Path, *, at_most: int = MAX_SAMPLES_BYTES) -> Arrays:
    """All arrays of numbers in the file, by name. Raises ModelError with one sentence for anything else."""
    try:
        with zipfile.ZipFile(path) as packed:
            members = packed.infolist()
        size = sum(member.file_size for member in members)
        if len(members) > MAX_MEMBERS or size > at_most:
            raise ModelError(
                f"{path.name} holds {len(members)} arrays with {size} bytes when unpacked; accepted are {MAX_MEMBERS} and {at_most}.",
                found=f"{size} bytes", accepted=f"at most {at_most}",
            )  # fmt: skip
        with np.load(path, allow_pickle=False) as stored:
            arrays = {str(key): _checked(path, str(key), stored[key]) for key in stored.files}
    # zipfile raises NotImplementedError for a compression it does not know, and RuntimeError for an encrypted member.
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"{path.name} is not an .npz file of numbers ({_why(error)}); write one with numpy.savez.",
            found=path.name, accepted="numpy.savez(FILE, INPUT=array, ...)",
        ) from error  # fmt: skip
    if not arrays:
        raise ModelError(f"{path.name} holds no array.", found=path.name)
    return arrays


def read_samples(path: Path) -> list[Arrays]:
    """The samples in a file, in their order. Raises ModelError."""
    arrays = read_arrays(path)
    arrays.pop(_MANIFEST, None)
    numbered = {key: key.partition("/") for key in arrays}
    if not all(slash and number.isdigit() for number, slash, _ in numbered.values()):
        return [arrays]
    samples: dict[int, Arrays] = {}
    for key, (number, _, name) in numbered.items():
        samples.setdefault(int(number), {})[name] = arrays[key]
    names = set(next(iter(samples.values())))
    for at, sample in samples.items():
        if set(sample) != names:
            raise ModelError(f"Sample {at} of {path.name} has the inputs {_list(sample)}; others have {_list(names)}.")
    return [samples[number] for number in sorted(samples)]


def read_labels(path: Path) -> np.ndarray[Any, Any]:
    """The right classes. Raises ModelError unless the file holds one array `labels` of integers in one dimension."""
    labels = read_arrays(path).get(LABELS)
    if labels is None or labels.dtype.kind not in "iu" or labels.ndim != 1 or not labels.size:
        raise ModelError(
            f"{path.name} must hold one array `labels` of integers, the right class of each item.",
            found=path.name, accepted="numpy.savez(FILE, labels=array of integers)",
        )  # fmt: skip
    return labels


def _checked(path: Path, key: str, array: Any) -> np.ndarray[Any, Any]:
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiub":
        raise ModelError(f"{path.name} holds {key!r}, which is not an array of numbers.", found=key)
    return array


def _why(error: BaseException) -> str:
    if "allow_pickle" in str(error) or "pickled" in str(error):
        return "it holds pickled objects, which are never read"
    return type(error).__name__


def _list(names: Any) -> str:
    return ", ".join(sorted(names)) or "nothing"
