"""What the centre remembers, typed, over the store. Whatever a method returned from is durable.

Keys: contract/ID, service/ID, model/NAME, profile/MODEL.TYPE, agent/ID, token/HASH, key/HASH, plans/SERVICE, knobs/SERVICE, window/SERVICE; logs decisions/SERVICE, outcomes/SERVICE.
All methods raise StoreUnavailableError when the outcome is unknown: repeat them, each is safe to repeat.
"""

from __future__ import annotations

import heapq
import logging
import zlib
from collections.abc import Callable

import msgspec

from controller.join_tokens import JoinTokens
from controller.records import (
    AgentRecord,
    ApiKeyRecord,
    DecisionRecord,
    KnobBook,
    OutcomeNote,
    PlanBook,
    PlanRecord,
    StoredContract,
    TokenRecord,
    TokenView,
    decode,
    decode_contract,
    encode,
    encode_contract,
)
from controller.store import Fence, Store
from controller.table import Table
from policies.decision import Decision
from policies.ids import AgentId, ModelName, ServiceId
from policies.plan import Plan
from policies.service import DeviceProfile, ModelProfile, ServiceSpec
from sla.contract import Contract
from sla.errors import (
    ConflictError,
    NotFoundError,
    TidegateError,
)

__all__ = [
    "AgentRecord", "DecisionRecord", "PlanBook", "PlanRecord", "State", "StoredContract", "TokenRecord", "TokenView",
]  # fmt: skip

MAX_DECISIONS = 500
"""Per service."""
_MAX_SNAPSHOT_BYTES = 64 << 20

_log = logging.getLogger(__name__)


class State:
    """The typed state of one namespace.

    While `fence` is set (by the controller that leads), everything that only a leader may write carries it: plans, epochs, decisions and
    windows. Such a write raises RefusedError when somebody newer leads.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fence: Fence | None = None
        self._services = Table(store, "service", ServiceSpec)
        self._models = Table(store, "model", ModelProfile)
        self._agents = Table(store, "agent", AgentRecord)
        self._tokens = JoinTokens(store)
        self._books = Table(store, "plans", PlanBook)
        self._device_profiles = Table(store, "profile", DeviceProfile)
        self._knobs = Table(store, "knobs", KnobBook)
        self._api_keys = Table(store, "key", ApiKeyRecord)

    # --- contracts

    async def put_contract(self, contract: Contract, if_version: int | None = None) -> StoredContract:
        """The stored contract. The same content again changes nothing and keeps its version, whatever `if_version` says.

        `if_version=0`: there must be none yet. Raises ConflictError with the current version when it is another one.
        """
        key = f"contract/{contract.service_id}"
        held = await self.store.get(key)
        if held is not None and decode_contract(held.value, key) == contract:
            return StoredContract(contract=contract, version=held.version)
        version = await self.store.put(key, encode_contract(contract), expected_version=if_version)
        if version is None:
            stored = await self.contract(contract.service_id)
            if stored is not None and stored.contract == contract:
                return stored
            raise _contract_conflict(contract.service_id, if_version, 0 if stored is None else stored.version)
        return StoredContract(contract=contract, version=version)

    async def contract(self, service: str) -> StoredContract | None:
        """The contract of a service id."""
        key = f"contract/{service}"
        held = await self.store.get(key)
        return None if held is None else StoredContract(contract=decode_contract(held.value, key), version=held.version)

    async def contracts(self) -> dict[ServiceId, StoredContract]:
        """All contracts, by service id."""
        found = await self.store.scan("contract/")
        return {
            ServiceId(key.removeprefix("contract/")): StoredContract(
                contract=decode_contract(held.value, key), version=held.version
            )
            for key, held in found.items()
        }

    async def delete_contract(self, service: str, if_version: int | None = None) -> bool:
        """True if it was deleted, False if there was none. Raises ConflictError when its version is another one."""
        key = f"contract/{service}"
        if await self.store.delete(key, if_version):
            return True
        held = await self.store.get(key)
        if held is not None:
            raise _contract_conflict(service, if_version, held.version)
        return False

    # --- services and models

    async def put_service(self, spec: ServiceSpec) -> None:
        """Store or replace a service."""
        await self._services.put(spec.id, spec)

    async def service(self, service: str) -> ServiceSpec | None:
        """One service."""
        return await self._services.get(service)

    async def services(self) -> dict[ServiceId, ServiceSpec]:
        """All services."""
        return {ServiceId(name): spec for name, spec in (await self._services.all()).items()}

    async def delete_service(self, service: str) -> bool:
        """False if there was none."""
        return await self._services.delete(service)

    async def put_knobs(self, service: str, book: KnobBook) -> None:
        """Store where a service's knobs stand."""
        await self._knobs.put(service, book, fence=self.fence)

    async def delete_knobs(self, service: str) -> bool:
        """False if none was ever turned."""
        return await self._knobs.delete(service)

    async def knob_books(self) -> dict[ServiceId, KnobBook]:
        """The knobs of all services where one was ever turned."""
        return {ServiceId(name): book for name, book in (await self._knobs.all()).items()}

    async def put_model(self, profile: ModelProfile) -> None:
        """Store or replace a model's profile."""
        await self._models.put(profile.name, profile)

    async def models(self) -> dict[ModelName, ModelProfile]:
        """All model profiles."""
        return {ModelName(name): profile for name, profile in (await self._models.all()).items()}

    async def delete_model(self, name: str) -> bool:
        """False if there was none."""
        return await self._models.delete(name)

    async def put_device_profile(self, key: str, profile: DeviceProfile) -> None:
        """Keep what a model takes on a type of device, by whatever names the two."""
        await self._device_profiles.put(key, profile)

    async def device_profiles(self) -> dict[str, DeviceProfile]:
        """All of them, also of models that are not registered now."""
        return await self._device_profiles.all()

    # --- agents

    async def put_agent(self, record: AgentRecord) -> AgentRecord:
        """Store what is known of an agent; what is stored then. A revoked agent stays revoked."""

        def keep_revoked(current: AgentRecord | None) -> AgentRecord:
            revoked = record.revoked or (current is not None and current.revoked)
            return msgspec.structs.replace(record, revoked=revoked)

        return await self._agents.update(record.id, keep_revoked)

    async def agent(self, agent: str) -> AgentRecord | None:
        """One agent, revoked or not."""
        return await self._agents.get(agent)

    async def agents(self) -> list[AgentRecord]:
        """All agents, revoked ones too, by id."""
        return list((await self._agents.all()).values())

    async def revoke_agent(self, agent: str) -> AgentRecord:
        """Revoke for good; the record stays so that its certificate is recognised. Raises NotFoundError."""

        def revoke(current: AgentRecord | None) -> AgentRecord:
            if current is None:
                raise NotFoundError(f"There is no agent {agent!r}.")
            return msgspec.structs.replace(current, revoked=True)

        return await self._agents.update(agent, revoke)

    async def forget_agent(self, agent: str) -> bool:
        """Delete the record; False if there was none."""
        return await self._agents.delete(AgentId(agent))

    # --- join tokens

    async def create_token(self, *, ttl_s: float, uses: int, now_s: float, note: str = "") -> str:
        """The secret of a new join token; see `JoinTokens`."""
        return await self._tokens.create(ttl_s=ttl_s, uses=uses, now_s=now_s, note=note)

    async def spend_token(self, secret: str, public_key_fingerprint: str, *, now_s: float) -> None:
        """Let one device in. Raises RefusedError when the token is unknown, expired or used up; see `JoinTokens`."""
        await self._tokens.spend(secret, public_key_fingerprint, now_s=now_s)

    async def tokens(self) -> list[TokenView]:
        """All join tokens, newest first; without their secrets."""
        return await self._tokens.views()

    async def revoke_token(self, token_id: str) -> bool:
        """Nobody joins with it any more; False if there is no such token. Devices that joined stay."""
        return await self._tokens.revoke(token_id)

    # --- API keys

    async def put_api_key(self, digest: str, record: ApiKeyRecord) -> None:
        """Remember a key by its hash."""
        await self._api_keys.put(digest, record)

    async def api_keys(self) -> dict[str, ApiKeyRecord]:
        """All keys, by hash."""
        return await self._api_keys.all()

    async def delete_api_key(self, digest: str) -> bool:
        """False if there was none."""
        return await self._api_keys.delete(digest)

    # --- plans

    async def next_epoch(self, service: str) -> int:
        """An epoch that was never given before and is larger than all of them, also after a crash."""
        return await self.store.increment(f"epoch/{service}", fence=self.fence)

    async def put_plan(self, service: str, plan: Plan, decision: Decision | None, *, at_s: float) -> None:
        """Remember a plan that was decided; it is not running before `set_running`. The same plan again changes nothing.

        Raises ConflictError when the service has a plan of this epoch or a later one.
        """

        def add(current: PlanBook | None) -> PlanBook:
            book = current or PlanBook()
            held = book.record(plan.epoch)
            if held is not None and held.plan == plan:
                return book
            newest = book.history[-1].plan.epoch if book.history else 0
            if plan.epoch <= newest:
                raise ConflictError(
                    f"Plan {plan.epoch} of {service} comes too late: plan {newest} was decided already.",
                    current_version=newest,
                )
            return book.with_plan(PlanRecord(plan=plan, decision=decision, at_s=at_s))

        await self._books.update(service, add, fence=self.fence)

    async def set_running(self, service: str, epoch: int | None) -> None:
        """Note which plan serves (None: none does any more). Raises NotFoundError if it is not remembered."""
        await self._point(service, epoch, lambda book: msgspec.structs.replace(book, running_epoch=epoch))

    async def set_last_good(self, service: str, epoch: int) -> None:
        """Note that a plan proved itself. Raises NotFoundError if it is not remembered."""
        await self._point(service, epoch, lambda book: msgspec.structs.replace(book, last_good_epoch=epoch))

    async def set_pinned(self, service: str, pinned: bool) -> None:
        """Pin or unpin the running plan."""
        await self._point(service, None, lambda book: msgspec.structs.replace(book, pinned=pinned))

    async def plan_book(self, service: str) -> PlanBook:
        """All that is remembered of a service's plans; an empty book if nothing is."""
        return await self._books.get(service) or PlanBook()

    async def plan_books(self) -> dict[ServiceId, PlanBook]:
        """The books of all services."""
        return {ServiceId(name): book for name, book in (await self._books.all()).items()}

    async def running(self, service: str) -> Plan | None:
        """The plan that serves."""
        return (await self.plan_book(service)).running

    async def last_good(self, service: str) -> Plan | None:
        """What a rollback restores."""
        return (await self.plan_book(service)).last_good

    async def history(self, service: str) -> tuple[PlanRecord, ...]:
        """The plans that are remembered, oldest first."""
        return (await self.plan_book(service)).history

    async def delete_plans(self, service: str) -> bool:
        """Forget a service's plans (its epochs go on growing); False if there were none."""
        return await self._books.delete(service)

    async def _point(self, service: str, epoch: int | None, change: Callable[[PlanBook], PlanBook]) -> None:
        def changed(current: PlanBook | None) -> PlanBook:
            book = current or PlanBook()
            if epoch is not None and book.record(epoch) is None:
                raise NotFoundError(f"{service} has no plan {epoch} in its history.")
            return change(book)

        await self._books.update(service, changed, fence=self.fence)

    # --- decisions

    async def append_decision(self, record: DecisionRecord, snapshot: bytes | None = None) -> str:
        """The id of the new entry in its service's log. `snapshot` is whatever replays it; it is kept compressed."""
        packed = None if snapshot is None else zlib.compress(snapshot, 1)
        return await self.store.append(
            f"decisions/{record.service_id}", encode(record), MAX_DECISIONS, attachment=packed, fence=self.fence
        )

    async def note_outcome(self, service: str, decision_id: str, outcome: str) -> None:
        """Note how a decision went; the newest note counts."""
        note = encode(OutcomeNote(decision_id=decision_id, outcome=outcome))
        await self.store.append(f"outcomes/{service}", note, MAX_DECISIONS, fence=self.fence)

    async def tail_decisions(self, count: int, service: str | None = None) -> list[DecisionRecord]:
        """The newest decisions, oldest of them first; of one service or of all."""
        if service is not None:
            return await self._tail(service, count)
        names = sorted(n.removeprefix("decisions/") for n in await self.store.streams() if n.startswith("decisions/"))
        return heapq.nlargest(count, [r for name in names for r in await self._tail(name, count)], key=_age_key)[::-1]

    async def snapshot_of(self, service: str, decision_id: str) -> bytes | None:
        """The snapshot that a decision was made from, if one was kept."""
        packed = await self.store.attachment(f"decisions/{service}", decision_id)
        return None if packed is None else zlib.decompressobj().decompress(packed, _MAX_SNAPSHOT_BYTES)

    async def _tail(self, service: str, count: int) -> list[DecisionRecord]:
        entries = await self.store.tail(f"decisions/{service}", count)
        notes = await self.store.tail(f"outcomes/{service}", MAX_DECISIONS)
        outcomes = {note.decision_id: note.outcome for note in (decode(e.value, OutcomeNote, e.id) for e in notes)}
        records = []
        for entry in entries:
            try:
                record = decode(entry.value, DecisionRecord, f"decisions/{service}/{entry.id}")
            except TidegateError as error:
                # The log is for people: one entry of another version must not hide the others.
                _log.warning("a decision is left out: %s", error)
                continue
            outcome = outcomes.get(entry.id, record.outcome)
            records.append(msgspec.structs.replace(record, id=entry.id, outcome=outcome))
        return records

    # --- service-level indicators

    async def save_window(self, service: str, data: bytes) -> None:
        """Keep a service's SLI counters, opaque to the store."""
        await self.store.put(f"window/{service}", data, expected_version=None, fence=self.fence)

    async def load_window(self, service: str) -> bytes | None:
        """What was kept last."""
        held = await self.store.get(f"window/{service}")
        return None if held is None else held.value

    async def delete_window(self, service: str) -> bool:
        """False if there was none."""
        return await self.store.delete(f"window/{service}", fence=self.fence)


def _contract_conflict(service: str, wanted: int | None, current: int) -> ConflictError:
    return ConflictError(
        f"The contract of {service} has version {current}, not {wanted}; read it and edit that one.",
        current_version=current,
    )


def _age_key(record: DecisionRecord) -> tuple[float, str]:
    return record.at_s, record.id
