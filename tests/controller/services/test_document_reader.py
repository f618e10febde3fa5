"""The document reader on real models: what it reads, how it registers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agents.wire import decode_tensors
from controller.models.registry import ModelRegistry
from controller.services.accuracy import correct, measure_accuracy, request, text_of
from controller.services.document_reader import ACCURACY, reference_pipeline, register, service_spec
from controller.services.documents import Document, render
from controller.services.reference import ReferencePipeline, ReferenceRun
from policies.plan import Span
from policies.service import ServiceSpec
from sla.errors import InvalidInputError, ModelError

TINY = {"detect": "det-tiny", "recognise": "rec-tiny"}
SMALL = {"detect": "det-small", "recognise": "rec-small"}


@pytest.fixture(scope="module")
def pipeline(zoo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> ReferencePipeline:
    return reference_pipeline(zoo_cache, tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def registered(zoo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ServiceSpec, ModelRegistry]:
    registry = ModelRegistry(tmp_path_factory.mktemp("registry"))
    return register(registry, zoo_cache, lambda sentence: None), registry


def read(pipeline: ReferencePipeline, document: Document, variants: dict[str, str], number: int = 0) -> ReferenceRun:
    return pipeline.run(request(document, document.questions[number][0]), variants)


@pytest.mark.parametrize("variants", [TINY, SMALL], ids=["tiny", "small"])
def test_every_variant_reads_a_clean_document(pipeline: ReferencePipeline, variants: dict[str, str]) -> None:
    document = render(5)
    tensors = read(pipeline, document, variants).tensors
    lines = json.loads(text_of(tensors["lines"]))
    assert len(lines) == 7
    assert sum(correct(line, expected) for line, expected in zip(lines, document.lines, strict=True)) >= 6
    assert correct(text_of(tensors["answer"]), document.questions[0][1])
    assert 0 < float(tensors["confidence"][0]) <= 1


def test_the_accurate_variant_reads_every_condition(pipeline: ReferencePipeline) -> None:
    accuracy = measure_accuracy(pipeline, SMALL, range(10, 15))
    assert accuracy.lines >= 0.95
    assert accuracy.answers >= 0.9


def test_the_small_variant_is_less_accurate_on_poor_pictures(pipeline: ReferencePipeline) -> None:
    poor = [12, 13]  # small and dim, small and dark
    tiny, small = measure_accuracy(pipeline, TINY, poor), measure_accuracy(pipeline, SMALL, poor)
    assert 0.3 < tiny.answers < small.answers


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_turned_page_reads_the_same(pipeline: ReferencePipeline, turns: int) -> None:
    document = render(5)
    upright = read(pipeline, document, TINY).tensors
    turned = {"image": np.ascontiguousarray(np.rot90(upright["page"], turns)), "question": upright["question"]}
    assert np.array_equal(pipeline.run(turned, TINY).tensors["page"], upright["page"])


def test_every_question_about_a_document_finds_its_line(pipeline: ReferencePipeline) -> None:
    right = 0
    for seed in (0, 1, 2, 3):
        document = render(seed)
        known = read(pipeline, document, TINY).tensors
        for question, expected in document.questions:
            asked = pipeline.run(known | request(document, question), TINY, start="decode").tensors
            right += correct(text_of(asked["answer"]), expected)
    assert right >= 22  # of 24


def test_a_blank_page_has_an_empty_answer(pipeline: ReferencePipeline) -> None:
    blank = np.full((480, 352, 3), 250, np.uint8)
    tensors = pipeline.run({"image": blank, "question": np.frombuffer(b"What is the total?", np.uint8)}, TINY).tensors
    assert text_of(tensors["answer"]) == ""
    assert json.loads(text_of(tensors["lines"])) == []


def test_a_file_that_is_no_picture_ends_in_one_sentence(pipeline: ReferencePipeline) -> None:
    tensors = {"image": np.frombuffer(b"no picture", np.uint8), "question": np.frombuffer(b"What?", np.uint8)}
    with pytest.raises(InvalidInputError, match="cannot be decoded"):
        pipeline.run(tensors)


def test_a_variant_of_another_stage_is_refused(pipeline: ReferencePipeline) -> None:
    with pytest.raises(ModelError, match="Stage detect has no variant 'rec-tiny'"):
        read(pipeline, render(5), {"detect": "rec-tiny"})


def test_registering_examines_every_variant(registered: tuple[ServiceSpec, ModelRegistry]) -> None:
    spec, registry = registered
    profiles = registry.profiles()
    for stage in spec.onnx_stages():
        for name in stage.variants:
            profile = profiles[name]
            assert len(profile.blocks) >= 2, f"{name}: {profile.atomic_reason}"
            assert profile.split_axis == stage.axis, registry.proof(name)
            assert profile.accuracy == ACCURACY[name]
            shard = registry.shard_file(name, Span(0, len(profile.blocks)))
            assert set(shard.inputs) == set(stage.inputs)
            assert set(stage.outputs) == set(shard.outputs)
    assert set(spec.assets) == {"tokenizer", "charset/rec-tiny", "charset/rec-small"}
    assert all(registry.blob_path(sha256) is not None for sha256 in spec.assets.values())


def test_every_variant_gives_the_answer_of_the_canary(
    registered: tuple[ServiceSpec, ModelRegistry], pipeline: ReferencePipeline
) -> None:
    spec, registry = registered
    assert spec.sample is not None
    path = registry.blob_path(spec.sample)
    assert path is not None
    sample = decode_tensors(path.read_bytes())
    asked = {name.removeprefix("in:"): value for name, value in sample.items() if name.startswith("in:")}
    for detect in ("det-tiny", "det-small"):
        for recognise in ("rec-tiny", "rec-small"):
            answer = pipeline.run(asked, {"detect": detect, "recognise": recognise}).tensors["answer"]
            assert text_of(answer) == text_of(sample["out:answer"])


def test_registering_again_changes_nothing(registered: tuple[ServiceSpec, ModelRegistry], zoo_cache: Path) -> None:
    spec, registry = registered
    before = registry.profiles()
    assert register(registry, zoo_cache, lambda sentence: None) == spec
    assert registry.profiles() == before


def test_the_accuracy_of_variants_is_a_real_choice() -> None:
    assert ACCURACY["rec-tiny"] < ACCURACY["rec-small"]
    named = {name for stage in service_spec({}).onnx_stages() for name in stage.variants}
    assert named == set(ACCURACY)
