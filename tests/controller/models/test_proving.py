"""What counts as the same, and which axes are believed to be independent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from controller.models.graph import build_graph
from controller.models.proving import difference, prove_split
from controller.models.samples import generate_sample
from controller.models.sessions import Arrays, open_session, run


def prove(model: Any, sample: Arrays | None = None) -> tuple[bool, str]:
    graph = build_graph(model, "it")
    sample = generate_sample(graph, 4, "it") if sample is None else sample
    session = open_session(model.SerializeToString(), "it")
    return prove_split(graph, session, sample, run(session, sample, graph.outputs, "it"), "it")


def test_independent_items_are_proven(mlp: Any) -> None:
    proven, sentence = prove(mlp)
    assert proven
    assert sentence.startswith("proven")


@pytest.mark.parametrize("mixing", ["Softmax", "CumSum", "Slice"])
def test_items_that_influence_each_other_or_know_their_place_are_not(mixing: str, build: Any) -> None:
    weights = {
        "zero": np.array(0),
        "stride": np.array([[1.0], [2.0], [3.0], [4.0]], np.float32),
        "start": np.array([0]),
        "axes": np.array([0]),
    }
    nodes = {
        "Softmax": [helper.make_node("Softmax", ["x"], ["y"], axis=0)],
        "CumSum": [helper.make_node("CumSum", ["x", "zero"], ["y"])],
        "Slice": [
            helper.make_node("Shape", ["x"], ["size"], start=0, end=1),
            helper.make_node("Slice", ["stride", "start", "size", "axes"], ["place"]),
            helper.make_node("Mul", ["x", "place"], ["y"]),
        ],
    }[mixing]
    proven, sentence = prove(build(nodes, [("x", ["n", 8])], [("y", ["n", 8])], **weights))
    assert not proven
    assert "running items apart changes the result" in sentence


def test_equal_items_prove_nothing(build: Any) -> None:
    model = build([helper.make_node("Softmax", ["x"], ["y"], axis=0)], [("x", ["n", 8])], [("y", ["n", 8])])
    proven, sentence = prove(model, {"x": np.ones((4, 8), np.float32)})
    assert not proven
    assert "alike" in sentence


def test_outputs_without_items_prove_nothing(build: Any) -> None:
    model = build([helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], [("x", ["n", 8])], [("y", [])])
    proven, sentence = prove(model)
    assert not proven
    assert "first axis" in sentence


def test_a_scale_of_the_whole_batch_is_accepted_within_the_cosine_that_is_named(build: Any) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "scale"], ["y"]),
    ]
    weights = {"w": np.random.default_rng(0).integers(-9, 9, (64, 16)).astype(np.int8)}
    model = build(nodes, [("x", ["n", 64])], [("y", ["n", 16])], **weights)
    proven, sentence = prove(model)
    assert proven
    assert "cosine" in sentence
    outlier = generate_sample(build_graph(model, "it"), 4, "it")
    outlier["x"][0] *= 500
    assert prove(model, outlier)[0] is False


def test_differences_are_relative_and_integers_must_be_equal() -> None:
    ones = np.ones(4, np.float32)
    assert difference(ones, ones.copy()) == 0
    assert difference(ones * 100, ones * 101) == pytest.approx(0.01)
    assert difference(np.array([1]), np.array([2])) == math.inf
    assert difference(ones, ones[:2]) == math.inf
    assert difference(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])) == 0
    assert difference(np.array([np.inf, 1.0]), np.array([1.0, 1.0])) == math.inf
    assert difference(np.array([1.0, 1.0]), np.array([np.nan, 1.0])) == math.inf
