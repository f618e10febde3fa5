"""What a live run of the prediction benchmark leaves: for each plan what the controller knew before and after, and what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from controller.replay import MAX_LOG_BYTES
from controller.snapshots import snapshot_from
from policies.ids import ServiceId
from policies.latency import Floats
from policies.plan import Plan
from policies.snapshot import Snapshot
from sla.errors import InvalidInputError

TAIL = 0.2
"""Share of the slowest requests from which the smoothed p99 is made."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One plan under one load."""

    share: float
    """Of the capacity that was predicted."""
    seconds: float
    due_ms: tuple[float, ...]
    """When each request was due, from the start of this load."""
    latency_ms: tuple[float, ...]
    failed: int = 0

    @property
    def rate_rps(self) -> float:
        """What was offered."""
        return (len(self.latency_ms) + self.failed) / self.seconds


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of one service on one fleet."""

    fleet: str
    service: ServiceId
    plan: Plan
    before: bytes
    """The controller's snapshot when it was asked for the plan, while another one ran."""
    after: bytes
    """... and after this plan had served."""
    loads: tuple[Load, ...]

    def seen_before(self) -> Snapshot:
        return snapshot_from(self.before)

    def seen_after(self) -> Snapshot:
        return snapshot_from(self.after)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of one load, with what is known of their own error."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    smooth_p99_ms: float
    """The slowest fifth taken as exponential: the same in expectation where the tail is one, and less noisy."""
    p99_error: float
    """Standard error of the smoothed p99 over its value, from resampling blocks of consecutive requests."""


def measured(load: Load, seed: int = 1) -> Measured:
    """What a load's requests took. Blocks of ten are resampled, since requests that queue behind each other are alike."""
    latency = np.array(load.latency_ms)
    rng, size = np.random.default_rng(seed), 10
    starts = rng.integers(0, max(1, len(latency) - size + 1), (200, -(-len(latency) // size)))
    again = [smooth_p99(latency[(row[:, None] + np.arange(size)).ravel() % len(latency)]) for row in starts]
    p50, p95, p99 = np.quantile(latency, [0.5, 0.95, 0.99])
    smooth = smooth_p99(latency)
    return Measured(
        p50_ms=float(p50), p95_ms=float(p95), p99_ms=float(p99), smooth_p99_ms=smooth,
        p99_error=float(np.std(again)) / smooth,
    )  # fmt: skip


def smooth_p99(latency_ms: Floats) -> float:
    """The p99 of an exponential tail with the mean excess of the slowest fifth (peaks over threshold with shape 0)."""
    threshold = float(np.quantile(latency_ms, 1.0 - TAIL))
    excess = latency_ms[latency_ms > threshold] - threshold
    return threshold + (float(excess.mean()) if len(excess) else 0.0) * float(np.log(TAIL / 0.01))


def save(trials: list[Trial], path: Path) -> None:
    """Write them to a file, so that they can be judged again by another version."""
    path.write_bytes(msgspec.msgpack.encode(trials))


def load(path: Path) -> list[Trial]:
    """Read such a file. Raises InvalidInputError."""
    try:
        if path.stat().st_size > 4 * MAX_LOG_BYTES:
            raise InvalidInputError(f"{path} is too large to be a record of trials.")
        return msgspec.msgpack.decode(path.read_bytes(), type=list[Trial])
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidInputError(f"{path} cannot be read as a record of trials: {error}.") from None
