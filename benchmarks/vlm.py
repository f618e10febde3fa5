"""A small vision-language model with random weights, as ONNX: for tests and benchmarks of sharding.

Tiles of a picture go through a vision tower (`patch` axis: one item per tile), questions through a text tower (`token` axis: one item per
question), and in the cross-attention blocks every token of every question attends to all patches of all tiles, so both axes end there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TILE_SIDE: Final = 32
PATCH_SIDE: Final = 8
VOCABULARY: Final = 200
_HEADS: Final = 4


@dataclass(frozen=True, slots=True)
class VlmModels:
    """The whole model, and its three parts as they are usually exported; the weights are the same."""

    whole: Any
    """tiles [T, 3, 32, 32] float32, input_ids [N, S] int64 -> answer [N, S, width]"""
    vision: Any
    """tiles -> patches [T, 16, width]"""
    text: Any
    """input_ids -> tokens [N, S, width]"""
    fusion: Any
    """tokens, patches -> answer"""


@dataclass(slots=True)
class Builder:
    """Nodes and weights of a transformer under construction; names are paths as exporters give them."""

    width: int
    rng: np.random.Generator
    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)

    def op(self, op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node named `name`; its output is called `name` + `_output`."""
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_output"], name=name, **attributes))
        return f"{name}_output"

    def constant(self, name: str, value: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        weight = (self.rng.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
        product = self.op("MatMul", [x, self.constant(f"{name}/weight", weight)], f"{name}/MatMul")
        bias = (self.rng.standard_normal(columns) / 10).astype(np.float32)
        return self.op("Add", [product, self.constant(f"{name}/bias", bias)], f"{name}/Add")

    def norm(self, x: str, name: str) -> str:
        scale = self.constant(f"{name}/scale", np.ones(self.width, np.float32))
        shift = self.constant(f"{name}/shift", np.zeros(self.width, np.float32))
        return self.op("LayerNormalization", [x, scale, shift], f"{name}/LayerNormalization", axis=-1)

    def heads(self, x: str, name: str, order: list[int]) -> str:
        shape = self.constant(f"{name}/shape", np.array([0, -1, _HEADS, self.width // _HEADS]))
        return self.op(
            "Transpose", [self.op("Reshape", [x, shape], f"{name}/Reshape")], f"{name}/Transpose", perm=order
        )

    def attention(self, x: str, context: str, name: str) -> str:
        """Multi-head attention of `x` [N, S, width] to `context` ([N or 1, P, width])."""
        width = self.width
        query = self.heads(self.linear(x, f"{name}/query", width, width), f"{name}/q", [0, 2, 1, 3])
        key = self.heads(self.linear(context, f"{name}/key", width, width), f"{name}/k", [0, 2, 3, 1])
        value = self.heads(self.linear(context, f"{name}/value", width, width), f"{name}/v", [0, 2, 1, 3])
        scale = self.constant(f"{name}/scale", np.float32(1 / np.sqrt(width / _HEADS)))
        scores = self.op("Mul", [self.op("MatMul", [query, key], f"{name}/MatMul"), scale], f"{name}/Mul")
        mixed = self.op("MatMul", [self.op("Softmax", [scores], f"{name}/Softmax", axis=-1), value], f"{name}/MatMul_1")
        back = self.op("Transpose", [mixed], f"{name}/Transpose", perm=[0, 2, 1, 3])
        flat = self.constant(f"{name}/flat", np.array([0, -1, width]))
        return self.linear(self.op("Reshape", [back, flat], f"{name}/Reshape"), f"{name}/output", width, width)

    def layer(self, x: str, name: str, context: str | None = None) -> str:
        """A pre-norm layer: attention (to itself, or to `context`) and a feed-forward part."""
        normed = self.norm(x, f"{name}/norm1")
        attended = self.attention(normed, normed if context is None else context, f"{name}/attention")
        x = self.op("Add", [x, attended], f"{name}/Add")
        wide = self.linear(self.norm(x, f"{name}/norm2"), f"{name}/mlp/fc1", self.width, 4 * self.width)
        active = self.op("Relu", [wide], f"{name}/mlp/Relu")
        return self.op("Add", [x, self.linear(active, f"{name}/mlp/fc2", 4 * self.width, self.width)], f"{name}/Add_1")

    def finish(self, inputs: list[Any], output: str, name: str) -> Any:
        """The model whose one output is `output`, called `name`; only the weights that are read are in it."""
        nodes = [*self.nodes, helper.make_node("Identity", [output], [name], name=f"/{name}")]
        read = {value for node in nodes for value in node.input}
        weights = [tensor for tensor in self.weights if tensor.name in read]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None, self.width])]
        graph = helper.make_graph(nodes, "vlm", inputs, outputs, weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.checker.check_model(model)
        return model


def vision_tower(builder: Builder, layers: int) -> str:
    """Adds the tower; the name of its features [T, patches, width]."""
    side, width = PATCH_SIDE, builder.width
    kernel = (builder.rng.standard_normal((width, 3, side, side)) / (side * 3)).astype(np.float32)
    embedded = builder.op(
        "Conv", ["tiles", builder.constant("/vision/embeddings/weight", kernel)], "/vision/embeddings/Conv",
        strides=[side, side],
    )  # fmt: skip
    flat = builder.constant("/vision/embeddings/flat", np.array([0, width, -1]))
    rows = builder.op("Reshape", [embedded, flat], "/vision/embeddings/Reshape")
    x = builder.op("Transpose", [rows], "/vision/embeddings/Transpose", perm=[0, 2, 1])
    for layer in range(layers):
        x = builder.layer(x, f"/vision/layer.{layer}")
    return builder.norm(x, "/vision/norm")


def text_tower(builder: Builder, layers: int) -> str:
    """Adds the tower; the name of its features [N, S, width]."""
    table = (builder.rng.standard_normal((VOCABULARY, builder.width)) / 2).astype(np.float32)
    x = builder.op(
        "Gather", [builder.constant("/text/embeddings/weight", table), "input_ids"], "/text/embeddings/Gather"
    )
    for layer in range(layers):
        x = builder.layer(x, f"/text/layer.{layer}")
    return builder.norm(x, "/text/norm")


def cross_attention(builder: Builder, tokens: str, patches: str, blocks: int) -> str:
    """Adds the cross-attention blocks; the name of the result. All patches of all tiles are one context for every question."""
    one_row = builder.constant("/gather/shape", np.array([1, -1, builder.width]))
    context = builder.op("Reshape", [patches, one_row], "/gather/Reshape")
    x = tokens
    for block in range(blocks):
        x = builder.layer(x, f"/cross_attention.{block}", context)
    return x


def build_vlm(*, width: int = 64, tower_layers: int = 3, cross_blocks: int = 6, seed: int = 5) -> VlmModels:
    """The model and its parts."""
    features = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None, width]) for name in ("tokens", "patches")
    ]
    tiles = helper.make_tensor_value_info("tiles", TensorProto.FLOAT, ["t", 3, TILE_SIDE, TILE_SIDE])
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["n", "s"])
    parts = [Builder(width, np.random.default_rng((seed, part))) for part in range(3)]
    vision, text = vision_tower(parts[0], tower_layers), text_tower(parts[1], tower_layers)
    answer = cross_attention(parts[2], "tokens", "patches", cross_blocks)
    whole = Builder(width, np.random.default_rng(seed))
    renamed = {"tokens": text, "patches": vision}
    for part in parts:
        for node in part.nodes:
            copied = onnx.NodeProto()
            copied.CopyFrom(node)
            copied.input[:] = [renamed.get(name, name) for name in node.input]
            whole.nodes.append(copied)
        whole.weights.extend(part.weights)
    return VlmModels(
        whole=whole.finish([tiles, ids], answer, "answer"),
        vision=parts[0].finish([tiles], vision, "patches"),
        text=parts[1].finish([ids], text, "tokens"),
        fusion=parts[2].finish(features, answer, "answer"),
    )
