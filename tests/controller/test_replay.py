"""A decision made again from its log is the same decision, bit for bit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.synthetic import fleet_snapshot
from controller.cli import main
from controller.loop import outcome_of
from controller.records import DecisionRecord
from controller.replay import DecisionLog, Logged, Look, log_bytes, log_from, look_bytes, replay, same_of
from controller.snapshots import snapshot_from
from policies.constraints import KeepPlan, Shift
from policies.decide import Keep, Memory, decide
from policies.ids import ServiceId
from policies.snapshot import Snapshot
from sla.errors import InvalidInputError

SERVICE = ServiceId("s0")


def recorded() -> list[Logged]:
    """A first plan, a hold, a keep, and the loss of an agent of the plan, with the epochs that a loop would give."""
    snapshot, memory = fleet_snapshot(devices=6, blocks=8, services=2), Memory()
    entries = []
    for epoch, keep in ((4, None), (5, None), (6, Keep(rationale="calm")), (7, None)):
        look = Look(memory=memory, trigger="agent-lost" if epoch == 7 else None, keep=keep)
        decision, memory = decide(snapshot, SERVICE, memory, trigger=look.trigger, suggestion=keep)
        seen = look_bytes(snapshot, look)
        if decision.plan is not None:
            decision = msgspec.structs.replace(decision, plan=msgspec.structs.replace(decision.plan, epoch=epoch))
            snapshot = with_running(snapshot, decision.plan)
        entries.append(Logged(record=DecisionRecord(at_s=float(epoch), decision=decision, id=str(epoch)), seen=seen))
        if epoch == 6:
            running = snapshot.services[SERVICE].running
            assert running is not None
            agents = {a: v for a, v in snapshot.fleet.agents.items() if a != min(running.agents())}
            snapshot = msgspec.structs.replace(snapshot, fleet=msgspec.structs.replace(snapshot.fleet, agents=agents))
        snapshot = msgspec.structs.replace(snapshot, now_ms=snapshot.now_ms + 1000.0)
    return entries


def with_running(snapshot: Snapshot, plan: object) -> Snapshot:
    view = msgspec.structs.replace(snapshot.services[SERVICE], running=plan)
    return msgspec.structs.replace(snapshot, services={**snapshot.services, SERVICE: view})


def test_every_decision_comes_out_the_same_through_a_file() -> None:
    entries = recorded()
    assert entries[0].record.decision.plan is not None
    assert entries[-1].record.decision.plan is not None
    log = log_from(log_bytes(DecisionLog(entries=tuple(entries))))
    assert same_of(replay(log)) == (4, 0, 0)


def test_a_decision_that_was_tampered_with_is_noticed() -> None:
    first, *rest = recorded()
    other = msgspec.structs.replace(first.record.decision, score=0.999)
    first = msgspec.structs.replace(first, record=msgspec.structs.replace(first.record, decision=other))
    assert same_of(replay(DecisionLog(entries=(first, *rest)))) == (3, 1, 0)


def test_wishes_of_the_llm_are_replayed_too() -> None:
    entries, memory = recorded(), Memory()
    assert entries[0].record.decision.plan is not None
    snapshot = with_running(fleet_snapshot(devices=6, blocks=8, services=2), entries[0].record.decision.plan)
    view = msgspec.structs.replace(snapshot.services[SERVICE], advised=(KeepPlan(), Shift(risk=1.5)))
    snapshot = msgspec.structs.replace(snapshot, services={**snapshot.services, SERVICE: view})
    wished = []
    for at_ms in (0.0, 1_000.0):
        now = msgspec.structs.replace(snapshot, now_ms=at_ms)
        look = Look(memory=memory)
        decision, memory = decide(now, SERVICE, memory)
        record = DecisionRecord(at_s=at_ms, decision=decision, id=str(at_ms))
        wished.append(Logged(record=record, seen=look_bytes(now, look)))
    assert memory.heeded is not None
    assert KeepPlan() in memory.heeded.rules
    assert same_of(replay(log_from(log_bytes(DecisionLog(entries=tuple(wished)))))) == (2, 0, 0)


def test_what_was_seen_still_reads_as_a_snapshot() -> None:
    entry = recorded()[0]
    assert entry.seen is not None
    assert snapshot_from(entry.seen).services.keys() == {"s0", "s1"}


def test_what_an_operator_did_is_not_replayed() -> None:
    entry = msgspec.structs.replace(recorded()[0], seen=None)
    assert same_of(replay(DecisionLog(entries=(entry,)))) == (0, 0, 1)


def test_another_policy_is_laid_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "log", tmp_path / "page.html"
    path.write_bytes(log_bytes(DecisionLog(entries=tuple(recorded()))))
    assert main(["replay", str(path), "--policy", "edge-only", "--html", str(page)]) == 0
    assert "4 decided the same again" in capsys.readouterr().out
    assert "edge-only" in page.read_text()


def test_a_wrong_log_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad").write_bytes(b"hello")
    assert main(["replay", str(tmp_path / "bad")]) == 2
    assert "not a decision log" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 2
    with pytest.raises(InvalidInputError, match="no policy"):
        replay(DecisionLog(entries=()), "magic")


def test_what_a_plan_brought_is_said_beside_what_was_predicted() -> None:
    decision = recorded()[0].record.decision
    assert decision.prediction is not None
    text = outcome_of(decision, 2 * decision.prediction.p99_ms, 120)
    assert text.endswith("(+100 %)")
    assert "120 requests" in text
