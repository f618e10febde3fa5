"""A small decoder with past keys and values and random weights, as ONNX: for tests and benchmarks of cache pruning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from benchmarks.vlm import Builder
from controller.models.kv_cache import CachedAttention

HEADS = 4


@dataclass(frozen=True, slots=True)
class CachedDecoder:
    """x [N, S, width] with `past.key.L`, `past.value.L` [N, heads, P, width / heads] -> y [N, S, width] and the grown `key.L`, `value.L`."""

    model: Any
    width: int
    layers: tuple[CachedAttention, ...]
    """For `prune_cache`."""

    @property
    def cache(self) -> tuple[str, ...]:
        """Names of the cache outputs; the inputs have `past.` before them."""
        return tuple(name for layer in self.layers for name in (layer.key, layer.value))

    @property
    def past(self) -> dict[str, str]:
        """Cache output -> the input that takes it at the next step."""
        return {name: f"past.{name}" for name in self.cache}

    def filled(self, past: int, items: int = 1, seed: int = 0) -> dict[str, Any]:
        """Cache inputs of `past` random entries, such as a prompt leaves behind."""
        rng = np.random.default_rng(seed)
        shape = (items, HEADS, past, self.width // HEADS)
        return {name: rng.standard_normal(shape).astype(np.float32) for name in self.past.values()}


def build_decoder(width: int = 64, layers: int = 2, seed: int = 4) -> CachedDecoder:
    """Attention layers alone, each over its whole cache."""
    b = Builder(width, np.random.default_rng(seed))
    x = "x"
    cached = []
    for layer in range(layers):
        name = f"/decoder/layer.{layer}"
        normed = b.norm(x, f"{name}/norm")
        query = b.heads(b.linear(normed, f"{name}/q_proj", width, width), f"{name}/q", [0, 2, 1, 3])
        grown = {}
        for kind in ("key", "value"):
            new = b.heads(b.linear(normed, f"{name}/{kind}_proj", width, width), f"{name}/{kind}", [0, 2, 1, 3])
            grown[kind] = b.op("Concat", [f"past.{kind}.{layer}", new], f"{name}/{kind}_all", axis=2)
            b.nodes.append(helper.make_node("Identity", [grown[kind]], [f"{kind}.{layer}"]))
        turned = b.op("Transpose", [grown["key"]], f"{name}/turned", perm=[0, 1, 3, 2])
        weights = b.op("Softmax", [b.op("MatMul", [query, turned], f"{name}/scores")], f"{name}/weights", axis=-1)
        mixed = b.op("MatMul", [weights, grown["value"]], f"{name}/mixed")
        back = b.op("Transpose", [mixed], f"{name}/back", perm=[0, 2, 1, 3])
        flat = b.constant(f"{name}/flat", np.array([0, -1, width]))
        x = b.op("Add", [x, b.op("Reshape", [back, flat], f"{name}/joined")], f"{name}/Add")
        cached.append(CachedAttention(weights, f"key.{layer}", f"value.{layer}"))
    decoder = CachedDecoder(None, width, tuple(cached))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "s", width])]
    inputs += [_cache_info(name, "p", width) for name in decoder.past.values()]
    model = b.finish(inputs, x, "y")
    model.graph.output.extend(_cache_info(name, "all", width) for name in decoder.cache)
    return CachedDecoder(model, width, tuple(cached))


def _cache_info(name: str, entries: str, width: int) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", HEADS, entries, width // HEADS])
