"""Graph transforms that are applied to a model when it is registered; each returns a new model."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

from sla.errors import ModelError

CTC_IDS = "rec_ids"
CTC_SCORES = "rec_scores"
_AXES_ARE_INPUTS_SINCE = 18


def append_ctc_head(model: Any) -> Any:
    """Replace the one output of class scores [N, T, C] by `rec_ids` int64 [N, T] and `rec_scores` float32 [N, T].

    The most likely class and its score are all that CTC decoding reads, and thousands of times smaller than the scores. Raises ModelError if
    the model does not have exactly one output with three dimensions.
    """
    outputs = model.graph.output
    if len(outputs) != 1:
        raise ModelError(f"A CTC head needs a model with one output of class scores, not {len(outputs)}.")
    scores = outputs[0]
    rank = len(scores.type.tensor_type.shape.dim)
    if rank not in (0, 3):
        raise ModelError(f"A CTC head needs class scores [N, T, C]; the output {scores.name!r} has {rank} dimensions.")
    taken = {name for node in model.graph.node for name in node.output}
    if not taken.isdisjoint({CTC_IDS, CTC_SCORES}):
        raise ModelError(f"The model already has a value named {CTC_IDS!r} or {CTC_SCORES!r}.")
    headed = onnx.ModelProto()
    headed.CopyFrom(model)
    graph = headed.graph
    graph.node.append(helper.make_node("ArgMax", [scores.name], [CTC_IDS], name="ctc_ids", axis=-1, keepdims=0))
    graph.node.append(_reduce_max(headed, scores.name))
    dims = [_dim(d) for d in scores.type.tensor_type.shape.dim[:2]] or [None, None]
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(CTC_IDS, TensorProto.INT64, dims))
    graph.output.append(helper.make_tensor_value_info(CTC_SCORES, TensorProto.FLOAT, dims))
    graph.value_info.append(scores)
    return headed


def _reduce_max(model: Any, scores: str) -> Any:
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset < _AXES_ARE_INPUTS_SINCE:
        return helper.make_node("ReduceMax", [scores], [CTC_SCORES], name="ctc_scores", axes=[-1], keepdims=0)
    axes = f"{CTC_SCORES}_axes"
    model.graph.initializer.append(helper.make_tensor(axes, TensorProto.INT64, [1], [-1]))
    return helper.make_node("ReduceMax", [scores, axes], [CTC_SCORES], name="ctc_scores", keepdims=0)


def _dim(dim: Any) -> int | str | None:
    return int(dim.dim_value) if dim.HasField("dim_value") else (str(dim.dim_param) or None)
