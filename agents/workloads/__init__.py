"""The graphs that the micro-benchmark runs, and what one run of each computes or moves.

The `.onnx` files beside this module are built by `controller/models/workload_graphs.py` (agents have no onnx).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

ROWS, WIDTH, MATMUL_LAYERS = 128, 256, 8
CHANNELS, PIXELS, CONV_LAYERS = 32, 56, 3
ELEMENTS, COPIES = 1 << 21, 4
"""8 MB: more than the caches that a core has to itself."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One graph with the input `x` and the output `y`."""

    file: str
    shape: tuple[int, ...]
    """Of its input."""
    amount: float
    """Floating-point operations of one run, or bytes; 0 for the empty run."""

    @property
    def path(self) -> Path:
        """Where the graph lies."""
        return directory() / self.file

    def feed(self) -> Mapping[str, np.ndarray]:
        """Its input."""
        return {"x": np.full(self.shape, 0.5, np.float32)}


MATMUL: Final = Workload("matmul.onnx", (ROWS, WIDTH), 2.0 * ROWS * WIDTH**2 * MATMUL_LAYERS)
CONV: Final = Workload(
    "conv.onnx", (1, CHANNELS, PIXELS, PIXELS), 2.0 * 9 * CHANNELS**2 * PIXELS**2 * CONV_LAYERS
)  # fmt: skip
COPY: Final = Workload("copy.onnx", (1, 1), 4.0 * ELEMENTS * (2 + 2 * COPIES))
"""The spread tensor is written once and read once at the end; each copy reads and writes it."""
LAUNCH: Final = Workload("launch.onnx", (1, 4), 0.0)
WORKLOADS: Final = (LAUNCH, MATMUL, CONV, COPY)


def directory() -> Path:
    """Of the graphs."""
    return Path(__file__).parent
