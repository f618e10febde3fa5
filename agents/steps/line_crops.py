"""Text lines cut out of a page and laid straight, as one batch for recognition."""

from __future__ import annotations

import cv2
import numpy as np

from agents.steps.text_boxes import size_of

HEIGHT_PX = 48
WIDTH_STEP_PX = 32
MIN_WIDTH_PX = 64
MAX_WIDTH_PX = 1280
"""Longer lines are squeezed."""
VERTICAL_FROM = 1.5
"""A box this many times higher than wide holds a line that runs downwards."""
PADDING = 127
"""The middle of the value range: zero for a network that was trained on normalised pixels padded with zeros."""


def cut_lines(page: np.ndarray, quads: list[np.ndarray]) -> np.ndarray:
    """The lines under `quads` (page pixels) of an RGB uint8 page, as BGR uint8 [N, 3, 48, W]; W is a multiple of 32.

    Without quads there is one blank line, so that the pipeline always has something to carry on with.
    """
    lines = [_cut(page, quad) for quad in quads]
    longest = max([line.shape[1] for line in lines], default=MIN_WIDTH_PX)
    width = max(MIN_WIDTH_PX, -(-longest // WIDTH_STEP_PX) * WIDTH_STEP_PX)
    batch = np.full((max(1, len(lines)), 3, HEIGHT_PX, width), PADDING, np.uint8)
    for item, line in zip(batch, lines, strict=False):
        item[:, :, : line.shape[1]] = line[:, :, ::-1].transpose(2, 0, 1)
    return batch


def _cut(page: np.ndarray, quad: np.ndarray) -> np.ndarray:
    width, height = size_of(quad)
    if height >= VERTICAL_FROM * width:
        quad, width, height = np.roll(quad, -1, axis=0), height, width
    target_width = int(np.clip(round(HEIGHT_PX * width / max(height, 1.0)), 8, MAX_WIDTH_PX))
    corners = np.array([[0, 0], [target_width, 0], [target_width, HEIGHT_PX], [0, HEIGHT_PX]], np.float32)
    straighten = cv2.getPerspectiveTransform(quad, corners)
    shape = (target_width, HEIGHT_PX)
    return np.asarray(
        cv2.warpPerspective(page, straighten, shape, flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    )
