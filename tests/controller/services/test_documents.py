"""Rendered documents: pure in the seed, varied, and honest about their answers."""

from __future__ import annotations

import numpy as np
import pytest

from agents.steps.images import read_page
from controller.services.accuracy import correct
from controller.services.document_kinds import KINDS
from controller.services.documents import PAGE_HEIGHT_PX, PAGE_WIDTH_PX, Document, reference_document, render


def pixels(document: Document) -> np.ndarray:
    return read_page(np.frombuffer(document.png_bytes, np.uint8))


def test_the_same_seed_gives_the_same_bytes() -> None:
    assert render(7) == render(7)
    assert render(7).png_bytes != render(8).png_bytes


def test_reading_random_numbers_elsewhere_changes_nothing() -> None:
    before = render(3)
    np.random.default_rng(3).random(100)
    assert render(3) == before


def test_title_and_six_lines_answer_six_questions() -> None:
    for seed in range(20):
        document = render(seed)
        assert len(document.lines) == 7
        assert [line.split(": ", 1)[1] for line in document.lines[1:]] == [value for _, value in document.questions]
        assert len({question for question, _ in document.questions}) == 6


def test_documents_vary() -> None:
    documents = [render(seed) for seed in range(40)]
    assert {document.lines[0] for document in documents} == {kind.title for kind in KINDS}
    assert len({document.lines for document in documents}) == 40


def test_options_change_the_picture_and_not_the_text() -> None:
    plain = render(5)
    for changed in (
        render(5, upside_down=True), render(5, tilt_deg=-3), render(5, noise=20), render(5, scale=2), render(5, darkness=0.5)
    ):  # fmt: skip
        assert changed.lines == plain.lines
        assert changed.png_bytes != plain.png_bytes
    assert pixels(render(5, scale=2)).shape == (2 * PAGE_HEIGHT_PX, 2 * PAGE_WIDTH_PX, 3)
    assert pixels(render(5, darkness=0.5)).mean() == pytest.approx(pixels(plain).mean() / 2, rel=0.02)


def test_upside_down_is_half_a_turn() -> None:
    upright, turned = render(5, noise=0), render(5, noise=0, upside_down=True)
    assert np.array_equal(pixels(upright), np.rot90(pixels(turned), 2))


def test_every_text_stays_on_the_page() -> None:
    for seed in range(25):
        page = pixels(render(seed, noise=0)).min(axis=2)
        margin = np.concatenate([page[:4].ravel(), page[-4:].ravel(), page[:, :4].ravel(), page[:, -4:].ravel()])
        assert margin.min() > 150, seed


def test_reference_documents_take_turns() -> None:
    assert reference_document(10) == render(10)
    assert reference_document(11) == render(11, upside_down=True)


@pytest.mark.parametrize(
    ("answer", "expected", "is_correct"),
    [
        ("Anna Keller", "anna  keller ", True),
        ("8245.34EUR", "8245.34 EUR", True),
        ("２１ %", "21 %", True),
        ("8245.84 EUR", "8245.34 EUR", False),
        ("", "x", False),
    ],
)
def test_case_spaces_and_widths_do_not_matter(answer: str, expected: str, is_correct: bool) -> None:
    assert correct(answer, expected) is is_correct
