"""Sessions of ONNX Runtime for proving and profiling: always one thread of the CPU, never spinning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from controller.models.graph import first_line
from sla.errors import ModelError

Arrays = dict[str, np.ndarray[Any, Any]]


class CannotRunError(ModelError):
    """A model does not run on the inputs that it was given; other inputs may do."""


def open_session(
    model: bytes, name: str, *, optimise: bool = True, profile_prefix: str | None = None, weights: Path | None = None
) -> Any:
    """An `onnxruntime.InferenceSession`; `weights` is where weights lie that are not in the model.

    Raises ModelError if ONNX Runtime refuses the model.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # what is wrong comes back as an exception
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the classes that onnxruntime raises are private and share no public base
        raise ModelError(f"{name} is refused by ONNX Runtime: {_reason(error)}.") from error


def run(session: Any, feeds: Mapping[str, np.ndarray[Any, Any]], outputs: Sequence[str], name: str) -> Arrays:
    """Outputs by name. Raises CannotRunError if the model cannot run on `feeds`, ModelError if it writes something other than numbers."""
    try:
        values = session.run(list(outputs), dict(feeds))
    except Exception as error:  # see open_session
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in feeds.items())
        raise CannotRunError(f"{name} cannot run on a sample of {shapes}: {_reason(error)}.") from error
    for key, value in zip(outputs, values, strict=True):
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
            raise ModelError(
                f"{name} writes {key!r}, which is not a tensor of numbers and cannot be served.", found=key
            )
    return dict(zip(outputs, values, strict=True))


def _reason(error: BaseException) -> str:
    """What onnxruntime says, without its `[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : ` in front."""
    return first_line(error).split(" : ")[-1]
