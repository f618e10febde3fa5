"""A device that this machine's CPU plays: real computation, stretched time, limited memory. Labelled as emulated everywhere."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agents.backends.base import Array, Tensors
from agents.backends.onnx import OnnxBackend
from agents.backends.remembered import Measured, Memory
from sla.errors import ModelError


class EmulatedBackend:
    """The ONNX Runtime on one core, each run stretched to `slowdown` times the CPU time that it took.

    CPU time of the calling thread, not wall time: the session has one thread, so its work is all counted, and a busy
    machine does not make the emulated device slower than `slowdown` says (unless it is too busy to keep up at all).
    """

    provider = "emulated"
    fault: str | None = None

    def __init__(
        self,
        path: Path,
        *,
        slowdown: float,
        budget_bytes: int,
        sleep: Callable[[float], None] = time.sleep,
        cpu_time_s: Callable[[], float] = time.thread_time,
        wall_time_s: Callable[[], float] = time.perf_counter,
        memory: Memory | None = None,
        throttle: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`throttle`: times as long as `slowdown` says, asked at every run. `memory`: compute each input once (see `agents.backends.remembered`). Raises ModelError if the file alone is more than the device's memory."""
        size_bytes = path.stat().st_size
        if size_bytes > budget_bytes:
            raise ModelError(
                f"The shard has {size_bytes >> 20} MB, but the emulated device has {budget_bytes >> 20} MB for shards.",
                found=f"{size_bytes} bytes", accepted=f"at most {budget_bytes} bytes",
            )  # fmt: skip
        self._inner = OnnxBackend(path, threads=1)
        self._slowdown, self._throttle = slowdown, throttle
        self.spent_s = 0.0
        """What all runs took on the device that is played, whatever this machine did meanwhile."""
        self._sleep, self._cpu_time_s, self._wall_time_s = sleep, cpu_time_s, wall_time_s
        # Files of shards are named by their content.
        self._measured = self._compute if memory is None else functools.partial(memory.run, path.name, self._compute)

    def run(self, inputs: Tensors, outputs: Sequence[str]) -> dict[str, Array]:
        began_wall_s = self._wall_time_s()
        results, cpu_s = self._measured(inputs, outputs)
        run_s = self._slowdown * self._throttle() * cpu_s
        self.spent_s += run_s
        left_s = run_s - (self._wall_time_s() - began_wall_s)
        if left_s > 0:
            self._sleep(left_s)
        return results

    def _compute(self, inputs: Tensors, outputs: Sequence[str]) -> Measured:
        began_s = self._cpu_time_s()
        results = self._inner.run(inputs, outputs)
        return results, self._cpu_time_s() - began_s

    def close(self) -> None:
        self._inner.close()
