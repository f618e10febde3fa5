"""The machine on which models are examined, as a device: what its one core does, so that times can be transferred to others."""

from __future__ import annotations

import functools
import threading

from agents.backends.onnx import OnnxBackend
from agents.calibration import measure_here
from policies.roofline import DeviceCalibration

_BUDGET_S, _TIGHT = 0.5, 0.03
_lock = threading.Lock()


def reference_calibration() -> DeviceCalibration:
    """Measured when first asked for, once in the life of the process: in the way in which blocks are timed (one thread, quickest runs)."""
    with _lock:
        return _measured()


@functools.cache
def _measured() -> DeviceCalibration:
    return measure_here(OnnxBackend, budget_s=_BUDGET_S, tight=_TIGHT)
