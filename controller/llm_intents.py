"""Operators' intents: a sentence or rules, shown back in plain words, in force once confirmed, revoked or expired in time.

An intent is durable before it is acknowledged, so it survives a restart; its times are wall-clock seconds.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Literal

import msgspec

from controller.clock import Clock
from controller.events import EventLog
from controller.llm import minute_of_day
from controller.llm_endpoint import LlmEndpoint, LlmUnusableError
from controller.settings import LlmSettings
from controller.state import State
from controller.table import Table
from policies.constraints import MAX_RULES, KnobBound, Rule, faults_of
from policies.ids import ServiceId
from policies.llm_intent import IntentQuestion, ask_intent, read_intent, wish_in_words
from policies.llm_names import redacted
from policies.llm_reply import Malformed
from policies.llm_resolve import Wish
from policies.snapshot import Snapshot
from sla.errors import ConflictError, InvalidInputError, NotFoundError, TidegateError

log = logging.getLogger(__name__)

MAX_LASTS_S = 24 * 3600.0
CONFIRM_WITHIN_S = 3600.0
MAX_OPEN = 20
"""Intents per service that wait for a person or are in force."""
MAX_OPEN_OF_LLM = 3
KEEP_ENDED_S = 7 * 86_400.0

IntentState = Literal["proposed", "active", "scheduled", "revoked", "expired"]


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """A rule and when it is in force, seconds since 1970."""

    rule: Rule
    from_s: float
    until_s: float
    text: str
    """In plain words."""


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants for a while."""

    id: str
    service_id: ServiceId
    said: str
    """The operator's sentence, or the model's reason."""
    by: Literal["operator", "llm"]
    created_s: float
    rules: tuple[Timed, ...]
    confirmed_s: float | None = None
    """When a person put it in force."""
    admitted_s: float | None = None
    """When the gate let the LLM's own wish act without a person (mode `control`)."""
    revoked_s: float | None = None

    def state(self, now_s: float) -> IntentState:
        """What has become of it."""
        if self.revoked_s is not None:
            return "revoked"
        if now_s >= max(rule.until_s for rule in self.rules):
            return "expired"
        if self.confirmed_s is None and self.admitted_s is None:
            return "expired" if now_s >= self.created_s + CONFIRM_WITHIN_S else "proposed"
        return "active" if any(rule.from_s <= now_s for rule in self.rules) else "scheduled"


class Intents:
    """All intents, in memory and in the store. Owned by the event loop."""

    def __init__(
        self, state: State, endpoint: LlmEndpoint, settings: LlmSettings, events: EventLog, clock: Clock
    ) -> None:
        self._table = Table(state.store, "intent", Intent)
        self._state = state
        self._endpoint = endpoint
        self._settings = settings
        self._events = events
        self._clock = clock
        self._intents: dict[str, Intent] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self) -> None:
        """Read everything from the store; what ended long ago is deleted."""
        now_s = self._clock.wall_s()
        for name, intent in (await self._table.all()).items():
            if max(rule.until_s for rule in intent.rules) + KEEP_ENDED_S < now_s:
                await self._table.delete(name)
            elif intent.admitted_s is not None and self._settings.mode != "control":
                self._intents[name] = msgspec.structs.replace(
                    intent, admitted_s=None
                )  # What it wished waits for a person now.
            else:
                self._intents[name] = intent

    async def close(self) -> None:
        """Wait for what is being written."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def in_force(self, service: ServiceId) -> tuple[Rule, ...]:
        """The rules of persons that the solver keeps to now, in the order in which they were said."""
        return self._rules(service, by_person=True)

    def advised(self, service: ServiceId) -> tuple[Rule, ...]:
        """Wishes of the LLM that act now without a person's word: only in mode `control`, and as `policies.advised` lets them."""
        return self._rules(service, by_person=False) if self._settings.mode == "control" else ()

    def _rules(self, service: ServiceId, *, by_person: bool) -> tuple[Rule, ...]:
        now_s = self._clock.wall_s()
        return tuple(
            timed.rule
            for intent in self.list(service)
            if intent.state(now_s) == "active" and (intent.confirmed_s is not None) == by_person
            for timed in intent.rules
            if timed.from_s <= now_s < timed.until_s
        )[:MAX_RULES]

    def list(self, service: str | None = None) -> list[Intent]:
        """Newest last."""
        found = (each for each in self._intents.values() if service is None or each.service_id == service)
        return sorted(found, key=lambda each: (each.created_s, each.id))

    async def understand(self, service: ServiceId, sentence: str, snapshot: Snapshot) -> Intent:
        """What the model makes of a sentence, as a proposal that is not in force.

        Raises ConflictError without a model, LlmUnusableError when it has no usable answer, InvalidInputError when the sentence asks
        for nothing that could be done.
        """
        if self._settings.base_url is None or self._settings.mode == "off":
            raise ConflictError("No LLM is configured that could read a sentence; give the rules themselves instead.")
        if (reason := self._endpoint.why_not()) is not None:
            raise LlmUnusableError(
                reason, f"The LLM is not asked at the moment ({reason}); give the rules themselves instead."
            )
        question = await asyncio.to_thread(ask_intent, snapshot, service, sentence, minute_of_day(self._clock.wall_s()))
        if question is None:
            raise InvalidInputError("The sentence is empty.", pointer="/text", accepted="what you want for a while")
        wishes = await self._asked(question, snapshot)
        if not wishes:
            raise InvalidInputError(
                "The model found nothing in this sentence that Tidegate could keep to.", pointer="/text",
                accepted="what to avoid, to prefer, to weigh or to keep, and until when",
            )  # fmt: skip
        return await self.propose(service, wishes, sentence, "operator", snapshot)

    async def propose(
        self, service: ServiceId, wishes: tuple[Wish, ...], said: str, by: Literal["operator", "llm"], snapshot: Snapshot,
        *, admitted: bool = False,
    ) -> Intent:  # fmt: skip
        """A proposal, durable; not in force before `confirm`, unless it is `admitted`. Raises InvalidInputError, ConflictError (too many are open)."""
        view = snapshot.services.get(service)
        if view is None:
            raise NotFoundError(f"There is no SLA for {service!r}, or its service is not registered.")
        if not 1 <= len(wishes) <= MAX_RULES:
            raise InvalidInputError(
                f"Give 1 to {MAX_RULES} rules.", pointer="/rules", accepted=f"1 to {MAX_RULES} rules"
            )
        for at, wish in enumerate(wishes):
            if faults := faults_of(wish.rule, view.spec, snapshot.fleet.agents):
                raise InvalidInputError(faults[0], pointer=f"/rules/{at}", accepted="names of this fleet and service")
            if not 0 <= wish.starts_in_s < wish.ends_in_s <= MAX_LASTS_S:
                raise InvalidInputError(
                    "A rule must end within 24 hours, and after it began.",
                    pointer=f"/rules/{at}",
                    accepted="at most 24 h",
                )
        open_now = [
            each
            for each in self.list(service)
            if each.state(self._clock.wall_s()) in ("proposed", "active", "scheduled")
        ]
        if len(open_now) >= MAX_OPEN:
            raise ConflictError(f"{service} has {MAX_OPEN} intents already; revoke some.")
        now_s = self._clock.wall_s()
        minute = minute_of_day(now_s)
        intent = Intent(
            id=secrets.token_hex(4), service_id=service, said=redacted(said)[:500], by=by, created_s=now_s,
            admitted_s=now_s if admitted else None,
            rules=tuple(
                Timed(rule=w.rule, from_s=now_s + w.starts_in_s, until_s=now_s + w.ends_in_s, text=wish_in_words(w, minute))
                for w in wishes
            ),
        )  # fmt: skip
        await self._keep(intent)
        return intent

    async def confirm(self, intent_id: str) -> Intent:
        """Put a proposal in force. Raises NotFoundError, ConflictError when it was revoked or has expired."""
        intent, now_s = self._known(intent_id), self._clock.wall_s()
        state = intent.state(now_s)
        if state in ("revoked", "expired"):
            raise ConflictError(f"The intent {intent_id} is {state}; say it again.")
        if intent.confirmed_s is None:
            intent = msgspec.structs.replace(intent, confirmed_s=now_s)
            await self._keep(intent)
            words = "; ".join(rule.text for rule in intent.rules)
            self._events.add(
                "llm", f"{intent.service_id}: in force by an operator's word: {words}.", service=intent.service_id
            )
        return intent

    async def revoke(self, intent_id: str) -> Intent:
        """Take an intent back. Raises NotFoundError."""
        intent = self._known(intent_id)
        if intent.revoked_s is None:
            intent = msgspec.structs.replace(intent, revoked_s=self._clock.wall_s())
            await self._keep(intent)
            self._events.add("llm", f"{intent.service_id}: intent {intent.id} is revoked.", service=intent.service_id)
        return intent

    def offer(
        self, service: ServiceId, wishes: tuple[Wish, ...], rationale: str, snapshot: Snapshot, *, admitted: bool = False
    ) -> None:  # fmt: skip
        """What the model would like to last: a few at most, none twice. Never raises.

        Where the gate `admitted` it and the mode is `control` it acts, otherwise it waits for a person.
        """
        now_s = self._clock.wall_s()
        rules = tuple(wish.rule for wish in wishes)
        its = [each for each in self.list(service) if each.by == "llm"]
        is_open = [each for each in its if each.state(now_s) in ("proposed", "active", "scheduled")]
        if len(is_open) >= MAX_OPEN_OF_LLM or any(_is_known(each, rules, now_s) for each in its):
            return
        # What a knob does stands in no prediction, so the gate cannot answer for it: a person must.
        acts = admitted and self._settings.mode == "control" and not any(isinstance(rule, KnobBound) for rule in rules)
        task = asyncio.get_running_loop().create_task(self._offered(service, wishes, rationale, snapshot, acts))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _offered(
        self, service: ServiceId, wishes: tuple[Wish, ...], rationale: str, snapshot: Snapshot, acts: bool
    ) -> None:  # fmt: skip
        try:
            intent = await self.propose(service, wishes, rationale, "llm", snapshot, admitted=acts)
        except TidegateError as error:
            log.warning("a wish of the LLM is not kept: %s", error)
            return
        words = "; ".join(rule.text for rule in intent.rules)
        told = (
            f"the LLM's wish acts: {words}. Take it back with: tidegate intent revoke {intent.id}"
            if acts
            else f"the LLM proposes: {words}. It waits for an operator."
        )
        self._events.add("llm", f"{service}: {told}", service=service)

    async def _asked(self, question: IntentQuestion, snapshot: Snapshot) -> tuple[Wish, ...]:
        """Raises LlmUnusableError."""
        until_s = asyncio.get_running_loop().time() + self._settings.deadline_s
        messages = question.messages
        for is_last in (False, True):
            left_s = max(0.01, until_s - asyncio.get_running_loop().time())
            completion = await self._endpoint.complete(messages, question.schema, left_s)
            reply = redacted(completion.text)
            try:
                wishes = read_intent(reply, question, snapshot)
                self._endpoint.succeeded()
                return wishes
            except Malformed as error:
                if is_last:
                    break
                again = f"That reply cannot be used: {error} Answer with one JSON object as described."
                messages = [
                    *question.messages, {"role": "assistant", "content": reply[:500]}, {"role": "user", "content": again}
                ]  # fmt: skip
        raise LlmUnusableError("malformed", "The model's answer could not be read; give the rules themselves instead.")

    def _known(self, intent_id: str) -> Intent:
        intent = self._intents.get(intent_id)
        if intent is None:
            raise NotFoundError(f"There is no intent {intent_id!r}; list them with: tidegate intent list")
        return intent

    async def _keep(self, intent: Intent) -> None:
        await self._table.put(intent.id, intent, fence=self._state.fence)
        self._intents[intent.id] = intent


def _is_known(intent: Intent, rules: tuple[Rule, ...], now_s: float) -> bool:
    """Whether to offer these rules again would be to insist: they are open, a person took them back, or nobody wanted them."""
    acted = intent.confirmed_s is not None or intent.admitted_s is not None
    ran_out = intent.state(now_s) == "expired" and acted
    return tuple(timed.rule for timed in intent.rules) == rules and not ran_out
