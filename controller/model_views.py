"""What the API accepts and answers about registering models and variants."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from policies.service import ActivationFormat, Axis

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A file that was uploaded before, see `/v1/uploads`."""
_Files = Annotated[dict[Annotated[str, Field(max_length=255)], Sha256], Field(min_length=1, max_length=4096)]
_Share = Annotated[float, Field(gt=0, le=1)]


class _In(BaseModel):
    model_config = {"extra": "forbid"}


class UploadOut(BaseModel):
    """How far an upload is; go on at `held_bytes`."""

    sha256: str
    held_bytes: int
    is_whole: bool
    max_piece_bytes: int


class ModelIn(_In):
    """A model to register."""

    graph: Annotated[str, Field(max_length=255)]
    """Which of the files is the ONNX graph."""
    files: _Files
    """Path below the model's directory -> hash of an uploaded file: the graph, and the weights that it keeps in other files."""
    sample: Sha256 | None = None
    """An .npz with an array per input of the model; generated if it is not given."""
    axis: Axis | None = None
    """What axis 0 of the inputs means; looked for if it is not given."""
    accuracy: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of right answers, as the caller measured it."""


class PrecisionIn(_In):
    """The same model in fewer bits."""

    kind: Literal["precision"]
    precision: Literal["fp16", "int8", "int8-static"]
    calibration: Sha256 | None = None
    """A calibration set, for `int8-static`."""
    preprocessing: Annotated[str, Field(max_length=200)] | None = None
    """What makes the inputs of inference; by default the step in front of the stage. Must be what made the calibration set."""


class PruneTokensIn(_In):
    """Fewer tokens behind a layer."""

    kind: Literal["prune-tokens"]
    keep: _Share
    after: Annotated[str, Field(max_length=255)] = ""
    """Number of the layer, from 0, or the name of a value; by default a quarter of the way."""
    protect: Annotated[int, Field(ge=0, le=1000)] = 1
    restore: Annotated[str, Field(max_length=255)] = ""
    """Where all tokens are needed again, as `after`; by default nowhere."""


class PruneCacheIn(_In):
    """A decoder that keeps only the cache entries that matter; how many is a knob of its service."""

    kind: Literal["prune-cache"]
    keep: _Share = 0.5
    """With which the saving is measured."""
    protect: Annotated[int, Field(ge=1, le=1000)] = 1


class FileIn(_In):
    """Another ONNX file with the same inputs and outputs."""

    kind: Literal["file"]
    file: Sha256


class VariantIn(_In):
    """A variant to register."""

    suffix: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
    how: Annotated[PrecisionIn | PruneTokensIn | PruneCacheIn | FileIn, Field(discriminator="kind")]
    samples: Sha256
    """An .npz with one or several samples of the base's inputs, on which both are run."""
    labels: Sha256 | None = None
    """An .npz with the right class of each item; then accuracy is the share of them."""
    classes: bool = False
    """The outputs are class scores: compare the strongest class instead of directions."""


class VariantOut(BaseModel):
    name: str
    accuracy: float
    measured_by: Literal["labels", "classes", "cosine", "nothing"]
    """What the accuracy follows from; `nothing`: what it costs shows only over many calls."""
    fidelity: float
    cosine: float
    difference: float | None
    """None where the shapes differ."""
    time_ratio: float
    size_ratio: float
    right: float | None = None
    base_right: float | None = None
    base_accuracy: float
    cache_ratio: float | None = None
    """Bytes of the cache at the keep ratio over those without pruning."""
    services: list[str]
    """Services that may run it from now on."""


class ActivationsIn(_In):
    """How values travel between the shards of a model."""

    format: ActivationFormat
    samples: Sha256 | None = None
    """Needed for anything but fp32: the error is measured on them."""
    classes: bool = False


class ActivationsOut(BaseModel):
    """One model in one stage."""

    service: str
    stage: str
    model: str
    format: ActivationFormat
    kept_accuracy: float
    """What is left of the model's accuracy."""
    cosine: float
    difference: float
    bytes_ratio: float


class DeletedOut(BaseModel):
    model: str
    services: list[str]
    """Services that were served by nothing else, and are gone with it."""
    stages: list[str]
    """SERVICE/STAGE that may not run it any more."""
