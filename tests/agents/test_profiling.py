"""Profiling blocks on a device: in series, bounded, stopped early, and never in the way of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agents.backends import InferenceBackend
from agents.backends.onnx import OnnxBackend
from agents.blobs import BlobCache
from agents.engine import Engine
from agents.frames import encode_tensors
from agents.ledger import Ledger
from agents.messages import Prepare, ProfileBlocks, ShardFile
from agents.profiling import MAX_RUNS, MIN_RUNS, Profiler
from agents.queue import AcceleratorQueue
from policies.plan import Span
from sla.errors import InvalidInputError, ModelError, OverloadedError


class Bench:
    """A profiler with its engine and queue; `opened` notes which files were opened, `shapes` what ran on them."""

    def __init__(self, tiny, directory: Path, clock, budget_bytes: int = 8 << 20) -> None:
        self.tiny = tiny
        self.opened: list[str] = []
        self.queue = AcceleratorQueue(clock=clock)
        self.blobs = BlobCache(directory / "blobs", max_bytes=1 << 24)
        self.engine = Engine(
            blobs=self.blobs, open_backend=lambda path, file: OnnxBackend(path), queue=self.queue, ledger=Ledger(),
            budget_bytes=budget_bytes, clock=clock,
        )  # fmt: skip
        self.profiler = Profiler(blobs=self.blobs, engine=self.engine, queue=self.queue, open_backend=self.open)
        self.before_open: Callable[[], None] = lambda: None

    def open(self, path: Path, file: ShardFile) -> InferenceBackend:
        self.before_open()
        self.opened.append(path.name)
        return OnnxBackend(path)

    def message(self, **changed: object) -> ProfileBlocks:
        x = np.ones((1, 4), np.float32)
        files = (self.tiny.file(0, 1), self.tiny.file(1, 2))
        sample = self.tiny.source.add(encode_tensors({"in:x": x}))
        message = ProfileBlocks(files=files, sample_sha256=sample, items=3, budget_s=0.05)
        return msgspec.structs.replace(message, **changed)

    async def request(self) -> None:
        """One request runs on the device."""
        file = self.tiny.file(0, 1)
        await self.engine.prepare(Prepare(service_id="s", epoch=1, files=(file,)), self.tiny.source)
        x = np.ones((2, 4), np.float32)
        await self.engine.run(
            file.sha256, {"x": x}, ["h"], deadline_s=self.queue.now_s() + 10, holder=("s", 1), stage="m", blocks=Span(0, 1)
        )  # fmt: skip


@pytest.fixture
async def bench(tiny, tmp_path, clock) -> AsyncIterator[Bench]:
    bench = Bench(tiny, tmp_path, clock)
    yield bench
    bench.engine.close()


async def test_every_block_is_timed_with_one_and_with_several_items(bench, tiny):
    found = await bench.profiler.profile(bench.message(), tiny.source)
    assert len(found.blocks) == 2
    assert found.provider == "CPUExecutionProvider"
    for timing in found.blocks:
        assert timing.one_ms > 0
        assert timing.many_ms is not None
        assert timing.many_ms > 0
        assert MIN_RUNS <= timing.runs <= MAX_RUNS
    assert bench.opened == [tiny.file(0, 1).sha256, tiny.file(1, 2).sha256], "one after the other"
    assert bench.engine.loaded() == frozenset(), "nothing stays loaded"


async def test_models_whose_items_mix_run_with_one_item_only(bench, tiny):
    found = await bench.profiler.profile(bench.message(items=1), tiny.source)
    assert [timing.many_ms for timing in found.blocks] == [None, None]


async def test_runs_that_agree_are_enough(bench, tiny):
    found = await bench.profiler.profile(bench.message(tight=1e9, budget_s=60.0), tiny.source)
    assert [timing.runs for timing in found.blocks] == [3, 3]


async def test_a_device_that_served_just_now_is_left_alone(bench, tiny, clock):
    await bench.request()
    clock.advance(1.0)
    with pytest.raises(OverloadedError, match="while it is idle"):
        await bench.profiler.profile(bench.message(), tiny.source)
    clock.advance(10.0)
    assert (await bench.profiler.profile(bench.message(), tiny.source)).blocks


async def test_a_request_that_comes_meanwhile_ends_the_profile(bench, tiny, clock):
    clock.advance(100.0)
    loop = asyncio.get_running_loop()

    def serve() -> None:
        bench.before_open = lambda: None
        asyncio.run_coroutine_threadsafe(bench.request(), loop).result(10)

    bench.before_open = serve
    with pytest.raises(OverloadedError, match="while it is idle"):
        await bench.profiler.profile(bench.message(), tiny.source)
    assert len(bench.opened) == 1, "the block under way is the last one"


async def test_one_profile_at_a_time(bench, tiny):
    first = asyncio.create_task(bench.profiler.profile(bench.message(), tiny.source))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="another model"):
        await bench.profiler.profile(bench.message(), tiny.source)
    await first


async def test_a_block_that_does_not_fit_is_not_loaded(tiny, tmp_path, clock):
    small = Bench(tiny, tmp_path, clock, budget_bytes=100)
    with pytest.raises(OverloadedError, match="MB for shards are free"):
        await small.profiler.profile(small.message(), tiny.source)
    assert small.opened == []
    small.engine.close()


async def test_a_sample_that_lacks_an_input_is_refused(bench, tiny):
    sample = tiny.source.add(encode_tensors({"in:z": np.ones((1, 4), np.float32)}))
    with pytest.raises(ModelError, match="'x'"):
        await bench.profiler.profile(bench.message(sample_sha256=sample), tiny.source)


@pytest.mark.parametrize(
    "changed",
    [{"items": 0}, {"items": 65}, {"budget_s": 0.0}, {"budget_s": 1e9}, {"tight": float("nan")}, {"files": ()}],
)
async def test_what_is_asked_for_is_bounded(bench, tiny, changed):
    with pytest.raises(InvalidInputError):
        await bench.profiler.profile(bench.message(**changed), tiny.source)
