"""The five steps of the document reader: a picture of a page and a question in, the answer out.

Order of a request's tensors (all pictures are uint8; normalisation is part of the graphs, because bytes are a quarter of
what the same picture takes as float32 on the way to another device):

prepare  image, question                          -> page, orient_in
upright  page, orient_logits                      -> page, det_in
crops    page, det_map                            -> rec_in, line_rows
decode   rec_ids, rec_scores, line_rows, question -> lines, line_scores, input_ids, attention_mask, token_type_ids, key_mask
answer   lines, line_scores, hidden, masks        -> answer, confidence

A text is its UTF-8 bytes as uint8 [n]; `lines` is a JSON list in that form.
"""

from __future__ import annotations

import json

import cv2
import numpy as np

from agents.steps import StepContext, Tensors, answers, ctc, images, sentences
from agents.steps.line_crops import cut_lines
from agents.steps.text_boxes import find_boxes, in_rows
from sla.errors import InvalidInputError, ModelError

MAX_QUESTION_CHARS = 1000
ORIENTATION_SHORT_PX = 256
ORIENTATION_CROP_PX = 224
DETECTION_LONG_PX = (480, 640)
"""The long side of a page is scaled into this range for detection: small print is found, and the cost stays bounded."""
DETECTION_STEP_PX = 32
RECOGNITION_STAGE = "recognise"
"""The stage whose variant decides which charset is read."""


def prepare(tensors: Tensors, context: StepContext) -> dict[str, np.ndarray]:
    """`page` uint8 [H, W, 3] RGB and `orient_in` uint8 [1, 3, 224, 224] RGB. Raises InvalidInputError."""
    _check_question(_input(tensors, "question"))
    page = images.read_page(_input(tensors, "image"))
    # Scaling the short side to 256 and keeping the middle 224 pixels is the same as scaling the middle square alone.
    middle = _middle(page, min(page.shape[:2]) * ORIENTATION_CROP_PX // ORIENTATION_SHORT_PX)
    return {"page": page, "orient_in": _planes(_resized(middle, ORIENTATION_CROP_PX, ORIENTATION_CROP_PX))}


def upright(tensors: Tensors, context: StepContext) -> dict[str, np.ndarray]:
    """`page` turned upright, and `det_in` uint8 [1, 3, H, W] BGR with sides that are multiples of 32."""
    logits = _result(tensors, "orient_logits", 2)
    if logits.shape[1] != 4:
        raise ModelError(f"The orientation model must give 4 scores (0, 90, 180, 270 degrees), not {logits.shape[1]}.")
    quarter_turns = int(logits[0].argmax())
    page = np.ascontiguousarray(np.rot90(_result(tensors, "page", 3), quarter_turns))
    long_px = max(page.shape[:2])
    factor = float(np.clip(long_px, *DETECTION_LONG_PX)) / long_px
    height, width = (_step(side * factor) for side in page.shape[:2])
    return {"page": page, "det_in": _planes(_resized(page, height, width)[:, :, ::-1])}


def crops(tensors: Tensors, context: StepContext) -> dict[str, np.ndarray]:
    """`rec_in` uint8 [N, 3, 48, W] BGR in reading order, N >= 1, and `line_rows` int64 [N], the row each crop lies in."""
    page, text_map = _result(tensors, "page", 3), _result(tensors, "det_map", 4)[0, 0]
    to_page = np.array([page.shape[1] / text_map.shape[1], page.shape[0] / text_map.shape[0]], np.float32)
    rows = in_rows(find_boxes(np.asarray(text_map, np.float32)))
    quads = [quad * to_page for row in rows for quad in row]
    numbers = [number for number, row in enumerate(rows) for _ in row] or [0]
    return {"rec_in": cut_lines(page, quads), "line_rows": np.array(numbers, np.int64)}


def decode(tensors: Tensors, context: StepContext) -> dict[str, np.ndarray]:
    """The lines that were read, and question and lines as token ids int64 [1 + lines, S]; `key_mask` marks the keys."""
    variant = context.models.get(RECOGNITION_STAGE)
    if variant is None:
        raise ModelError(f"Step document.decode needs to know the model of stage {RECOGNITION_STAGE!r}.")
    charset = ctc.load_charset(context.asset(f"charset/{variant}"))
    read = ctc.decode(_result(tensors, "rec_ids", 2), _result(tensors, "rec_scores", 2), charset)
    pieces = [(row, text, score) for row, (text, score) in zip(tensors["line_rows"], read, strict=True) if text]
    lines, scores = _joined(pieces)
    tokenizer = sentences.load_tokenizer(context.asset("tokenizer"))
    encoded = sentences.encode(tokenizer, [_text(tensors["question"]), *lines])
    keys = [answers.split_line(line)[0] for line in lines]
    key_mask = sentences.prefix_mask(tokenizer, encoded["attention_mask"], ["", *keys])
    return {
        "lines": _bytes(json.dumps(lines, ensure_ascii=False)),
        "line_scores": np.array(scores, np.float32),
        **encoded,
        "key_mask": key_mask,
    }


def answer(tensors: Tensors, context: StepContext) -> dict[str, np.ndarray]:
    """`answer` (text; empty if nothing could be read) and `confidence` float32 [1] in [0, 1]."""
    lines = json.loads(_text(tensors["lines"]))
    if not lines:
        return {"answer": _bytes(""), "confidence": np.zeros(1, np.float32)}
    hidden = _result(tensors, "hidden", 3)
    by_line = sentences.pool(hidden, tensors["attention_mask"])
    by_key = sentences.pool(hidden[1:], tensors["key_mask"][1:])
    best, likeness = answers.choose(lines, by_line[1:] @ by_line[0], by_key @ by_line[0])
    confidence = likeness * float(tensors["line_scores"][best])
    return {"answer": _bytes(answers.split_line(lines[best])[1]), "confidence": np.array([confidence], np.float32)}


def _joined(pieces: list[tuple[int, str, float]]) -> tuple[list[str], list[float]]:
    """Texts and scores of lines: a piece that ends in a colon takes in its right neighbour (a form with columns)."""
    lines: list[str] = []
    scores: list[float] = []
    last_row = -1
    for row, text, score in pieces:
        if lines and row == last_row and lines[-1][-1] in answers.COLONS:
            lines[-1], scores[-1] = f"{lines[-1]} {text}", min(scores[-1], score)
        else:
            lines.append(text)
            scores.append(score)
        last_row = row
    return lines, scores


def _input(tensors: Tensors, name: str) -> np.ndarray:
    if name not in tensors:
        raise InvalidInputError(
            f"The request has no input {name!r}; the document reader needs image and question.", pointer=f"/{name}",
            found="nothing", accepted="image and question",
        )  # fmt: skip
    return tensors[name]


def _result(tensors: Tensors, name: str, rank: int) -> np.ndarray:
    """A tensor that an earlier stage gave, checked so far that a foreign model cannot crash a step."""
    tensor = tensors.get(name)
    if tensor is None or tensor.ndim != rank or (rank != 2 and tensor.size == 0) or tensor.shape[0] == 0:
        found = "nothing" if tensor is None else str(list(tensor.shape))
        raise ModelError(f"The document reader expects a tensor {name!r} with {rank} axes, not {found}.", found=found)
    return tensor


def _check_question(question: np.ndarray) -> None:
    accepted = f"1 to {MAX_QUESTION_CHARS} characters of UTF-8 text"
    try:
        if question.dtype != np.uint8 or question.ndim != 1 or question.size > 4 * MAX_QUESTION_CHARS:
            raise ValueError(f"{question.size} bytes")
        text = _text(question)
    except ValueError:  # also UnicodeDecodeError
        found = f"{question.dtype} {list(question.shape)}"
    else:
        if text.strip() and len(text) <= MAX_QUESTION_CHARS:
            return
        found = f"{len(text)} characters"
    raise InvalidInputError(
        f"The question is not a text of at most {MAX_QUESTION_CHARS} characters: found {found}.", pointer="/question",
        found=found, accepted=accepted,
    )  # fmt: skip


def _text(tensor: np.ndarray) -> str:
    return tensor.tobytes().decode("utf-8")


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8"), np.uint8)


def _step(side_px: float) -> int:
    return max(1, round(side_px / DETECTION_STEP_PX)) * DETECTION_STEP_PX


def _resized(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    if picture.shape[:2] == (height, width):
        return picture
    shrinks = height * width < picture.shape[0] * picture.shape[1]
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(picture, (width, height), interpolation=method))


def _middle(picture: np.ndarray, side_px: int) -> np.ndarray:
    top, left = (picture.shape[0] - side_px) // 2, (picture.shape[1] - side_px) // 2
    return picture[top : top + side_px, left : left + side_px]


def _planes(picture: np.ndarray) -> np.ndarray:
    """[H, W, 3] as a batch [1, 3, H, W] in C order."""
    return np.ascontiguousarray(picture.transpose(2, 0, 1)[None])
