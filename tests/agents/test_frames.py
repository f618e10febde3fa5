"""Frames: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agents.frames import (
    ALIGNMENT_BYTES,
    DEFAULT_LIMITS,
    MAGIC,
    REQUEST,
    Frame,
    FrameAssembler,
    FrameLimits,
    decode_frame,
    decode_tensors,
    encode_frame,
    encode_tensors,
)
from agents.messages import Probe
from sla.errors import InvalidInputError

DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
)
tensor_maps = st.dictionaries(st.text(min_size=1, max_size=20), arrays, max_size=6)


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert list(left) == list(right)
    for name, array in left.items():
        assert right[name].dtype == array.dtype
        assert right[name].shape == array.shape
        assert right[name].tobytes() == array.tobytes()


def feed(data: bytes, sizes: list[int], limits: FrameLimits = DEFAULT_LIMITS) -> list[Frame]:
    """Give `data` to an assembler in pieces of the given sizes, the last one again and again."""
    frames: list[Frame] = []
    assembler = FrameAssembler(frames.append, limits)
    position = 0
    while position < len(data):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        buffer = assembler.get_buffer()
        chunk = data[position : position + min(size, len(buffer))]
        buffer[: len(chunk)] = chunk
        assembler.advance(len(chunk))
        position += len(chunk)
    assert assembler.is_between_frames
    return frames


def frame_bytes(header: Any, payload: bytes = b"", *, magic: bytes = MAGIC) -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return struct.pack("<4sIQ", magic, len(encoded), len(payload)) + encoded + payload


@settings(max_examples=60)
@given(tensors=tensor_maps)
def test_tensors_at_rest_come_back(tensors: dict[str, Any]) -> None:
    back = decode_tensors(encode_tensors(tensors))
    assert_same(tensors, back)
    for array in back.values():
        assert array.flags.writeable
        assert array.size == 0 or array.ctypes.data % ALIGNMENT_BYTES == 0


@settings(max_examples=40)
@given(
    maps=st.lists(tensor_maps, min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    long_body=st.booleans(),
)
def test_a_stream_in_any_pieces_gives_the_same_frames(
    maps: list[dict[str, Any]], sizes: list[int], long_body: bool
) -> None:
    class Text(msgspec.Struct):
        text: str

    body = Text("x" * 40_000 if long_body else "x")
    if long_body:
        sizes.append(1000)
    stream = b"".join(b"".join(encode_frame(REQUEST, index, body, tensors)) for index, tensors in enumerate(maps))
    frames = feed(stream, sizes)
    assert [frame.id for frame in frames] == list(range(len(maps)))
    for frame, tensors in zip(frames, maps, strict=True):
        assert msgspec.msgpack.decode(frame.body, type=Text) == body
        assert_same(tensors, frame.tensors)


def test_other_orders_and_byte_orders_are_made_portable() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = {"fortran": np.asfortranarray(array), "strided": array[:, ::2], "big": array.astype(">f4")}
    back = decode_tensors(encode_tensors(tensors))
    for name, original in tensors.items():
        np.testing.assert_array_equal(back[name], original)
        assert back[name].dtype == np.float32


def test_contiguous_tensors_are_not_copied() -> None:
    array = np.zeros(100_000, dtype=np.float64)
    pieces = encode_frame(REQUEST, 0, None, {"x": array})
    assert np.shares_memory(np.frombuffer(pieces[-1], dtype=np.uint8), array)


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"x": np.array(["text"])}, "does not travel"),
        ({"x": np.array([object()])}, "does not travel"),
        ({"x": np.zeros(2, dtype=np.complex64)}, "does not travel"),
        ({"": np.zeros(1)}, "1 to 256 characters"),
        ({"x": np.zeros((1,) * 9)}, "9 dimensions"),
        ({str(i): np.zeros(1) for i in range(65)}, "at most 64 tensors"),
        ({"x": np.broadcast_to(np.uint8(0), (300 << 20,))}, "accepted"),
    ],
)
def test_what_cannot_travel_is_refused_by_the_sender(tensors: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        encode_tensors(tensors)


@given(data=st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInputError):
        decode_tensors(data)


@given(cut=st.integers(0, 10_000))
def test_a_truncated_frame_is_refused(cut: int) -> None:
    data = encode_tensors({"x": np.arange(500, dtype=np.int64), "y": np.ones((3, 3))})
    with pytest.raises(InvalidInputError, match="exactly one frame"):
        decode_tensors(data[: cut % len(data)])


@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_read_as_other_values(position: int, value: int) -> None:
    damaged = bytearray(encode_tensors({"x": np.arange(40, dtype=np.int16), "flags": np.ones(7, dtype=bool)}))
    damaged[position % len(damaged)] = value
    try:
        tensors = decode_tensors(damaged)
    except InvalidInputError:
        return
    assert len(tensors) == 2


def test_two_frames_are_not_one() -> None:
    data = encode_tensors({"x": np.ones(3)})
    with pytest.raises(InvalidInputError, match="exactly one frame"):
        decode_frame(data + data)


@pytest.mark.parametrize(
    ("magic", "sentence"), [(b"HTTP", "does not speak"), (b"TDG\x07", "version 7"), (bytes(4), "does not speak")]
)
def test_another_protocol_is_named(magic: bytes, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        decode_frame(frame_bytes([0, 0, None, []], magic=magic))


@pytest.mark.parametrize(
    ("tensors", "payload_bytes", "sentence"),
    [
        ([["x", "float32", [2], 0]], 4, "need 8 bytes"),
        ([["x", "float32", [2], 0]], 12, "need 8 bytes"),
        ([["x", "float32", [-1], 0]], 4, "damaged"),
        ([["x", "object", [1], 0]], 8, "damaged"),
        ([["x", "uint8", [64], 64]], 64, "starts at 64 instead of 0"),
        ([["x", "uint8", [4], 0], ["y", "uint8", [4], 0]], 4, "starts at 0 instead of 64"),
        ([["x", "uint8", [4], 0], ["x", "uint8", [4], 64]], 68, "two tensors named"),
        ([["x", "uint8", [0, 1 << 40, 1 << 40], 0]], 0, "too large"),
        ([["x", "uint8", [1 << 62, 1 << 62], 0]], 0, "too large"),
        ([["x", "bool", [1] * 9, 0]], 1, "damaged"),
        ([["x" * 300, "bool", [1], 0]], 1, "damaged"),
        ([[str(i), "bool", [0], 0] for i in range(65)], 0, "damaged"),
        ([["x", "bool", [3], 0]], 3, "other than 0 and 1"),
        ([["x", "bool", [3], 0, 5]], 3, "damaged"),
    ],
)
def test_lies_about_tensors_are_refused(tensors: list[Any], payload_bytes: int, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        decode_frame(frame_bytes([0, 0, None, tensors], b"\x07" * payload_bytes))


@pytest.mark.parametrize(("header_bytes", "payload_bytes"), [(2**32 - 1, 0), (1001, 0), (10, 2**64 - 1), (10, 5001)])
def test_a_length_beyond_the_limits_is_refused_before_anything_follows(header_bytes: int, payload_bytes: int) -> None:
    limits = FrameLimits(header_bytes=1000, payload_bytes=5000)
    with pytest.raises(InvalidInputError, match="are accepted"):
        feed(struct.pack("<4sIQ", MAGIC, header_bytes, payload_bytes), [16], limits)


def test_a_payload_that_no_tensor_needs_is_refused_before_it_arrives() -> None:
    header = msgspec.msgpack.encode([0, 0, None, []])
    with pytest.raises(InvalidInputError, match="need 0 bytes"):
        feed(struct.pack("<4sIQ", MAGIC, len(header), 200 << 20) + header, [64])


def test_a_frame_keeps_its_body_when_the_buffer_is_used_again() -> None:
    first = b"".join(encode_frame(REQUEST, 1, Probe(), {"x": np.zeros(60_000, dtype=np.uint8)}))
    second = b"".join(encode_frame(REQUEST, 2, None, {"y": np.ones(60_000, dtype=np.uint8)}))
    frames = feed(first + second, [1 << 20])
    assert bytes(frames[0].body) == msgspec.msgpack.encode(Probe())
    assert not frames[0].tensors["x"].any()
