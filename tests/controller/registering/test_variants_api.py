"""Variants, formats of activations and removing, through the API: what is measured is what the gate holds plans to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest

from benchmarks.vlm import build_vlm
from controller.core import Controller
from controller.models.calibration import make_set, save_set
from controller.models.sessions import open_session, run
from policies.ids import ModelName, ServiceId
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane

Rows = Callable[[int, int], np.ndarray]
Pack = Callable[..., bytes]


@pytest.fixture
def add(api: httpx.AsyncClient, dense: Any) -> Callable[..., Any]:
    """Register the dense model as `m`."""

    async def added(name: str = "m") -> dict[str, Any]:
        response = await api.put(f"/v1/models/{name}", content=dense.SerializeToString())
        assert response.status_code == 201, response.text
        model: dict[str, Any] = response.json()
        return model

    return added


@pytest.fixture
def vary(api: httpx.AsyncClient, send: Any, pack: Pack, rows: Rows) -> Callable[..., Any]:
    """Ask for a variant of `m`, measured on three samples."""

    async def asked(suffix: str, how: dict[str, Any], base: str = "m", **wanted: Any) -> httpx.Response:
        samples = await send(pack(**{f"{at}/x": rows(at, 8) for at in range(3)}))
        return await api.post(
            f"/v1/models/{base}/variants", json={"suffix": suffix, "how": how, "samples": samples, **wanted}
        )

    return asked


async def variants_of(api: httpx.AsyncClient, service: str = "m") -> list[str]:
    services = (await api.get("/v1/services")).json()
    return next(s["stages"][0]["variants"] for s in services if s["id"] == service)


def right_labels(dense: Any, rows: Rows) -> np.ndarray:
    """What the model itself says of the three samples."""
    session = open_session(dense.SerializeToString(), "it")
    return np.concatenate([run(session, {"x": rows(at, 8)}, ["y"], "it")["y"].argmax(axis=-1) for at in range(3)])


async def test_fewer_bits_are_one_more_choice_with_what_they_cost(
    api: httpx.AsyncClient, add: Any, vary: Any, controller: Controller
) -> None:
    await add()
    half = (await vary("fp16", {"kind": "precision", "precision": "fp16"})).json()
    byte = (await vary("int8", {"kind": "precision", "precision": "int8"})).json()
    assert half["accuracy"] > byte["accuracy"] > 0.9
    assert half["measured_by"] == "cosine"
    assert half["size_ratio"] < 0.65
    assert (half["services"], half["base_accuracy"]) == (["m"], 1.0)
    assert await variants_of(api) == ["m", "m.fp16", "m.int8"]
    assert controller.desired.models[ModelName("m.int8")].accuracy == byte["accuracy"]
    assert controller.desired.models[ModelName("m.int8")].split_axis == "patch"


async def test_with_labels_accuracy_is_the_share_that_is_right(
    add: Any, vary: Any, send: Any, pack: Pack, dense: Any, rows: Rows
) -> None:
    await add()
    labels = right_labels(dense, rows)
    labels[0] = (labels[0] + 1) % 64
    how = {"kind": "precision", "precision": "fp16"}
    made = (await vary("fp16", how, labels=await send(pack(labels=labels)))).json()
    assert (made["measured_by"], made["accuracy"], made["base_right"]) == ("labels", 23 / 24, 23 / 24)
    for wrong, words in (
        (labels[:-1], "23 labels for 24 items"),
        (labels.astype(np.float32), "array `labels` of integers"),
    ):
        refused = await vary("bad", how, labels=await send(pack(labels=wrong)))
        assert (refused.status_code, words in refused.text) == (422, True), refused.text


def calibration(rows: Rows, directory: Path) -> bytes:
    scenes = {
        "indoor": [{"x": rows(at, 1)} for at in range(200)],
        "outdoor": [{"x": rows(at, 1)} for at in range(200, 260)],
    }
    path = directory / "set.npz"
    save_set(make_set(scenes, {"indoor": 0.4, "outdoor": 0.6}, preprocessing="scaled-v1"), path)
    return path.read_bytes()


async def test_static_int8_learns_from_a_calibration_set_of_the_same_preprocessing(
    add: Any, vary: Any, send: Any, rows: Rows, tmp_path: Path
) -> None:
    await add()
    kind = {"kind": "precision", "precision": "int8-static", "calibration": await send(calibration(rows, tmp_path))}
    made = await vary("static", {**kind, "preprocessing": "scaled-v1"})
    assert made.status_code == 201, made.text
    assert made.json()["accuracy"] > 0.9
    for how, words in (
        ({**kind, "preprocessing": "scaled-v2"}, "made by the preprocessing 'scaled-v1'"),
        (kind, "Say what makes the inputs of m"),
        ({"kind": "precision", "precision": "int8-static"}, "needs a calibration set"),
        ({**kind, "calibration": await send(b"no set"), "preprocessing": "x"}, "is not a calibration set"),
    ):
        refused = await vary("other", how)
        assert (refused.status_code, words in refused.json()["detail"]) == (422, True), refused.text


async def test_another_file_must_read_and_write_the_same(
    api: httpx.AsyncClient, add: Any, vary: Any, send: Any, dense: Any, tiny_onnx: bytes
) -> None:
    await add()
    noisy = onnx.ModelProto()
    noisy.CopyFrom(dense)
    weights = noisy.graph.initializer[0]
    values = onnx.numpy_helper.to_array(weights) * np.float32(1.2)
    weights.CopyFrom(onnx.numpy_helper.from_array(values, weights.name))
    made = (await vary("small", {"kind": "file", "file": await send(noisy.SerializeToString())})).json()
    assert 0.9 < made["accuracy"] < 1
    for content, words in ((tiny_onnx, "cannot run on a sample"), (b"text", "is not an ONNX model")):
        refused = await vary("other", {"kind": "file", "file": await send(content)})
        assert (refused.status_code, words in refused.text) == (422, True), refused.text
    renamed = onnx.ModelProto()
    renamed.CopyFrom(dense)
    renamed.graph.output[0].name = renamed.graph.node[-1].output[0] = "z"
    refused = await vary("other", {"kind": "file", "file": await send(renamed.SerializeToString())})
    assert "its outputs are z (float), not y (float)" in refused.json()["detail"]
    assert await variants_of(api) == ["m", "m.small"]


async def test_tokens_are_pruned_behind_a_layer(api: httpx.AsyncClient, send: Any, pack: Pack, vary: Any) -> None:
    vision = build_vlm().vision.SerializeToString()
    assert (await api.put("/v1/models/vision", content=vision)).status_code == 201
    tiles = np.random.default_rng(1).standard_normal((2, 3, 32, 32)).astype(np.float32)
    samples = await send(pack(tiles=tiles))
    name = (
        "vision"
        if any(s["id"] == "vision" and len(s["stages"]) == 1 for s in (await api.get("/v1/services")).json())
        else ""
    )
    assert name
    how = {"kind": "prune-tokens", "keep": 0.7, "after": "0", "protect": 0, "restore": "1"}
    wanted = {"suffix": "fewer", "how": how, "samples": samples}
    made = await api.post("/v1/models/vision/variants", json=wanted)
    assert made.status_code == 201, made.text
    assert 0.5 < made.json()["accuracy"] < 1
    for changed, words in (
        ({"after": "9"}, "9 is none of them"),
        ({"after": "nowhere"}, "produces 'nowhere'"),
        ({"keep": 0}, "keep"),
    ):
        refused = await api.post(
            "/v1/models/vision/variants", json={**wanted, "suffix": "bad", "how": {**how, **changed}}
        )
        assert (refused.status_code, words in refused.text) == (422, True), refused.text


async def test_a_model_without_known_layers_must_be_told_where(add: Any, vary: Any) -> None:
    await add()
    refused = await vary("fewer", {"kind": "prune-tokens", "keep": 0.5, "after": "3"})
    assert (refused.status_code, "layers that its graph tells" in refused.text) == (422, True), refused.text


@pytest.mark.parametrize(
    ("base", "wanted", "status"),
    [
        ("ghost", {}, 404),
        ("m", {"suffix": "Bad Suffix"}, 422),
        ("m", {"suffix": "a.b"}, 422),
        ("m", {"how": {"kind": "magic"}}, 422),
        ("m", {"how": {"kind": "precision", "precision": "int4"}}, 422),
        ("m", {"samples": "0" * 64}, 404),
        ("m", {"samples": "no hash"}, 422),
        ("m", {"extra": 1}, 422),
    ],
)
async def test_what_makes_no_sense_is_refused_and_changes_nothing(
    api: httpx.AsyncClient, add: Any, vary: Any, base: str, wanted: dict[str, Any], status: int
) -> None:
    await add()
    asked = {"suffix": "x", "how": {"kind": "precision", "precision": "fp16"}, **wanted}
    refused = await vary(asked.pop("suffix"), asked.pop("how"), base, **asked)
    assert refused.status_code == status, refused.text
    assert await variants_of(api) == ["m"]


async def test_the_same_model_again_keeps_its_variants_and_another_one_does_not(
    api: httpx.AsyncClient, add: Any, vary: Any, tiny_onnx: bytes
) -> None:
    await add()
    await vary("fp16", {"kind": "precision", "precision": "fp16"})
    await add()
    assert await variants_of(api) == ["m", "m.fp16"]
    assert (await api.put("/v1/models/m", content=tiny_onnx)).status_code == 201
    assert await variants_of(api) == ["m"]
    assert (await api.put("/v1/models/m.fp16", content=tiny_onnx)).status_code == 409  # it is still a model
    assert (await api.delete("/v1/models/m.fp16")).status_code == 200


# --- activations


async def test_the_format_of_activations_is_set_with_its_measured_error(
    api: httpx.AsyncClient,
    add: Any,
    vary: Any,
    send: Any,
    pack: Pack,
    rows: Rows,
    controller: Controller,
    make_sla: Any,
) -> None:
    await add()
    await vary("fp16", {"kind": "precision", "precision": "fp16"})
    samples = await send(pack(x=rows(5, 32)))
    set_to = (await api.put("/v1/models/m/activations", json={"format": "int8", "samples": samples})).json()
    assert [(one["service"], one["stage"], one["model"]) for one in set_to] == [
        ("m", "model", "m"),
        ("m", "model", "m.fp16"),
    ]
    assert 0.99 < set_to[0]["kept_accuracy"] < 1
    assert set_to[0]["bytes_ratio"] < 0.3
    assert set_to[1]["kept_accuracy"] == 1  # its values are float16 already, and travel as they are
    stage = controller.desired.specs[ServiceId("m")].onnx_stages()[0]
    assert stage.activations == "int8"
    assert stage.accuracy(controller.desired.models[ModelName("m")]) == set_to[0]["kept_accuracy"]
    added = (await vary("int8", {"kind": "precision", "precision": "int8"})).json()
    stage = controller.desired.specs[ServiceId("m")].onnx_stages()[0]
    assert stage.kept_accuracy[ModelName(added["name"])] < 1
    assert (await api.put("/v1/models/m/activations", json={"format": "int8"})).status_code == 422
    plain = (await api.put("/v1/models/m/activations", json={"format": "fp32"})).json()
    assert {one["kept_accuracy"] for one in plain} == {1.0}
    await api.post("/v1/slas", content=make_sla("m", accuracy_floor=1))
    refused = await api.put("/v1/models/m/activations", json={"format": "int8", "samples": samples})
    assert (refused.status_code, "below the floor 1 of" in refused.text) == (409, True), refused.text
    assert controller.desired.specs[ServiceId("m")].onnx_stages()[0].activations == "fp32"


# --- removing


async def test_a_model_goes_with_its_service_and_variants_unless_it_is_promised(
    api: httpx.AsyncClient, add: Any, vary: Any, make_sla: Any, controller: Controller, make_controller: Any
) -> None:
    await add()
    await vary("fp16", {"kind": "precision", "precision": "fp16"})
    await api.post("/v1/slas", content=make_sla("m"))
    refused = await api.delete("/v1/models/m")
    assert refused.status_code == 409
    assert "tidegate sla delete m" in refused.json()["detail"]
    await api.delete("/v1/slas/m")
    gone = (await api.delete("/v1/models/m")).json()
    assert (gone["model"], gone["services"]) == ("m", ["m"])
    assert (await api.get("/v1/models")).json() == (await api.get("/v1/services")).json() == []
    blobs = controller.settings.directory / "models" / "blobs"
    assert not [path for path in blobs.rglob("*") if path.is_file()]
    assert (await api.delete("/v1/models/m")).status_code == 404
    again: Controller = make_controller()
    await again.start()
    assert again.models() == []


def plan_with(model: str, blocks: int) -> Plan:
    lane = make_lane("model", model, None, WHOLE_AXIS, (("agent", Span(0, blocks)),))  # type: ignore[arg-type]
    stage = StagePlan(stage=lane.shards[0].stage, model=ModelName(model), axis=None, lanes=(lane,))
    return Plan(service_id=ServiceId("m"), epoch=1, stages=(stage,))


async def test_a_variant_goes_unless_the_running_plan_uses_it(
    api: httpx.AsyncClient, add: Any, vary: Any, make_sla: Any, controller: Controller
) -> None:
    await add()
    for suffix, precision in (("fp16", "fp16"), ("int8", "int8")):
        await vary(suffix, {"kind": "precision", "precision": precision})
    await api.post("/v1/slas", content=make_sla("m"))
    await controller.state.put_plan("m", plan_with("m.int8", 6), None, at_s=1.0)
    await controller.state.set_running("m", 1)
    await controller.desired.load()
    refused = await api.delete("/v1/models/m.int8")
    assert refused.status_code == 409
    assert "tidegate intent add m --only model=m --yes" in refused.json()["detail"]
    gone = (await api.delete("/v1/models/m.fp16")).json()
    assert gone["stages"] == ["m/model"]
    assert await variants_of(api) == ["m", "m.int8"]
    assert "m.fp16" not in {model["name"] for model in (await api.get("/v1/models")).json()}


async def test_a_model_that_another_service_needs_stays(
    api: httpx.AsyncClient, add: Any, controller: Controller
) -> None:
    await add()
    spec = controller.desired.specs[ServiceId("m")]
    other = type(spec)(id=ServiceId("other"), inputs=spec.inputs, outputs=spec.outputs, stages=spec.stages)
    await controller.desired.put_service(other, {})
    refused = await api.delete("/v1/models/m")
    assert (refused.status_code, "Stage model of the service other needs m" in refused.text) == (409, True)


async def test_a_variant_brings_the_assets_of_its_base(
    controller: Controller, add: Any, vary: Any, api: httpx.AsyncClient
) -> None:
    await add()
    spec = controller.desired.specs[ServiceId("m")]
    blob = controller.registry.add_asset(b"symbols")
    with_asset = type(spec)(
        id=spec.id, inputs=spec.inputs, outputs=spec.outputs, stages=spec.stages, assets={"charset/m": blob}
    )
    await controller.desired.put_service(with_asset, {})
    await vary("fp16", {"kind": "precision", "precision": "fp16"})
    assert controller.desired.specs[ServiceId("m")].assets == {"charset/m": blob, "charset/m.fp16": blob}
    await api.delete("/v1/models/m.fp16")
    assert controller.desired.specs[ServiceId("m")].assets == {"charset/m": blob}


async def test_progress_is_told_as_events(api: httpx.AsyncClient, add: Any, vary: Any) -> None:
    await add()
    await vary("fp16", {"kind": "precision", "precision": "fp16"})
    texts = [event["text"] for event in (await api.get("/v1/events")).json() if event["service"] == "m"]
    for words in ("making m.fp16", "comparing m.fp16 with m on 3 samples", "m.fp16 is a variant of m"):
        assert any(words in text for text in texts), texts


def cached_decoder() -> onnx.ModelProto:
    """One layer of attention over a cache: x [n, 1, 16] and past.key, past.value [n, 1, p, 16] -> y, present.key, present.value."""
    rng, make = np.random.default_rng(8), onnx.helper.make_node
    kinds = ("query", "key", "value")
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal((16, 16)).astype(np.float32) / 4, f"w_{kind}")
        for kind in kinds
    ]
    weights.append(onnx.numpy_helper.from_array(np.array([1]), "heads"))
    nodes = []
    for kind in kinds:
        nodes += [
            make("MatMul", ["x", f"w_{kind}"], [f"{kind}_flat"]),
            make("Unsqueeze", [f"{kind}_flat", "heads"], [f"{kind}_new"]),
        ]
    nodes += [make("Concat", [f"past.{kind}", f"{kind}_new"], [f"present.{kind}"], axis=2) for kind in kinds[1:]]
    nodes += [
        make("Transpose", ["present.key"], ["turned"], perm=[0, 1, 3, 2]),
        make("MatMul", ["query_new", "turned"], ["scores"]),
        make("Softmax", ["scores"], ["weights"], axis=-1),
        make("MatMul", ["weights", "present.value"], ["mixed"]),
        make("Squeeze", ["mixed", "heads"], ["y"]),
    ]

    def value(name: str, dims: list[Any]) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims)

    cache = {kind: ["n", 1, "p", 16] for kind in kinds[1:]}
    inputs = [value("x", ["n", 1, 16]), *(value(f"past.{kind}", dims) for kind, dims in cache.items())]
    outputs = [value("y", ["n", 1, 16]), *(value(f"present.{kind}", ["n", 1, "all", 16]) for kind in cache)]
    graph = onnx.helper.make_graph(nodes, "decoder", inputs, outputs, weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)


async def test_a_decoder_with_a_pruned_cache_is_a_service_of_its_own(
    api: httpx.AsyncClient, send: Any, pack: Pack, add: Any, vary: Any
) -> None:
    rng = np.random.default_rng(1)
    sample = {"x": rng.standard_normal((1, 1, 16))} | {
        f"past.{k}": rng.standard_normal((1, 1, 19, 16)) for k in ("key", "value")
    }
    samples = await send(pack(**{key: array.astype(np.float32) for key, array in sample.items()}))
    files = {"d.onnx": await send(cached_decoder().SerializeToString())}
    added = await api.post("/v1/models/decoder", json={"graph": "d.onnx", "files": files, "sample": samples})
    assert added.status_code == 201, added.text
    wanted = {"suffix": "pruned", "how": {"kind": "prune-cache", "keep": 0.5}, "samples": samples}
    made = await api.post("/v1/models/decoder/variants", json=wanted)
    assert made.status_code == 201, made.text
    out = made.json()
    assert (out["cache_ratio"], out["measured_by"], out["services"]) == (0.5, "nothing", ["decoder.pruned"])
    assert out["fidelity"] == pytest.approx(1)
    services = {s["id"]: s for s in (await api.get("/v1/services")).json()}
    # What it keeps is no tensor that clients send, but a knob that is turned while it serves.
    assert {tensor["name"] for tensor in services["decoder.pruned"]["inputs"]} == set(sample)
    assert [knob["input"] for knob in services["decoder.pruned"]["stages"][0]["knobs"]] == ["keep_ratio"]
    assert services["decoder"]["stages"][0]["variants"] == ["decoder"]
    assert (await api.delete("/v1/models/decoder")).status_code == 200
    assert (await api.delete("/v1/models/decoder.pruned")).status_code == 200
    await add()
    refused = await vary("pruned", {"kind": "prune-cache"})
    assert (refused.status_code, "no pairs of cache outputs" in refused.text) == (422, True)
