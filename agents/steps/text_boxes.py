"""From a map of text probabilities to text boxes in reading order.

The post-processing of differentiable binarization: Liao et al. (2020), "Real-time Scene Text Detection with
Differentiable Binarization", AAAI. A quad is float32 [4, 2]: top left, top right, bottom right, bottom left, (x, y) in pixels.
"""

from __future__ import annotations

import cv2
import numpy as np

PIXEL_THRESHOLD = 0.3
"""A pixel is text from this probability on."""
BOX_THRESHOLD = 0.5
"""A box is kept from this mean probability on."""
UNCLIP_RATIO = 1.6
"""The map marks a shrunk kernel of each line; the box grows by area * ratio / perimeter on each side to hold all of it."""
MIN_SIDE_PX = 3
MAX_BOXES = 64
"""Lines of a page that are read; the most probable ones if there are more."""


def find_boxes(text_map: np.ndarray) -> list[np.ndarray]:
    """The quads of the text lines in `text_map` (float32 [H, W], probabilities), at most `MAX_BOXES`, in any order."""
    bitmap = (text_map > PIXEL_THRESHOLD).astype(np.uint8)
    contours, _ = cv2.findContours(bitmap, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    found: list[tuple[float, np.ndarray]] = []
    for contour in sorted(contours, key=len, reverse=True)[: 4 * MAX_BOXES]:
        centre, (width, height), angle = cv2.minAreaRect(contour)
        if min(width, height) < MIN_SIDE_PX:
            continue
        score = _mean_inside(text_map, contour)
        if score >= BOX_THRESHOLD:
            grow = UNCLIP_RATIO * width * height / (width + height)  # twice area * ratio / perimeter
            found.append((score, _quad((centre, (width + grow, height + grow), angle))))
    found.sort(key=lambda pair: -pair[0])
    return [quad for _, quad in found[:MAX_BOXES]]


def _mean_inside(text_map: np.ndarray, contour: np.ndarray) -> float:
    x, y, width, height = cv2.boundingRect(contour)
    mask = np.zeros((height, width), np.uint8)
    cv2.fillPoly(mask, [contour - (x, y)], 1)
    return float(cv2.mean(text_map[y : y + height, x : x + width], mask)[0])


def _quad(rectangle: tuple[tuple[float, float], tuple[float, float], float]) -> np.ndarray:
    points = cv2.boxPoints(rectangle)
    by_x = points[np.argsort(points[:, 0], kind="stable")]
    left, right = by_x[:2], by_x[2:]
    top_left, bottom_left = left[np.argsort(left[:, 1], kind="stable")]
    top_right, bottom_right = right[np.argsort(right[:, 1], kind="stable")]
    return np.stack([top_left, top_right, bottom_right, bottom_left]).astype(np.float32)


def size_of(quad: np.ndarray) -> tuple[float, float]:
    """Width and height of a quad, pixels."""
    return float(np.linalg.norm(quad[1] - quad[0])), float(np.linalg.norm(quad[3] - quad[0]))


def in_rows(quads: list[np.ndarray]) -> list[list[np.ndarray]]:
    """The quads in reading order: rows from top to bottom, each from left to right.

    The common tilt of the boxes is taken out first; otherwise the right end of a tilted line slips into the next row.
    """
    if not quads:
        return []
    tilt = float(np.median([_tilt_of(quad) for quad in quads]))
    turn = np.array([[np.cos(tilt), np.sin(tilt)], [-np.sin(tilt), np.cos(tilt)]])
    centres = {id(quad): turn @ quad.mean(axis=0) for quad in quads}
    rows: list[list[np.ndarray]] = []
    for quad in sorted(quads, key=lambda q: float(centres[id(q)][1])):
        last = rows[-1][-1] if rows else None
        if last is not None and centres[id(quad)][1] - centres[id(last)][1] < 0.5 * min(
            size_of(quad)[1], size_of(last)[1]
        ):
            rows[-1].append(quad)
        else:
            rows.append([quad])
    return [sorted(row, key=lambda q: float(centres[id(q)][0])) for row in rows]


def _tilt_of(quad: np.ndarray) -> float:
    along = quad[1] - quad[0]
    return float(np.arctan2(along[1], along[0]))
