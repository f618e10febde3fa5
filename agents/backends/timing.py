"""How long runs of a backend take, as little disturbed by the rest of the machine as can be seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from agents.backends.base import Array, InferenceBackend, Tensors
from agents.backends.emulated import EmulatedBackend
from agents.backends.onnx import CPU


def clock_for(backend: InferenceBackend, threads: int) -> Callable[[], float]:
    """Seconds by which its runs are timed, in the thread that runs them.

    So that a busy machine does not look slow: the processor time of that thread where it does all the work, and an emulated device's own
    time, which is a multiple of that. Else real time.
    """
    if isinstance(backend, EmulatedBackend):
        return lambda: backend.spent_s
    return time.thread_time if backend.provider == CPU and threads == 1 else time.perf_counter


def timed_run(
    backend: InferenceBackend, inputs: Tensors, outputs: Sequence[str], clock: Callable[[], float]
) -> tuple[dict[str, Array], float]:
    """What one run gives, and the seconds that it took."""
    began_s = clock()
    made = backend.run(inputs, outputs)
    return made, max(clock() - began_s, 1e-9)


def quickest(times_s: Sequence[float]) -> float:
    """The middle of the quickest quarter of the times: most of these were left alone, and one lucky clock reading counts little."""
    return float(np.quantile(times_s, 0.125))
