"""Adding models through the API: samples from their owner, weights in other files, and everything that must be refused in one sentence."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from controller.core import Controller
from controller.models import extraction, graph, sample_files
from controller.models.folders import check_member
from controller.models.sharding_zoo import fetch_specimen, specimen_sample
from policies.plan import Span
from sla.errors import ModelError

Rows = Callable[[int, int], np.ndarray]
Pack = Callable[..., bytes]
LIMIT = 40_000


async def add(api: httpx.AsyncClient, name: str, **wanted: Any) -> httpx.Response:
    return await api.post(f"/v1/models/{name}", json=wanted)


async def test_a_model_whose_sample_cannot_be_generated_is_added_with_its_owners(
    api: httpx.AsyncClient, send: Any, pack: Pack, zoo_cache: Path
) -> None:
    """Generated inputs break silero-vad: it takes one of two sampling rates, and a state of a certain shape."""
    content = fetch_specimen("silero-vad", zoo_cache).read_bytes()
    refused = await api.put("/v1/models/vad", content=content)
    assert refused.status_code == 422
    assert refused.json()["detail"].endswith("This sample was generated; give one of your own with --sample.")
    files = {"vad.onnx": await send(content)}
    sample = await send(pack(**specimen_sample("silero-vad")))
    added = await add(api, "vad", graph="vad.onnx", files=files, sample=sample, accuracy=0.9)
    assert added.status_code == 201, added.text
    assert added.json()["accuracy"] == 0.9
    assert added.json()["atomic_reason"]
    (service,) = (await api.get("/v1/services")).json()
    assert {tensor["name"]: tensor["shape"] for tensor in service["inputs"]}["sr"] == []


async def test_the_axis_and_the_accuracy_are_the_owners(
    api: httpx.AsyncClient, send: Any, pack: Pack, rows: Rows, dense: Any
) -> None:
    files = {"m.onnx": await send(dense.SerializeToString())}
    sample = await send(pack(x=rows(1, 3)))
    added = (await add(api, "m", graph="m.onnx", files=files, sample=sample, axis="token", accuracy=0.75)).json()
    assert (added["split_axis"], added["accuracy"], len(added["blocks"])) == ("token", 0.75, 6)


class Mean:
    """Pickles into something that NumPy would have to execute."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def bomb() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("x.npy", bytes(3 << 20))
    return packed.getvalue()


BAD_SAMPLES: list[tuple[Callable[[Pack, Rows], bytes], str]] = [
    (lambda pack, rows: b"no archive", "is not an .npz file of numbers"),
    (lambda pack, rows: pack(x=np.array([Mean()], dtype=object)), "pickled objects, which are never read"),
    (lambda pack, rows: pack(x=np.array(["text"])), "is not an array of numbers"),
    (lambda pack, rows: pack(x=np.full((1, 64), 1j)), "is not an array of numbers"),
    (lambda pack, rows: pack(), "holds no array"),
    (lambda pack, rows: pack(x=rows(1, 2))[:-30], "is not an .npz file of numbers"),
    (lambda pack, rows: bomb(), "bytes when unpacked"),
    (lambda pack, rows: pack(z=rows(1, 2)), "the model reads x"),
    (lambda pack, rows: pack(x=rows(1, 2), y=rows(1, 2)), "the model reads x"),
    (lambda pack, rows: pack(x=np.ones((2, 3), np.float32)), "cannot run on a sample"),
    (lambda pack, rows: pack(x=np.ones((2, 64), np.int32)), "cannot run on a sample"),
    (lambda pack, rows: pack(**{"0/x": rows(1, 1), "1/x": rows(2, 1)}), "not on 2 samples"),
    (lambda pack, rows: pack(**{"0/x": rows(1, 1), "1/z": rows(2, 1)}), "others have x"),
]


async def test_a_bad_sample_is_one_clear_sentence(
    api: httpx.AsyncClient, send: Any, pack: Pack, rows: Rows, dense: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sample_files.read_arrays, "__kwdefaults__", {"at_most": 2 << 20})
    files = {"m.onnx": await send(dense.SerializeToString())}
    for content, words in BAD_SAMPLES:
        refused = await add(api, "m", graph="m.onnx", files=files, sample=await send(content(pack, rows)))
        assert refused.status_code == 422, refused.text
        detail = refused.json()["detail"]
        assert words in detail, detail
        assert "\n" not in detail
        assert detail.endswith(".")
        assert str(Path.home()) not in detail
    assert "executed" not in capsys.readouterr().out
    assert (await api.get("/v1/models")).json() == []


# --- weights in other files


async def test_weights_beside_the_graph_are_drawn_in(
    api: httpx.AsyncClient, send: Any, dense_files: dict[str, bytes], controller: Controller
) -> None:
    files = {name: await send(content) for name, content in dense_files.items()}
    added = await add(api, "m", graph="dense.onnx", files=files)
    assert added.status_code == 201, added.text
    assert controller.registry.profile("m").shard_limit_bytes == 0
    assert not list((controller.settings.directory / "models" / "folders").iterdir())


async def test_a_model_that_no_file_can_hold_lives_in_the_registry(
    api: httpx.AsyncClient, send: Any, dense_files: dict[str, bytes], controller: Controller, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Here "too large" begins at 40 KB instead of 2 GB."""
    for module in (graph, extraction):
        monkeypatch.setattr(module, "MAX_MODEL_BYTES", LIMIT)
    nested = {
        "sub/dense.onnx": dense_files["dense.onnx"],
        "sub/weights.bin": dense_files["weights.bin"],
    }
    files = {name: await send(content) for name, content in nested.items()}
    added = await add(api, "large", graph="sub/dense.onnx", files=files)
    assert added.status_code == 201, added.text
    assert controller.registry.profile("large").shard_limit_bytes == LIMIT
    folders = controller.settings.directory / "models" / "folders"
    assert len(list(folders.iterdir())) == 1
    for path in (controller.settings.directory / "models" / "uploads").iterdir():
        path.unlink()  # Uploads go after a day; the registry keeps what it needs.
    assert controller.registry.shard_file("large", Span(0, 2)).size_bytes < LIMIT
    with pytest.raises(ModelError, match="must be placed as smaller shards"):
        controller.registry.shard_file("large", Span(0, 6))
    samples = await send(await _samples(controller))
    variant = {"suffix": "fp16", "how": {"kind": "precision", "precision": "fp16"}, "samples": samples}
    refused = await api.post("/v1/models/large/variants", json=variant)
    assert (refused.status_code, "larger than one file" in refused.text) == (422, True)
    assert (await api.delete("/v1/models/large")).status_code == 200
    assert not list(folders.iterdir())


async def _samples(controller: Controller) -> bytes:
    packed = io.BytesIO()
    np.savez(packed, x=np.ones((1, 64), np.float32))
    return packed.getvalue()


LEADS_ELSEWHERE = [
    "../weights.bin",
    "/etc/weights.bin",
    "a/../../weights.bin",
    "C:weights.bin",
    "a\\weights.bin",
    "",
    ".",
    "a//b",
    "./a",
    "a\x00b",
    "x" * 256,
    "/".join("abcdefghij"),
    "a\nb",
]


@pytest.mark.parametrize("name", LEADS_ELSEWHERE)
def test_a_file_name_that_leads_elsewhere_names_no_file(name: str) -> None:
    with pytest.raises(ModelError, match="cannot name a file of a model"):
        check_member(name)


async def test_files_with_such_names_are_refused(
    api: httpx.AsyncClient, send: Any, dense_files: dict[str, bytes], controller: Controller
) -> None:
    graph, weights = await send(dense_files["dense.onnx"]), await send(dense_files["weights.bin"])
    for name in LEADS_ELSEWHERE:
        refused = await add(api, "m", graph="dense.onnx", files={"dense.onnx": graph, name: weights})
        assert refused.status_code == 422, refused.text
    assert (await api.get("/v1/models")).json() == []
    folders = controller.settings.directory / "models" / "folders"
    assert not folders.is_dir() or not list(folders.iterdir())


async def test_a_graph_that_names_weights_elsewhere_is_refused(
    api: httpx.AsyncClient, send: Any, dense_files: dict[str, bytes]
) -> None:
    for location in ("../secret", "/etc/passwd", "..\\secret", "C:\\secret", "a/../../secret"):
        await _refused_for(api, send, dense_files, location)


async def _refused_for(api: httpx.AsyncClient, send: Any, dense_files: dict[str, bytes], location: str) -> None:
    model = onnx.load_model_from_string(dense_files["dense.onnx"])
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    content = model.SerializeToString()
    refused = await add(api, "m", graph="m.onnx", files={"m.onnx": await send(content)})
    assert (refused.status_code, "outside of the model's own directory" in refused.text) == (422, True)
    direct = await api.put("/v1/models/m", content=content)
    assert (direct.status_code, "keeps weights in other files" in direct.text) == (422, True)


async def test_a_small_file_that_unfolds_into_many_weights_is_refused(
    api: httpx.AsyncClient, send: Any, dense_files: dict[str, bytes]
) -> None:
    """Sixty tensors that all name the same 16 KB; a model of terabytes could be claimed with a few of them."""
    model = onnx.load_model_from_string(dense_files["dense.onnx"])
    for copy in range(60):
        model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
        model.graph.initializer[-1].name = f"again{copy}"
    files = {"m.onnx": await send(model.SerializeToString()), "weights.bin": await send(dense_files["weights.bin"])}
    refused = await add(api, "m", graph="m.onnx", files=files)
    assert (refused.status_code, "claims 1081344 bytes of weights in files that hold 98304" in refused.text) == (
        422,
        True,
    )
    assert (await api.get("/readyz")).json() == {"ready": True}


async def test_what_was_not_uploaded_or_does_not_fit_together_is_named(
    api: httpx.AsyncClient, send: Any, dense_files: dict[str, bytes]
) -> None:
    dense = await send(dense_files["dense.onnx"])
    missing = await add(api, "m", graph="m.onnx", files={"m.onnx": "0" * 64})
    assert (missing.status_code, "upload it to /v1/uploads/" in missing.text) == (404, True)
    other = await add(api, "m", graph="n.onnx", files={"m.onnx": dense})
    assert (other.status_code, "none of the files" in other.text) == (422, True)
    clash = await add(api, "m", graph="a", files={"a": dense, "a/b": dense})
    assert (clash.status_code, "a file and a directory" in clash.text) == (422, True)
    alone = await add(api, "m", graph="m.onnx", files={"m.onnx": dense})
    assert (alone.status_code, "weights" in alone.text) == (422, True)
    for wrong in (
        {},
        {"graph": "m.onnx", "files": {}},
        {"graph": "m", "files": {"m": "x"}},
        {"graph": "m", "files": {"m": dense}, "accuracy": 2},
    ):
        assert (await add(api, "m", **wrong)).status_code == 422
    assert (await api.get("/v1/models")).json() == []


# --- bad input: the controller says what is wrong, with the operator, and stays up


def built(nodes: list[Any], inputs: list[Any], outputs: list[Any], **weights: Any) -> bytes:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in (*inputs, *outputs)]
    graph = helper.make_graph(
        nodes, "bad", values[: len(inputs)], values[len(inputs) :],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


BAD: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("not an ONNX model",)),
    "text": (b"hello, this is no model", ("not an ONNX model",)),
    "cycle": (
        built([helper.make_node("Add", ["x", "b"], ["a"], name="first"), helper.make_node("Relu", ["a"], ["b"], name="second")],
              [("x", [2])], [("b", [2])]),
        ("cycle", "first"),
    ),
    "nan": (
        built([helper.make_node("Neg", ["w"], ["n"]), helper.make_node("Sqrt", ["n"], ["root"], name="the-root"),
               helper.make_node("Add", ["x", "root"], ["y"])], [("x", [2])], [("y", [2])], w=np.ones(2, np.float32)),
        ("NaN", "the-root"),
    ),
    "nothing": (
        built([helper.make_node("NonZero", ["x"], ["at"], name="find"), helper.make_node("Sub", ["x", "x"], ["none"]),
               helper.make_node("Compress", ["x", "never"], ["y"], name="drop", axis=0)], [("x", ["n"])], [("y", [None])],
              never=np.zeros(3, np.bool_)),
        ("with no element", "drop"),
    ),
    "unmade": (built([helper.make_node("Relu", ["ghost"], ["y"])], [("x", [2])], [("y", [2])]), ("'ghost'",)),
    "unknown operator": (
        built([helper.make_node("Frobnicate", ["x"], ["y"])], [("x", [2])], [("y", [2])]), ("refused by ONNX Runtime", "Frobnicate"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
async def test_a_bad_model_is_one_sentence_and_the_controller_stays_up(
    api: httpx.AsyncClient, controller: Controller, dense: Any, kind: str
) -> None:
    content, words = BAD[kind]
    refused = await api.put("/v1/models/bad", content=content)
    assert refused.status_code == 422, refused.text
    detail = refused.json()["detail"]
    assert all(word in detail for word in words), detail
    assert "\n" not in detail
    assert (await api.get("/readyz")).json() == {"ready": True}
    assert (await api.get("/v1/models")).json() == []
    assert controller.loop.faults == 0
    assert (await api.put("/v1/models/good", content=dense.SerializeToString())).status_code == 201


async def test_a_truncated_model_is_refused(api: httpx.AsyncClient, dense: Any) -> None:
    content = dense.SerializeToString()
    for share in (0.1, 0.5, 0.9, 0.999):
        refused = await api.put("/v1/models/cut", content=content[: int(share * len(content))])
        assert refused.status_code == 422
    assert (await api.get("/readyz")).json() == {"ready": True}


async def test_a_graph_of_many_operators_is_cut_in_time(api: httpx.AsyncClient) -> None:
    """3,000 operators here; `python -m benchmarks sharding` measures 10,000 (2.4 s)."""
    nodes = [helper.make_node("Tanh" if at % 2 else "Neg", [f"v{at}"], [f"v{at + 1}"]) for at in range(3000)]
    added = await api.put("/v1/models/long", content=built(nodes, [("v0", [2, 8])], [("v3000", [2, 8])]), timeout=30)
    assert added.status_code == 201, added.text
    assert 1 < len(added.json()["blocks"]) <= 8
