"""What is served: models with their measured blocks, and pipelines of stages."""

from __future__ import annotations

from typing import Literal

import msgspec

from policies.ids import BlobHash, ModelName, ServiceId, StageName
from policies.roofline import BlockWork, DeviceCalibration

Axis = Literal["patch", "token"]
ActivationFormat = Literal["fp32", "fp16", "int8"]
"""How large float32 values travel between two shards of a chain."""


class BlockProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous run of a model's graph that is never cut inside. Times are of one core of the profiling machine."""

    name: str
    fixed_ms: float
    """Cost of one run that does not depend on the number of items."""
    per_item_ms: float
    """Added cost of each item (crop, sequence, picture)."""
    param_bytes: int
    cut_bytes_per_item: int
    """Bytes that cross the cut after this block, per item (for the last block: the model's outputs)."""
    file_bytes: int = 0
    """Size of the block as a file, which is what is pushed to an agent; 0 if it was not noted."""
    cut_bytes_as: dict[ActivationFormat, int] = {}
    """The same bytes per item where values travel in fewer bits; a format that is not noted is as large as fp32."""
    work: BlockWork | None = None
    """What it computes and moves for one item; None if it was not counted."""


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One registered ONNX model: what it is, where it can be cut, and what each block costs."""

    name: ModelName
    sha256: BlobHash
    blocks: tuple[BlockProfile, ...]
    input_bytes_per_item: int
    split_axis: Axis | None = None
    """The axis along which the graph was proven to act item by item; None if it was not."""
    activation_bytes: int = 0
    """Peak of live activations for one item, as measured."""
    accuracy: float = 1.0
    """Share of the reference answers that this variant gets right, in [0, 1]."""
    atomic_reason: str = ""
    """Why there is only one block, if there is only one."""
    split_until: int | None = None
    """The first block that mixes items: those before it were proven to act item by item. None if that was not looked for."""
    shard_limit_bytes: int = 0
    """No file of its blocks may be larger, so it must be placed as several shards; 0 if all of it fits into one file."""
    knobs: dict[str, tuple[tuple[float, float], ...]] = {}
    """Graph input of a knob -> (value, share of the accuracy that is kept there), as measured."""
    timed_on: DeviceCalibration | None = None
    """Speeds of the machine on which the blocks were timed, measured then; None if they were not."""


class BlockTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one block on one kind of device; see `BlockProfile`."""

    fixed_ms: float
    per_item_ms: float


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What the blocks of a model take on one type of device, timed on one of them and believed of all."""

    device_type: str
    blocks: tuple[BlockTime, ...]
    provider: str
    """The execution provider that ran."""
    agent: str
    """On which it was timed."""
    measured_at_s: float
    """Seconds since 1970, the controller's clock."""
    runs: int
    """Fewest runs of any block."""
    spread: float
    """How far the times lie above the quickest runs, relative, of the whole model."""
    peak_bytes: int = 0
    """Largest growth of the agent's memory while one block was loaded and ran; 0 if it was not seen."""


class Knob(msgspec.Struct, frozen=True, kw_only=True):
    """A float32 scalar input of a stage's graphs that is turned while requests run: the ingress feeds it, not the client."""

    name: str
    input: str
    """Name of the graph input; every variant of the stage has it."""
    default: float
    low: float
    high: float
    better: Literal["high", "low"] = "high"
    """The end at which the model is most accurate."""

    @property
    def prunes(self) -> bool:
        """Whether it is a share that is kept (or dropped), which may follow the memory bandwidth."""
        return 0.0 <= self.low < self.high <= 1.0


class OnnxStage(msgspec.Struct, frozen=True, kw_only=True, tag="onnx"):
    """Runs one of several interchangeable models."""

    name: StageName
    variants: tuple[ModelName, ...]
    inputs: dict[str, str]
    """Graph input name -> name of a tensor of the request."""
    outputs: dict[str, str]
    """Graph output name -> name that the tensor gets in the request."""
    axis: Axis | None = None
    """Axis 0 of every input is this axis; None if the stage always has one item."""
    items: float = 1.0
    """Typical number of items per request; prediction uses it until it was measured."""
    raw: bool = False
    """The inputs are raw user data (pixels, text) in the sense of the contract's `privacy`."""
    activations: ActivationFormat = "fp32"
    """How values travel between its shards; anything but fp32 costs accuracy, see `kept_accuracy`."""
    kept_accuracy: dict[ModelName, float] = {}
    """What the format of the activations leaves of a variant's accuracy, as measured, in [0, 1]; all of it where nothing is noted."""

    knobs: tuple[Knob, ...] = ()
    """What can be turned without loading anything again."""

    @property
    def yields(self) -> bool:
        """Whether its runs count as text in an accelerator's queue, where pictures go ahead of them."""
        return self.axis == "token"

    def accuracy(self, model: ModelProfile) -> float:
        """Accuracy of a variant in this stage. Counted also where a plan cuts nowhere, so it errs on the low side."""
        return model.accuracy * self.kept_accuracy.get(model.name, 1.0)


class PythonStage(msgspec.Struct, frozen=True, kw_only=True, tag="python"):
    """A small trusted step that runs at the ingress; `step` names an entry of the agents' step registry."""

    name: StageName
    step: str
    typical_ms: float = 1.0


Stage = OnnxStage | PythonStage


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the public interface, in Open Inference Protocol v2 terms (-1: any size)."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ServiceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline: tensors in by name, stages in order, tensors out by name."""

    id: ServiceId
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    stages: tuple[Stage, ...]
    assets: dict[str, BlobHash] = {}
    """Files that Python steps need (vocabularies, tokenizers) by name; agents with an ingress fetch them by hash."""
    sample: BlobHash | None = None
    """A request with its known answer (tensors `in:NAME` and `out:NAME`): the canary of every new plan."""

    def onnx_stages(self) -> tuple[OnnxStage, ...]:
        """The stages that can be sharded, in order."""
        return tuple(stage for stage in self.stages if isinstance(stage, OnnxStage))
