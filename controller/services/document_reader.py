"""The document reader: a photo of a document and a question in, the answer out."""

from __future__ import annotations

from policies.ids import BlobHash, ModelName, ServiceId, StageName
from policies.service import OnnxStage, PythonStage, ServiceSpec, TensorSpec

SERVICE_ID = ServiceId("document-reader")


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
                name=StageName("detect"), variants=_models("det-tiny", "det-base", "det-small"),
                inputs={"pixels": "det_in"}, outputs={"result": "det_map"}, raw=True,
            ),
            _step("crops"),
            OnnxStage(
                name=StageName("recognise"), variants=_models("rec-tiny", "rec-base", "rec-small"),
                inputs={"pixels": "rec_in"}, outputs={"ids": "rec_ids", "scores": "rec_scores"},
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


STEP_MS = {"prepare": 5.0, "upright": 1.0, "crops": 3.0, "decode": 2.0, "answer": 0.5}


def _step(name: str) -> PythonStage:
    return PythonStage(name=StageName(name), step=f"document.{name}", typical_ms=STEP_MS[name])


def _models(*names: str) -> tuple[ModelName, ...]:
    return tuple(ModelName(name) for name in names)
