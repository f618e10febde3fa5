"""A service around any ONNX model: what `tidegate model add` makes.

Usually it has one stage. Where the graph acts item by item only up to some block (pooling over tiles, attention over all patches), it gets two:
`items`, which may be split over devices along its axis, and `rest`, in front of which the items are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx

from controller.models.graph import read_file
from controller.models.packages import Progress
from controller.models.registry import ModelRegistry
from controller.models.samples import likely_axis
from controller.models.sessions import Arrays
from policies.ids import ModelName, ServiceId, StageName
from policies.plan import Span
from policies.service import Axis, ModelProfile, OnnxStage, ServiceSpec, TensorSpec
from sla.errors import ModelError

_DATATYPES = {
    onnx.TensorProto.BOOL: "BOOL", onnx.TensorProto.UINT8: "UINT8", onnx.TensorProto.UINT16: "UINT16",
    onnx.TensorProto.UINT32: "UINT32", onnx.TensorProto.UINT64: "UINT64", onnx.TensorProto.INT8: "INT8",
    onnx.TensorProto.INT16: "INT16", onnx.TensorProto.INT32: "INT32", onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.FLOAT16: "FP16", onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.DOUBLE: "FP64",
}  # fmt: skip
_WORTH_SPLITTING = 0.2
"""Share of the run time that must be item by item for a stage of its own."""


@dataclass(frozen=True, slots=True)
class Given:
    """What its owner says of a model beside its file."""

    sample: Arrays | None = None
    axis: Axis | None = None
    accuracy: float = 1.0


def single_stage_service(
    registry: ModelRegistry,
    name: ModelName,
    source: bytes | Path,
    progress: Progress = lambda sentence: None,
    given: Given | None = None,
) -> tuple[ServiceSpec, ModelProfile, dict[ModelName, ModelProfile]]:
    """The service, its model's profile, and the profiles of this model and of those that its stages run.

    Raises ModelError; the registry holds nothing new then.
    """
    data = source if isinstance(source, bytes) else read_file(source)
    profile, axis = _examined(registry, name, source, data, progress, given or Given())
    model = onnx.load_from_string(data)
    weights = {initializer.name for initializer in model.graph.initializer}
    inputs = tuple(_spec(value) for value in model.graph.input if value.name not in weights)
    outputs = tuple(_spec(value) for value in model.graph.output)
    read, written = tuple(spec.name for spec in inputs), tuple(spec.name for spec in outputs)
    stages: tuple[OnnxStage, ...] = (_stage("model", name, read, written, profile.split_axis),)
    profiles = {name: profile}
    until = profile.split_until or 0
    is_one_file = profile.shard_limit_bytes == 0
    if (
        axis is not None
        and profile.split_axis is None
        and is_one_file
        and _item_share(profile, until) >= _WORTH_SPLITTING
    ):
        progress(f"the items of {name} mix in block {profile.blocks[until].name}: it becomes two stages")
        stages, profiles = _gathered(registry, profile, axis, written)
    return ServiceSpec(id=ServiceId(name), inputs=inputs, outputs=outputs, stages=stages), profile, profiles


def _examined(
    registry: ModelRegistry, name: ModelName, source: bytes | Path, data: bytes, progress: Progress, given: Given
) -> tuple[ModelProfile, Axis | None]:
    """The model under the axis that was given or that its inputs suggest; without one if it cannot run on several items."""

    def add(axis: Axis | None) -> ModelProfile:
        return registry.add(
            name, source, axis=axis, samples=given.sample, accuracy=given.accuracy, progress=progress
        )  # fmt: skip

    axis = given.axis or likely_axis(data)
    if given.sample is not None and any(array.ndim == 0 for array in given.sample.values()):
        axis = None  # A single number has no items.
    if axis is not None:
        try:
            return add(axis), axis
        except ModelError as error:
            progress(f"{name} does not run on several items ({error}); it is looked at with one")
    return add(None), None


def _gathered(
    registry: ModelRegistry, profile: ModelProfile, axis: Axis, outputs: tuple[str, ...]
) -> tuple[tuple[OnnxStage, ...], dict[ModelName, ModelProfile]]:
    until, count = profile.split_until or 0, len(profile.blocks)
    stages: list[OnnxStage] = []
    profiles = {profile.name: profile}
    for stage, blocks in (("items", Span(0, until)), ("rest", Span(until, count))):
        name = ModelName(f"{profile.name}.{stage}")
        part = registry.part(profile.name, blocks)
        own = axis if stage == "items" else None
        # Several items for the first part are generated as they were for the whole.
        samples = None if own else part.sample
        accuracy = profile.accuracy if stage == "rest" else 1.0
        profiles[name] = registry.add(name, part.content, axis=own, samples=samples, accuracy=accuracy)
        split = profiles[name].split_axis
        stages.append(_stage(stage, name, part.inputs, outputs if stage == "rest" else part.outputs, split))
    return tuple(stages), profiles


def _item_share(profile: ModelProfile, until: int) -> float:
    times = [block.fixed_ms + block.per_item_ms for block in profile.blocks]
    return sum(times[:until]) / max(sum(times), 1e-9) if until < len(times) else 0.0


def _stage(
    name: str, model: ModelName, inputs: tuple[str, ...], outputs: tuple[str, ...], axis: Axis | None
) -> OnnxStage:
    return OnnxStage(
        name=StageName(name), variants=(model,), inputs={key: key for key in inputs}, outputs={key: key for key in outputs},
        axis=axis, raw=name != "rest",
    )  # fmt: skip


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else -1 for dim in tensor.shape.dim)
    return TensorSpec(name=value.name, datatype=_DATATYPES.get(tensor.elem_type, "FP32"), shape=shape)
