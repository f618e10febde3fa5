"""Greedy decoding of connectionist temporal classification (Graves et al. 2006, ICML): symbols from the best path."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from sla.errors import ModelError

BLANK = 0
"""The class that stands between symbols; symbol i of the charset is class i + 1."""


@lru_cache(maxsize=8)
def load_charset(path: Path) -> tuple[str, ...]:
    """The symbols of a recognition model, one per line of the file. Raises ModelError if it cannot be one."""
    # str.splitlines() would also split at symbols such as U+2028, which are symbols here.
    symbols = tuple(path.read_text(encoding="utf-8").split("\n"))
    if len(symbols) < 2 or "" in symbols[:-1]:
        raise ModelError(f"The charset {path.name} is not a list of symbols, one per line.", accepted="one per line")
    return symbols[:-1] if symbols[-1] == "" else symbols


def decode(ids: np.ndarray, scores: np.ndarray, charset: tuple[str, ...]) -> list[tuple[str, float]]:
    """Text and mean score of each line, from the best class (int64 [N, T]) and its probability (float32 [N, T]).

    Raises ModelError if a class lies outside the charset: then the charset belongs to another model.
    """
    if ids.ndim != 2 or ids.shape != scores.shape:
        raise ModelError(
            f"Recognition gave ids {list(ids.shape)} and scores {list(scores.shape)}; both must be [N, T]."
        )
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) <= len(charset):
        raise ModelError(
            f"Recognition gave class {int(ids.max())}, but its charset has {len(charset)} symbols.",
            found=str(int(ids.max())), accepted=f"classes 0 to {len(charset)}",
        )  # fmt: skip
    kept = ids != BLANK
    kept[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    return [_line(row[mask], score[mask], charset) for row, score, mask in zip(ids, scores, kept, strict=True)]


def _line(ids: np.ndarray, scores: np.ndarray, charset: tuple[str, ...]) -> tuple[str, float]:
    text = "".join(charset[index - 1] for index in ids)
    return text.strip(), float(scores.mean()) if len(scores) else 0.0
