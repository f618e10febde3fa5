"""Geometry: what a probability map says about where lines are, and in which order they are read."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from agents.steps.line_crops import MAX_WIDTH_PX, cut_lines
from agents.steps.text_boxes import MAX_BOXES, UNCLIP_RATIO, find_boxes, in_rows, size_of


def text_map(
    *rectangles: tuple[tuple[float, float], tuple[float, float], float], probability: float = 0.9
) -> np.ndarray:
    """A map of 320 x 240 pixels with filled rotated rectangles ((centre), (width, height), degrees)."""
    drawn = np.zeros((240, 320), np.float32)
    for rectangle in rectangles:
        cv2.fillPoly(drawn, [cv2.boxPoints(rectangle).astype(np.int32)], probability)
    return drawn


def box(left: float, top: float, width: float, height: float) -> np.ndarray:
    right, bottom = left + width, top + height
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float32)


def test_a_box_grows_by_area_times_ratio_over_perimeter() -> None:
    (quad,) = find_boxes(text_map(((160, 120), (100, 10), 0)))
    grow = UNCLIP_RATIO * 100 * 10 / (100 + 10)
    assert size_of(quad) == pytest.approx((100 + grow, 10 + grow), abs=1.5)
    assert quad.mean(axis=0) == pytest.approx([160, 120], abs=1)


@pytest.mark.parametrize("tilt", [-20, -2, 0, 2, 20])
def test_corners_start_top_left_and_run_clockwise(tilt: float) -> None:
    (quad,) = find_boxes(text_map(((160, 120), (120, 14), tilt)))
    along = quad[1] - quad[0]
    assert np.degrees(np.arctan2(along[1], along[0])) == pytest.approx(tilt, abs=1.5)
    assert size_of(quad)[0] > size_of(quad)[1]


def test_faint_and_tiny_spots_are_no_text() -> None:
    assert find_boxes(text_map(((160, 120), (100, 10), 0), probability=0.4)) == []
    assert find_boxes(text_map(((160, 120), (2, 1), 0))) == []
    assert find_boxes(np.zeros((32, 32), np.float32)) == []


def test_the_number_of_boxes_is_bounded() -> None:
    spots = [((8 + 16 * x, 6 + 12 * y), (8, 5), 0) for x in range(20) for y in range(20)]
    assert len(find_boxes(text_map(*spots))) == MAX_BOXES


def test_rows_are_read_downwards_and_pieces_rightwards() -> None:
    first, second, third = box(10, 10, 60, 20), box(150, 14, 60, 20), box(10, 50, 200, 20)
    rows = in_rows([third, second, first])
    assert [[id(quad) for quad in row] for row in rows] == [[id(first), id(second)], [id(third)]]


def test_a_tilt_does_not_mix_rows() -> None:
    turn = cv2.getRotationMatrix2D((0, 0), 6, 1)[:, :2].astype(np.float32)
    left_below, right_above = box(0, 40, 100, 20) @ turn.T, box(400, 10, 100, 20) @ turn.T
    left_above, right_below = box(0, 10, 100, 20) @ turn.T, box(400, 40, 100, 20) @ turn.T
    rows = in_rows([left_below, right_above, left_above, right_below])
    assert [[id(q) for q in row] for row in rows] == [
        [id(left_above), id(right_above)],
        [id(left_below), id(right_below)],
    ]


def test_no_boxes_make_no_rows_but_one_blank_line() -> None:
    assert in_rows([]) == []
    batch = cut_lines(np.zeros((50, 50, 3), np.uint8), [])
    assert batch.shape == (1, 3, 48, 64)
    assert batch.min() == batch.max()


def test_lines_are_laid_straight_and_padded_to_one_width() -> None:
    page = np.full((240, 320, 3), 255, np.uint8)
    tilted = ((160.0, 120.0), (200.0, 24.0), 2.0)
    cv2.fillPoly(page, [cv2.boxPoints(tilted).astype(np.int32)], (200, 0, 0))
    (quad,) = in_rows(find_boxes(text_map(tilted)))[0]
    batch = cut_lines(page, [quad, box(10, 10, 24, 24)])
    assert batch.shape[:3] == (2, 3, 48)
    assert batch.shape[3] % 32 == 0
    middle = batch[0, :, 24, :]
    assert middle[2, 60] == 200  # red comes last: channels are BGR
    assert middle[0, 60] == 0
    edge = np.argmax(batch[0, 0] < 128, axis=0)[40:160]
    assert int(edge.max()) - int(edge.min()) <= 2


def test_a_line_that_runs_downwards_is_turned() -> None:
    page = np.zeros((240, 320, 3), np.uint8)
    page[20:60, 100:120] = 255  # the upper end of the line, where it starts
    batch = cut_lines(page, [box(100, 20, 20, 160)])
    assert batch.shape == (1, 3, 48, 384)
    assert batch[0, 0, 24, 10] == 255
    assert batch[0, 0, 24, 370] == 0


def test_a_very_long_line_is_squeezed() -> None:
    assert cut_lines(np.zeros((50, 1600, 3), np.uint8), [box(0, 0, 1600, 10)]).shape == (1, 3, 48, MAX_WIDTH_PX)
