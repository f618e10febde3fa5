"""The graphs of the agents' micro-benchmark. `python -m controller.models.workload_graphs` writes them into `agents/workloads/` again.

Agents do not have onnx, so the files are part of the package; a test holds them equal to what is built here. Weights are made by
ConstantOfShape: the file stays tiny, and the runtime folds them into constants, which it packs for its kernels like a model's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from agents.workloads import CHANNELS, CONV_LAYERS, COPIES, ELEMENTS, MATMUL_LAYERS, PIXELS, ROWS, WIDTH, directory

_OPSET, _IR = 13, 7
"""Old enough for every runtime that is supported."""


def build_workloads() -> dict[str, bytes]:
    """File name -> content, the same at every call."""
    return {
        "matmul.onnx": _matmul(),
        "conv.onnx": _conv(),
        "copy.onnx": _copy(),
        "launch.onnx": _graph([helper.make_node("Add", ["x", "x"], ["y"])], "launch", (1, 4), (1, 4)),
    }


def _matmul() -> bytes:
    """A chain of products with one square matrix."""
    nodes = [*_constant("w", (WIDTH, WIDTH), 1.0 / WIDTH)]
    for layer in range(MATMUL_LAYERS):
        read, written = f"h{layer}" if layer else "x", f"h{layer + 1}" if layer + 1 < MATMUL_LAYERS else "y"
        nodes.append(helper.make_node("MatMul", [read, "w"], [written]))
    return _graph(nodes, "matmul", (ROWS, WIDTH), (ROWS, WIDTH))


def _conv() -> bytes:
    """A chain of 3 x 3 convolutions, and a mean, so that little comes back."""
    nodes = [*_constant("w", (CHANNELS, CHANNELS, 3, 3), 1.0 / (9 * CHANNELS))]
    for layer in range(CONV_LAYERS):
        read, written = f"h{layer}" if layer else "x", f"h{layer + 1}"
        nodes.append(helper.make_node("Conv", [read, "w"], [written], pads=[1, 1, 1, 1], kernel_shape=[3, 3]))
    nodes.append(helper.make_node("GlobalAveragePool", [f"h{CONV_LAYERS}"], ["y"]))
    return _graph(nodes, "conv", (1, CHANNELS, PIXELS, PIXELS), (1, CHANNELS, 1, 1))


def _copy() -> bytes:
    """One number spread over a large tensor, which is read and written again and again; only its largest element comes back."""
    shape = numpy_helper.from_array(np.array([1, ELEMENTS], np.int64), "shape")
    nodes = [helper.make_node("Expand", ["x", "shape"], ["h0"])]
    nodes += [helper.make_node("Neg", [f"h{at}"], [f"h{at + 1}"]) for at in range(COPIES)]
    nodes.append(helper.make_node("ReduceMax", [f"h{COPIES}"], ["y"], axes=[1], keepdims=1))
    return _graph(nodes, "copy", (1, 1), (1, 1), [shape])


def _constant(name: str, shape: tuple[int, ...], value: float) -> list[Any]:
    dims = numpy_helper.from_array(np.array(shape, np.int64), "")
    fill = numpy_helper.from_array(np.array([value], np.float32), "")
    return [
        helper.make_node("Constant", [], [f"{name}.shape"], value=dims),
        helper.make_node("ConstantOfShape", [f"{name}.shape"], [name], value=fill),
    ]


def _graph(
    nodes: list[Any], name: str, read: tuple[int, ...], written: tuple[int, ...], constants: list[Any] | None = None
) -> bytes:
    graph = helper.make_graph(
        nodes, name, [helper.make_tensor_value_info("x", TensorProto.FLOAT, read)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, written)], constants or [],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", _OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR, producer_name="tidegate")
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def main() -> int:
    for name, content in build_workloads().items():
        Path(directory(), name).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
