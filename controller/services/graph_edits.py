"""What is added to a model's graph when it is registered, so that small tensors travel instead of large ones.

The edits are plain ONNX operators that every runtime and vendor compiler knows; see `controller.models.transforms` for others.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sla.errors import ModelError

Normalisation = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Mean and standard deviation of the three channels, for values in [0, 1]."""

IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: Normalisation = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

PIXELS = "pixels"
RESULT = "result"


def take_pixels(model: onnx.ModelProto, normalisation: Normalisation) -> onnx.ModelProto:
    """A model with the input `pixels`, uint8 [N, 3, H, W], in place of normalised float32: a quarter of the bytes."""
    edited = _copy(model)
    entry = _single(edited.graph.input, "input")
    mean, std = (np.array(part, np.float32).reshape(1, 3, 1, 1) for part in normalisation)
    constants = {"pixels_factor": 1.0 / (255.0 * std), "pixels_offset": -mean / std}
    edited.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    nodes = [
        helper.make_node("Cast", [PIXELS], ["pixels_float"], "pixels_cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["pixels_float", "pixels_factor"], ["pixels_scaled"], "pixels_scale"),
        helper.make_node("Add", ["pixels_scaled", "pixels_offset"], [entry.name], "pixels_shift"),
    ]
    for index, node in enumerate(nodes):
        edited.graph.node.insert(index, node)
    pixels = onnx.ValueInfoProto()
    pixels.CopyFrom(entry)
    pixels.name = PIXELS
    pixels.type.tensor_type.elem_type = TensorProto.UINT8
    edited.graph.input.remove(entry)
    edited.graph.input.append(pixels)
    return edited


def name_result(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose one output is called `result`, so that variants of different origin are interchangeable."""
    edited = _copy(model)
    result = _single(edited.graph.output, "output")
    edited.graph.node.append(helper.make_node("Identity", [result.name], [RESULT], "name_result"))
    result.name = RESULT
    return edited


def charset_of(model: onnx.ModelProto) -> bytes:
    """The symbols of a recognition model in the order of its classes after the blank, one per line.

    The space, which these models have as their last class, is not in the metadata. Raises ModelError if there is none.
    """
    for entry in model.metadata_props:
        if entry.key == "character":
            return f"{entry.value}\n ".encode()
    raise ModelError(
        "The recognition model carries no character list in its metadata.", accepted="metadata `character`"
    )


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied


def _single(values: list[onnx.ValueInfoProto], kind: str) -> onnx.ValueInfoProto:
    if len(values) != 1:
        raise ModelError(f"The model has {len(values)} {kind}s; this edit needs exactly one.", found=str(len(values)))
    return values[0]
