"""What the engine needs of a device: one loaded shard that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = Mapping[str, np.ndarray[Any, Any]]


class InferenceBackend(Protocol):
    """One loaded shard on one device. `run` is called by one thread at a time."""

    provider: str
    """The execution provider that really runs, as it is reported."""
    fault: str | None
    """Why this is not the provider that the platform asks for, in one sentence; None if it is."""

    def run(self, inputs: Tensors, outputs: Sequence[str]) -> dict[str, Array]:
        """The named outputs for these inputs (names, dtypes and shapes of the shard's graph, C order).

        Raises InvalidInputError when the shard refuses the inputs (the same call fails again), RetryableError when the
        device failed.
        """
        ...

    def close(self) -> None:
        """Give the device's memory back; the backend is not used afterwards."""
        ...
