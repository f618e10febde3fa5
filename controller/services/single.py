"""A service around any ONNX model: what `tidegate model add` makes.

Usually it has one stage. Where the graph acts item by item only up to some block (pooling over tiles, attention over all patches), it gets two:
`items`, which may be split over devices along its axis, and `rest`, in front of which the items are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx

from controller.models.cache_accuracy import KEEP_KNOB
from controller.models.graph import build_graph, read_file, read_model
from controller.models.kv_cache import KEEP_RATIO, KEPT_ENTRIES
from controller.models.packages import Progress
from controller.models.registry import ModelRegistry
from controller.models.samples import generate_sample, likely_axis
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
    knobs: Mapping[str, tuple[tuple[float, float], ...]] | None = None
    """See `ModelProfile.knobs`."""


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
    spec = service_of(profile, data)
    stages, written = spec.onnx_stages(), tuple(output.name for output in spec.outputs)
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
    return msgspec.structs.replace(spec, stages=stages), profile, profiles


def service_of(profile: ModelProfile, data: bytes) -> ServiceSpec:
    """A service of one stage around a registered model; `data` is its file.

    What a decoder with a pruned cache keeps is a knob of the service and no tensor that clients send.
    """
    graph = onnx.load_from_string(data).graph
    weights = {initializer.name for initializer in graph.initializer}
    knobs = (KEEP_KNOB,) if _is_cache_pruned(graph) else ()
    fed = weights | {knob.input for knob in knobs}
    inputs = tuple(_spec(value) for value in graph.input if value.name not in fed)
    outputs = tuple(_spec(value) for value in graph.output)
    read, written = (tuple(spec.name for spec in specs) for specs in (inputs, outputs))
    stage = msgspec.structs.replace(_stage("model", profile.name, read, written, profile.split_axis), knobs=knobs)
    return ServiceSpec(id=ServiceId(profile.name), inputs=inputs, outputs=outputs, stages=(stage,))


def _is_cache_pruned(graph: onnx.GraphProto) -> bool:
    """Whether `kv_cache.prune_cache` made it."""
    return any(value.name == KEEP_RATIO for value in graph.input) and any(
        value.name == KEPT_ENTRIES for value in graph.output
    )


def _examined(
    registry: ModelRegistry, name: ModelName, source: bytes | Path, data: bytes, progress: Progress, given: Given
) -> tuple[ModelProfile, Axis | None]:
    """The model under the axis that was given or that its inputs suggest; without one if it cannot run on several items."""

    def add(axis: Axis | None) -> ModelProfile:
        return registry.add(
            name, source, axis=axis, samples=sample, accuracy=given.accuracy, knobs=given.knobs, progress=progress
        )  # fmt: skip

    sample = given.sample or _unpruned_sample(name, source, data)
    axis = given.axis or likely_axis(data)
    if sample is not None and any(array.ndim == 0 for array in sample.values()):
        axis = None  # A single number has no items.
    if axis is not None:
        try:
            return add(axis), axis
        except ModelError as error:
            progress(f"{name} does not run on several items ({error}); it is looked at with one")
    return add(None), None


def _unpruned_sample(name: ModelName, source: bytes | Path, data: bytes) -> Arrays | None:
    """For a decoder with a pruned cache: everything is kept, so that its golden outputs do not hang on close scores. None for others."""
    if KEEP_RATIO.encode() not in data:
        return None
    model = read_model(source, name)[0]
    if not _is_cache_pruned(model.graph):
        return None
    return {**generate_sample(build_graph(model, name), 1, name), KEEP_RATIO: np.array(KEEP_KNOB.high, np.float32)}


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
