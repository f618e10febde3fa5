"""Rockchip NPUs through rknn-toolkit-lite2, which exists for aarch64 boards only and is imported only when used.

The calls and their return codes are those of rknn-toolkit-lite2 2.5.0.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agents.backends.base import Array, Tensors
from agents.backends.onnx import first_line
from sla.errors import InvalidInputError, ModelError, RetryableError

MAGIC = b"RKNN"
"""First bytes of a compiled `.rknn` file."""
_ALL_CORES = 0xFFFF


class RknnBackend:
    """One compiled `.rknn` file on the NPU. The file keeps no names: inputs and outputs go by position."""

    provider = "rknn"
    fault: str | None = None

    def __init__(self, path: Path, *, input_names: Sequence[str], output_names: Sequence[str]) -> None:
        """Raises ModelError when the library or the driver refuses the file."""
        self._input_names, self._output_names = tuple(input_names), tuple(output_names)
        self._npu = _new_npu()
        _expect_zero(self._npu.load_rknn(str(path)), f"The NPU library cannot read the shard {path.name[:16]}")
        _expect_zero(self._npu.init_runtime(core_mask=_ALL_CORES), f"The NPU driver refuses the shard {path.name[:16]}")

    def run(self, inputs: Tensors, outputs: Sequence[str]) -> dict[str, Array]:
        missing = [name for name in self._input_names if name not in inputs]
        if missing:
            raise InvalidInputError(f"The shard needs the input {missing[0]!r}, which did not come.")
        ordered = [np.ascontiguousarray(inputs[name]) for name in self._input_names]
        layout = ["nchw" if tensor.ndim == 4 else None for tensor in ordered]
        try:
            values = self._npu.inference(inputs=ordered, data_format=layout if any(layout) else None)
        except ValueError as error:
            raise InvalidInputError(f"The NPU refused its inputs: {first_line(error)}.") from error
        if values is None:
            raise RetryableError("The NPU gave no result; its driver log says why.")
        named = dict(zip(self._output_names, values, strict=False))
        return {name: named[name] for name in outputs}

    def close(self) -> None:
        self._npu.release()


def is_compiled(path: Path) -> bool:
    """True if the file was compiled for the NPU."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def versions() -> dict[str, str]:
    """Version of the NPU library; empty where there is none."""
    try:
        return {"rknn": str(_new_npu().get_sdk_version()).strip()[:120]}
    except ModelError:
        return {}


def _new_npu() -> Any:
    try:
        return importlib.import_module("rknnlite.api").RKNNLite()
    except (ImportError, OSError) as error:
        raise ModelError(
            f"A compiled RKNN shard needs rknn-toolkit-lite2 and librknnrt.so on this device: {first_line(error)}."
        ) from error


def _expect_zero(status: int, sentence: str) -> None:
    if status != 0:
        raise ModelError(f"{sentence} (status {status}).", found=str(status), accepted="0")
