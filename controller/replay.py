"""Record and replay: a decision with everything that it was made from, so that it can be made again, or by another policy.

Beside a decision the log keeps the snapshot and the *look*: what the loop remembered, why it looked, what was suggested to it. The
policy is pure, so from these the same version decides the same, bit for bit; where it does not, the code has changed what it decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from controller.llm_records import Exchange
from controller.records import DecisionRecord
from controller.snapshots import plain_encoder, typed_decoder
from policies.admit import plan_faults
from policies.baselines import BASELINES
from policies.decide import Keep, Memory, decide, solver_policy
from policies.decision import Decision, Prediction, Proposal, Trigger
from policies.ids import ServiceId
from policies.neighbourhood import places_of
from policies.plan import Plan
from policies.predict import Predictor
from policies.score import Scored, score
from policies.snapshot import Snapshot
from policies.solve import candidates
from sla.errors import InfeasibleError, InvalidInputError

LOG_VERSION = 1
MAX_LOG_BYTES = 256 << 20
POLICIES = ("solver", *BASELINES)


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision depends on besides the snapshot."""

    memory: Memory = Memory()
    trigger: Trigger | None = None
    proposal: Proposal | None = None
    """A plan that was suggested, or ..."""
    keep: Keep | None = None
    """... the advice to keep the running one."""
    planned: Plan | None = None
    """The first plan of a service, as it was made together with those of others; it is judged, not searched for again."""


class SeenWorld(Snapshot, frozen=True, kw_only=True):
    """A snapshot with the look; who only wants the snapshot reads it as one."""

    look: Look | None = None


class Logged(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a log file."""

    record: DecisionRecord
    seen: bytes | None = None
    """A `SeenWorld`, encoded; None for what an operator did."""


class LoggedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """One question to the LLM in a log file."""

    exchange: Exchange
    seen: bytes | None = None
    """The snapshot that it was about, encoded; None where it is not kept any more."""


class DecisionLog(msgspec.Struct, frozen=True, kw_only=True):
    """A log file: the decisions of one service or of several, oldest first, and what the LLM was asked about them."""

    entries: tuple[Logged, ...]
    exchanges: tuple[LoggedExchange, ...] = ()
    version: int = LOG_VERSION


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One decision beside what came of making it again."""

    record: DecisionRecord
    again: Decision | None = None
    """None where there is nothing to replay."""
    is_same: bool = False
    other: Decision | None = None
    """What another policy would have done there."""


def look_bytes(snapshot: Snapshot, look: Look) -> bytes:
    """What is kept beside a decision."""
    fields = {name: getattr(snapshot, name) for name in snapshot.__struct_fields__}
    return _ENCODER.encode(SeenWorld(**fields, look=look))


def log_bytes(log: DecisionLog) -> bytes:
    """A log as a file."""
    return _ENCODER.encode(log)


def log_from(data: bytes) -> DecisionLog:
    """The log in a file. Raises InvalidInputError."""
    if len(data) > MAX_LOG_BYTES:
        raise InvalidInputError(f"A decision log has at most {MAX_LOG_BYTES >> 20} MB.")
    try:
        log = _LOG_DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"This is not a decision log that this version can read: {error}.") from None
    if log.version != LOG_VERSION:
        raise InvalidInputError(f"The log has version {log.version}; this Tidegate reads version {LOG_VERSION}.")
    return log


def replay(log: DecisionLog, policy: str | None = None) -> list[Replayed]:
    """Every decision made again; with `policy`, also by that one. Raises InvalidInputError for an unknown policy."""
    if policy is not None and policy not in POLICIES:
        raise InvalidInputError(f"There is no policy {policy!r} to replay with; there are {', '.join(POLICIES)}.")
    return [_replayed(entry, policy) for entry in log.entries]


def decided_again(world: SeenWorld, service: ServiceId) -> Decision:
    """The decision that follows from what was seen. Raises InvalidInputError when it was not kept."""
    look = world.look
    if look is None:
        raise InvalidInputError("The log keeps no look for this decision: an older version wrote it.")
    return decided(world, service, look)[0]


def decided(world: Snapshot, service: ServiceId, look: Look) -> tuple[Decision, Memory]:
    """The decision under a look, and what to remember: what the loop does, and what replay does again."""
    scored = None
    if look.planned is not None and set(places_of(look.planned)) <= world.fleet.agents.keys():
        p = Predictor(world, service)
        prediction = p.predict(look.planned)
        scored = [Scored(plan=look.planned, prediction=prediction, score=score(prediction, p.view.contract))]
    suggestion = look.proposal or look.keep
    return decide(world, service, look.memory, trigger=look.trigger, suggestion=suggestion, scored=scored)


def world_from(data: bytes) -> SeenWorld:
    """What was seen. Raises InvalidInputError."""
    try:
        return _SEEN_DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"A snapshot of the log makes no sense to this version: {error}.") from None


def _replayed(entry: Logged, policy: str | None) -> Replayed:
    record = entry.record
    world = world_from(entry.seen) if entry.seen is not None else None
    if world is None or world.look is None or record.service_id not in world.services:
        return Replayed(record=record)
    again = _as_recorded(decided_again(world, record.service_id), record.decision)
    is_same = _ENCODER.encode(again) == _ENCODER.encode(record.decision)
    other = None if policy is None else _by(policy, world, record.service_id)
    return Replayed(record=record, again=again, is_same=is_same, other=other)


def _as_recorded(again: Decision, recorded: Decision) -> Decision:
    """With the epoch and the service that the loop gave the plan: those are not the policy's to choose."""
    if again.plan is None or recorded.plan is None:
        return again
    plan = msgspec.structs.replace(again.plan, epoch=recorded.plan.epoch, service_id=recorded.plan.service_id)
    return msgspec.structs.replace(again, plan=plan)


def _by(policy: str, world: SeenWorld, service: ServiceId) -> Decision:
    """What a policy would want there, without anybody's calm: its plan, judged by the same prediction."""
    p = Predictor(world, service)
    chosen = solver_policy if policy == "solver" else BASELINES[policy]
    try:
        scored = candidates(world, service, 1, predictor=p)
    except InfeasibleError:
        scored = []
    proposal, _ = chosen(world, service, scored, Memory())
    running = p.view.running
    plan = proposal.plan if proposal is not None else running
    if plan is None:
        return Decision(service_id=service, trigger="start", proposer=policy, plan=None, reasons=())
    faults = plan_faults(plan, p, "start")
    prediction: Prediction | None = None if faults else p.predict(plan)
    value = None if prediction is None else score(prediction, p.view.contract)
    same = running is not None and plan.layout() == running.layout()
    return Decision(
        service_id=service, trigger="start", proposer=policy, plan=None if same else plan, reasons=tuple(faults),
        prediction=prediction, score=value,
    )  # fmt: skip


def same_of(replayed: Sequence[Replayed]) -> tuple[int, int, int]:
    """How many decided the same, differently, and could not be replayed."""
    tried = [r for r in replayed if r.again is not None]
    same = sum(r.is_same for r in tried)
    return same, len(tried) - same, len(replayed) - len(tried)


_ENCODER = plain_encoder()
_SEEN_DECODER = typed_decoder(SeenWorld)
_LOG_DECODER = typed_decoder(DecisionLog)
