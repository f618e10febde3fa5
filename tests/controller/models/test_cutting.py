"""Cuts: what crosses them, what is computed again instead, and that they never change the result."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from controller.models.cutting import MAX_BLOCKS, partition
from controller.models.extraction import declare, extract, piece, serialise
from controller.models.graph import Graph, build_graph
from controller.models.layout import Partition, assemble, lay_out
from controller.models.observing import Observation, observe
from controller.models.proving import CLOSE, largest_difference
from controller.models.samples import first_item, generate_sample
from controller.models.sessions import Arrays, open_session, run


def look(model: Any, items: int = 2) -> tuple[Graph, Observation, Arrays]:
    """The graph with what one item shows, and a sample of more items."""
    graph = build_graph(model, "it")
    sample = generate_sample(graph, items, "it")
    return graph, observe(graph, first_item(sample) if sample["x"].shape[0] > 1 else sample, "it"), sample


def run_chain(cut: Partition, seen: Observation, sample: Arrays, steps: list[int]) -> Arrays:
    """Outputs of the shards between the blocks `steps` (from 0 to the last), one after another; each must pass the checker."""
    declared = declare(cut, seen)
    values = dict(sample)
    out: Arrays = {}
    for start, stop in itertools.pairwise(steps):
        part = piece(cut, start, stop)
        model = extract(cut, start, stop, declared)
        onnx.checker.check_model(model)
        session = open_session(serialise(model), "shard")
        out = run(session, {key: values[key] for key in part.inputs}, part.outputs, "shard")
        values |= out
    return out


def whole(model: Any, sample: Arrays) -> Arrays:
    session = open_session(model.SerializeToString(), "whole")
    return run(session, sample, [value.name for value in model.graph.output], "whole")


def assert_same(model: Any, cut: Partition, seen: Observation, sample: Arrays, steps: list[int]) -> None:
    assert largest_difference(whole(model, sample), run_chain(cut, seen, sample, steps)) <= CLOSE


def test_equal_layers_become_equal_blocks_named_by_their_scopes(mlp: Any) -> None:
    graph, seen, sample = look(mlp)
    cut = partition(graph, seen)
    assert cut.names == tuple(f"layer.{layer}" for layer in range(6))
    assert [cut.crossing(block) for block in range(1, 6)] == [(f"h{layer}",) for layer in range(5)]
    assert_same(mlp, cut, seen, sample, [0, 1, 2, 3, 4, 5, 6])


def test_cuts_are_the_same_at_every_look(mlp: Any, masked: Any, captured: Any) -> None:
    for model in (mlp, masked):
        looks = [look(model) for _ in range(2)]
        assert len({partition(graph, seen).bounds for graph, seen, _ in looks}) == 1
    graph = build_graph(captured, "it")
    sample = {"x": np.ones((2, 128), np.float32), "flag": np.array(True)}
    assert len({partition(graph, observe(graph, sample, "it")).bounds for _ in range(3)}) == 1


def test_a_shard_holds_only_its_own_weights(mlp: Any) -> None:
    graph, seen, _ = look(mlp)
    cut = assemble(graph, (), (0, 2, 6, 12))
    shard = extract(cut, 1, 2, declare(cut, seen))
    assert [tensor.name for tensor in shard.graph.initializer] == ["w1", "w2"]


def test_values_that_stay_live_cross_every_cut_and_early_outputs_reach_the_last_hop(residual: Any) -> None:
    graph, seen, sample = look(residual)
    cut = assemble(graph, (), (0, 4, 8, 12))
    assert set(cut.crossing(1)) == {"early", "features", "h0"}
    assert piece(cut, 1, 2).inputs == ("features", "h0")
    assert piece(cut, 2, 3).outputs == ("early", "h4")
    assert "early" in piece(cut, 2, 3).inputs
    assert_same(residual, cut, seen, sample, [0, 1, 2, 3])


def test_a_mask_is_made_again_on_both_sides_instead_of_shipped(masked: Any) -> None:
    graph, seen, sample = look(masked)
    cut = partition(graph, seen)
    assert {graph.nodes[at].op_type for at in cut.shared} == {"Cast", "Sub", "Mul", "Unsqueeze"}
    assert len(cut.names) > 1
    for block in range(1, len(cut.names)):
        assert "mask" in cut.crossing(block)
        assert not {"mask_f", "bias"} & set(cut.crossing(block))
    assert_same(masked, cut, seen, sample, list(range(len(cut.names) + 1)))


def test_the_shape_of_an_activation_crosses_as_a_few_bytes(build: Any) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Shape", ["m"], ["size"]),
        helper.make_node("Reshape", ["m", "flat"], ["f"]),
        helper.make_node("Tanh", ["f"], ["t"]),
        helper.make_node("Reshape", ["t", "size"], ["y"]),
    ]
    weights = {"w": np.eye(32, dtype=np.float32), "flat": np.array([-1])}
    model = build(nodes, [("x", ["n", 32])], [("y", ["n", 32])], **weights)
    graph, seen, sample = look(model, items=3)
    cut = assemble(graph, (), (0, 4, 5))
    assert set(cut.crossing(1)) == {"size", "t"}
    assert seen.values["size"].size_bytes == 16
    assert_same(model, cut, seen, sample, [0, 1, 2])


def test_control_flow_is_never_cut_inside_and_its_captured_values_travel(captured: Any) -> None:
    graph = build_graph(captured, "it")
    sample = {"x": np.random.default_rng(0).standard_normal((2, 128)).astype(np.float32), "flag": np.array(True)}
    seen = observe(graph, sample, "it")
    cut = assemble(graph, (), (0, 2, 3, 5))
    assert piece(cut, 1, 2).inputs == ("x", "flag", "h")
    for flag in (True, False):
        assert_same(captured, cut, seen, {**sample, "flag": np.array(flag)}, [0, 1, 2, 3])


def test_a_graph_of_one_captured_region_says_why_it_is_atomic(build: Any) -> None:
    def branch(op: str) -> Any:
        inner = helper.make_node(op, ["x"], [f"{op}_out"])
        return helper.make_graph([inner], op, [], [helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, None)])

    gate = helper.make_node("If", ["flag"], ["y"], name="gate", then_branch=branch("Relu"), else_branch=branch("Neg"))
    model = build([gate], [("x", ["n", 4]), ("flag", [], TensorProto.BOOL)], [("y", ["n", 4])])
    graph = build_graph(model, "it")
    seen = observe(graph, {"x": np.ones((1, 4), np.float32), "flag": np.array(True)}, "it")
    cut = partition(graph, seen)
    assert len(cut.names) == 1
    assert "'gate' captures outer values (x)" in cut.atomic_reason


def test_values_that_cannot_be_shipped_are_not_cut(build: Any) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("SequenceConstruct", ["m", "x"], ["both"]),
        helper.make_node("ConcatFromSequence", ["both"], ["joined"], axis=0),
        helper.make_node("MatMul", ["joined", "w"], ["y"]),
    ]
    model = build(nodes, [("x", ["n", 64])], [("y", None)], w=np.eye(64, dtype=np.float32))
    graph, seen, _ = look(model)
    assert "both" not in seen.values
    assert all(
        "both" not in partition(graph, seen).crossing(block) for block in range(1, len(partition(graph, seen).names))
    )


def test_there_are_at_most_eight_blocks_and_none_is_tiny(mlp: Any, residual: Any, masked: Any) -> None:
    for model in (mlp, residual, masked):
        graph, seen, _ = look(model)
        for most in (1, 2, 3, MAX_BLOCKS):
            cut = partition(graph, seen, max_blocks=most)
            assert 1 <= len(cut.names) <= most
            assert len(set(cut.names)) == len(cut.names)
            assert (cut.atomic_reason != "") == (len(cut.names) == 1)


WIDTH = 6
OPS = ("Tanh", "Add", "Mul", "MatMul", "Concat", "Shift", "Reuse")


@st.composite
def dags(draw: st.DrawFn) -> Any:
    """A random graph of values [n, WIDTH], with constants folded at load, an integer input, and outputs anywhere in it."""
    names, nodes = ["x"], []
    for at in range(draw(st.integers(2, 14))):
        op = draw(st.sampled_from(OPS))
        left, right = (draw(st.sampled_from(names)) for _ in range(2))
        made = f"v{at}"
        match op:
            case "Tanh":
                nodes.append(helper.make_node("Tanh", [left], [made]))
            case "MatMul":
                nodes.append(helper.make_node("MatMul", [left, draw(st.sampled_from(["w0", "w1"]))], [made]))
            case "Concat":
                nodes.append(helper.make_node("Concat", [left, right], [f"{made}_wide"], axis=1))
                nodes.append(helper.make_node("MatMul", [f"{made}_wide", "w2"], [made]))
            case "Shift":
                nodes.append(helper.make_node("Cast", ["ids"], [f"{made}_ids"], to=TensorProto.FLOAT))
                nodes.append(helper.make_node("Add", [left, f"{made}_ids"], [made]))
            case "Reuse":
                nodes.append(helper.make_node("Neg", ["w0"], [f"{made}_w"]))
                nodes.append(helper.make_node("MatMul", [left, f"{made}_w"], [made]))
            case _:
                nodes.append(helper.make_node(op, [left, right], [made]))
        names.append(made)
    outputs = {names[-1], *draw(st.lists(st.sampled_from(names[1:]), max_size=2))}
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shapes = {"w0": (WIDTH, WIDTH), "w1": (WIDTH, WIDTH), "w2": (2 * WIDTH, WIDTH)}
    weights = [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32) / 4, k) for k, s in shapes.items()]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH]),
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", WIDTH]),
    ]
    made_outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in sorted(outputs)]
    graph = helper.make_graph(nodes, "random", inputs, made_outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@settings(max_examples=40, deadline=None)
@given(model=dags(), data=st.data())
def test_no_cut_and_no_grouping_of_blocks_changes_the_result(model: Any, data: st.DataObject) -> None:
    graph = build_graph(model, "it")
    rng = np.random.default_rng(1)
    sample = {"x": rng.standard_normal((2, WIDTH)).astype(np.float32), "ids": rng.integers(0, 3, (2, WIDTH))}
    seen = observe(graph, first_item(sample), "it")
    shared, order, _ = lay_out(graph, seen)
    cuts = data.draw(st.sets(st.integers(1, max(1, len(order) - 1)), max_size=5)) if len(order) > 1 else set()
    cut = assemble(graph, shared, (0, *sorted(cuts), len(order)))
    blocks = len(cut.names)
    steps = sorted({0, blocks, *data.draw(st.sets(st.integers(0, blocks), max_size=blocks))})
    assert_same(model, cut, seen, sample, list(range(blocks + 1)))
    assert_same(model, cut, seen, sample, steps)
