"""The same model in fewer bits: fp16, and int8 with ranges taken at run time (dynamic) or from a calibration set (static).

The quantisers are those of ONNX Runtime. Inputs and outputs keep their types, so that variants are interchangeable in a stage. What a
variant costs in accuracy is measured (`variants`), never assumed.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import onnx

from controller.models.calibration import CalibrationSet
from controller.models.graph import first_line
from sla.errors import ModelError

Precision = Literal["fp16", "int8-dynamic", "int8-static"]
PRECISIONS: tuple[Precision, ...] = ("fp16", "int8-dynamic", "int8-static")
_KEPT_IN_FLOAT = ["LayerNormalization", "Softmax"]
"""Too sensitive for eight bits."""


def at_precision(
    model: Any, precision: Precision, calibration: CalibrationSet | None = None, preprocessing: str = ""
) -> Any:
    """A new model; `calibration` and the name of the inference's `preprocessing` are needed for `int8-static`.

    Raises ModelError if the model cannot be converted, or if the calibration set was made by another preprocessing.
    """
    match precision:
        case "fp16":
            return _converted(lambda: _to_fp16(model), precision)
        case "int8-dynamic":
            return _converted(lambda: _to_dynamic_int8(model), precision)
        case "int8-static":
            if calibration is None:
                raise ModelError("Static int8 needs a calibration set.", accepted="a calibration set")
            if calibration.manifest.preprocessing != preprocessing:
                raise ModelError(
                    f"The calibration set was made by the preprocessing {calibration.manifest.preprocessing!r}, but inference uses {preprocessing!r}.",
                    found=calibration.manifest.preprocessing, accepted=preprocessing,
                )  # fmt: skip
            return _converted(lambda: _to_static_int8(model, calibration), precision)


def _to_fp16(model: Any) -> Any:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return convert_float_to_float16(copied, keep_io_types=True)


def _to_dynamic_int8(model: Any) -> Any:
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory(prefix="tidegate-quantise-") as scratch:
        source, target = Path(scratch, "model.onnx"), Path(scratch, "int8.onnx")
        onnx.save(model, source)
        quantize_dynamic(source, target, op_types_to_quantize=["MatMul", "Gemm", "Attention"])
        return onnx.load(target)


def _to_static_int8(model: Any, calibration: CalibrationSet) -> Any:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Hands the samples to the quantiser, one at a time."""

        def __init__(self) -> None:
            self._left = calibration.weighted()

        def get_next(self) -> Any:
            return next(self._left, None)

    kinds = {node.op_type for node in model.graph.node}
    with tempfile.TemporaryDirectory(prefix="tidegate-quantise-") as scratch:
        source, target = Path(scratch, "model.onnx"), Path(scratch, "int8.onnx")
        onnx.save(model, source)
        quantize_static(
            source, target, Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
            op_types_to_quantize=sorted(kinds & {"Conv", "Gemm", "MatMul"} - set(_KEPT_IN_FLOAT)),
        )  # fmt: skip
        return onnx.load(target)


def _converted(convert: Callable[[], Any], precision: Precision) -> Any:
    try:
        with _quiet():
            return convert()
    except Exception as error:  # the quantisers raise ValueError, RuntimeError, and what protobuf and onnxruntime raise
        raise ModelError(f"The model cannot be converted to {precision}: {first_line(error)}.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """The quantisers warn through the root logger about preprocessing that these models do not need."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.setLevel(level)
