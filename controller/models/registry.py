"""The registry of models: what was added is validated, cut, proven, profiled and kept, so that any range of blocks can be served.

On disk: `models/NAME.json` is the record of a model, `blobs/` holds its files by hash. Adding the same content in the same way again
returns at once. Every method may be called from several threads; a crash leaves whole records and whole blobs only.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agents.engine import GOLDEN_INPUT, GOLDEN_OUTPUT
from agents.messages import ShardFile
from agents.wire import encode_tensors
from controller.models.blobs import BlobStore, content_hash, write_atomically
from controller.models.examining import Examination, examine
from controller.models.extraction import Declaration, extract, piece, serialise
from controller.models.graph import build_graph, read_file, read_model, shard_limit_bytes
from controller.models.layout import Partition, assemble
from controller.models.packages import Progress
from controller.models.proving import Proof
from controller.models.reference import reference_calibration
from controller.models.samples import SAMPLE_ITEMS, check_sample, generate_sample
from controller.models.sessions import Arrays, CannotRunError
from policies.ids import BlobHash, ModelName
from policies.plan import Span, file_key
from policies.service import Axis, ModelProfile
from sla.errors import ModelError, NotFoundError

RECORD_VERSION = 8
"""Raise it when cutting, proving or profiling changes its results: models are then examined anew."""
MAX_ASSET_BYTES = 256 << 20
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")
_log = logging.getLogger(__name__)

Transform = Callable[[Any], Any]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept about one model beside its blobs."""

    key: str
    """What was added and how; the same key means the same record."""
    self_contained: bool
    """False if weights lie in other files, which the key does not cover: such a model is examined at every `add`."""
    profile: ModelProfile
    proof: Proof
    shared: tuple[int, ...]
    bounds: tuple[int, ...]
    declared: dict[str, Declaration]
    weights: str = ""
    """Directory of the weights of a model that is larger than one file may be: below the registry's own, or where the caller keeps it."""
    trace: BlobHash
    """The values of one item at every cut, from which golden blobs are made."""


@dataclass(frozen=True, slots=True)
class Part:
    """A range of blocks as a model of its own."""

    content: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sample: Arrays
    """What comes in when the whole model runs on its own sample, for one item."""


class ModelRegistry:
    """See the module; `directory` belongs to this registry alone."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._records_directory = directory / "models"
        self._blobs = BlobStore(directory / "blobs")
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        self._shards: dict[tuple[str, str, Span], ShardFile] = {}
        self._file_keys: dict[str, str] = {}
        """Hash of a shard file -> what it is called in plans."""
        self._busy: dict[str, threading.RLock] = {}
        self._load_records()

    def add(
        self,
        name: str,
        path_or_bytes: Path | bytes,
        *,
        axis: Axis | None = None,
        samples: Mapping[str, np.ndarray[Any, Any]] | None = None,
        accuracy: float = 1.0,
        knobs: Mapping[str, tuple[tuple[float, float], ...]] | None = None,
        transform: Transform | None = None,
        progress: Progress = lambda sentence: None,
    ) -> ModelProfile:
        """Examine a model and keep it under `name`; replaces what had the name. Takes seconds, or milliseconds if it is known.

        `axis` is what axis 0 of its inputs means, to be split if the items are proven independent; `samples` are inputs with a few
        different items (generated if not given); `accuracy` is the share of right answers, `knobs` what was measured of inputs that are
        knobs (see `ModelProfile.knobs`). Raises ModelError; then nothing changes.
        """
        if _NAME.fullmatch(name) is None:
            raise ModelError(
                f"{name!r} cannot name a model.",
                found=name,
                accepted="1 to 64 lower-case letters, digits, dots, dashes and underscores",
            )
        if not 0 <= accuracy <= 1:
            raise ModelError(
                f"The accuracy of {name} is {accuracy}; accepted is a share between 0 and 1.", found=str(accuracy)
            )
        source = path_or_bytes if isinstance(path_or_bytes, bytes) else read_file(path_or_bytes)
        key = _key(source, axis, samples, transform)
        with self._exclusive(name):
            known = self._records.get(name)
            if known is None or known.key != key or not self._is_reusable(known):
                known = self._examine(name, path_or_bytes, key, axis, samples, transform, progress)
            profile = msgspec.structs.replace(
                known.profile, accuracy=accuracy, knobs=known.profile.knobs if knobs is None else dict(knobs)
            )
            if profile != known.profile or known is not self._records.get(name):
                self._keep(msgspec.structs.replace(known, profile=profile))
            return self._records[name].profile

    def profile(self, name: str) -> ModelProfile:
        """The profile of a model. Raises NotFoundError."""
        return self._record(name).profile

    def proof(self, name: str) -> Proof:
        """What was compared when the model was added. Raises NotFoundError."""
        return self._record(name).proof

    def profiles(self) -> dict[ModelName, ModelProfile]:
        """All models by name."""
        with self._lock:
            return {record.profile.name: record.profile for record in self._records.values()}

    def shard_file(self, name: str, blocks: Span) -> ShardFile:
        """Blocks of a model as a file, extracted when first asked for. Raises NotFoundError for a range the model does not have."""
        record = self._record(name)
        count = len(record.profile.blocks)
        if not 0 <= blocks.start < blocks.stop <= count:
            raise NotFoundError(f"{name} has blocks 0 to {count}, not [{blocks.start}, {blocks.stop}).")
        with self._exclusive(name):
            shard = self._shards.get((name, record.key, blocks))
            if shard is None:
                shard = self._extract(record, blocks)
                with self._lock:
                    self._shards[name, record.key, blocks] = shard
                    self._file_keys[shard.sha256] = file_key(ModelName(name), blocks)
            return shard

    def file_keys(self, blobs: Iterable[str]) -> frozenset[str]:
        """Which shard files (`policies.plan.file_key`) are among these blobs, of those that were extracted since the start."""
        return frozenset(self._file_keys[blob] for blob in blobs if blob in self._file_keys)

    def block_files(self, name: str) -> tuple[tuple[ShardFile, ...], BlobHash]:
        """Every block of a model as a file, in order, and a blob with the inputs of the first item that they read. Raises NotFoundError."""
        record = self._record(name)
        files = tuple(self.shard_file(name, Span(at, at + 1)) for at in range(len(record.profile.blocks)))
        made: set[str] = set()
        needed: dict[str, None] = {}
        for file in files:
            needed |= dict.fromkeys(key for key in file.inputs if key not in made)
            made.update(file.outputs)
        trace = self._trace(record)
        return files, self._blobs.put(encode_tensors({GOLDEN_INPUT + key: trace[key] for key in needed}))

    def part(self, name: str, blocks: Span) -> Part:
        """Blocks of a model, to be added as a model of their own. Raises NotFoundError."""
        file = self.shard_file(name, blocks)
        trace = self._trace(self._record(name))
        content = read_file(self._existing(file.sha256))
        return Part(content, file.inputs, file.outputs, {key: trace[key] for key in file.inputs})

    def add_asset(self, content: bytes) -> BlobHash:
        """Keep a file that Python steps need. Raises ModelError if it is too large."""
        if len(content) > MAX_ASSET_BYTES:
            raise ModelError(f"An asset may have {MAX_ASSET_BYTES >> 20} MB, not {len(content) >> 20}.")
        return self._blobs.put(content)

    def remove(self, name: str) -> None:
        """Forget a model, and drop the files that only it needed. Raises NotFoundError."""
        record = self._record(name)
        with self._exclusive(name):
            (self._records_directory / f"{name}.json").unlink(missing_ok=True)
            with self._lock:
                self._records.pop(name, None)
                own = self._drop_shards(name)
                needed = {blob for other in self._records.values() for blob in (other.profile.sha256, other.trace)}
                needed |= {blob for shard in self._shards.values() for blob in _blobs_of(shard)}
        mine = {record.profile.sha256, record.trace, *(blob for shard in own.values() for blob in _blobs_of(shard))}
        for blob in mine - needed:
            self._blobs.remove(blob)

    def weight_directories(self) -> set[Path]:
        """Where the weights lie of models that are larger than one file may be."""
        with self._lock:
            return {self._directory / record.weights for record in self._records.values() if record.weights}

    def blob_path(self, sha256: str) -> Path | None:
        """Where a shard file, golden blob or asset lies; None if there is no such blob."""
        return self._blobs.path(sha256)

    def _examine(
        self,
        name: str,
        source: Path | bytes,
        key: str,
        axis: Axis | None,
        samples: Mapping[str, np.ndarray[Any, Any]] | None,
        transform: Transform | None,
        progress: Progress,
    ) -> Record:
        model, self_contained = read_model(source, name)
        if transform is not None:
            model = transform(model)
        graph = build_graph(model, name, weights=source.parent.resolve() if isinstance(source, Path) else None)
        items = SAMPLE_ITEMS if axis else 1
        sample = generate_sample(graph, items, name) if samples is None else check_sample(graph, samples, name)
        content = serialise(model)
        try:
            found = examine(graph, content, sample, axis, name, progress)
        except CannotRunError as error:
            if samples is not None:
                raise
            why = f"{error} This sample was generated; give one of your own with --sample."
            raise CannotRunError(why, found=name, accepted="a sample with an array per input") from error
        profile = ModelProfile(
            name=ModelName(name), sha256=self._blobs.put(content), blocks=found.blocks, input_bytes_per_item=found.input_bytes,
            split_axis=axis if found.split else None, activation_bytes=found.activation_bytes,
            atomic_reason=found.cut.atomic_reason, split_until=found.split_until, timed_on=reference_calibration(),
            shard_limit_bytes=shard_limit_bytes(graph),
        )  # fmt: skip
        return Record(
            key=key, self_contained=self_contained, weights=self._noted(graph.weights), profile=profile, proof=found.proof, shared=tuple(sorted(found.cut.shared)), bounds=found.cut.bounds,
            declared=found.declared, trace=self._blobs.put(_pack_trace(found)),
        )  # fmt: skip

    def _extract(self, record: Record, blocks: Span) -> ShardFile:
        profile = record.profile
        cut, content = self._cut(record)
        part = piece(cut, blocks.start, blocks.stop)
        whole = len(blocks) == len(profile.blocks)
        if not whole or cut.graph.weights is not None:
            content = serialise(extract(cut, blocks.start, blocks.stop, record.declared))
        trace = self._trace(record)
        inputs = cut.graph.inputs if whole else part.inputs
        golden = {GOLDEN_INPUT + key: trace[key] for key in inputs}
        golden |= {GOLDEN_OUTPUT + key: trace[key] for key in part.outputs}
        inside = profile.blocks[blocks.start : blocks.stop]
        weights = sum(block.param_bytes for block in inside)
        return ShardFile(
            model=profile.name,
            blocks=blocks,
            sha256=self._blobs.put(content),
            size_bytes=len(content),
            inputs=inputs,
            outputs=part.outputs,
            golden_sha256=self._blobs.put(encode_tensors(golden)),
            memory_bytes=weights + profile.activation_bytes,
            moved_bytes_per_item=int(sum(block.work.moved_bytes for block in inside if block.work is not None)),
        )

    def _cut(self, record: Record) -> tuple[Partition, bytes]:
        content = read_file(self._existing(record.profile.sha256))
        weights = self._directory / record.weights if record.weights else None
        model, _ = read_model(content, record.profile.name, weights=weights)
        graph = build_graph(model, record.profile.name, weights=weights)
        return assemble(graph, record.shared, record.bounds, reason=record.profile.atomic_reason), content

    def _trace(self, record: Record) -> Arrays:
        with np.load(io.BytesIO(read_file(self._existing(record.trace))), allow_pickle=False) as trace:
            names = [str(name) for name in trace["names"]]
            return {name: trace[f"value_{at}"] for at, name in enumerate(names)}

    def _noted(self, weights: Path | None) -> str:
        """How a directory is noted in a record: relative to the registry if it is below, so that both can move together."""
        if weights is None:
            return ""
        own = self._directory.resolve()
        return str(weights.relative_to(own) if weights.is_relative_to(own) else weights)

    def _existing(self, sha256: BlobHash) -> Path:
        path = self._blobs.path(sha256)
        if path is None:
            raise NotFoundError(f"The registry has lost the file {sha256[:12]}; add the model again.")
        return path

    def _is_reusable(self, record: Record) -> bool:
        return record.self_contained and all(
            self._blobs.path(sha256) is not None for sha256 in (record.profile.sha256, record.trace)
        )

    def _record(self, name: str) -> Record:
        with self._lock:
            record = self._records.get(name)
        if record is None:
            raise NotFoundError(f"There is no model named {name!r}; add it with `tidegate model add {name} FILE.onnx`.")
        return record

    def _keep(self, record: Record) -> None:
        name = record.profile.name
        stored = msgspec.json.encode({"version": RECORD_VERSION, "record": record})
        write_atomically(self._records_directory / f"{name}.json", stored)
        with self._lock:
            previous = self._records.get(name)
            self._records[name] = record
            if previous is not None and (previous.key, previous.bounds) != (record.key, record.bounds):
                self._drop_shards(name)

    def _drop_shards(self, name: str) -> dict[tuple[str, str, Span], ShardFile]:
        """Forget the shards of a model; they are returned. With the lock held."""
        own = {at: shard for at, shard in self._shards.items() if at[0] == name}
        self._shards = {at: shard for at, shard in self._shards.items() if at[0] != name}
        self._file_keys = {s.sha256: file_key(ModelName(of), blocks) for (of, _, blocks), s in self._shards.items()}
        return own

    def _load_records(self) -> None:
        for path in sorted(self._records_directory.glob("*.json")):
            try:
                stored = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
                if msgspec.json.decode(stored["version"]) == RECORD_VERSION:
                    self._records[path.stem] = msgspec.json.decode(stored["record"], type=Record)
            except (msgspec.MsgspecError, KeyError) as error:
                _log.warning("%s is not a record of a model and is left out: %s", path.name, error)

    def _exclusive(self, name: str) -> threading.RLock:
        """One thread at a time works on a model; others on other models."""
        with self._lock:
            return self._busy.setdefault(name, threading.RLock())


def _blobs_of(shard: ShardFile) -> tuple[BlobHash, ...]:
    return (shard.sha256,) if shard.golden_sha256 is None else (shard.sha256, shard.golden_sha256)


def _pack_trace(found: Examination) -> bytes:
    """The traced values as an uncompressed .npz (names apart, because a value may be named like a path)."""
    packed = io.BytesIO()
    values = {f"value_{at}": array for at, array in enumerate(found.trace.values())}
    np.savez(packed, allow_pickle=False, names=np.array(list(found.trace), dtype=np.str_), **values)
    return packed.getvalue()


def _key(
    content: bytes, axis: Axis | None, samples: Mapping[str, np.ndarray[Any, Any]] | None, transform: Transform | None
) -> str:
    """Hash of everything that an examination depends on."""
    digest = hashlib.sha256(content_hash(content).encode())
    applied = f"{transform.__module__}.{transform.__qualname__}" if transform is not None else ""
    digest.update(f"|{axis}|{applied}|".encode())
    for key, array in sorted((samples or {}).items()):
        digest.update(f"{key}:{array.dtype}:{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
