"""The shell around `policies.llm`: when the model is asked, what its answer may do, and what is recorded of it.

The solver's plan goes first. When nothing is urgent, the model is asked in the background; its answer becomes a suggestion
that the next look passes through the same gate as everything else. A late, wrong or missing answer changes nothing, and in mode
`shadow` no answer does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from controller.clock import Clock
from controller.events import EventLog
from controller.llm_endpoint import BREAK_AFTER, BREAK_S, Completion, LlmEndpoint, LlmUnusableError
from controller.llm_ledger import LlmLedger
from controller.llm_records import Effects, Exchange, LlmLog, Side
from controller.settings import LlmSettings
from controller.snapshots import snapshot_bytes
from policies.decide import Keep, Memory
from policies.decision import Proposal
from policies.effects import Effect, effect_of
from policies.groups import Footprint, footprint_of, group_of
from policies.ids import ServiceId
from policies.llm import Outcome, Question, ask, parse, repair, repair_refused
from policies.llm_judge import Judged, judge
from policies.llm_names import redacted
from policies.llm_reply import Answer, Malformed
from policies.llm_resolve import Wish
from policies.plan import Plan
from policies.score import Scored
from policies.snapshot import Snapshot
from sla.errors import NotFoundError, TidegateError

__all__ = ["BREAK_AFTER", "BREAK_S", "Advice", "LlmAdvisor"]

log = logging.getLogger(__name__)

MAX_KEPT_CHARS = 16_000
"""A longer reply is no answer: it could not be kept whole, so it could not be replayed."""
PASS_OVER_EVERY_MS = 20_000.0
WAITS_FOR_MS = 10_000.0
"""A service that was turned away and has come back within this time still waits for its turn."""


class WishKeeper(Protocol):
    """Where wishes go that the model would like to last: they act in mode `control` where `admitted`, else a person confirms them."""

    def offer(self, service: ServiceId, wishes: tuple[Wish, ...], rationale: str, *, admitted: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Advice:
    """What the model advises in mode `advise`; a person accepts or dismisses it."""

    id: str
    at_s: float
    service: ServiceId
    epoch: int
    suggestion: Proposal | Keep
    text: str
    rationale: str
    exchange: Exchange


@dataclass(slots=True)
class _Move:
    epoch: int
    at_ms: float
    outcome: Outcome


@dataclass(slots=True)
class _Pending:
    task: asyncio.Task[None] | None = None
    suggestion: Proposal | Keep | None = None
    epoch: int = 0
    """Of the suggestion, or of the question under way."""
    asked_ms: float = float("-inf")
    passed_ms: float = float("-inf")
    turned_away_ms: float = float("-inf")
    """When it last found its group busy."""
    footprint: Footprint = frozenset()
    advice: Advice | None = None
    wanted: deque[Plan] = field(default_factory=lambda: deque(maxlen=4))
    moves: deque[_Move] = field(default_factory=lambda: deque(maxlen=5))
    unsettled: deque[Exchange] = field(default_factory=lambda: deque(maxlen=8))
    """Exchanges of which it is not known yet what the two choices bring."""

    def is_busy(self) -> bool:
        """A question is under way."""
        return self.task is not None and not self.task.done()


@dataclass(slots=True)
class _Try:
    """One question under way."""

    replies: list[str] = field(default_factory=list)
    answer: Answer | None = None
    judged: Judged | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class LlmAdvisor:
    """Asks and keeps suggestions, one call at a time per group of services. Owned by the event loop; nothing here is awaited by the loop."""

    def __init__(
        self, settings: LlmSettings, events: EventLog, clock: Clock, *, records: LlmLog | None = None, wishes: WishKeeper | None = None
    ) -> None:  # fmt: skip
        self.settings = settings
        self.endpoint = LlmEndpoint(settings, clock)
        self.ledger = LlmLedger()
        self._events = events
        self._clock = clock
        self._records = records
        self._wishes = wishes
        self._pending: dict[ServiceId, _Pending] = {}
        self._next = 0

    async def restore(self) -> None:
        """The newest comparisons of earlier processes."""
        if self._records is not None:
            for service in await self._records.services():
                self.ledger.restore(await self._records.tail(service, 50))

    @property
    def asked(self) -> int:
        """Questions that were asked and are done with."""
        return self.ledger.asked

    @property
    def answered(self) -> int:
        """Those with an answer that could be read."""
        return self.ledger.answered()

    @property
    def is_on(self) -> bool:
        """There is somebody to ask."""
        return self.settings.base_url is not None and self.settings.mode != "off"

    def policy(self) -> str:
        """Who decides, in words."""
        s = self.settings
        if s.base_url is None:
            return "solver (no LLM is configured)"
        if s.mode == "off":
            return "solver (the LLM is switched off)"
        match self.endpoint.why_not():
            case "breaker":
                return "solver (the LLM endpoint failed several times; it is asked again later)"
            case "budget":
                return "solver (the LLM's tokens of this hour are spent)"
            case "rate-limited":
                return "solver (the LLM endpoint asked to wait)"
        if s.mode == "shadow":
            return f"solver, with llm {s.model} in its shadow"
        if s.mode == "advise":
            return f"solver, advised by llm {s.model}"
        return f"llm {s.model}, behind the solver and the gate"

    # --- what the loop calls; nothing here waits

    def take(self, service: ServiceId, epoch: int) -> Proposal | Keep | None:
        """The suggestion that came in since the last look, if any. What is about an older plan than `epoch` is dropped, also
        when it is still under way."""
        pending = self._pending.get(service)
        if pending is None:
            return None
        if pending.epoch != epoch:
            if pending.task is not None and not pending.task.done():
                pending.task.cancel()
                self.ledger.passed_over("epoch")
            pending.advice = None
        suggestion, pending.suggestion = pending.suggestion, None
        return suggestion if pending.epoch == epoch else None

    def consider(self, service: ServiceId, snapshot: Snapshot, memory: Memory) -> None:
        """Ask the model about a quiet service, if one is configured and it is time."""
        now_ms = self._clock.now_ms()
        pending = self._pending.setdefault(service, _Pending())
        too_soon = now_ms - pending.asked_ms < self.settings.min_interval_s * 1000
        if not self.is_on or pending.is_busy() or too_soon:
            return
        pending.footprint = footprint_of(service, snapshot)
        if self._is_taken(service, now_ms):
            pending.turned_away_ms = now_ms
            return
        if (reason := self.endpoint.why_not()) is not None:
            if now_ms - pending.passed_ms >= PASS_OVER_EVERY_MS:
                pending.passed_ms = now_ms
                self.ledger.passed_over(reason)
            return
        pending.asked_ms = now_ms
        running = snapshot.services[service].running
        pending.epoch = running.epoch if running is not None else 0
        pending.task = asyncio.create_task(self._guarded(service, snapshot, pending), name=f"llm-{service}")

    def _is_taken(self, service: ServiceId, now_ms: float) -> bool:
        """Whether a question about another service of its group is under way, or one has waited longer for its turn."""
        mine = self._pending[service]
        rivals = {
            name for name, other in self._pending.items()
            if name != service
            and (other.is_busy() or (other.asked_ms < mine.asked_ms and now_ms - other.turned_away_ms < WAITS_FOR_MS))
        }  # fmt: skip
        footprints = {name: pending.footprint for name, pending in self._pending.items()}
        return bool(rivals) and not rivals.isdisjoint(group_of(service, footprints))

    # --- what people do

    def advices(self) -> list[Advice]:
        """What waits for a person, by service."""
        return [pending.advice for _, pending in sorted(self._pending.items()) if pending.advice is not None]

    def accept(self, advice_id: str) -> Advice:
        """Pass an advice on: the next look judges it once more. Raises NotFoundError."""
        pending, advice = self._advice(advice_id)
        pending.suggestion, pending.epoch, pending.advice = advice.suggestion, advice.epoch, None
        self.ledger.acted += 1
        return advice

    def dismiss(self, advice_id: str) -> None:
        """Forget an advice. Raises NotFoundError."""
        self._advice(advice_id)[0].advice = None

    def _advice(self, advice_id: str) -> tuple[_Pending, Advice]:
        for pending in self._pending.values():
            if pending.advice is not None and pending.advice.id == advice_id:
                return pending, pending.advice
        raise NotFoundError(f"There is no advice {advice_id!r} (any more).")

    # --- one question

    async def _guarded(self, service: ServiceId, snapshot: Snapshot, pending: _Pending) -> None:
        try:
            await self._ask(service, snapshot, pending)
        except TidegateError as error:
            log.warning("an exchange with the LLM about %s came to nothing: %s", service, error)
        except Exception:
            # The model may only help: what stumbles here must not reach the loop.
            self.endpoint.failed()
            log.exception("asking the LLM about %s stumbled", service)

    async def _ask(self, service: ServiceId, snapshot: Snapshot, pending: _Pending) -> None:
        await self._settle(service, snapshot, pending)
        self._next += 1
        seed, outcomes = self._next, self._outcomes(pending, snapshot, service)
        question = await asyncio.to_thread(
            ask, snapshot, service, seed=seed, outcomes=outcomes, limit=self.settings.candidates
        )
        if question is None:
            return
        began_s, minute, attempt = time.monotonic(), minute_of_day(self._clock.wall_s()), _Try()
        self._note_move(pending, question)
        reason = ""
        try:
            await self._converse(question, snapshot, minute, attempt)
            self.endpoint.succeeded()
        except LlmUnusableError as error:
            reason = error.reason
        except Malformed:
            reason = "malformed"
        if reason:
            self.endpoint.failed()
            self._events.add(
                "llm", f"{service}: no use of the LLM ({reason}); the solver's plan stands.", service=service
            )
        exchange = self._exchange(question, attempt, reason, outcomes, seed, minute)
        exchange = msgspec.structs.replace(exchange, seconds=time.monotonic() - began_s)
        await self._conclude(exchange, question, attempt, snapshot, pending)

    async def _converse(self, question: Question, snapshot: Snapshot, minute: float, attempt: _Try) -> None:
        """At most one repair round: after a reply that cannot be read, or a choice that the gate refuses. Raises Malformed."""
        until_s = asyncio.get_running_loop().time() + self.settings.deadline_s
        messages = question.messages
        for is_last in (False, True):
            left_s = until_s - asyncio.get_running_loop().time()
            try:
                completion = await self.endpoint.complete(messages, question.schema, max(0.01, left_s))
            except LlmUnusableError:
                if attempt.judged is None:
                    raise
                return  # The first choice was refused and there is no second one.
            reply = self._kept(completion, attempt)
            try:
                attempt.answer = parse(reply, question)
                attempt.judged = await asyncio.to_thread(judge, attempt.answer, question, snapshot, minute)
            except Malformed as error:
                if is_last and attempt.judged is None:
                    raise
                if is_last:
                    return
                messages = repair(question, reply, error)
                continue
            if attempt.judged.suggestion is not None or is_last:
                return
            messages = repair_refused(question, reply, attempt.judged.reasons)

    def _kept(self, completion: Completion, attempt: _Try) -> str:
        """The reply as it is recorded and read. Raises Malformed when it is too long to be kept."""
        attempt.prompt_tokens += completion.prompt_tokens
        attempt.cached_tokens += completion.cached_tokens
        attempt.output_tokens += completion.output_tokens
        if len(completion.text) > MAX_KEPT_CHARS:
            attempt.replies.append(redacted(completion.text[:500]))
            raise LlmUnusableError("too-long", f"The reply has {len(completion.text)} characters.")
        attempt.replies.append(redacted(completion.text))
        return attempt.replies[-1]

    async def _conclude(
        self, exchange: Exchange, question: Question, attempt: _Try, snapshot: Snapshot, pending: _Pending
    ) -> None:  # fmt: skip
        judged = attempt.judged if exchange.verdict != "fallback" else None
        suggestion = judged.suggestion if judged is not None else None
        acts = self.settings.mode == "control" and suggestion is not None
        exchange = msgspec.structs.replace(exchange, acted=acts)
        if acts:
            pending.suggestion, pending.epoch = suggestion, question.epoch
            pending.wanted.append(exchange_plan(judged))
        elif self.settings.mode == "advise" and suggestion is not None and judged is not None and not judged.agrees:
            pending.advice = Advice(
                f"{question.service_id}-{question.epoch}-{exchange.seed}", exchange.at_s, question.service_id, question.epoch,
                suggestion, exchange.llm.what if exchange.llm else "", redacted(attempt.answer.rationale if attempt.answer else ""),
                exchange,
            )  # fmt: skip
            pending.wanted.append(exchange_plan(judged))
        log.debug("%s: %s", exchange.service_id, judged)
        if judged is not None and judged.wishes and self.settings.mode != "shadow" and self._wishes is not None:
            rationale = attempt.answer.rationale if attempt.answer is not None else ""
            self._wishes.offer(question.service_id, judged.wishes, rationale, admitted=suggestion is not None)
        self.ledger.note(exchange)
        if self._records is not None:
            noted = await self._records.append(exchange, await asyncio.to_thread(snapshot_bytes, snapshot))
            exchange = msgspec.structs.replace(exchange, id=noted)
        if exchange.llm is not None:
            pending.unsettled.append(exchange)

    def _exchange(
        self, question: Question, attempt: _Try, reason: str, outcomes: tuple[Outcome, ...], seed: int, minute: float
    ) -> Exchange:  # fmt: skip
        s, judged = self.settings, attempt.judged
        tokens = attempt.prompt_tokens + attempt.output_tokens
        exchange = Exchange(
            at_s=self._clock.wall_s(), service_id=question.service_id, epoch=question.epoch, mode=s.mode, model=s.model, seed=seed,
            minute_of_day=minute, messages=tuple(question.messages), replies=tuple(attempt.replies), answer=attempt.answer,
            verdict="fallback", reason=reason, candidates=s.candidates, solver=_side(question, question.best), outcomes=outcomes,
            prompt_tokens=attempt.prompt_tokens, cached_tokens=attempt.cached_tokens, output_tokens=attempt.output_tokens, cost=tokens * s.price_per_million_tokens / 1e6,
            measured_p99_ms=outcomes[-1].measured_p99_ms if outcomes else None,
        )  # fmt: skip
        return exchange if reason or judged is None else judged_exchange(exchange, question, judged)

    # --- what became of earlier decisions

    async def _settle(self, service: ServiceId, snapshot: Snapshot, pending: _Pending) -> None:
        """What earlier choices brought or would have brought, now that the running plan has served for a while."""
        if snapshot.services[service].measured_p99_ms is None:
            return
        while pending.unsettled:
            exchange = pending.unsettled.popleft()
            try:
                effects = await asyncio.to_thread(effects_of, exchange, snapshot)
            except NotFoundError as error:
                log.info("what an earlier choice about %s brought is not known: %s", service, error)
                continue
            self.ledger.settle(exchange, effects)
            if self._records is not None:
                await self._records.note_effects(service, effects)

    def _outcomes(self, pending: _Pending, snapshot: Snapshot, service: ServiceId) -> tuple[Outcome, ...]:
        view, now_ms = snapshot.services[service], self._clock.now_ms()
        for move in pending.moves:
            if view.running is not None and move.epoch == view.running.epoch and view.measured_p99_ms is not None:
                move.outcome = msgspec.structs.replace(move.outcome, measured_p99_ms=view.measured_p99_ms)
        return tuple(
            msgspec.structs.replace(move.outcome, seconds_ago=(now_ms - move.at_ms) / 1000) for move in pending.moves
        )

    def _note_move(self, pending: _Pending, question: Question) -> None:
        """The running plan, the first time it is seen."""
        running = question.running
        if running is None or any(move.epoch == question.epoch for move in pending.moves):
            return
        by_llm = any(plan.layout() == running.plan.layout() for plan in pending.wanted)
        outcome = Outcome(
            seconds_ago=0.0, proposer="llm" if by_llm else "solver", predicted_p99_ms=running.prediction.p99_ms
        )
        pending.moves.append(_Move(question.epoch, self._clock.now_ms(), outcome))

    async def close(self) -> None:
        """Ask nothing more."""
        tasks = [pending.task for pending in self._pending.values() if pending.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.endpoint.close()


def judged_exchange(exchange: Exchange, question: Question, judged: Judged) -> Exchange:
    """The exchange with what the answer came to."""
    refused = judged.suggestion is None
    what = option_name(question, judged)
    p99_ms = judged.prediction.p99_ms if judged.prediction is not None else None
    return msgspec.structs.replace(
        exchange,
        verdict="refused" if refused else "agreed" if judged.agrees else "won",
        reason=judged.reasons[0].code if judged.reasons else "",
        llm=Side(what=what, predicted_p99_ms=p99_ms, score=judged.score, plan=judged.plan),
        behind=judged.behind,
        regret=judged.regret,
    )


def effects_of(exchange: Exchange, snapshot: Snapshot) -> Effects:
    """What the two choices of an exchange come to by what was measured since."""

    def of(side: Side | None) -> Effect | None:
        return None if side is None or side.plan is None else effect_of(side.plan, snapshot, exchange.service_id)

    return Effects(exchange_id=exchange.id, solver=of(exchange.solver), llm=of(exchange.llm))


def exchange_plan(judged: Judged | None) -> Plan:
    """The plan that an admitted answer stands for."""
    assert judged is not None
    assert judged.plan is not None
    return judged.plan


def option_name(question: Question, judged: Judged) -> str:
    """What an answer wants, in words that hold no names."""
    if judged.plan is None:
        return judged.action
    return judged.action if judged.action == "keep" else f"{judged.action} {_layout_name(question, judged.plan)}"


def minute_of_day(wall_s: float) -> float:
    """Minutes since midnight on this machine's clock."""
    local = time.localtime(wall_s)
    return local.tm_hour * 60 + local.tm_min + local.tm_sec / 60


def _side(question: Question, entry: Scored) -> Side:
    return Side(
        what=_layout_name(question, entry.plan), predicted_p99_ms=entry.prediction.p99_ms, score=entry.score, plan=entry.plan
    )  # fmt: skip


def _layout_name(question: Question, plan: Plan) -> str:
    if question.running is not None and question.running.plan.layout() == plan.layout():
        return "the running plan"
    known = (name for name, entry in question.options.items() if entry.plan.layout() == plan.layout())
    return next(known, "a plan of its own")
