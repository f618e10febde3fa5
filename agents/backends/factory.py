"""Which backend runs a shard file on this device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from agents.backends.base import InferenceBackend
from agents.backends.emulated import EmulatedBackend
from agents.backends.onnx import CPU, OnnxBackend
from agents.backends.remembered import Memory
from agents.backends.rknn import RknnBackend, is_compiled
from policies.platforms import Platform

_CPU_IS_NATIVE = frozenset({"x86", "ray"})
"""Platforms whose device is the CPU: running there is no silent fall-back."""


def open_backend(
    platform: Platform,
    path: Path,
    *,
    emulate: bool,
    budget_bytes: int = 0,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    threads: int = 1,
    memory: Memory | None = None,
    throttle: Callable[[], float] = lambda: 1.0,
) -> InferenceBackend:
    """The shard file at `path`, loaded on `platform` (or on its emulation, limited to `budget_bytes`).

    `memory`: an emulated device computes each input once; `throttle`: its runs take so many times as long now. A device whose accelerator cannot run the file runs it on its CPU, and the backend's `fault` says so. Raises ModelError.
    """
    if emulate:
        budget_bytes = budget_bytes or platform.emulated_budget_bytes
        return EmulatedBackend(
            path, slowdown=platform.emulated_slowdown, budget_bytes=budget_bytes, memory=memory, throttle=throttle
        )
    if is_compiled(path):
        return RknnBackend(path, input_names=input_names, output_names=output_names)
    wanted = [name for name in platform.providers if name != "rknn"]
    backend = OnnxBackend(path, providers=wanted, cpu_is_native=platform.name in _CPU_IS_NATIVE, threads=threads)
    if "rknn" in platform.providers:
        backend.fault = f"The shard is not compiled for the NPU of {platform.name}, so it runs on {CPU}."
    return backend
