"""Names of blocks, for people: from the scopes or names that the exporter gave to the nodes, else from what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

_MAX_LENGTH = 64
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


def block_name(nodes: Sequence[Any], number: int, *, taken: Sequence[str]) -> str:
    """A short name that no other block has, e.g. `encoder/layer.3`, `Conv.12 to Mul.30` or `block 2 (Conv, Softmax)`."""
    for name in (_common_scope(nodes), _first_to_last(nodes)):
        if name and len(name) <= _MAX_LENGTH and name not in taken:
            return name
    counts = Counter(node.op_type for node in nodes)
    telling = [op for op in _TELLING_OPS if counts[op]][:2] or [op for op, _ in counts.most_common(2)]
    return f"block {number} ({', '.join(telling)})" if telling else f"block {number}"


def _common_scope(nodes: Sequence[Any]) -> str:
    """The longest scope (`/encoder/layer.3/...`) that all named nodes have in common."""
    scopes = [node.name.strip("/").split("/")[:-1] for node in nodes if node.name]
    if not scopes:
        return ""
    common = scopes[0]
    for scope in scopes[1:]:
        shared = 0
        while shared < min(len(common), len(scope)) and common[shared] == scope[shared]:
            shared += 1
        common = common[:shared]
    return "/".join(common)


def _first_to_last(nodes: Sequence[Any]) -> str:
    """First and last named node; empty unless most nodes have names."""
    names = [node.name.strip("/") for node in nodes if node.name]
    if not names or len(names) * 2 < len(nodes):
        return ""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
