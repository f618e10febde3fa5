"""What the centre remembers, against a real server."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from agents.messages import DeviceFacts
from controller.records import MAX_PLAN_HISTORY, PlanBook, decode, encode
from controller.state import MAX_DECISIONS, AgentRecord, DecisionRecord, PlanRecord, State
from controller.store import Fence, Store
from policies.decision import Decision, Prediction, Reason
from policies.ids import AgentId, BlobHash, ModelName, ServiceId, StageName
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.service import BlockProfile, ModelProfile, OnnxStage, PythonStage, ServiceSpec, TensorSpec
from sla.contract import Contract, parse_contract
from sla.errors import ConflictError, InvalidInputError, NotFoundError, PermanentError, RefusedError, SettingsError

NOW_S = 1_000_000.0
READER = ServiceId("document-reader")


@pytest.fixture
def state(valkey_store: Store) -> State:
    return State(valkey_store)


def contract(p99_ms: float = 150, service: str = READER) -> Contract:
    return parse_contract(
        f'{{"service_id": "{service}", "latency_p99_ms": {p99_ms}, "throughput_rps": 8, "availability_sla": "99.95%",'
        ' "zones": ["a"]}'
    )


def plan(epoch: int, agent: str = "a1") -> Plan:
    lane = make_lane(StageName("detect"), ModelName("det"), None, WHOLE_AXIS, ((AgentId(agent), Span(0, 3)),))
    stage = StagePlan(stage=StageName("detect"), model=ModelName("det"), axis=None, lanes=(lane,))
    return Plan(service_id=READER, epoch=epoch, stages=(stage,))


def decision(epoch: int = 1, service: ServiceId = READER) -> Decision:
    prediction = Prediction(
        p50_ms=1, p95_ms=2, p99_ms=float("inf"), mean_ms=1, throughput_rps=9, saturation=0.5, jitter_ms=0, risk=1.0,
        availability=0.999, accuracy=1, energy_j=1, memory_bytes={AgentId("a1"): 5}, move_bytes=0, move_ms=0, bottleneck="b",
    )  # fmt: skip
    return Decision(
        service_id=service, trigger="contract", proposer="solver", plan=plan(epoch), prediction=prediction,
        reasons=(Reason(code="first-plan", text="the first plan"),),
    )  # fmt: skip


def agent(name: str, host: str = "10.0.0.1") -> AgentRecord:
    facts = DeviceFacts(platform="rk3588", evidence="emulated", hostname=name, versions={"onnxruntime": "1.32.0"})
    return AgentRecord(
        id=AgentId(name), facts=facts, public_key_fingerprint=f"key-{name}", enrolled_at_s=NOW_S, seen_host=host
    )


# --- contracts


async def test_the_same_contract_again_keeps_its_version(state: State) -> None:
    stored = await state.put_contract(contract())
    assert await state.put_contract(contract()) == stored
    assert await state.put_contract(contract(), if_version=stored.version + 7) == stored, (
        "a repeated edit is no conflict"
    )
    assert await state.contract(READER) == stored
    assert await state.contracts() == {READER: stored}


async def test_an_edit_of_an_old_version_is_a_conflict_that_names_the_current_one(state: State) -> None:
    first = await state.put_contract(contract(150), if_version=0)
    second = await state.put_contract(contract(100), if_version=first.version)
    assert second.version > first.version
    for stale in (0, first.version):
        with pytest.raises(ConflictError) as conflict:
            await state.put_contract(contract(90), if_version=stale)
        assert conflict.value.current_version == second.version
    with pytest.raises(ConflictError):
        await state.delete_contract(READER, if_version=first.version)
    assert await state.contract(READER) == second


async def test_one_of_twenty_concurrent_edits_wins(state: State) -> None:
    first = await state.put_contract(contract())
    edits = (state.put_contract(contract(n + 1), if_version=first.version) for n in range(20))
    outcomes = await asyncio.gather(*edits, return_exceptions=True)
    assert len([o for o in outcomes if not isinstance(o, ConflictError)]) == 1


async def test_a_contract_is_deleted_once(state: State) -> None:
    await state.put_contract(contract())
    assert await state.delete_contract(READER)
    assert not await state.delete_contract(READER)
    assert await state.contract(READER) is None


async def test_a_contract_of_a_newer_tidegate_is_read_without_what_is_new(state: State) -> None:
    document = contract().model_dump_json()[:-1] + ', "colour": "blue"}'
    await state.store.put(f"contract/{READER}", encode(document), expected_version=0)
    stored = await state.contract(READER)
    assert stored is not None
    assert stored.contract == contract()


# --- services, models, agents


async def test_services_and_models_are_read_back(state: State) -> None:
    onnx = OnnxStage(name=StageName("detect"), variants=(ModelName("det"),), inputs={"x": "in"}, outputs={"y": "out"})
    spec = ServiceSpec(
        id=READER,
        inputs=(TensorSpec(name="image", datatype="BYTES", shape=(1,)),),
        outputs=(TensorSpec(name="lines", datatype="BYTES", shape=(-1,)),),
        stages=(PythonStage(name=StageName("prepare"), step="document.prepare"), onnx),
        assets={"tokenizer": BlobHash("00" * 32)},
    )
    block = BlockProfile(name="b", fixed_ms=1, per_item_ms=2, param_bytes=3, cut_bytes_per_item=4)
    profile = ModelProfile(name=ModelName("det"), sha256=BlobHash("11" * 32), blocks=(block,), input_bytes_per_item=5)
    await state.put_service(spec)
    await state.put_model(profile)
    assert await state.services() == {READER: spec}
    assert await state.service(READER) == spec
    assert await state.models() == {"det": profile}
    assert await state.delete_service(READER)
    assert await state.delete_model("det")
    assert not await state.delete_model("det")


async def test_a_revoked_agent_stays_revoked(state: State) -> None:
    await state.put_agent(agent("b"))
    await state.put_agent(agent("a"))
    assert [record.id for record in await state.agents()] == ["a", "b"]
    await state.revoke_agent("a")
    late = await state.put_agent(agent("a", host="10.0.0.9"))
    assert late.revoked
    assert late.seen_host == "10.0.0.9"
    assert await state.agent("a") == late
    with pytest.raises(NotFoundError):
        await state.revoke_agent("nobody")
    assert await state.forget_agent("a")
    assert await state.agent("a") is None


# --- join tokens


async def test_a_token_lets_in_as_many_keys_as_it_has_uses_and_each_key_again(state: State) -> None:
    secret = await state.create_token(ttl_s=60, uses=2, now_s=NOW_S, note="lab")
    for key in ("k1", "k1", "k2", "k1", "k2"):
        await state.spend_token(secret, key, now_s=NOW_S)
    with pytest.raises(RefusedError, match="used up"):
        await state.spend_token(secret, "k3", now_s=NOW_S)
    (view,) = await state.tokens()
    assert (view.note, view.uses, view.used, view.expires_at_s) == ("lab", 2, 2, NOW_S + 60)


async def test_an_expired_token_lets_in_only_who_began_in_time(state: State) -> None:
    secret = await state.create_token(ttl_s=60, uses=5, now_s=NOW_S)
    await state.spend_token(secret, "k1", now_s=NOW_S + 59)
    await state.spend_token(secret, "k1", now_s=NOW_S + 61)
    with pytest.raises(RefusedError, match="expired 1 s ago"):
        await state.spend_token(secret, "k2", now_s=NOW_S + 61)


async def test_an_unknown_or_revoked_token_is_refused(state: State) -> None:
    with pytest.raises(RefusedError, match="not known"):
        await state.spend_token("tgj_wrong", "k1", now_s=NOW_S)
    secret = await state.create_token(ttl_s=60, uses=5, now_s=NOW_S)
    await state.spend_token(secret, "k1", now_s=NOW_S)
    (view,) = await state.tokens()
    assert not await state.revoke_token("")
    assert await state.revoke_token(view.id)
    assert not await state.revoke_token(view.id)
    for key in ("k1", "k2"):
        with pytest.raises(RefusedError, match="not known"):
            await state.spend_token(secret, key, now_s=NOW_S)


async def test_of_twenty_keys_that_spend_a_token_at_once_one_wins(state: State) -> None:
    secret = await state.create_token(ttl_s=60, uses=1, now_s=NOW_S)
    spends = (state.spend_token(secret, f"k{n}", now_s=NOW_S) for n in range(20))
    outcomes = await asyncio.gather(*spends, return_exceptions=True)
    assert len([outcome for outcome in outcomes if outcome is None]) == 1
    assert all(isinstance(outcome, RefusedError) for outcome in outcomes if outcome is not None)


async def test_no_secret_is_in_the_store_or_in_a_listing(state: State) -> None:
    secret = await state.create_token(ttl_s=60, uses=1, now_s=NOW_S)
    held = await state.store.scan("")
    listing = msgspec.json.encode(await state.tokens()).decode()
    assert not any(secret in text for text in (*held, *(repr(v.value) for v in held.values()), listing))


async def test_tokens_that_expired_long_ago_are_forgotten(state: State) -> None:
    await state.create_token(ttl_s=60, uses=1, now_s=NOW_S)
    await state.create_token(ttl_s=60, uses=1, now_s=NOW_S + 86_400)
    assert len(await state.tokens()) == 2
    await state.create_token(ttl_s=60, uses=1, now_s=NOW_S + 8 * 86_400 - 1)
    assert len(await state.tokens()) == 2


@pytest.mark.parametrize(
    ("ttl_s", "uses", "note", "field"), [(0, 1, "", "ttl_s"), (60, 0, "", "uses"), (60, 1, "x" * 201, "note")]
)
async def test_a_wrong_token_names_its_field(state: State, ttl_s: float, uses: int, note: str, field: str) -> None:
    with pytest.raises(InvalidInputError) as wrong:
        await state.create_token(ttl_s=ttl_s, uses=uses, now_s=NOW_S, note=note)
    assert wrong.value.pointer == f"/{field}"


# --- plans


async def test_a_plan_runs_only_once_it_is_said_to(state: State) -> None:
    await state.put_plan(READER, plan(1), decision(1), at_s=NOW_S)
    assert await state.running(READER) is None
    await state.set_running(READER, 1)
    await state.set_last_good(READER, 1)
    await state.put_plan(READER, plan(2, "a2"), decision(2), at_s=NOW_S + 1)
    assert await state.running(READER) == plan(1)
    await state.set_running(READER, 2)
    await state.set_pinned(READER, True)
    book = await state.plan_book(READER)
    assert (book.running, book.last_good, book.pinned) == (plan(2, "a2"), plan(1), True)
    assert await state.history(READER) == (
        PlanRecord(plan=plan(1), decision=decision(1), at_s=NOW_S),
        PlanRecord(plan=plan(2, "a2"), decision=decision(2), at_s=NOW_S + 1),
    )
    assert await state.plan_books() == {READER: book}
    await state.set_running(READER, None)
    assert await state.running(READER) is None
    assert await state.last_good(READER) == plan(1)


async def test_every_step_with_a_plan_may_be_repeated(state: State) -> None:
    for _ in range(2):
        await state.put_plan(READER, plan(1), decision(1), at_s=NOW_S)
        await state.set_running(READER, 1)
        await state.set_last_good(READER, 1)
    assert len(await state.history(READER)) == 1


async def test_a_plan_that_comes_too_late_is_a_conflict(state: State) -> None:
    await state.put_plan(READER, plan(5), None, at_s=NOW_S)
    for late in (plan(4), plan(5, "other")):
        with pytest.raises(ConflictError, match="too late"):
            await state.put_plan(READER, late, None, at_s=NOW_S)
    with pytest.raises(NotFoundError):
        await state.set_running(READER, 4)


def test_the_history_is_bounded_and_keeps_what_is_pointed_at() -> None:
    book = PlanBook().with_plan(PlanRecord(plan=plan(1), at_s=NOW_S)).with_plan(PlanRecord(plan=plan(2), at_s=NOW_S))
    book = msgspec.structs.replace(book, running_epoch=2, last_good_epoch=1)
    for epoch in range(3, 200):
        book = book.with_plan(PlanRecord(plan=plan(epoch), at_s=NOW_S))
        assert len(book.history) == min(epoch, MAX_PLAN_HISTORY)
        assert book.history[-1].plan.epoch == epoch
        assert (book.running, book.last_good) == (plan(2), plan(1))


async def test_epochs_grow_and_are_never_given_twice(state: State) -> None:
    epochs = await asyncio.gather(*(state.next_epoch(READER) for _ in range(20)))
    assert sorted(epochs) == list(range(1, 21))
    await state.put_plan(READER, plan(20), None, at_s=NOW_S)
    assert await state.delete_plans(READER)
    assert await state.next_epoch(READER) == 21


async def test_a_controller_that_no_longer_leads_changes_no_plan(state: State, valkey_store: Store) -> None:
    old = await valkey_store.acquire("leader", "a", 60_000)
    assert old is not None
    state.fence = Fence("leader", old)
    await state.put_plan(READER, plan(1), None, at_s=NOW_S)
    await valkey_store.release("leader", old)
    assert await valkey_store.acquire("leader", "b", 60_000)
    for write in (
        state.next_epoch(READER),
        state.put_plan(READER, plan(2), None, at_s=NOW_S),
        state.set_running(READER, 1),
        state.append_decision(DecisionRecord(at_s=NOW_S, decision=decision())),
        state.save_window(READER, b""),
    ):
        with pytest.raises(RefusedError, match="newer one leads"):
            await write
    await state.put_contract(contract())


# --- decisions and windows


async def test_decisions_are_tailed_with_their_outcomes_and_replayed_from_their_snapshots(state: State) -> None:
    snapshot = b"snapshot " * 1000
    first = await state.append_decision(DecisionRecord(at_s=NOW_S, decision=decision(1)), snapshot)
    second = await state.append_decision(DecisionRecord(at_s=NOW_S + 2, decision=decision(2), outcome="held"))
    other = DecisionRecord(at_s=NOW_S + 1, decision=decision(7, ServiceId("other")))
    await state.append_decision(other)
    await state.note_outcome(READER, first, "rolled back")
    await state.note_outcome(READER, first, "running")
    tail = await state.tail_decisions(10, READER)
    assert [(r.id, r.outcome, r.decision) for r in tail] == [
        (first, "running", decision(1)),
        (second, "held", decision(2)),
    ]
    assert [r.service_id for r in await state.tail_decisions(10)] == [READER, "other", READER]
    assert [r.id for r in await state.tail_decisions(1)] == [second]
    assert await state.snapshot_of(READER, first) == snapshot
    assert await state.snapshot_of(READER, second) is None
    assert await state.tail_decisions(10, "nobody") == []


async def test_the_decision_log_is_bounded(state: State) -> None:
    record = DecisionRecord(at_s=NOW_S, decision=decision())
    for _ in range(MAX_DECISIONS + 20):
        await state.append_decision(record)
    assert len(await state.tail_decisions(10_000, READER)) == MAX_DECISIONS


async def test_an_entry_of_another_version_does_not_hide_the_others(state: State) -> None:
    await state.store.append(f"decisions/{READER}", b"\x09?", 5)
    await state.append_decision(DecisionRecord(at_s=NOW_S, decision=decision()))
    assert len(await state.tail_decisions(10, READER)) == 1


async def test_windows_are_opaque(state: State) -> None:
    assert await state.load_window(READER) is None
    await state.save_window(READER, b"\x00\xff")
    assert await state.load_window(READER) == b"\x00\xff"
    assert await state.delete_window(READER)


# --- encoding


class _Newer(msgspec.Struct, frozen=True, kw_only=True):
    history: tuple[PlanRecord, ...] = ()
    pinned: bool = False
    colour: str = "blue"


def test_new_fields_are_skipped_and_missing_ones_take_their_defaults() -> None:
    assert decode(encode(_Newer(pinned=True)), PlanBook, "k") == PlanBook(pinned=True)


@pytest.mark.parametrize(
    ("data", "error"), [(b"", SettingsError), (b"\x02?", SettingsError), (b"\x01\xc1", PermanentError)]
)
def test_what_cannot_be_read_is_one_sentence_with_its_key(data: bytes, error: type[PermanentError]) -> None:
    with pytest.raises(error, match="plans/x"):
        decode(data, PlanBook, "plans/x")
