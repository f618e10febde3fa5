"""Layers and names as the exporter gave them; graphs of every opset and of ten thousand operators; models that write nothing useful."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from benchmarks.sharding import many_nodes
from benchmarks.vlm import build_vlm
from controller.models.cutting import MAX_BLOCKS, partition
from controller.models.graph import build_graph
from controller.models.layout import lay_out
from controller.models.observing import observe
from controller.models.registry import ModelRegistry
from controller.models.scopes import layer_edges, layer_of, path_scope
from sla.errors import ModelError


def test_scopes_keep_an_index_with_its_word_and_drop_wrappers() -> None:
    assert path_scope("/model/encoder/layer.3/attention/MatMul") == ("encoder", "layer.3", "attention")
    assert path_scope("MatMul_12") == ()
    assert layer_of(("encoder", "layer.3", "attention.1")) == (("encoder", "layer"), 3)
    assert layer_of(("encoder", "norm")) is None


def test_every_layer_of_every_tower_is_a_block_of_its_own_name() -> None:
    model = build_vlm(tower_layers=2, cross_blocks=10).whole
    graph = build_graph(model, "it")
    sample = {"tiles": np.ones((2, 3, 32, 32), np.float32), "input_ids": np.ones((2, 4), np.int64)}
    names = partition(graph, observe(graph, sample, "it")).names
    wanted = [f"{tower}.layer.{n}" for tower in ("vision", "text") for n in range(2)]
    wanted += [f"cross_attention.{n}" for n in range(10)]
    assert set(wanted) <= set(names)
    assert len(names) > MAX_BLOCKS


def test_names_of_weights_tell_the_layers_where_nodes_have_lost_theirs() -> None:
    model = build_vlm(tower_layers=3).text
    renamed = onnx.ModelProto()
    renamed.CopyFrom(model)
    new = {tensor.name: f"text.encoder.{tensor.name[6:].replace('/', '.')}" for tensor in renamed.graph.initializer}
    for tensor in renamed.graph.initializer:
        tensor.name = new[tensor.name]
    for at, node in enumerate(renamed.graph.node):
        node.name = f"node_{at}"
        node.input[:] = [new.get(name, name) for name in node.input]
    graph = build_graph(renamed, "it")
    seen = observe(graph, {"input_ids": np.ones((1, 4), np.int64)}, "it")
    names = partition(graph, seen).names
    assert [name for name in names if "layer" in name] == [f"text.encoder.layer.{n}" for n in range(3)]


def test_what_was_hoisted_to_the_front_is_computed_where_it_is_read() -> None:
    model = build_vlm(cross_blocks=6).fusion
    hoisted = onnx.ModelProto()
    hoisted.CopyFrom(model)
    early = [node for node in model.graph.node if "/attention/key/" in node.name or node.name.startswith("/gather")]
    late = [node for node in model.graph.node if node not in early]
    del hoisted.graph.node[:]
    hoisted.graph.node.extend([*early, *late])
    graph = build_graph(hoisted, "it")
    sample = {name: np.ones((1, 8, 64), np.float32) for name in ("tokens", "patches")}
    seen = observe(graph, sample, "it")
    _, order, _ = lay_out(graph, seen)
    assert layer_edges(graph, order)
    cut = partition(graph, seen)
    assert all(len(cut.crossing(block)) <= 2 for block in range(3, len(cut.names)))


@pytest.mark.parametrize("opset", [7, 11, 13, 18, 21, onnx.defs.onnx_opset_version()])
def test_old_and_new_opsets(opset: int, mlp: Any, tmp_path: Path) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(mlp)
    model.opset_import[0].version = opset
    assert len(ModelRegistry(tmp_path).add("it", model.SerializeToString()).blocks) == 6


def test_a_graph_of_thousands_of_operators_is_cut() -> None:
    graph = build_graph(many_nodes(3000), "it")
    assert len(partition(graph, observe(graph, {"x": np.ones((1, 64), np.float32)}, "it")).names) == MAX_BLOCKS


def test_nan_is_traced_to_the_operator_that_makes_it(build: Any, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["n"], name="negate"),
        helper.make_node("Abs", ["x"], ["a"], name="positive"),
        helper.make_node("Sub", ["n", "a"], ["s"], name="below"),
        helper.make_node("Log", ["s"], ["l"], name="logarithm"),
        helper.make_node("Tanh", ["l"], ["y"], name="last"),
    ]
    model = build(nodes, [("x", ["n", 8])], [("y", ["n", 8])])
    registry = ModelRegistry(tmp_path)
    with pytest.raises(ModelError, match=r"NaN in 'y'.*first appears in operator 'logarithm' \(Log\)"):
        registry.add("it", model.SerializeToString())
    assert registry.profiles() == {}


def test_an_output_without_elements_is_refused(build: Any, tmp_path: Path) -> None:
    nodes = [helper.make_node("Slice", ["x", "zero", "zero"], ["y"], name="nothing")]
    model = build(nodes, [("x", ["n", 8])], [("y", None)], zero=np.array([0]))
    with pytest.raises(ModelError, match=r"no element.*'nothing'"):
        ModelRegistry(tmp_path).add("it", model.SerializeToString())


def test_a_sample_that_does_not_fit_names_the_operator(build: Any, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    model = build(nodes, [("x", ["n", "m"])], [("y", None)], w=np.ones((7, 3), np.float32))
    with pytest.raises(ModelError, match="product"):
        ModelRegistry(tmp_path).add("it", model.SerializeToString())
