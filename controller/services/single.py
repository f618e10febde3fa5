"""A service of one stage around any ONNX model: what `tidegate model add` makes."""

from __future__ import annotations

import onnx

from controller.models.registry import ModelRegistry
from policies.ids import ModelName, ServiceId, StageName
from policies.service import ModelProfile, OnnxStage, ServiceSpec, TensorSpec

_DATATYPES = {
    onnx.TensorProto.BOOL: "BOOL", onnx.TensorProto.UINT8: "UINT8", onnx.TensorProto.UINT16: "UINT16",
    onnx.TensorProto.UINT32: "UINT32", onnx.TensorProto.UINT64: "UINT64", onnx.TensorProto.INT8: "INT8",
    onnx.TensorProto.INT16: "INT16", onnx.TensorProto.INT32: "INT32", onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.FLOAT16: "FP16", onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.DOUBLE: "FP64",
}  # fmt: skip


def single_stage_service(registry: ModelRegistry, name: ModelName, data: bytes) -> tuple[ServiceSpec, ModelProfile]:
    """The service and its model's profile. Raises ModelError; the registry holds nothing new then."""
    profile = registry.add(name, data)
    graph = onnx.load_from_string(data).graph
    weights = {initializer.name for initializer in graph.initializer}
    inputs = tuple(_spec(value) for value in graph.input if value.name not in weights)
    outputs = tuple(_spec(value) for value in graph.output)
    stage = OnnxStage(
        name=StageName("model"),
        variants=(name,),
        inputs={spec.name: spec.name for spec in inputs},
        outputs={spec.name: spec.name for spec in outputs},
        axis=profile.split_axis,
        raw=True,
    )
    return ServiceSpec(id=ServiceId(name), inputs=inputs, outputs=outputs, stages=(stage,)), profile


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else -1 for dim in tensor.shape.dim)
    return TensorSpec(name=value.name, datatype=_DATATYPES.get(tensor.elem_type, "FP32"), shape=shape)
