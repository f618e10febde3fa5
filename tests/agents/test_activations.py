"""Activations in fewer bits: what comes back, what is left alone, and a chain that uses them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from agents.activations import pack, packed_bytes, unpack
from sla.errors import InvalidInputError


def activations() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((4, 16, 64)).astype(np.float32)


@pytest.mark.parametrize(("how", "share", "error"), [("fp16", 0.5, 1e-3), ("int8", 0.27, 1e-2)])
def test_what_comes_back_is_close_and_smaller(how, share, error):
    x = activations()
    sent, packed = pack({"h": x}, how)
    assert packed == ("h",)
    assert sum(tensor.nbytes for tensor in sent.values()) <= share * x.nbytes
    back = unpack(sent, packed)
    assert set(back) == {"h"}
    assert back["h"].dtype == np.float32
    assert np.abs(back["h"] - x).max() / np.abs(x).max() < error


def test_what_cannot_take_it_travels_as_it_is():
    mask = np.zeros((1, 1, 64, 64), np.float32)
    mask[..., 3:] = -np.inf
    tensors = {"ids": np.arange(4096), "mask": mask, "small": np.ones(4, np.float32), "half": np.ones(4096, np.float16)}
    for how in ("fp32", "fp16", "int8"):
        sent, packed = pack(tensors, how)
        assert packed == ()
        assert all(sent[name] is tensor for name, tensor in tensors.items())
    large = np.full((32, 32), 1e6, np.float32)
    assert pack({"h": large}, "fp16")[1] == ()
    assert np.allclose(unpack(*pack({"h": large}, "int8"))["h"], large)


def test_zeros_stay_zeros():
    zeros = np.zeros((8, 64), np.float32)
    assert np.array_equal(unpack(*pack({"h": zeros}, "int8"))["h"], zeros)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"h": np.ones((2, 2), np.float32)},
        {"h": np.ones((2, 2), np.int8)},
        {"h": np.ones((2, 2), np.int8), "h#scale": np.ones(2, np.float32)},
    ],
)
def test_what_is_not_packed_as_it_says_is_refused(tensors):
    with pytest.raises(InvalidInputError, match="said to be packed"):
        unpack(tensors, ["h"])


@pytest.mark.parametrize("how", ["fp16", "int8"])
async def test_a_chain_sends_fewer_bits_and_stays_close(fleet, items, how):
    first, _ = await fleet.start("one"), await fleet.start("two")
    route = fleet.route([("one", 0, 1), ("two", 1, 2)])
    stage = msgspec.structs.replace(route.spec.stages[0], activations=how)
    await fleet.activate(msgspec.structs.replace(route, spec=msgspec.structs.replace(route.spec, stages=(stage,))))
    x = items(200)
    expected = fleet.tiny.expected(x)
    found = (await first.driver.infer("tiny-service", {"x": x}, 5000)).tensors["y"]
    assert not np.array_equal(found, expected)
    assert np.abs(found - expected).max() / np.abs(expected).max() < 0.02


@pytest.mark.parametrize("how", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("shape", [(2, 3), (4, 16, 64), (1, 8, 33), (300,), (256, 1)])
def test_the_size_that_is_foretold_is_the_size_that_is_sent(how, shape):
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    sent, _ = pack({"h": x}, how)
    assert sum(tensor.nbytes for tensor in sent.values()) == packed_bytes(shape, how)
