"""Snapshots as bytes: what is kept beside a decision, so that it can be made again."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from policies.snapshot import Snapshot
from sla.contract import Contract, contract_from
from sla.errors import PermanentError

T = TypeVar("T")


def snapshot_bytes(snapshot: Snapshot) -> bytes:
    """A snapshot as it is kept beside its decision."""
    return _ENCODER.encode(snapshot)


def snapshot_from(data: bytes) -> Snapshot:
    """The snapshot again. Raises PermanentError when another version wrote it in a form that makes no sense here."""
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise PermanentError(f"This snapshot makes no sense to this version: {error}.") from None


def _to_plain(value: Any) -> Any:
    return value.model_dump(mode="json")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is not Contract:
        raise PermanentError(f"A snapshot holds a {kind.__name__}, which has no way back.")
    return contract_from({name: item for name, item in value.items() if name in Contract.model_fields})


def plain_encoder() -> msgspec.msgpack.Encoder:
    """An encoder for whatever holds contracts."""
    return msgspec.msgpack.Encoder(enc_hook=_to_plain)


def typed_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """A decoder for whatever holds contracts."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_DECODER = msgspec.msgpack.Decoder(Snapshot, dec_hook=_from_plain)
