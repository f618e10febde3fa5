"""The five steps on hand-made tensors: shapes, bounds, and the paths that no model is needed for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from agents.steps import StepContext, Tensors, run_step
from sla.errors import InvalidInputError, ModelError, TidegateError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "the", "total", ":", "41", "date", "?"]


def bytes_of(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def text_of(tensor: np.ndarray) -> str:
    return tensor.tobytes().decode()


QUESTION = bytes_of("what is the total?")


@pytest.fixture
def context(tmp_path: Path) -> StepContext:
    """Assets of a tiny alphabet and a tiny word list."""
    charset = tmp_path / "charset"
    charset.write_text("\n".join("abcdehilnoqstuw:41") + "\n ")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return StepContext(
        assets={"charset/rec-tiny": charset, "tokenizer": tmp_path / "tokenizer.json"}, models={"recognise": "rec-tiny"}
    )


def read_as(context: StepContext, *texts: str) -> dict[str, np.ndarray]:
    """The tensors of recognition that decode to `texts`."""
    symbols = context.asset("charset/rec-tiny").read_text().split("\n")
    ids = np.zeros((len(texts), 2 * max(len(text) for text in texts) + 1), np.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: 2 * len(text) : 2] = [symbols.index(symbol) + 1 for symbol in text]
    return {
        "rec_ids": ids, "rec_scores": np.full(ids.shape, 0.9, np.float32), "line_rows": np.arange(len(texts)), "question": QUESTION
    }  # fmt: skip


def test_a_page_is_prepared_for_the_orientation_model() -> None:
    page = np.zeros((600, 400, 3), np.uint8)
    page[:, :, 0] = 200
    new = run_step("document.prepare", {"image": page, "question": QUESTION}, StepContext())
    assert new["page"].shape == (600, 400, 3)
    assert new["orient_in"].shape == (1, 3, 224, 224)
    assert new["orient_in"].dtype == np.uint8
    assert new["orient_in"][0, 0].min() == 200  # red comes first


@pytest.mark.parametrize("shape", [(16, 1600), (1600, 16), (16, 16), (2000, 100)])
def test_any_aspect_ratio_passes_the_picture_steps(shape: tuple[int, int]) -> None:
    known = {"image": np.full((*shape, 3), 255, np.uint8), "question": QUESTION}
    known |= run_step("document.prepare", known, StepContext())
    known |= {"orient_logits": np.array([[0, 1, 0, 0]], np.float32)}
    known |= run_step("document.upright", known, StepContext())
    _, channels, height, width = known["det_in"].shape
    assert channels == 3
    assert height % 32 == width % 32 == 0
    assert max(height, width) <= 640
    known |= {"det_map": np.zeros((1, 1, height, width), np.float32)}
    assert run_step("document.crops", known, StepContext())["rec_in"].shape == (1, 3, 48, 64)


@pytest.mark.parametrize("label", [0, 1, 2, 3])
def test_a_page_turned_clockwise_by_its_label_is_turned_back(label: int) -> None:
    upright = np.arange(40 * 60 * 3, dtype=np.uint8).reshape(40, 60, 3)
    turned = np.rot90(upright, -label)
    tensors: Tensors = {"page": turned, "orient_logits": np.eye(4, dtype=np.float32)[[label]]}
    new = run_step("document.upright", tensors, StepContext())
    assert np.array_equal(new["page"], upright)
    assert new["det_in"].flags.c_contiguous


def test_boxes_are_found_in_map_pixels_and_cut_in_page_pixels() -> None:
    page = np.full((960, 640, 3), 255, np.uint8)
    page[400:440, 100:500] = 0
    text_map = np.zeros((1, 1, 480, 320), np.float32)
    text_map[0, 0, 205:215, 55:245] = 0.9
    new = run_step("document.crops", {"page": page, "det_map": text_map}, StepContext())
    assert new["rec_in"].shape[:3] == (1, 3, 48)
    assert new["rec_in"][0, 0, 24, 40:200].max() == 0
    assert new["line_rows"].tolist() == [0]


def test_lines_are_decoded_and_tokenized_with_the_question_first(context: StepContext) -> None:
    new = run_step("document.decode", read_as(context, "total: 41", "date"), context)
    assert json.loads(text_of(new["lines"])) == ["total: 41", "date"]
    assert new["line_scores"] == pytest.approx([0.9, 0.9])
    shapes = {name: new[name].shape for name in ("input_ids", "attention_mask", "token_type_ids", "key_mask")}
    assert set(shapes.values()) == {(3, 7)}
    assert [WORDS[index] for index in new["input_ids"][1]] == ["[CLS]", "total", ":", "41", "[SEP]", "[PAD]", "[PAD]"]
    assert new["attention_mask"][1].tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert new["key_mask"][1].tolist() == [0, 1, 0, 0, 0, 0, 0]
    assert new["key_mask"][2].tolist() == new["attention_mask"][2].tolist()  # no key: the whole line


def test_a_key_takes_in_the_value_beside_it(context: StepContext) -> None:
    tensors = read_as(context, "total:", "41", "date:", "41") | {"line_rows": np.array([0, 0, 1, 2])}
    new = run_step("document.decode", tensors, context)
    assert json.loads(text_of(new["lines"])) == ["total: 41", "date:", "41"]


def answer_to(known: dict[str, np.ndarray], context: StepContext) -> tuple[str, float]:
    """The answer if every token's hidden state is the unit vector of its id."""
    known = known | run_step("document.decode", known, context)
    known["hidden"] = np.eye(len(WORDS), dtype=np.float32)[known["input_ids"]]
    new = run_step("document.answer", known, context)
    assert new["confidence"].dtype == np.float32
    assert new["confidence"].shape == (1,)
    return text_of(new["answer"]), float(new["confidence"][0])


def test_the_nearest_line_answers_with_its_value(context: StepContext) -> None:
    said, confidence = answer_to(read_as(context, "date: 14", "total: 41"), context)
    assert said == "41"
    assert 0 < confidence < 1


def test_a_page_without_text_has_an_empty_answer(context: StepContext) -> None:
    known = {
        **read_as(context, "date"),
        "rec_ids": np.zeros((1, 3), np.int64),
        "rec_scores": np.zeros((1, 3), np.float32),
    }
    assert answer_to(known, context) == ("", 0.0)


def test_long_lines_are_cut_and_long_questions_accepted(context: StepContext) -> None:
    known = read_as(context, "total: " + "41 " * 300) | {"question": bytes_of("total " * 160)}
    new = run_step("document.decode", known, context)
    assert new["input_ids"].shape == (2, 64)


BAD_QUESTIONS = {
    "empty": bytes_of("  "),
    "too long": bytes_of("x" * 1001),
    "far too long": bytes_of("x" * 5000),
    "no UTF-8": np.array([0xFF, 0xFE], np.uint8),
    "wrong type": np.zeros(4, np.float32),
    "a picture": np.zeros((2, 2), np.uint8),
}


@pytest.mark.parametrize("question", BAD_QUESTIONS.values(), ids=BAD_QUESTIONS.keys())
def test_a_wrong_question_is_one_sentence(question: np.ndarray) -> None:
    with pytest.raises(InvalidInputError, match=r"^The question is not a text .*\.$") as caught:
        run_step("document.prepare", {"image": np.zeros((32, 32, 3), np.uint8), "question": question}, StepContext())
    assert caught.value.pointer == "/question"


@pytest.mark.parametrize("missing", ["image", "question"])
def test_a_missing_input_is_named(missing: str) -> None:
    tensors = {"image": np.zeros((32, 32, 3), np.uint8), "question": QUESTION}
    del tensors[missing]
    with pytest.raises(InvalidInputError, match=f"no input '{missing}'"):
        run_step("document.prepare", tensors, StepContext())


def test_tensors_of_a_foreign_model_are_refused_not_crashed_on(context: StepContext) -> None:
    page = np.zeros((32, 32, 3), np.uint8)
    cases: list[tuple[str, Tensors]] = [
        ("upright", {"page": page}),
        ("upright", {"page": page, "orient_logits": np.zeros((0, 4), np.float32)}),
        ("upright", {"page": page, "orient_logits": np.zeros((1, 9), np.float32)}),
        ("crops", {"page": page, "det_map": np.zeros((4, 4), np.float32)}),
        ("decode", {"rec_ids": np.zeros(3, np.int64), "rec_scores": np.zeros(3, np.float32)}),
        ("answer", {"lines": bytes_of('["a: b"]')}),
    ]
    for step, tensors in cases:
        with pytest.raises(TidegateError):
            run_step(f"document.{step}", tensors, context)


def test_decoding_without_knowing_the_variant_is_refused(context: StepContext) -> None:
    with pytest.raises(ModelError, match="needs to know the model of stage 'recognise'"):
        run_step("document.decode", read_as(context, "date"), StepContext(assets=context.assets))
