"""Timing the blocks of a model on this device, for all devices of its type: short runs, one block in memory at a time, never in the way.

The blocks run in series on the sample, as they would on several agents: what one writes the later ones read. Each run is the least urgent
work in the accelerator's queue, and the profile is given up as soon as a request comes: it can be asked for again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import psutil

from agents.backends.base import InferenceBackend
from agents.backends.timing import clock_for, quickest, timed_run
from agents.blobs import BlobCache, BlobSource
from agents.engine import GOLDEN_INPUT, LOADED_SIZE_FACTOR, Engine
from agents.frames import decode_tensors
from agents.messages import BlocksProfiled, BlockTiming, ProfileBlocks, ShardFile
from agents.queue import AcceleratorQueue
from policies.ids import BlobHash
from sla.errors import InvalidInputError, ModelError, OverloadedError, RetryableError

Values = dict[str, np.ndarray]
OpenBackend = Callable[[Path, ShardFile], InferenceBackend]
MIN_RUNS, MAX_RUNS = 2, 20
TIGHT_RUNS = 3
"""So many runs can agree."""
MAX_ITEMS = 64
MAX_BUDGET_S = 60.0
IDLE_S = 5.0
"""A device on which no request ran for this long is idle."""
NEVER_S = 3600.0
"""Deadline of a run: everything else is more urgent."""


class Profiler:
    """One profile at a time. Owned by the agent's event loop."""

    def __init__(
        self, *, blobs: BlobCache, engine: Engine, queue: AcceleratorQueue, open_backend: OpenBackend, threads: int = 1
    ) -> None:
        self._blobs = blobs
        self._engine = engine
        self._queue = queue
        self._open_backend = open_backend
        self._threads = threads
        self._busy = asyncio.Lock()

    async def profile(self, message: ProfileBlocks, source: BlobSource | None) -> BlocksProfiled:
        """What the blocks take here.

        Raises OverloadedError while this device serves, profiles something else, or has no room for a block; ModelError or InvalidInputError
        if the blocks cannot run on the sample; RetryableError if they cannot be fetched.
        """
        _check(message)
        if self._busy.locked():
            raise OverloadedError("This agent profiles another model already.", retry_after_s=IDLE_S)
        async with self._busy:
            self._expect_idle(IDLE_S)
            for sha256 in (*(file.sha256 for file in message.files), message.sample_sha256):
                await self._blobs.ensure(sha256, source)
            return await self._profile(message)

    async def _profile(self, message: ProfileBlocks) -> BlocksProfiled:
        began_s = time.monotonic()
        path = self._path(message.sample_sha256)
        sample = decode_tensors(await asyncio.to_thread(path.read_bytes))
        one = {name.removeprefix(GOLDEN_INPUT): value for name, value in sample.items()}
        batches = [one] if message.items == 1 else [one, _repeated(one, message.items)]
        timings, provider, peak_bytes = [], "", 0
        for at, file in enumerate(message.files):
            self._expect_idle(time.monotonic() - began_s)
            still_read = {name for later in message.files[at + 1 :] for name in later.inputs}
            budget_s = message.budget_s / (len(message.files) * len(batches))
            timing, provider, grown = await self._block(file, batches, budget_s, message.tight)
            timings.append(timing)
            peak_bytes = max(peak_bytes, grown)
            batches = [{name: value for name, value in batch.items() if name in still_read} for batch in batches]
        return BlocksProfiled(blocks=tuple(timings), provider=provider, peak_bytes=peak_bytes)

    async def _block(
        self, file: ShardFile, batches: list[Values], budget_s: float, tight: float
    ) -> tuple[BlockTiming, str, int]:
        """Times of one block on each batch, which gets what the block writes; the provider, and by how much the process grew."""
        path = self._path(file.sha256)
        needed = max(file.memory_bytes, int(path.stat().st_size * LOADED_SIZE_FACTOR))
        if needed > self._engine.free_bytes:
            raise OverloadedError(
                f"A block of {file.model} needs {needed >> 20} MB, but only {self._engine.free_bytes >> 20} MB for shards are free.",
                retry_after_s=60.0,
            )
        before_bytes = _resident_bytes()
        backend = await asyncio.to_thread(self._open_backend, path, file)
        try:
            times = [await self._times(backend, file, batch, budget_s, tight) for batch in batches]
            grown = max(0, _resident_bytes() - before_bytes)
        finally:
            self._queue.run_after(backend.close)
        timing = BlockTiming(
            one_ms=1000.0 * quickest(times[0]), many_ms=1000.0 * quickest(times[1]) if len(times) > 1 else None,
            runs=min(map(len, times)), spread=max(map(_spread, times)),
        )  # fmt: skip
        return timing, backend.provider, grown

    async def _times(
        self, backend: InferenceBackend, file: ShardFile, values: Values, budget_s: float, tight: float
    ) -> list[float]:
        """Seconds of some runs after one that warms up; ends when they agree or took long enough. Adds what the block writes to `values`."""
        missing = [name for name in file.inputs if name not in values]
        if missing:
            raise ModelError(
                f"No earlier block of {file.model} writes {missing[0]!r}, and the sample does not have it."
            )
        feed = {name: values[name] for name in file.inputs}
        clock = clock_for(backend, self._threads)

        async def run() -> tuple[Values, float]:
            return await self._queue.submit(
                lambda: timed_run(backend, feed, file.outputs, clock), deadline_s=self._queue.now_s() + NEVER_S, modality="text"
            )  # fmt: skip

        made, _ = await run()
        values |= made
        times: list[float] = []
        while len(times) < MAX_RUNS and (len(times) < MIN_RUNS or sum(times) < budget_s):
            times.append((await run())[1])
            if len(times) >= TIGHT_RUNS and _spread(times) <= tight:
                break
        return times

    def _expect_idle(self, for_s: float) -> None:
        """Raises OverloadedError if a request ran within the last `for_s` seconds."""
        if self._engine.idle_s < for_s:
            raise OverloadedError(
                "This agent serves requests; models are profiled while it is idle.", retry_after_s=IDLE_S
            )

    def _path(self, sha256: BlobHash) -> Path:
        path = self._blobs.path(sha256)
        if path is None:
            raise RetryableError(f"The file {sha256[:12]} was evicted before it could be profiled.", retry_after_s=1.0)
        return path


def _check(message: ProfileBlocks) -> None:
    sound = (
        0 < len(message.files) <= 10_000
        and 1 <= message.items <= MAX_ITEMS
        and 0.0 < message.budget_s <= MAX_BUDGET_S
        and math.isfinite(message.tight)
    )
    if not sound:
        raise InvalidInputError(
            "A profile needs blocks, a few items and seconds.",
            accepted=f"1 to {MAX_ITEMS} items, up to {MAX_BUDGET_S:g} s",
        )


def _repeated(values: Mapping[str, np.ndarray], items: int) -> Values:
    """The first item of each value, as often; the items of such a model were proven independent, so that equal ones cost like others."""
    return {name: np.repeat(value[:1], items, axis=0) for name, value in values.items()}


def _spread(times: list[float]) -> float:
    return quickest(times) / min(times) - 1.0


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
