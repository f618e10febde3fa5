"""Estimated use of the memory bandwidth: what was moved over what can be, averaged over some reports."""

from __future__ import annotations

import numpy as np
import pytest

from agents.bandwidth import BandwidthMeter, moved_bytes
from agents.messages import ShardFile
from policies.ids import BlobHash, ModelName
from policies.plan import Span

FILE = ShardFile(
    model=ModelName("m"), blocks=Span(0, 1), sha256=BlobHash("0" * 64), size_bytes=600_000, inputs=("x",), outputs=("y",)
)  # fmt: skip
X, Y = {"x": np.zeros((2, 25_000), np.float32)}, {"y": np.zeros((2, 25_000), np.float32)}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_weights_count_once_and_activations_per_item():
    assert moved_bytes(FILE, X, Y, 2) == 600_000 + 400_000
    counted = ShardFile(
        **{name: getattr(FILE, name) for name in FILE.__struct_fields__} | {"moved_bytes_per_item": 700_000}
    )
    assert moved_bytes(counted, X, Y, 2) == 600_000 + 1_400_000


def test_the_use_settles_at_the_share_that_is_moved_and_fades_when_nothing_runs():
    clock = Clock()
    meter = BandwidthMeter(clock)
    use = 0.0
    for _ in range(40):
        meter.ran(FILE, X, Y, 2)
        clock.now_s += 0.5
        found = meter.use(10e6)
        assert found is not None
        assert found >= use - 1e-9
        use = found
    assert use == pytest.approx(0.2, rel=0.01)  # 1 MB each half second, of 10 MB/s
    for _ in range(40):
        clock.now_s += 0.5
        found = meter.use(10e6)
    assert found == pytest.approx(0.0, abs=1e-3)


def test_it_is_bounded_and_unknown_before_the_device_was_measured():
    clock = Clock()
    meter = BandwidthMeter(clock)
    meter.ran(FILE, X, Y, 2)
    clock.now_s += 5.0
    assert meter.use(None) is None
    meter.ran(FILE, X, Y, 2)
    clock.now_s += 5.0
    assert meter.use(1.0) == 1.0
    assert meter.use(1.0) == 1.0, "asked twice at the same time"
