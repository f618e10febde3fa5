"""Any model as a service: its axis is found, and where items mix in the middle a gather is placed there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from controller.models.registry import ModelRegistry
from controller.models.samples import likely_axis
from controller.models.sessions import open_session, run
from controller.services.reference import ReferencePipeline
from controller.services.single import single_stage_service
from policies.ids import ModelName

WIDTH, LAYERS = 96, 4


def pooling_model(*, pools: bool = True) -> Any:
    """Layers over tiles, then (if it pools) a mean over all tiles that is added to each, then layers."""
    rng = np.random.default_rng(1)
    nodes, weights, last = [], [], "x"

    def layers(stem: str) -> None:
        nonlocal last
        for layer in range(LAYERS):
            name = f"{stem}{layer}"
            weights.append(
                numpy_helper.from_array(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8, f"w_{name}")
            )
            nodes.append(helper.make_node("MatMul", [last, f"w_{name}"], [f"m_{name}"]))
            nodes.append(helper.make_node("Tanh", [f"m_{name}"], [f"h_{name}"]))
            last = f"h_{name}"

    layers("tile")
    if pools:
        nodes.append(helper.make_node("ReduceMean", [last], ["mean"], axes=[0], keepdims=1))
        nodes.append(helper.make_node("Add", [last, "mean"], ["mixed"]))
        last = "mixed"
    layers("after")
    shape = ["tiles", 16, WIDTH]
    graph = helper.make_graph(
        nodes, "pooling", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, shape)], weights,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.fixture
def registry(tmp_path: Path) -> ModelRegistry:
    return ModelRegistry(tmp_path / "registry")


def test_a_model_that_acts_item_by_item_is_one_stage_with_its_axis(registry: ModelRegistry) -> None:
    lines: list[str] = []
    data = pooling_model(pools=False).SerializeToString()
    spec, profile, models = single_stage_service(registry, ModelName("plain"), data, lines.append)
    assert profile.split_axis == "patch"
    assert [(stage.name, stage.axis) for stage in spec.onnx_stages()] == [("model", "patch")]
    assert set(models) == {"plain"}
    assert any("proven" in line for line in lines)


def test_where_items_mix_they_are_gathered(registry: ModelRegistry) -> None:
    model = pooling_model()
    spec, profile, models = single_stage_service(registry, ModelName("pooled"), model.SerializeToString())
    assert profile.split_axis is None
    assert 0 < (profile.split_until or 0) < len(profile.blocks)
    assert [(stage.name, stage.axis) for stage in spec.onnx_stages()] == [("items", "patch"), ("rest", None)]
    assert set(models) == {"pooled", "pooled.items", "pooled.rest"}
    sample = {"x": np.random.default_rng(2).standard_normal((5, 16, WIDTH)).astype(np.float32)}
    files = {name: registry.blob_path(models[ModelName(name)].sha256) for name in ("pooled.items", "pooled.rest")}
    parts = {name: path for name, path in files.items() if path is not None}
    outputs = [output.name for output in spec.outputs]
    expected = run(open_session(model.SerializeToString(), "whole"), sample, outputs, "whole")
    found = ReferencePipeline(spec, parts, {}).run(sample).tensors
    for name in outputs:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-6)


def test_an_axis_that_is_not_open_or_not_common_is_not_tried() -> None:
    fixed = pooling_model()
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    assert likely_axis(fixed.SerializeToString()) is None
    assert likely_axis(pooling_model().SerializeToString()) == "patch"
    assert likely_axis(b"no model") is None
