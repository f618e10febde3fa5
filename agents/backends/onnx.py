"""ONNX Runtime, with an execution provider that is chosen, and verified after loading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

from agents.backends.base import Array, Tensors
from sla.errors import InvalidInputError, ModelError, RetryableError

CPU = "CPUExecutionProvider"


class OnnxBackend:
    """One ONNX file in one session."""

    def __init__(
        self, path: Path, *, providers: Sequence[str] = (), cpu_is_native: bool = False, threads: int = 1
    ) -> None:
        """`providers` are wanted in this order before the CPU; `cpu_is_native` says that the CPU is no second choice.

        Raises ModelError if the file is not a model that this runtime can load.
        """
        self._session = _open_session(path, providers, threads)
        self.provider: str = self._session.get_providers()[0]
        self.fault = _provider_fault(self.provider, providers, cpu_is_native)

    def run(self, inputs: Tensors, outputs: Sequence[str]) -> dict[str, Array]:
        try:
            values = self._session.run(list(outputs), dict(inputs))
        except _BAD_INPUT as error:
            raise InvalidInputError(f"The shard refused its inputs: {first_line(error)}.") from error
        except RuntimeError as error:
            raise RetryableError(f"{self.provider} failed while a shard ran: {first_line(error)}.") from error
        return dict(zip(outputs, values, strict=True))

    def close(self) -> None:
        self._session = None


def available_providers() -> tuple[str, ...]:
    """The execution providers of the installed runtime."""
    return tuple(ort.get_available_providers())


def runtime_version() -> str:
    """The version of ONNX Runtime."""
    return str(ort.__version__)


def first_line(error: BaseException) -> str:
    """The first line of a foreign error, bounded, without its full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(". ")


def _open_session(path: Path, providers: Sequence[str], threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning pools of several shards in one process steal the cores from each other (measured: 1.7 to 3.4 times slower).
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    usable = [name for name in providers if name in ort.get_available_providers()]
    try:
        return ort.InferenceSession(str(path), sess_options=options, providers=[*usable, CPU])
    except Exception as error:  # the runtime raises a dozen unrelated classes for an unusable file
        raise ModelError(f"The shard {path.name[:16]} cannot be loaded: {first_line(error)}.") from error


def _provider_fault(ran: str, wanted: Sequence[str], cpu_is_native: bool) -> str | None:
    if not wanted or ran in wanted:
        return None
    missing = [name for name in wanted if name not in ort.get_available_providers()]
    if len(missing) == len(wanted):
        if cpu_is_native:
            return None
        return f"{' and '.join(wanted)} is not part of the installed runtime, so shards run on {ran}."
    return f"{wanted[0]} was asked for, but the shard runs on {ran}."


_BAD_INPUT: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    ort.capi.onnxruntime_pybind11_state.InvalidArgument,
)
