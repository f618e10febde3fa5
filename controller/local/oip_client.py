"""The client's half of the Open Inference Protocol v2 with the binary tensor extension: BYTES in, anything out."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import httpx

LENGTH_HEADER = "Inference-Header-Content-Length"


def encode_request(inputs: Mapping[str, list[bytes]]) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request whose inputs are BYTES tensors; all outputs are asked for as binary."""
    described, parts = [], []
    for name, elements in inputs.items():
        data = b"".join(struct.pack("<I", len(element)) + element for element in elements)
        described.append(
            {"name": name, "datatype": "BYTES", "shape": [len(elements)], "parameters": {"binary_data_size": len(data)}}
        )
        parts.append(data)
    header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    headers = {LENGTH_HEADER: str(len(header)), "Content-Type": "application/octet-stream"}
    return header + b"".join(parts), headers


def bytes_output(response: httpx.Response, name: str) -> list[bytes]:
    """The elements of a BYTES output. Raises KeyError when the response has no such output."""
    length = response.headers.get(LENGTH_HEADER)
    header = json.loads(response.content[: int(length)] if length else response.content)
    at = int(length) if length else len(response.content)
    for output in header["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if output["name"] == name:
            return _elements(output, response.content[at : at + (size or 0)], size)
        at += size or 0
    raise KeyError(name)


def _elements(output: dict[str, Any], data: bytes, size: int | None) -> list[bytes]:
    if size is None:
        return [str(value).encode() for value in output["data"]]
    elements, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        elements.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return elements
