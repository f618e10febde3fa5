"""Sentences as token ids for a sentence encoder, and its hidden states as unit vectors."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

MAX_TOKENS = 64


@lru_cache(maxsize=4)
def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, cutting at `MAX_TOKENS` and padding nothing."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def encode(tokenizer: Tokenizer, sentences: list[str]) -> dict[str, np.ndarray]:
    """`input_ids`, `attention_mask` and `token_type_ids`, int64 [len(sentences), longest]."""
    # One by one: encode_batch starts a thread pool, which costs more than these few short sentences do.
    rows = [tokenizer.encode(sentence).ids for sentence in sentences]
    shape = (len(rows), max(len(row) for row in rows))
    ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros(shape, np.int64)}


def pool(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Unit vectors float32 [N, width]: the mean of the hidden states [N, S, width] where `mask` [N, S] is set."""
    weights = mask.astype(np.float32)[:, :, None]
    mean = (hidden * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1.0)
    return np.asarray(mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-9), np.float32)


def prefix_mask(tokenizer: Tokenizer, attention_mask: np.ndarray, prefixes: list[str]) -> np.ndarray:
    """The part of `attention_mask` (int64 [N, S]) that covers each sentence's prefix; all of it for an empty prefix."""
    mask = np.zeros_like(attention_mask)
    for index, prefix in enumerate(prefixes):
        if not prefix:
            mask[index] = attention_mask[index]
            continue
        tokens = len(tokenizer.encode(prefix, add_special_tokens=False).ids)
        mask[index, 1 : 1 + tokens] = attention_mask[index, 1 : 1 + tokens]  # 0 is the encoder's [CLS]
    return mask
