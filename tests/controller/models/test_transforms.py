"""Transforms keep what the rest of the pipeline reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from controller.models.sessions import open_session, run
from controller.models.transforms import CTC_IDS, CTC_SCORES, append_ctc_head
from sla.errors import ModelError


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_a_ctc_head_gives_the_likeliest_class_and_its_score(opset: int, build: Any) -> None:
    model = build([helper.make_node("Softmax", ["x"], ["p"], axis=2)], [("x", ["n", "t", 7])], [("p", ["n", "t", 7])])
    model.opset_import[0].version = opset
    before = model.SerializeToString()
    headed = append_ctc_head(model)
    assert model.SerializeToString() == before
    onnx.checker.check_model(headed)
    x = np.random.default_rng(0).standard_normal((3, 5, 7)).astype(np.float32)
    scores = run(open_session(before, "it"), {"x": x}, ["p"], "it")["p"]
    made = run(open_session(headed.SerializeToString(), "it"), {"x": x}, [CTC_IDS, CTC_SCORES], "it")
    np.testing.assert_array_equal(made[CTC_IDS], scores.argmax(axis=2))
    np.testing.assert_array_equal(made[CTC_SCORES], scores.max(axis=2))
    assert made[CTC_IDS].dtype == np.int64
    assert made[CTC_SCORES].dtype == np.float32


def test_models_without_one_output_of_class_scores_are_refused(mlp: Any, residual: Any) -> None:
    for model in (mlp, residual):
        with pytest.raises(ModelError, match="CTC head"):
            append_ctc_head(model)
