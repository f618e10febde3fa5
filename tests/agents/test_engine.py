"""The engine: what is loaded is proven, within the budget, and kept as long as somebody needs it."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import numpy as np
import pytest

from agents.backends.onnx import OnnxBackend
from agents.blobs import BlobCache
from agents.engine import Engine, golden_error
from agents.frames import encode_tensors
from agents.ledger import Ledger
from agents.messages import Prepare
from agents.queue import AcceleratorQueue
from policies.plan import Span
from sla.errors import InvalidInputError, ModelError, OverloadedError, RetryableError


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
async def engine(tmp_path, ledger):
    queue = AcceleratorQueue()
    blobs = BlobCache(tmp_path, max_bytes=1 << 24)
    engine = Engine(
        blobs=blobs,
        open_backend=lambda path, file: OnnxBackend(path),
        queue=queue,
        ledger=ledger,
        budget_bytes=(5 << 20) // 2,
    )
    yield engine
    engine.close()


def prepare(*files, epoch=1, assets=()):
    return Prepare(service_id="s", epoch=epoch, files=files, assets=assets)


async def run(engine, file, x, **more):
    options = {"deadline_s": float("inf"), "holder": ("s", 1), "stage": "model", "blocks": file.blocks} | more
    return await engine.run(file.sha256, {"x": x}, file.outputs, **options)


async def test_a_shard_is_fetched_loaded_proven_and_run(engine, tiny, items, ledger):
    file = tiny.file(0, 2)
    answer = await engine.prepare(prepare(file), tiny.source)
    (ready,) = answer.shards
    assert (ready.provider, ready.golden_error < 1e-5) == ("CPUExecutionProvider", True)
    assert ready.fetched_bytes == file.size_bytes + len(tiny.source.blobs[file.golden_sha256])
    assert engine.loaded_bytes == 1 << 20
    ran = await run(engine, file, items(3))
    np.testing.assert_allclose(ran.outputs["y"], tiny.expected(items(3)), rtol=1e-5)
    ((service,), faults) = ledger.take()
    (shard,) = service.shards
    assert (shard.count, shard.items, shard.provider, faults) == (1, 3, "CPUExecutionProvider", ())
    assert shard.sum_ms == pytest.approx(ran.ms)
    assert ledger.take() == ((), ())


async def test_what_is_here_already_is_not_fetched_again(engine, tiny):
    await engine.prepare(prepare(tiny.file(0, 2)), tiny.source)
    (ready,) = (await engine.prepare(prepare(tiny.file(0, 2), epoch=2), None)).shards
    assert ready.fetched_bytes == 0


async def test_more_than_the_budget_is_refused_and_nothing_stays_half_loaded(engine, tiny):
    await engine.prepare(prepare(tiny.file(0, 2)), tiny.source)
    with pytest.raises(OverloadedError, match=r"needs 1\.0 MB, but only 0\.5 MB of the 2\.5 MB"):
        await engine.prepare(prepare(tiny.file(0, 1), tiny.file(1, 2), epoch=2), tiny.source)
    assert engine.loaded() == {tiny.file(0, 2).sha256}
    assert engine.release("s", 2) == [tiny.file(0, 2).sha256]
    await engine.prepare(prepare(tiny.file(0, 1), tiny.file(1, 2), epoch=2), tiny.source)
    assert engine.free_bytes == 1 << 19


async def test_a_prepare_that_fails_leaves_what_an_earlier_one_loaded(engine, tiny):
    await engine.prepare(prepare(tiny.file(0, 1)), tiny.source)
    bad = msgspec.structs.replace(tiny.file(1, 2), memory_bytes=1 << 30)
    with pytest.raises(OverloadedError):
        await engine.prepare(prepare(tiny.file(0, 1), bad), tiny.source)
    assert engine.loaded() == {tiny.file(0, 1).sha256}


async def test_a_shard_stays_as_long_as_any_epoch_needs_it(engine, tiny):
    file = tiny.file(0, 2)
    await engine.prepare(prepare(file, epoch=1), tiny.source)
    await engine.prepare(prepare(file, epoch=2), tiny.source)
    assert engine.release("s", 2) == []
    assert engine.release("another", 99) == []
    assert engine.release("s", 0, abandoned=9) == []
    assert engine.release("s", 3) == [file.sha256]


async def test_a_shard_that_computes_something_else_is_not_taken(engine, tiny):
    file = tiny.file(0, 2)
    x = np.ones((1, 4), np.float32)
    wrong = tiny.source.add(encode_tensors({"in:x": x, "out:y": tiny.expected(x) + 1}))
    with pytest.raises(ModelError, match="computes something else"):
        await engine.prepare(prepare(msgspec.structs.replace(file, golden_sha256=wrong)), tiny.source)
    no_inputs = tiny.source.add(encode_tensors({"out:y": x}))
    with pytest.raises(ModelError, match="does not hold the inputs"):
        await engine.prepare(prepare(msgspec.structs.replace(file, golden_sha256=no_inputs)), tiny.source)
    assert engine.loaded() == frozenset()


async def test_a_file_that_is_no_model_is_refused(engine, tiny):
    junk = msgspec.structs.replace(tiny.file(0, 2), sha256=tiny.source.add(b"not a model"), golden_sha256=None)
    with pytest.raises(ModelError, match="cannot be loaded"):
        await engine.prepare(prepare(junk), tiny.source)


async def test_runs_of_what_is_not_here_and_bad_inputs(engine, tiny, items):
    file = tiny.file(1, 2)
    with pytest.raises(RetryableError, match="not loaded"):
        await run(engine, file, items(1))
    await engine.prepare(prepare(file), tiny.source)
    with pytest.raises(ModelError, match="needs the tensor 'h'"):
        await run(engine, file, items(1))
    await engine.prepare(prepare(tiny.file(0, 1)), tiny.source)
    with pytest.raises(InvalidInputError, match="refused its inputs"):
        await run(engine, tiny.file(0, 1), np.ones((1, 99), np.float32))


async def test_a_release_lets_the_runs_under_way_end(tiny, items, tmp_path, ledger):
    gate, closed = threading.Event(), threading.Event()

    class Slow(OnnxBackend):
        def run(self, inputs, outputs):
            gate.wait(10)
            assert not closed.is_set()
            return super().run(inputs, outputs)

        def close(self):
            closed.set()
            super().close()

    engine = Engine(
        blobs=BlobCache(tmp_path, max_bytes=1 << 24), open_backend=lambda path, file: Slow(path), queue=AcceleratorQueue(),
        ledger=ledger, budget_bytes=1 << 22,
    )  # fmt: skip
    file = msgspec.structs.replace(tiny.file(0, 2), golden_sha256=None)
    await engine.prepare(prepare(file), tiny.source)
    runs = [asyncio.create_task(run(engine, file, items(2))) for _ in range(3)]
    await asyncio.sleep(0)
    engine.release("s", 2)
    assert engine.loaded() == frozenset()
    gate.set()
    for ran in await asyncio.gather(*runs):
        np.testing.assert_allclose(ran.outputs["y"], tiny.expected(items(2)), rtol=1e-5)
    assert await asyncio.to_thread(closed.wait, 10)
    engine.close()


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([np.nan, 2.0], [1.0, 2.0], float("inf")),
        ([1.0], [1.0, 2.0], float("inf")),
        ([1, 2, 3, 4], [1, 2, 3, 5], 0.25),
        ([], [], 0.0),
    ],
)
def test_the_golden_error_is_relative_to_the_largest_magnitude(found, expected, error):
    assert golden_error(np.array(found), np.array(expected)) == pytest.approx(error)


async def test_blocks_are_reported_apart(engine, tiny, items, ledger):
    for span in ((0, 1), (0, 2)):
        await engine.prepare(prepare(tiny.file(*span)), tiny.source)
        await run(engine, tiny.file(*span), items(2))
    ((service,), _) = ledger.take()
    assert {shard.blocks for shard in service.shards} == {Span(0, 1), Span(0, 2)}


async def test_an_abandoned_epoch_gives_its_memory_back_though_it_is_newer(engine, tiny):
    kept, tried = tiny.file(0, 1), tiny.file(1, 2)
    await engine.prepare(prepare(kept, epoch=3), tiny.source)
    await engine.prepare(prepare(kept, tried, epoch=4), tiny.source)
    assert engine.release("s", 0, abandoned=4) == [tried.sha256]
    assert engine.loaded() == {kept.sha256}
