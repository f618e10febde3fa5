"""The Open Inference Protocol codec: what a client says is what the pipeline gets, and back."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from agents.oip import DATATYPES, decode_request, encode_response, metadata
from policies.ids import ServiceId
from policies.service import ServiceSpec, TensorSpec
from sla.errors import InvalidInputError, ModelError


def spec(inputs: list[TensorSpec], outputs: list[TensorSpec] | None = None) -> ServiceSpec:
    return ServiceSpec(id=ServiceId("s"), inputs=tuple(inputs), outputs=tuple(outputs or inputs), stages=())


def tensor(name: str, datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=shape)


READER = spec(
    [tensor("image", "BYTES", 1), tensor("question", "BYTES", 1)],
    [tensor("answer", "BYTES", 1), tensor("lines", "BYTES", -1), tensor("confidence", "FP32", 1)],
)
ANSWER = {
    "answer": np.frombuffer("42 €".encode(), np.uint8),
    "lines": np.frombuffer(json.dumps(["Total: 42 €", ""]).encode(), np.uint8),
    "confidence": np.array([0.5], np.float32),
}


def body(inputs: list[dict], **more: object) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def json_input(name: str, datatype: str, shape: list[int], data: object) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


@st.composite
def any_tensor(draw: st.DrawFn) -> tuple[str, np.ndarray]:
    datatype = draw(st.sampled_from(sorted(DATATYPES)))
    shape = draw(npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))
    elements = {"allow_nan": False} if DATATYPES[datatype].kind == "f" else None
    return datatype, draw(npst.arrays(DATATYPES[datatype], shape, elements=elements))


@given(any_tensor())
def test_binary_tensors_arrive_bit_by_bit_and_return_so(sample):
    datatype, values = sample
    service = spec([tensor("t", datatype, *[-1] * values.ndim)])
    raw = values.tobytes()
    head = {
        "name": "t",
        "datatype": datatype,
        "shape": list(values.shape),
        "parameters": {"binary_data_size": len(raw)},
    }
    document = body([head], parameters={"binary_data_output": True})
    request = decode_request(service, document + raw, len(document))
    np.testing.assert_array_equal(request.tensors["t"], values)
    assert request.tensors["t"].dtype == values.dtype
    content, length = encode_response(service, request, request.tensors, version="1")
    (output,) = json.loads(content[:length])["outputs"]
    assert (output["shape"], output["parameters"]) == (list(values.shape), {"binary_data_size": len(raw)})
    assert content[length:] == raw


@given(any_tensor().filter(lambda sample: np.all(np.isfinite(sample[1].astype(float)))))
def test_json_tensors_arrive_with_the_same_values_nested_or_flat(sample):
    datatype, values = sample
    service = spec([tensor("t", datatype, *[-1] * values.ndim)])
    for data in (values.tolist(), values.reshape(-1).tolist()):
        request = decode_request(service, body([json_input("t", datatype, list(values.shape), data)]), None)
        np.testing.assert_array_equal(request.tensors["t"], values)
    content, length = encode_response(service, request, request.tensors, version="1")
    assert length is None
    np.testing.assert_array_equal(np.array(json.loads(content)["outputs"][0]["data"], values.dtype), values.reshape(-1))


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=1), st.binary(max_size=40))
def test_binary_bytes_elements_are_preceded_by_their_lengths(image, question):
    raw = [struct.pack("<I", len(element)) + element for element in (image[0], question)]
    document = body(
        [
            {"name": name, "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(part)}}
            for name, part in zip(("image", "question"), raw, strict=True)
        ]
    )
    request = decode_request(READER, document + b"".join(raw), len(document))
    assert request.tensors["image"].tobytes() == image[0]
    assert request.tensors["question"].tobytes() == question


@given(st.lists(st.text(max_size=20), max_size=5))
def test_lists_of_strings_are_json_inside_and_elements_outside(texts):
    service = spec([tensor("texts", "BYTES", -1)])
    request = decode_request(service, body([json_input("texts", "BYTES", [len(texts)], texts)]), None)
    assert json.loads(request.tensors["texts"].tobytes()) == texts
    content, _ = encode_response(service, request, request.tensors, version="1")
    output = json.loads(content)["outputs"][0]
    assert (output["data"], output["shape"]) == (texts, [len(texts)])


def test_a_response_in_json():
    request = decode_request(
        READER,
        body([json_input("image", "BYTES", [1], ["x"]), json_input("question", "BYTES", [1], ["q"])], id="7"),
        None,
    )
    content, length = encode_response(READER, request, ANSWER, version="1")
    assert length is None
    assert json.loads(content) == {
        "model_name": "s", "model_version": "1", "id": "7",
        "outputs": [
            {"name": "answer", "datatype": "BYTES", "shape": [1], "data": ["42 €"]},
            {"name": "lines", "datatype": "BYTES", "shape": [2], "data": ["Total: 42 €", ""]},
            {"name": "confidence", "datatype": "FP32", "shape": [1], "data": [0.5]},
        ],
    }  # fmt: skip


def test_only_the_outputs_that_were_asked_for_in_the_form_that_was_asked_for():
    wanted = [{"name": "lines", "parameters": {"binary_data": True}}, {"name": "confidence"}]
    inputs = [json_input("image", "BYTES", [1], ["x"]), json_input("question", "BYTES", [1], ["q"])]
    request = decode_request(READER, body(inputs, outputs=wanted), None)
    content, length = encode_response(READER, request, ANSWER, version="1")
    lines, confidence = json.loads(content[:length])["outputs"]
    first = "Total: 42 €".encode()
    assert content[length:] == struct.pack("<I", len(first)) + first + struct.pack("<I", 0)
    assert lines["parameters"] == {"binary_data_size": len(content) - length}
    assert confidence["data"] == [0.5]


def test_a_picture_may_stand_in_for_an_image_file():
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    inputs = [json_input("image", "UINT8", [2, 4, 3], picture.tolist()), json_input("question", "BYTES", [1], ["q"])]
    np.testing.assert_array_equal(decode_request(READER, body(inputs), None).tensors["image"], picture)


def test_the_timeout_parameter_is_in_microseconds():
    service = spec([tensor("t", "FP32", -1)])
    inputs = [json_input("t", "FP32", [1], [1.0])]
    assert decode_request(service, body(inputs, parameters={"timeout": 1_500_000}), None).timeout_ms == 1500.0
    assert decode_request(service, body(inputs), None).timeout_ms is None


def test_an_output_that_is_not_text_must_be_asked_for_in_binary_form():
    service = spec([tensor("file", "BYTES", 1)])
    request = decode_request(service, body([json_input("file", "BYTES", [1], ["x"])]), None)
    with pytest.raises(InvalidInputError, match="binary_data"):
        encode_response(service, request, {"file": np.array([0xFF, 0xFE], np.uint8)}, version="1")


def test_a_pipeline_that_breaks_its_own_interface_is_no_fault_of_the_client():
    service = spec([tensor("texts", "BYTES", -1)])
    request = decode_request(service, body([json_input("texts", "BYTES", [0], [])]), None)
    with pytest.raises(ModelError, match="not a JSON list"):
        encode_response(service, request, {"texts": np.array([1], np.uint8)}, version="1")


_T = [tensor("t", "FP32", -1, 2)]
BAD = {
    "not an inference request": b"{",
    "missing required field": b"{}",
    "lacks the input 't'": body([]),
    "takes each of its inputs once": body([json_input("u", "FP32", [1, 2], [1, 2])]),
    "found 't'": body([json_input("t", "FP32", [1, 2], [1, 2])] * 2),
    "has datatype FP32, not INT8": body([json_input("t", "INT8", [1, 2], [1, 2])]),
    "not a datatype": body([json_input("t", "FP8", [1, 2], [1, 2])]),
    "does not hold 3 elements": body([json_input("t", "FP32", [1, 2], [1, 2, 3])]),
    r"has shape \[-1, 2\]": body([json_input("t", "FP32", [2], [1, 2])]),
    "nested unevenly": body([json_input("t", "FP32", [1, 2], [[1, 2], [3]])]),
    "not of the datatype": body([json_input("t", "FP32", [1, 2], ["1", "2"])]),
    "no data": body([{"name": "t", "datatype": "FP32", "shape": [1, 2]}]),
    "Shared memory": body([json_input("t", "FP32", [1, 2], [1, 2]) | {"parameters": {"shared_memory_region": "r"}}]),
    "8 bytes were announced": body([{"name": "t", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}]),
    "takes the place of": body([json_input("t", "FP32", [1, 2], [1, 2]) | {"parameters": {"binary_data_size": 8}}]),
    "gives each of its outputs once": body([json_input("t", "FP32", [1, 2], [1, 2])], outputs=[{"name": "z"}]),
    "'classification' is not offered": body(
        [json_input("t", "FP32", [1, 2], [1, 2])], outputs=[{"name": "t", "parameters": {"classification": 3}}]
    ),
    "number of microseconds": body([json_input("t", "FP32", [1, 2], [1, 2])], parameters={"timeout": -1}),
}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_bad_requests_are_refused_with_a_reason(words):
    with pytest.raises(InvalidInputError, match=words):
        decode_request(spec(_T), BAD[words], None)


@pytest.mark.parametrize(
    ("datatype", "values"), [("UINT8", [256]), ("INT8", [-129]), ("INT64", [1.5]), ("BOOL", [2]), ("UINT64", [-1]), ("BYTES", [1])]
)  # fmt: skip
def test_values_out_of_range_are_refused(datatype, values):
    with pytest.raises(InvalidInputError):
        decode_request(spec([tensor("t", datatype, -1)]), body([json_input("t", datatype, [1], values)]), None)


@pytest.mark.parametrize("raw", [b"\x05\0\0\0abcd", b"\x01\0", b"\xff\xff\xff\xffx"])
def test_torn_binary_strings_are_refused(raw):
    head = {"name": "t", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}}
    document = body([head])
    with pytest.raises(InvalidInputError, match="ends within"):
        decode_request(spec([tensor("t", "BYTES", 1)]), document + raw, len(document))


@given(st.binary(max_size=200), st.none() | st.integers(-5, 300))
def test_noise_is_refused_and_never_crashes(noise, length):
    with pytest.raises(InvalidInputError):
        decode_request(READER, noise, length)


def test_metadata_names_the_interface():
    assert metadata(READER, version="1")["outputs"][1] == {"name": "lines", "datatype": "BYTES", "shape": [-1]}
