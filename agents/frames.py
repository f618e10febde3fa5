"""Frames: how a small header and raw tensors lie in a byte stream, or in a file.

    prefix    16 bytes: b"TDG" and the version of this format, header length (u32), payload length (u64), little-endian
    header    MessagePack of `Header`: id, kind, body, and one `TensorMeta` for every tensor
    payload   the tensors' buffers, C order, little-endian, each starting on a multiple of 64 bytes

There is no pickling. A frame is believed only after every number in it was checked: lengths against `FrameLimits` before memory
is taken, shapes against the payload's length before an array is built. Whatever fails is an `InvalidInputError`.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from sla.errors import InvalidInputError

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = Mapping[str, Array]
DtypeName = Literal[
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"
]  # fmt: skip

FORMAT_VERSION: Final = 1
MAGIC: Final = b"TDG" + bytes([FORMAT_VERSION])
ALIGNMENT_BYTES: Final = 64
MAX_TENSORS: Final = 64
MAX_DIMENSIONS: Final = 8
MAX_NAME_LENGTH: Final = 256

REQUEST: Final = 0
REPLY: Final = 1
ONE_WAY: Final = 2
"""No answer is wanted. With the id of an earlier request and no body: nobody waits for the answer to that one any more. (An older peer
does not understand that, says so in its log and goes on.)"""
READY: Final = 3
"""First frame from the side that accepted the connection: it is willing to serve, or says in a Fault why not."""
AT_REST: Final = 4
"""A frame that is kept in a file."""

_PREFIX: Final = struct.Struct("<4sIQ")
_HEAD_BYTES: Final = 16 * 1024
"""Read ahead of a payload: most messages fit whole, and little of a tensor is copied once more."""
_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    name: np.dtype(name).newbyteorder("<") for name in DtypeName.__args__  # type: ignore[attr-defined]
}  # fmt: skip
_NAMES: Final = {np.dtype(name): name for name in _DTYPES}
"""`dtype.name` costs microseconds."""
_NO_BYTES: Final[Array] = np.empty(0, dtype=np.uint8)
_PADDING: Final = bytes(ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """What one frame may cost the side that receives it."""

    header_bytes: int = 1 << 20
    payload_bytes: int = 256 << 20


DEFAULT_LIMITS: Final = FrameLimits()


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is needed to read one tensor out of a payload."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    dtype: DtypeName
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    offset: int


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Ids count per direction; a reply bears the id of its request."""

    id: Annotated[int, msgspec.Meta(ge=0)]
    kind: Literal[0, 1, 2, 3, 4]
    body: msgspec.Raw
    tensors: Annotated[tuple[TensorMeta, ...], msgspec.Meta(max_length=MAX_TENSORS)] = ()


class _OutgoingHeader(msgspec.Struct, frozen=True, array_like=True):
    """The same bytes as `Header`, from a body that is not encoded yet."""

    id: int
    kind: int
    body: msgspec.Struct | None
    tensors: Sequence[TensorMeta]


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame that was received: the body still encoded, the tensors as writable views of one buffer of its own."""

    id: int
    kind: int
    body: msgspec.Raw
    tensors: dict[str, Array]
    payload_bytes: int


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Header)


def encode_frame(
    kind: int, frame_id: int, body: msgspec.Struct | None, tensors: Tensors, limits: FrameLimits = DEFAULT_LIMITS
) -> list[bytes | memoryview]:
    """The buffers of one frame, in order; tensors that are C-contiguous are views and not copied.

    Raises InvalidInputError for tensors that may not travel (dtype, count, dimensions, size).
    """
    if len(tensors) > MAX_TENSORS:
        raise InvalidInputError(f"A frame holds at most {MAX_TENSORS} tensors, not {len(tensors)}.")
    _check_lengths(0, sum(tensor.nbytes for tensor in tensors.values()), limits)
    metas: list[TensorMeta] = []
    pieces: list[bytes | memoryview] = []
    end = 0
    for name, tensor in tensors.items():
        array, dtype_name = _portable(name, tensor)
        offset = _aligned(end)
        if array.nbytes:
            if offset > end:
                pieces.append(_PADDING[: offset - end])
            pieces.append(array.reshape(-1).view(np.uint8).data)
            end = offset + array.nbytes
        metas.append(TensorMeta(name, dtype_name, array.shape, offset))  # type: ignore[arg-type]
    header = _encoder.encode(_OutgoingHeader(frame_id, kind, body, metas))
    _check_lengths(len(header), end, limits)
    return [_PREFIX.pack(MAGIC, len(header), end) + header, *pieces]


def _portable(name: str, tensor: Array) -> tuple[Array, str]:
    """The same values, in C order and little-endian, and the name of their dtype."""
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InvalidInputError(f"A tensor's name has 1 to {MAX_NAME_LENGTH} characters, not {len(name)}.")
    known = _NAMES.get(tensor.dtype) or tensor.dtype.name
    dtype = _DTYPES.get(known)
    if dtype is None:
        raise InvalidInputError(
            f"Tensor {name!r} has dtype {known}, which does not travel; bool, integers and floats do.",
            found=known,
            accepted=", ".join(_DTYPES),
        )
    if tensor.ndim > MAX_DIMENSIONS:
        raise InvalidInputError(f"Tensor {name!r} has {tensor.ndim} dimensions; at most {MAX_DIMENSIONS} are accepted.")
    return np.asarray(tensor, dtype=dtype, order="C"), known


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _check_lengths(header_bytes: int, payload_bytes: int, limits: FrameLimits) -> None:
    if header_bytes > limits.header_bytes:
        raise InvalidInputError(f"A frame's header has {header_bytes} bytes; {limits.header_bytes} are accepted.")
    if payload_bytes > limits.payload_bytes:
        raise InvalidInputError(f"A frame's payload has {payload_bytes} bytes; {limits.payload_bytes} are accepted.")


def _parse_prefix(prefix: memoryview, limits: FrameLimits) -> tuple[int, int]:
    """Header and payload length."""
    magic, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
    if magic[:3] != MAGIC[:3]:
        raise InvalidInputError("The other side does not speak Tidegate's protocol.")
    if magic != MAGIC:
        raise InvalidInputError(
            f"The other side speaks version {magic[3]} of the frame format; this is version {FORMAT_VERSION}."
        )
    _check_lengths(header_bytes, payload_bytes, limits)
    return header_bytes, payload_bytes


def _parse_header(raw: memoryview, payload_bytes: int) -> Header:
    """A header whose tensors fill the payload exactly, in the one layout that `encode_frame` writes."""
    try:
        header = _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(f"A frame's header is damaged: {error}") from error
    end = 0
    names: set[str] = set()
    for meta in header.tensors:
        if meta.offset != _aligned(end):
            raise InvalidInputError(f"Tensor {meta.name!r} starts at {meta.offset} instead of {_aligned(end)}.")
        if meta.name in names:
            raise InvalidInputError(f"A frame holds two tensors named {meta.name!r}.")
        names.add(meta.name)
        item_bytes = _DTYPES[meta.dtype].itemsize
        # Zeros aside, so that an empty tensor cannot hide dimensions that NumPy could not hold.
        if math.prod(length or 1 for length in meta.shape) * item_bytes > DEFAULT_LIMITS.payload_bytes:
            raise InvalidInputError(f"Tensor {meta.name!r} has a shape that is too large.")
        size = math.prod(meta.shape) * item_bytes
        end = meta.offset + size if size else end
    if end != payload_bytes:
        raise InvalidInputError(f"A frame's tensors need {end} bytes, but its payload has {payload_bytes}.")
    return header


def _new_buffer(size: int) -> Array:
    """Uninitialised bytes that start on an aligned address."""
    if size == 0:
        return _NO_BYTES
    raw: Array = np.empty(size + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return raw[start : start + size]


def _build(header: Header, payload: Array) -> Frame:
    tensors: dict[str, Array] = {}
    for meta in header.tensors:
        dtype = _DTYPES[meta.dtype]
        flat = payload[meta.offset : meta.offset + math.prod(meta.shape) * dtype.itemsize]
        if meta.dtype == "bool" and flat.size and flat.max() > 1:
            raise InvalidInputError(f"Tensor {meta.name!r} is of dtype bool but holds bytes other than 0 and 1.")
        array = flat.view(dtype).reshape(meta.shape)
        tensors[meta.name] = array if sys.byteorder == "little" else array.astype(dtype.newbyteorder("="))
    # The body is a view of a buffer that the next bytes overwrite.
    return Frame(header.id, header.kind, header.body.copy(), tensors, payload.size)


class FrameAssembler:
    """Turns a byte stream into frames, without I/O: fill `get_buffer()`, then say how much with `advance`.

    A payload is received straight into the memory that its tensors are views of.
    """

    def __init__(self, deliver: Callable[[Frame], None], limits: FrameLimits = DEFAULT_LIMITS) -> None:
        self._deliver = deliver
        self._limits = limits
        self._head = memoryview(bytearray(_HEAD_BYTES))
        self._head_filled = 0
        self._header: Header | None = None
        """Set while the rest of its payload is awaited."""
        self._payload = _NO_BYTES
        self._payload_filled = 0

    @property
    def is_between_frames(self) -> bool:
        """True if the stream may end here."""
        return self._header is None and self._head_filled == 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes of the stream go; never empty."""
        if self._header is not None:
            return self._payload.data[self._payload_filled :]
        return self._head[self._head_filled :]

    def advance(self, count: int) -> None:
        """`count` bytes were written into the buffer; delivers the frames that they complete."""
        if self._header is not None:
            self._payload_filled += count
            if self._payload_filled == self._payload.size:
                header, payload = self._header, self._payload
                self._header, self._payload = None, _NO_BYTES
                self._deliver(_build(header, payload))
            return
        self._head_filled += count
        position = self._take_frames()
        rest = self._head_filled - position
        if position and rest:
            self._head[:rest] = self._head[position : self._head_filled].tobytes()
        self._head_filled = rest

    def _take_frames(self) -> int:
        """Position up to which the head was used."""
        position = 0
        while self._head_filled - position >= _PREFIX.size:
            start = position + _PREFIX.size
            header_bytes, payload_bytes = _parse_prefix(self._head[position:start], self._limits)
            stop = start + header_bytes
            if stop > self._head_filled:
                self._make_room(_PREFIX.size + header_bytes)
                return position
            header = _parse_header(self._head[start:stop], payload_bytes)
            payload = _new_buffer(payload_bytes)
            ready = min(self._head_filled - stop, payload_bytes)
            payload.data[:ready] = self._head[stop : stop + ready]
            position = stop + ready
            frame_is_whole = ready == payload_bytes
            if not frame_is_whole:
                # The body must outlive the head, which is filled again after this payload.
                self._header = Header(header.id, header.kind, header.body.copy(), header.tensors)
                self._payload, self._payload_filled = payload, ready
                return position
            self._deliver(_build(header, payload))
        return position

    def _make_room(self, needed: int) -> None:
        if needed > len(self._head):
            larger = memoryview(bytearray(needed))
            larger[: self._head_filled] = self._head[: self._head_filled]
            self._head = larger


def decode_frame(data: bytes | bytearray | memoryview) -> Frame:
    """The one frame that `data` holds; its tensors are copies, aligned and writable."""
    frames: list[Frame] = []
    assembler = FrameAssembler(frames.append)
    for chunk in _chunks(memoryview(data), assembler):
        assembler.get_buffer()[: len(chunk)] = chunk
        assembler.advance(len(chunk))
        if len(frames) > 1:
            break
    if len(frames) != 1 or not assembler.is_between_frames:
        raise InvalidInputError(f"{len(data)} bytes were expected to hold exactly one frame and do not.")
    return frames[0]


def _chunks(data: memoryview, assembler: FrameAssembler) -> Iterator[memoryview]:
    position = 0
    while position < len(data):
        size = min(len(assembler.get_buffer()), len(data) - position)
        yield data[position : position + size]
        position += size


def encode_tensors(tensors: Tensors) -> bytes:
    """Tensors as one frame to keep in a file."""
    return b"".join(encode_frame(AT_REST, 0, None, tensors))


def decode_tensors(data: bytes | bytearray | memoryview) -> dict[str, Array]:
    """What `encode_tensors` was given. Raises InvalidInputError for anything else."""
    return decode_frame(data).tensors
