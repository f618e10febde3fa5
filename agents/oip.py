"""The Open Inference Protocol v2 as bytes: requests in, responses out, JSON and the binary tensor extension. No I/O.

Inside Tidegate a BYTES tensor is a uint8 array: one string is its bytes, and where the service's interface does not say that
there is exactly one element, a JSON list of strings. A BYTES input also takes a UINT8 tensor (a decoded picture) as it is.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from policies.service import ServiceSpec, TensorSpec
from sla.errors import InvalidInputError, ModelError

MAX_TENSORS = 64
MAX_ELEMENTS = 64 << 20
_LENGTH = struct.Struct("<I")
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(bool), "UINT8": np.dtype("<u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"), "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
}  # fmt: skip
Parameters = dict[str, Any]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Input(msgspec.Struct):
    name: _Name
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=8)]
    datatype: str
    parameters: Parameters = {}
    data: list[Any] | None = None


class _Output(msgspec.Struct):
    name: _Name
    parameters: Parameters = {}


class _Request(msgspec.Struct):
    inputs: Annotated[list[_Input], msgspec.Meta(max_length=MAX_TENSORS)]
    id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    parameters: Parameters = {}
    outputs: Annotated[list[_Output], msgspec.Meta(max_length=MAX_TENSORS)] = []


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request, in Tidegate's tensors."""

    id: str
    tensors: dict[str, np.ndarray]
    outputs: tuple[tuple[str, bool], ...]
    """Names to answer, each with True if it is wanted in binary form."""
    timeout_ms: float | None


def decode_request(spec: ServiceSpec, body: bytes, json_length: int | None) -> InferRequest:
    """The request in `body`; `json_length` is the header Inference-Header-Content-Length, None if there is none.

    Raises InvalidInputError that names the field, what was found, and what is accepted.
    """
    if json_length is not None and not 0 < json_length <= len(body):
        raise _wrong("", f"The Inference-Header-Content-Length is {json_length}, but the body has {len(body)} bytes.")
    try:
        request = msgspec.json.decode(body if json_length is None else body[:json_length], type=_Request)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong("", f"The body is not an inference request: {error}.") from None
    binary = memoryview(body)[json_length:] if json_length is not None else memoryview(b"")
    tensors, used = _tensors(spec, request.inputs, binary)
    if used != len(binary):
        raise _wrong("/inputs", f"The inputs name {used} bytes of binary data, but {len(binary)} came.")
    return InferRequest(
        id=request.id,
        tensors=tensors,
        outputs=_wanted_outputs(spec, request),
        timeout_ms=_timeout_ms(request.parameters),
    )


def encode_response(
    spec: ServiceSpec, request: InferRequest, tensors: Mapping[str, np.ndarray], *, version: str
) -> tuple[bytes, int | None]:
    """The response body, and the length of its JSON part if binary data follows it."""
    specs = {item.name: item for item in spec.outputs}
    outputs: list[dict[str, Any]] = []
    chunks: list[bytes] = []
    for name, in_binary in request.outputs:
        head, data = _output(specs[name], tensors[name], in_binary)
        if isinstance(data, bytes):
            head["parameters"] = {"binary_data_size": len(data)}
            chunks.append(data)
        else:
            head["data"] = data
        outputs.append(head)
    document = {"model_name": spec.id, "model_version": version, "outputs": outputs}
    if request.id:
        document["id"] = request.id
    encoded = msgspec.json.encode(document)
    has_binary = any(in_binary for _, in_binary in request.outputs)
    return (encoded + b"".join(chunks), len(encoded)) if has_binary else (encoded, None)


def metadata(spec: ServiceSpec, *, version: str) -> dict[str, Any]:
    """What a client needs to know to ask."""
    return {
        "name": spec.id,
        "versions": [version],
        "platform": "tidegate_pipeline",
        "inputs": [_described(item) for item in spec.inputs],
        "outputs": [_described(item) for item in spec.outputs],
    }


def _described(item: TensorSpec) -> dict[str, Any]:
    return {"name": item.name, "datatype": item.datatype, "shape": list(item.shape)}


# Inputs


def _tensors(spec: ServiceSpec, inputs: Iterable[_Input], binary: memoryview) -> tuple[dict[str, np.ndarray], int]:
    """The inputs by name, and how much of `binary` they used."""
    specs = {item.name: item for item in spec.inputs}
    tensors: dict[str, np.ndarray] = {}
    used = 0
    for index, given in enumerate(inputs):
        pointer = f"/inputs/{index}"
        wanted = specs.get(given.name)
        if wanted is None or given.name in tensors:
            raise _wrong(
                f"{pointer}/name", f"{spec.id} takes each of its inputs once: {', '.join(specs)}; found {given.name!r}."
            )
        size = _binary_size(given, pointer)
        if size is None:
            tensors[given.name] = _from_json(given, wanted, pointer)
        else:
            if size > len(binary) - used:
                raise _wrong(
                    f"{pointer}/parameters/binary_data_size",
                    f"{size} bytes were announced for {given.name!r}, {len(binary) - used} came.",
                )
            tensors[given.name] = _from_binary(given, wanted, binary[used : used + size], pointer)
            used += size
    missing = [name for name in specs if name not in tensors]
    if missing:
        raise _wrong("/inputs", f"The request lacks the input {missing[0]!r} of {spec.id}.")
    return tensors, used


def _binary_size(given: _Input, pointer: str) -> int | None:
    if "shared_memory_region" in given.parameters:
        raise _wrong(f"{pointer}/parameters", "Shared memory regions are not offered; send the data in the request.")
    size = given.parameters.get("binary_data_size")
    if size is None:
        if given.data is None:
            raise _wrong(
                f"{pointer}/data",
                f"The input {given.name!r} has no data: send `data` or the parameter binary_data_size.",
            )
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or given.data is not None:
        raise _wrong(
            f"{pointer}/parameters/binary_data_size",
            "binary_data_size is a number of bytes that takes the place of `data`.",
        )
    return size


def _from_json(given: _Input, wanted: TensorSpec, pointer: str) -> np.ndarray:
    assert given.data is not None
    if given.datatype == "BYTES":
        elements = list(_flattened(given.data))
        if any(not isinstance(element, str) for element in elements):
            raise _wrong(f"{pointer}/data", f"The elements of the BYTES input {given.name!r} must be strings.")
        return _bytes_tensor(given, wanted, [element.encode() for element in elements], pointer)
    dtype = _dtype(given, wanted, pointer)
    try:
        values = np.asarray(given.data)
    except ValueError:
        raise _wrong(f"{pointer}/data", f"The data of {given.name!r} is nested unevenly.") from None
    allowed = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}[dtype.kind]
    if values.size and values.dtype.kind not in allowed:
        raise _wrong(
            f"{pointer}/data", f"The data of {given.name!r} is not of the datatype {given.datatype} that it names."
        )
    if dtype.kind in "iu" and values.size:
        limits = np.iinfo(dtype)
        if int(values.min()) < limits.min or int(values.max()) > limits.max:
            raise _wrong(f"{pointer}/data", f"A value of {given.name!r} is outside the range of {given.datatype}.")
    with np.errstate(over="ignore"):
        return _shaped(values.astype(dtype), given, wanted, pointer)


def _from_binary(given: _Input, wanted: TensorSpec, data: memoryview, pointer: str) -> np.ndarray:
    if given.datatype == "BYTES":
        return _bytes_tensor(given, wanted, _split_bytes(data, given.name, pointer), pointer)
    dtype = _dtype(given, wanted, pointer)
    if len(data) % dtype.itemsize:
        raise _wrong(
            f"{pointer}/parameters/binary_data_size",
            f"{len(data)} bytes are no whole number of {given.datatype} elements.",
        )
    values = np.frombuffer(data, np.uint8 if dtype.kind == "b" else dtype)
    if dtype.kind == "b":
        if values.size and values.max() > 1:
            raise _wrong(pointer, f"The BOOL input {given.name!r} holds bytes other than 0 and 1.")
        values = values.astype(bool)
    return _shaped(values, given, wanted, pointer)


def _split_bytes(data: memoryview, name: str, pointer: str) -> list[bytes]:
    """Elements that are each preceded by their length in four little-endian bytes."""
    elements, at = [], 0
    while at < len(data):
        if at + 4 > len(data):
            raise _wrong(pointer, f"The binary data of {name!r} ends within an element's length.")
        (length,) = _LENGTH.unpack(data[at : at + 4])
        at += 4
        if at + length > len(data):
            raise _wrong(pointer, f"The binary data of {name!r} ends within an element.")
        elements.append(bytes(data[at : at + length]))
        at += length
    return elements


def _bytes_tensor(given: _Input, wanted: TensorSpec, elements: list[bytes], pointer: str) -> np.ndarray:
    if wanted.datatype != "BYTES":
        raise _wrong(
            f"{pointer}/datatype", f"The input {given.name!r} has datatype {wanted.datatype}, not BYTES.",
        )  # fmt: skip
    if math.prod(given.shape) != len(elements):
        raise _wrong(
            f"{pointer}/shape",
            f"The shape {list(given.shape)} of {given.name!r} does not hold {len(elements)} elements.",
        )
    _check_shape(given, wanted, pointer)
    if _is_one(wanted):
        return np.frombuffer(elements[0], np.uint8)
    try:
        texts = [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise _wrong(pointer, f"The elements of {given.name!r} must be UTF-8 text.") from None
    return np.frombuffer(json.dumps(texts, ensure_ascii=False).encode(), np.uint8)


def _dtype(given: _Input, wanted: TensorSpec, pointer: str) -> np.dtype[Any]:
    dtype = DATATYPES.get(given.datatype)
    if dtype is None:
        raise _wrong(
            f"{pointer}/datatype",
            f"{given.datatype[:20]!r} is not a datatype; accepted are {', '.join(DATATYPES)}, BYTES.",
        )
    if given.datatype != wanted.datatype and not _is_picture(given, wanted):
        raise _wrong(
            f"{pointer}/datatype", f"The input {given.name!r} has datatype {wanted.datatype}, not {given.datatype}."
        )
    return dtype


def _shaped(values: np.ndarray, given: _Input, wanted: TensorSpec, pointer: str) -> np.ndarray:
    if math.prod(given.shape) != values.size or values.size > MAX_ELEMENTS:
        raise _wrong(
            f"{pointer}/shape", f"The shape {list(given.shape)} of {given.name!r} does not hold {values.size} elements."
        )
    if not _is_picture(given, wanted):
        _check_shape(given, wanted, pointer)
    return values.reshape(given.shape)


def _check_shape(given: _Input, wanted: TensorSpec, pointer: str) -> None:
    fits = len(given.shape) == len(wanted.shape) and all(
        want in (-1, have) for have, want in zip(given.shape, wanted.shape, strict=True)
    )
    if not fits:
        raise _wrong(
            f"{pointer}/shape",
            f"The input {given.name!r} has shape {list(wanted.shape)} (-1: any size), not {list(given.shape)}.",
        )


def _is_picture(given: _Input, wanted: TensorSpec) -> bool:
    return wanted.datatype == "BYTES" and given.datatype == "UINT8" and len(given.shape) == 3


def _is_one(item: TensorSpec) -> bool:
    return math.prod(item.shape) == 1


def _flattened(data: list[Any], depth: int = 0) -> Iterable[Any]:
    for item in data:
        if isinstance(item, list) and depth < 8:
            yield from _flattened(item, depth + 1)
        else:
            yield item


# Outputs


def _wanted_outputs(spec: ServiceSpec, request: _Request) -> tuple[tuple[str, bool], ...]:
    by_default = request.parameters.get("binary_data_output") is True
    if not request.outputs:
        return tuple((item.name, by_default) for item in spec.outputs)
    known = {item.name for item in spec.outputs}
    wanted: dict[str, bool] = {}
    for index, output in enumerate(request.outputs):
        if output.name not in known or output.name in wanted:
            raise _wrong(
                f"/outputs/{index}/name",
                f"{spec.id} gives each of its outputs once: {', '.join(sorted(known))}; found {output.name!r}.",
            )
        unknown = {"classification", "shared_memory_region"} & output.parameters.keys()
        if unknown:
            raise _wrong(f"/outputs/{index}/parameters", f"The output parameter {unknown.pop()!r} is not offered.")
        wanted[output.name] = output.parameters.get("binary_data", by_default) is True
    return tuple(wanted.items())


def _timeout_ms(parameters: Parameters) -> float | None:
    """The request parameter `timeout`, in microseconds as Triton has it."""
    timeout = parameters.get("timeout")
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int) or not 0 < timeout <= 3600 * 10**6:
        raise _wrong(
            "/parameters/timeout", "The parameter timeout is a number of microseconds between 1 and an hour's."
        )
    return timeout / 1000


def _output(item: TensorSpec, tensor: np.ndarray, in_binary: bool) -> tuple[dict[str, Any], bytes | list[Any]]:
    if item.datatype == "BYTES":
        elements = _elements(item, tensor)
        head = {"name": item.name, "datatype": "BYTES", "shape": list(item.shape) if _is_one(item) else [len(elements)]}
        if in_binary:
            return head, b"".join(_LENGTH.pack(len(element)) + element for element in elements)
        try:
            return head, [element.decode() for element in elements]
        except UnicodeDecodeError:
            raise InvalidInputError(
                f"The output {item.name!r} is not text; ask for it with the parameter binary_data.", pointer="/outputs"
            ) from None
    dtype = DATATYPES[item.datatype]
    values = np.ascontiguousarray(tensor, dtype=dtype)
    head = {"name": item.name, "datatype": item.datatype, "shape": list(values.shape)}
    return head, values.tobytes() if in_binary else values.reshape(-1).tolist()


def _elements(item: TensorSpec, tensor: np.ndarray) -> list[bytes]:
    content = tensor.astype(np.uint8, copy=False).tobytes()
    if _is_one(item):
        return [content]
    try:
        return [text.encode() for text in msgspec.json.decode(content, type=list[str])]
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ModelError(f"The pipeline's output {item.name!r} is not a JSON list of strings.") from None


def _wrong(pointer: str, sentence: str) -> InvalidInputError:
    return InvalidInputError(sentence, pointer=pointer)
