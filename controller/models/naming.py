"""Names of blocks, for people: from the scopes that the exporter gave to the nodes, else from what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from controller.models.scopes import Scope, layer_of

_MAX_LENGTH = 64
_MAJORITY = 0.7
"""A block is called by the scope that so many of its scoped nodes share; exporters leave a few strangers everywhere."""
_SCOPED_SHARE = 8
"""One node in so many must have a scope: quantisers leave few."""
_TELLING_OPS = (
    "If",
    "Loop",
    "Scan",
    "Conv",
    "ConvTranspose",
    "MatMul",
    "Gemm",
    "LSTM",
    "GRU",
    "Softmax",
    "LayerNormalization",
)


def block_name(nodes: Sequence[Any], scopes: Sequence[Scope], number: int, *, taken: Sequence[str]) -> str:
    """A short name that no other block has, e.g. `encoder.layer.3`, `Conv.12 to Mul.30` or `block 2 (Conv, Softmax)`.

    `scopes` are those of the nodes.
    """
    for name in (_layers(scopes), _majority_scope(scopes), _first_to_last(nodes)):
        if name and len(name) <= _MAX_LENGTH and name not in taken:
            return name
    counts = Counter(node.op_type for node in nodes)
    telling = [op for op in _TELLING_OPS if counts[op]][:2] or [op for op, _ in counts.most_common(2)]
    return f"block {number} ({', '.join(telling)})" if telling else f"block {number}"


def _layers(scopes: Sequence[Scope]) -> str:
    """`encoder.layer.3-5` for a block of several whole layers of one family; empty for a single one, or for none."""
    layers = Counter(layer for scope in scopes if (layer := layer_of(scope)) is not None)
    families = Counter(family for family, _ in layers.elements())
    if not families:
        return ""
    family, nodes = families.most_common(1)[0]
    counts = {index: count for (of, index), count in layers.items() if of == family}
    indices = sorted(index for index, count in counts.items() if count * 4 >= max(counts.values()))
    if len(indices) < 2 or nodes < _MAJORITY * sum(map(bool, scopes)):
        return ""
    return f"{'.'.join(family)}.{indices[0]}-{indices[-1]}"


def _majority_scope(scopes: Sequence[Scope]) -> str:
    """The longest scope that most of the scoped nodes share; empty unless a fair part of all nodes has scopes."""
    scoped = [scope for scope in scopes if scope]
    if len(scoped) * _SCOPED_SHARE < len(scopes):
        return ""
    common: Scope = ()
    while True:
        counts = Counter(scope[: len(common) + 1] for scope in scoped if len(scope) > len(common))
        counts = Counter({scope: count for scope, count in counts.items() if scope[:-1] == common})
        if not counts:
            break
        deeper, count = counts.most_common(1)[0]
        if count < _MAJORITY * len(scoped):
            break
        common = deeper
    return ".".join(common)


def _first_to_last(nodes: Sequence[Any]) -> str:
    """First and last named node; empty unless most nodes have names."""
    names = [node.name.strip("/") for node in nodes if node.name]
    if not names or len(names) * 2 < len(nodes):
        return ""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
