"""How often the document reader is right, measured on reference documents."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from controller.services.documents import Document, reference_document
from controller.services.reference import ReferencePipeline


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares in [0, 1]."""

    lines: float
    """Lines of the documents that were read exactly."""
    answers: float
    """Questions that were answered right."""


def correct(answer: str, expected: str) -> bool:
    """True if the answer is the expected one, whatever its case, its spaces and the width of its characters."""
    return _bare(answer) == _bare(expected)


def measure_accuracy(pipeline: ReferencePipeline, variants: Mapping[str, str], seeds: Iterable[int]) -> Accuracy:
    """Accuracy of a choice of variants on the reference documents of `seeds`, with all questions about each."""
    read = lines = right = asked = 0
    for seed in seeds:
        document = reference_document(seed)
        known: Mapping[str, np.ndarray] = {}
        for question, expected in document.questions:
            # The page is read once; only what depends on the question is run again.
            asking = dict(known) | request(document, question)
            known = pipeline.run(asking, variants, start="decode" if known else None).tensors
            right += correct(text_of(known["answer"]), expected)
            asked += 1
        found = {_bare(line) for line in json.loads(text_of(known["lines"]))}
        read += sum(_bare(line) in found for line in document.lines)
        lines += len(document.lines)
    return Accuracy(lines=read / max(lines, 1), answers=right / max(asked, 1))


def request(document: Document, question: str) -> dict[str, np.ndarray]:
    """The input tensors of one request, in the form that texts and files have inside Tidegate."""
    return {
        "image": np.frombuffer(document.png_bytes, np.uint8),
        "question": np.frombuffer(question.encode("utf-8"), np.uint8),
    }


def text_of(tensor: np.ndarray) -> str:
    """The text in a uint8 tensor."""
    return tensor.tobytes().decode("utf-8")


def _bare(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
