"""Activations in fewer bits on the wire between two shards: float16, or int8 with one scale per row of the last axis.

Only large float32 tensors that can take it are packed; all others (ids, shapes, masks with infinities, values beyond float16) travel as they are.
What a format costs in accuracy is measured per model by the controller before anyone asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from policies.service import ActivationFormat
from sla.errors import InvalidInputError

SCALE_SUFFIX = "#scale"
_WORTH_BYTES = 1024
_LEVELS = 127.0


def pack(tensors: Mapping[str, np.ndarray], how: ActivationFormat) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The tensors as they are sent, and the names of those that were packed; scales stand beside theirs."""
    sent: dict[str, np.ndarray] = {}
    packed: list[str] = []
    for name, tensor in tensors.items():
        smaller = _packed(name, tensor, how)
        sent |= smaller or {name: tensor}
        if smaller is not None:
            packed.append(name)
    return sent, tuple(packed)


def packed_bytes(shape: Sequence[int], how: ActivationFormat) -> int:
    """Bytes of a float32 tensor of this shape as it is sent, if its values can take the format."""
    plain = 4 * math.prod(shape)
    if how == "fp32" or plain < _WORTH_BYTES:
        return plain
    return plain // 2 if how == "fp16" else plain // 4 + 4 * math.prod(shape[:-1])


def unpack(tensors: Mapping[str, np.ndarray], packed: Iterable[str]) -> dict[str, np.ndarray]:
    """The tensors as the next shard reads them. Raises InvalidInputError if a packed one is not what it is said to be."""
    restored = dict(tensors)
    for name in packed:
        tensor, scale = restored.get(name), restored.pop(f"{name}{SCALE_SUFFIX}", None)
        if tensor is not None and tensor.dtype == np.float16 and scale is None:
            restored[name] = tensor.astype(np.float32)
        elif tensor is not None and scale is not None and tensor.dtype == np.int8 and _is_scale(scale, tensor):
            restored[name] = tensor.astype(np.float32) * scale
        else:
            raise InvalidInputError(f"The tensor {name!r} is said to be packed but is not.", found=name)
    return restored


def _packed(name: str, tensor: np.ndarray, how: ActivationFormat) -> dict[str, np.ndarray] | None:
    """None if the tensor is to travel as it is."""
    if how == "fp32" or tensor.dtype != np.float32 or tensor.nbytes < _WORTH_BYTES or not np.isfinite(tensor).all():
        return None
    if how == "fp16":
        return {name: tensor.astype(np.float16)} if np.abs(tensor).max() <= np.finfo(np.float16).max else None
    scale = np.maximum(np.abs(tensor).max(axis=-1, keepdims=True) / _LEVELS, np.finfo(np.float32).tiny)
    levels = np.rint(tensor / scale).astype(np.int8)
    return {name: levels, f"{name}{SCALE_SUFFIX}": scale.astype(np.float32)}


def _is_scale(scale: np.ndarray | None, tensor: np.ndarray) -> bool:
    return scale is not None and scale.dtype == np.float32 and scale.shape == (*tensor.shape[:-1], 1)
