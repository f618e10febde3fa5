"""The shards of one device: fetched, loaded within the memory budget, proven against golden outputs, and run."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from agents.backends.base import InferenceBackend
from agents.bandwidth import BandwidthMeter
from agents.blobs import BlobCache, BlobSource
from agents.frames import decode_tensors
from agents.ledger import Ledger
from agents.messages import Prepare, Prepared, ShardFile, ShardReady
from agents.queue import AcceleratorQueue, Modality, RunTimes
from policies.ids import BlobHash, ServiceId
from policies.plan import Span
from sla.errors import ModelError, OverloadedError, RetryableError

Holder = tuple[ServiceId, int]
"""A service and the epoch of its plan that needs a shard."""
OpenBackend = Callable[[Path, ShardFile], InferenceBackend]
LOADED_SIZE_FACTOR = 1.5
"""Memory of a loaded shard over its file's size, when the controller sent no measured figure."""
PROOF_DEADLINE_S = 20.0
"""A warm-up takes its turn among requests as if it had this deadline: it neither overtakes them all nor starves behind them."""
GOLDEN_INPUT, GOLDEN_OUTPUT = "in:", "out:"


@dataclass(slots=True)
class LoadedShard:
    """A shard in memory, and who needs it."""

    file: ShardFile
    backend: InferenceBackend
    memory_bytes: int
    golden_error: float
    load_ms: float
    holders: set[Holder] = field(default_factory=set)
    in_use: int = 0
    """Runs that wait or run; the backend is closed when nobody needs the shard and none is left."""


@dataclass(frozen=True, slots=True)
class ShardRun:
    """What one run of a shard gave."""

    outputs: dict[str, np.ndarray]
    ms: float
    """Time on the accelerator, without waiting."""


class Engine:
    """Loads and runs shards on one accelerator."""

    def __init__(
        self,
        *,
        blobs: BlobCache,
        open_backend: OpenBackend,
        queue: AcceleratorQueue,
        ledger: Ledger,
        budget_bytes: int,
        golden_tolerance: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blobs = blobs
        self._open_backend = open_backend
        self._queue = queue
        self._ledger = ledger
        self._budget_bytes = budget_bytes
        self._golden_tolerance = golden_tolerance
        self._clock = clock
        self._loaded: dict[BlobHash, LoadedShard] = {}
        self._loading = asyncio.Lock()
        self._times = RunTimes()
        self._asked_s = -math.inf
        self.bandwidth = BandwidthMeter(clock)

    @property
    def loaded_bytes(self) -> int:
        """Memory that loaded shards use, as accounted."""
        return sum(shard.memory_bytes for shard in self._loaded.values())

    @property
    def free_bytes(self) -> int:
        """What is left of the budget."""
        return max(0, self._budget_bytes - self.loaded_bytes)

    @property
    def idle_s(self) -> float:
        """Seconds since a request last needed this device; 0 while one does, infinite if none ever did."""
        in_use = any(shard.in_use for shard in self._loaded.values())
        return 0.0 if in_use else self._clock() - self._asked_s

    @property
    def queue_depth(self) -> int:
        """Runs that wait or run."""
        return self._queue.depth

    def loaded(self) -> frozenset[BlobHash]:
        """Hashes of the shards in memory."""
        return frozenset(self._loaded)

    async def prepare(self, message: Prepare, source: BlobSource | None) -> Prepared:
        """Fetch, load, warm up and compare what `message` names; serves nothing yet.

        Shards that are here already are only marked as needed by this epoch. On any error the shards that were newly loaded
        for this call are unloaded again. Raises OverloadedError if the budget does not allow it, ModelError if a shard is
        damaged or computes something else than it should, RetryableError if it cannot be fetched.
        """
        holder = (message.service_id, message.epoch)
        for sha256 in message.assets:
            await self._blobs.ensure(sha256, source)
        fetched = [await self._fetch(file, source) for file in message.files]
        async with self._loading:
            marked: list[LoadedShard] = []
            try:
                for file in message.files:
                    shard = self._loaded.get(file.sha256) or await self._load(file)
                    self._loaded[file.sha256] = shard
                    if holder not in shard.holders:
                        shard.holders.add(holder)
                        marked.append(shard)
            except BaseException:
                for shard in marked:
                    self._drop_holders(shard, {holder})
                raise
        return Prepared(
            shards=tuple(
                _ready(self._loaded[file.sha256], n_bytes) for file, n_bytes in zip(message.files, fetched, strict=True)
            )
        )

    def release(self, service_id: ServiceId, below_epoch: int, abandoned: int | None = None) -> list[BlobHash]:
        """Unload what only epochs of the service below `below_epoch`, or an abandoned one, needed; the hashes that went."""
        gone = []
        for sha256, shard in list(self._loaded.items()):
            old = {
                (s, epoch)
                for s, epoch in shard.holders
                if s == service_id and (epoch < below_epoch or epoch == abandoned)
            }
            if old and self._drop_holders(shard, old):
                gone.append(sha256)
        return gone

    async def run(
        self,
        sha256: BlobHash,
        inputs: Mapping[str, np.ndarray],
        outputs: Iterable[str],
        *,
        deadline_s: float,
        modality: Modality = "vision",
        holder: Holder,
        stage: str,
        blocks: Span,
    ) -> ShardRun:
        """Run a loaded shard through the accelerator's queue; those of `outputs` that the shard makes.

        Raises RetryableError if the shard is not loaded here, OverloadedError if the queue cannot take it, and what the
        backend raises.
        """
        shard = self._loaded.get(sha256)
        if shard is None:
            raise RetryableError(f"The shard {sha256[:12]} of stage {stage} is not loaded here.", retry_after_s=0.5)
        missing = [name for name in shard.file.inputs if name not in inputs]
        if missing:
            raise ModelError(f"The shard of stage {stage} needs the tensor {missing[0]!r}, which did not come.")
        feed = {name: inputs[name] for name in shard.file.inputs}
        wanted = [name for name in outputs if name in shard.file.outputs]
        items = _items(feed)

        def ran(run: ShardRun) -> None:
            self._times.ran(sha256, run.ms / 1000, items)
            self.bandwidth.ran(shard.file, feed, run.outputs, items)
            self._ledger.shard_ran(
                *holder, stage=stage, blocks=blocks, ms=run.ms, items=items, provider=shard.backend.provider
            )

        shard.in_use += 1
        self._asked_s = self._clock()
        try:
            return await self._queue.submit(
                lambda: _timed_run(shard.backend, feed, wanted), deadline_s=deadline_s, modality=modality,
                expected_s=self._times.expected_s(sha256, items), ran=ran,
            )  # fmt: skip
        except OverloadedError:
            self._times.doubt(sha256)
            raise
        finally:
            shard.in_use -= 1
            self._asked_s = self._clock()
            self._close_if_unused(shard)

    def close(self) -> None:
        """Unload everything and turn away who still waits."""
        for shard in list(self._loaded.values()):
            self._drop_holders(shard, set(shard.holders))
        self._queue.close()

    async def _fetch(self, file: ShardFile, source: BlobSource | None) -> int:
        if file.sha256 in self._loaded:
            return 0
        _, fetched = await self._blobs.ensure(file.sha256, source)
        if file.golden_sha256 is not None:
            fetched += (await self._blobs.ensure(file.golden_sha256, source))[1]
        return fetched

    async def _load(self, file: ShardFile) -> LoadedShard:
        path = self._blobs.path(file.sha256)
        if path is None:
            raise RetryableError(
                f"The shard {file.sha256[:12]} was evicted before it could be loaded.", retry_after_s=0.1
            )
        memory_bytes = max(file.memory_bytes, int(path.stat().st_size * LOADED_SIZE_FACTOR))
        if memory_bytes > self.free_bytes:
            raise OverloadedError(
                f"The shard of {file.model} needs {_mb(memory_bytes)}, but only {_mb(self.free_bytes)} of the "
                f"{_mb(self._budget_bytes)} for shards are free on this agent.",
                retry_after_s=5.0,
            )
        began_s = self._clock()
        backend = await asyncio.to_thread(self._open_backend, path, file)
        try:
            golden_error = await self._prove(backend, file)
        except BaseException:
            backend.close()
            raise
        if backend.fault is not None:
            self._ledger.fault(backend.fault)
        return LoadedShard(file, backend, memory_bytes, golden_error, (self._clock() - began_s) * 1000)

    async def _prove(self, backend: InferenceBackend, file: ShardFile) -> float:
        """Warm the shard up with its golden inputs; its error against the golden outputs. Raises ModelError beyond the tolerance."""
        golden_path = None if file.golden_sha256 is None else self._blobs.path(file.golden_sha256)
        if golden_path is None:
            return 0.0
        golden = decode_tensors(await asyncio.to_thread(golden_path.read_bytes))
        feed = {name: golden[GOLDEN_INPUT + name] for name in file.inputs if GOLDEN_INPUT + name in golden}
        expected = {
            name.removeprefix(GOLDEN_OUTPUT): value for name, value in golden.items() if name.startswith(GOLDEN_OUTPUT)
        }
        if len(feed) != len(file.inputs) or not expected:
            raise ModelError(f"The golden sample of {file.model} does not hold the inputs of its shard.")
        # In the queue, so that a warm-up never runs beside a request on the same accelerator; first in it, since the plan that
        # would relieve a congested fleet must not wait behind the congestion.
        found = await self._queue.submit(
            lambda: _timed_run(backend, feed, list(expected)), deadline_s=self._clock() + PROOF_DEADLINE_S, first=True
        )
        error = max(golden_error(found.outputs[name], value) for name, value in expected.items())
        if not error <= self._golden_tolerance:
            raise ModelError(
                f"The shard of {file.model} computes something else here than when it was cut (relative error {error:.3g}).",
                found=f"{error:.3g}", accepted=f"at most {self._golden_tolerance:.3g}",
            )  # fmt: skip
        return error

    def _drop_holders(self, shard: LoadedShard, holders: set[Holder]) -> bool:
        """True if nobody else needs the shard, which is then unloaded."""
        shard.holders -= holders
        if shard.holders:
            return False
        self._loaded.pop(shard.file.sha256, None)
        self._times.forget(shard.file.sha256)
        self._close_if_unused(shard)
        return True

    def _close_if_unused(self, shard: LoadedShard) -> None:
        if not shard.holders and shard.in_use == 0:
            # In the accelerator's thread: a run whose caller gave up may still be under way there.
            self._queue.run_after(shard.backend.close)


def golden_error(found: np.ndarray, expected: np.ndarray) -> float:
    """How far `found` is from `expected`: for floats the largest absolute difference over the largest magnitude, for others
    the share of elements that differ; infinite for another shape or for numbers that are none."""
    if found.shape != expected.shape:
        return float("inf")
    if found.size == 0 or np.array_equal(found, expected):
        return 0.0
    if not np.issubdtype(expected.dtype, np.floating):
        return float(np.mean(found != expected))
    difference = np.max(np.abs(found.astype(np.float64) - expected.astype(np.float64)))
    scale = max(float(np.max(np.abs(expected))), 1e-12)
    return float(difference) / scale if np.isfinite(difference) else float("inf")


def _timed_run(backend: InferenceBackend, feed: Mapping[str, np.ndarray], wanted: list[str]) -> ShardRun:
    began_s = time.perf_counter()
    outputs = backend.run(feed, wanted)
    return ShardRun(outputs, (time.perf_counter() - began_s) * 1000)


def _ready(shard: LoadedShard, fetched_bytes: int) -> ShardReady:
    return ShardReady(
        sha256=shard.file.sha256, provider=shard.backend.provider, golden_error=shard.golden_error, load_ms=shard.load_ms,
        fetched_bytes=fetched_bytes,
    )  # fmt: skip


def _items(feed: Mapping[str, np.ndarray]) -> int:
    """Axis 0 of the first tensor that has one."""
    return next((int(value.shape[0]) for value in feed.values() if value.ndim > 0), 1)


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):.1f} MB"
