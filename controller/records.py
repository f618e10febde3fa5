"""What the centre remembers, and how it is written down.

A record is one byte with the version of the encoding, then MessagePack (JSON cannot say infinity, which predictions may hold).
Fields that a newer Tidegate added are skipped when they are read, and fields that are missing take their defaults.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from agents.messages import DeviceFacts
from policies.decision import Decision
from policies.ids import AgentId, ModelName, ServiceId
from policies.plan import Lane, Plan, StagePlan
from policies.service import Axis
from sla.contract import Contract, contract_from
from sla.errors import ContractError, PermanentError, SettingsError

T = TypeVar("T")

MAX_PLAN_HISTORY = 50
LATELY = 4
"""So many plans of a service may lie within the window of measures."""
_ENCODING = 1


class StoredContract(msgspec.Struct, frozen=True, kw_only=True):
    """A contract and the version under which it is stored (the ETag of the API)."""

    contract: Contract
    version: int


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One enrolled device."""

    id: AgentId
    facts: DeviceFacts
    public_key_fingerprint: str
    enrolled_at_s: float
    """Seconds since 1970, the controller's clock."""
    seen_host: str = ""
    """The address it enrolled from, as the controller saw it."""
    enrolled_in_ms: float | None = None
    revoked: bool = False


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A join token; of its secret only the hash is kept."""

    created_at_s: float
    expires_at_s: float
    uses: int
    note: str = ""


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A join token as an operator may see it."""

    id: str
    """Begins the hash of the secret; names the token when it is revoked."""
    note: str
    created_at_s: float
    expires_at_s: float
    uses: int
    used: int


class ApiKeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An API key; of the key itself only the hash is kept, as the record's name."""

    role: int
    """A `controller.auth.Role`."""
    note: str = ""
    created_at_s: float = 0.0


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of a service's history, with the decision that wanted it."""

    plan: Plan
    at_s: float
    decision: Decision | None = None


class PlanBook(msgspec.Struct, frozen=True, kw_only=True):
    """All that is remembered of one service's plans; it changes as a whole or not at all."""

    history: tuple[PlanRecord, ...] = ()
    """By epoch, oldest first, bounded; the running and the last good plan never fall out."""
    running_epoch: int | None = None
    last_good_epoch: int | None = None
    pinned: bool = False

    def record(self, epoch: int | None) -> PlanRecord | None:
        """The plan of that epoch, if it is remembered."""
        return next((record for record in self.history if record.plan.epoch == epoch), None)

    @property
    def running(self) -> Plan | None:
        """The plan that serves."""
        record = self.record(self.running_epoch)
        return None if record is None else record.plan

    def alike(self) -> dict[str, set[int]]:
        """By stage of the running plan: its epoch and those of the newest plans that have the stage as it has, fallbacks aside.

        What was measured under other plans says nothing of it: with the same blocks on the same agent it may have been another model, or another
        share of the items.
        """
        running = self.running
        if running is None:
            return {}
        wanted = {stage.stage: _placed(stage) for stage in running.stages}
        found: dict[str, set[int]] = {name: {running.epoch} for name in wanted}
        for record in self.history[-LATELY:]:
            for stage in record.plan.stages:
                if stage.stage in wanted and _placed(stage) == wanted[stage.stage]:
                    found[stage.stage].add(record.plan.epoch)
        return found

    @property
    def last_good(self) -> Plan | None:
        """The newest plan that proved itself; what a rollback restores."""
        record = self.record(self.last_good_epoch)
        return None if record is None else record.plan

    def with_plan(self, record: PlanRecord) -> PlanBook:
        """The book with one more plan; the oldest that nobody points at falls out."""
        history = (*self.history, record)
        kept = {self.running_epoch, self.last_good_epoch, record.plan.epoch}
        spare = [r.plan.epoch for r in history if r.plan.epoch not in kept]
        dropped = set(spare[: max(0, len(history) - MAX_PLAN_HISTORY)])
        return msgspec.structs.replace(self, history=tuple(r for r in history if r.plan.epoch not in dropped))


class KnobSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted of one knob."""

    value: float
    """As set; with `auto`, where it stands now."""
    auto: bool = False
    """It follows the use of the memory bandwidth."""


class KnobBook(msgspec.Struct, frozen=True, kw_only=True):
    """The knobs of one service; those that nobody set are missing."""

    version: int = 0
    """Grows with every change, so that ingresses know which values are newer."""
    settings: dict[str, KnobSetting] = {}
    """By `policies.knobs.knob_key`."""


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the decision log. The snapshot that it was made from is kept beside it (see `State.snapshot_of`)."""

    at_s: float
    decision: Decision
    outcome: str = ""
    """How it went, in words; it may be noted later."""
    id: str = ""
    """Given when it is appended; names the entry within its service."""

    @property
    def service_id(self) -> ServiceId:
        """The service that was decided about."""
        return self.decision.service_id


class OutcomeNote(msgspec.Struct, frozen=True, kw_only=True):
    """How a decision went, noted after it was appended."""

    decision_id: str
    outcome: str


def encode(record: Any) -> bytes:
    """A record as bytes."""
    return bytes([_ENCODING]) + msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[T], key: str) -> T:
    """The record in `data`. Raises SettingsError if a newer Tidegate wrote it, PermanentError if it makes no sense."""
    if not data or data[0] != _ENCODING:
        raise SettingsError(
            f"The store holds {key!r} in a form that this version cannot read; start the newer Tidegate."
        )
    try:
        return msgspec.msgpack.decode(data[1:], type=kind)
    except msgspec.MsgspecError as error:
        raise PermanentError(f"The store holds {key!r} in a form that makes no sense: {error}.") from error


def encode_contract(contract: Contract) -> bytes:
    """A contract as bytes: its JSON document."""
    return encode(contract.model_dump_json())


def decode_contract(data: bytes, key: str) -> Contract:
    """The contract in `data`; fields that only a newer Tidegate knows are left out."""
    document = json.loads(decode(data, str, key))
    try:
        return contract_from({name: value for name, value in document.items() if name in Contract.model_fields})
    except ContractError as error:
        raise PermanentError(f"The store holds {key!r} in a form that makes no sense: {error}") from error


def _placed(stage: StagePlan) -> tuple[ModelName, Axis | None, tuple[Lane, ...]]:
    return stage.model, stage.axis, stage.lanes
