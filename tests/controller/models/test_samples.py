"""Generated samples run on the graphs they were generated for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from controller.models.graph import build_graph
from controller.models.samples import check_sample, first_item, generate_sample
from sla.errors import ModelError


def test_open_dimensions_get_usual_sizes_and_fixed_ones_are_kept(build: Any) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Relu", ["s"], ["z"])]
    model = build(nodes, [("x", ["n", 3, None, 64]), ("s", ["n", "t", 8])], [("y", None), ("z", None)])
    sample = generate_sample(build_graph(model, "it"), 4, "it")
    assert sample["x"].shape == (4, 3, 224, 64)
    assert sample["s"].shape == (4, 16, 8)
    assert first_item(sample)["x"].shape == (1, 3, 224, 64)
    np.testing.assert_array_equal(sample["x"], generate_sample(build_graph(model, "it"), 4, "it")["x"])


def test_ids_stay_within_the_tables_that_they_index(build: Any) -> None:
    nodes = [
        helper.make_node("Cast", ["ids"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "wide"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask_f"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask_f", "axes"], ["mask3"]),
        helper.make_node("Mul", ["rows", "mask3"], ["y"]),
    ]
    inputs = [("ids", ["n", "t"], TensorProto.INT32), ("attention_mask", ["n", "t"], TensorProto.INT64)]
    weights = {"table": np.zeros((5, 3), np.float32), "axes": np.array([2])}
    sample = generate_sample(build_graph(build(nodes, inputs, [("y", None)], **weights), "it"), 4, "it")
    assert sample["ids"].dtype == np.int32
    assert 0 <= sample["ids"].min() <= sample["ids"].max() == 4
    assert sample["attention_mask"].min() == 1


def test_inputs_that_cannot_be_guessed_are_refused(build: Any) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    for value in (("x", ["n"], TensorProto.STRING), ("x", ["n", 1 << 20, 1 << 20])):
        with pytest.raises(ModelError, match="give"):
            generate_sample(build_graph(build(nodes, [value], [("y", None)]), "it"), 1, "it")


def test_a_callers_sample_must_have_the_inputs_of_the_model(mlp: Any) -> None:
    graph = build_graph(mlp, "it")
    with pytest.raises(ModelError, match="the model reads x"):
        check_sample(graph, {"z": np.ones(1)}, "it")
    with pytest.raises(ModelError, match="larger than"):
        check_sample(graph, {"x": np.ones((1, 1 << 24))}, "it")
