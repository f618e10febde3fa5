"""Which line of a document answers a question, and which part of the line is the answer."""

from __future__ import annotations

import numpy as np

COLONS = ":：﹕︓∶"
"""The colon and what recognition reads in its place (full-width, small, vertical, ratio)."""
KEY_WEIGHT = 0.75
"""Share of the key in a line's likeness to the question; the rest is the whole line. Measured on 360 questions about
rendered documents: the key alone answers 360, the whole line alone 349; the line still helps where a key was misread."""


def split_line(line: str) -> tuple[str, str]:
    """Key and value of a "key: value" line; the key is empty, and the value the whole line, if it has no such form."""
    at = min((line.find(colon) for colon in COLONS if colon in line), default=-1)
    # A colon between two digits belongs to a time of day: "Gate opens 10:45".
    while 0 < at < len(line) - 1 and line[at - 1].isdigit() and line[at + 1].isdigit():
        at = min((line.find(colon, at + 1) for colon in COLONS if colon in line[at + 1 :]), default=-1)
    key, value = (line[:at].strip(), line[at + 1 :].strip()) if at >= 0 else ("", "")
    return (key, value) if key and value else ("", line.strip())


def choose(lines: list[str], to_line: np.ndarray, to_key: np.ndarray) -> tuple[int, float]:
    """Index of the line that answers the question, and how alike they are in [0, 1]; `lines` is not empty.

    `to_line` and `to_key` (float32 [len(lines)]) are cosines between the question and each line, and its key alone.
    Lines of the form "key: value" are preferred as a class: a title is often nearer to a question than any answer.
    """
    likeness = KEY_WEIGHT * to_key + (1.0 - KEY_WEIGHT) * to_line
    has_key = np.array([bool(split_line(line)[0]) for line in lines])
    ranked = np.where(has_key, likeness, -np.inf) if has_key.any() else likeness
    best = int(ranked.argmax())
    return best, float(np.clip(likeness[best], 0.0, 1.0))
