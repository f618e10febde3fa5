"""One reader of the API for all pages that are open with the same key: each endpoint is asked once a second, for all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pydantic import TypeAdapter, ValidationError

from controller.dashboard.api import Answer, Api
from controller.llm_views import AdviceOut, IntentOut, LlmReport
from controller.views import AgentOut, DecisionOut, EventOut, PlanOut, SlaOut, StatusOut
from sla.errors import RetryableError

log = logging.getLogger(__name__)

POLL_EVERY_S = 1.0
PLANS = 20
DECISIONS = 12
EVENTS = 16
LATE_AFTER_S = 2.5
"""A reading older than this is shown as old, even while an answer is still awaited."""

_STATUS = TypeAdapter(StatusOut)
_SLAS = TypeAdapter(list[SlaOut])
_AGENTS = TypeAdapter(list[AgentOut])
_PLANS = TypeAdapter(list[PlanOut])
_DECISIONS = TypeAdapter(list[DecisionOut])
_EVENTS = TypeAdapter(list[EventOut])
_LLM = TypeAdapter(LlmReport)
_ADVICES = TypeAdapter(list[AdviceOut])
_INTENTS = TypeAdapter(list[IntentOut])


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at everything."""

    status: StatusOut
    slas: list[SlaOut]
    agents: list[AgentOut]
    running: dict[str, PlanOut]
    """The running plan of each service that has one."""
    decisions: list[DecisionOut]
    """Newest first, as `events`."""
    events: list[EventOut]
    read_at_s: float
    """The loop's clock, when the answers were in."""
    llm: LlmReport | None = None
    """None while the controller does not tell."""
    advices: list[AdviceOut] = field(default_factory=list)
    intents: list[IntentOut] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FeedState:
    """The newest reading, and what is wrong if it is not fresh."""

    reading: Reading | None = None
    error: str | None = None
    """Why there is no newer reading; None while all is well."""
    signed_out: bool = False
    """The key is not accepted (any more)."""
    now_s: float = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since the reading."""
        return max(0.0, self.now_s - self.reading.read_at_s) if self.reading else 0.0


Listener = Callable[[FeedState], None]


class _SignedOutError(Exception):
    """The API no longer takes this key."""


@dataclass(slots=True)
class Feed:
    """Reads while somebody listens. Owned by the event loop."""

    api: Api
    state: FeedState = field(default_factory=FeedState)
    _listeners: set[Listener] = field(default_factory=set)
    _task: asyncio.Task[None] | None = None
    _running: dict[str, PlanOut] = field(default_factory=dict)

    def listen(self, listener: Listener) -> None:
        """Call `listener` about once a second, until it is dropped. Safe to repeat."""
        self._listeners.add(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._loop())

    def drop(self, listener: Listener) -> None:
        """Forget a listener; the last one stops the reading. Safe to repeat."""
        self._listeners.discard(listener)
        if not self._listeners and self._task is not None:
            self._task.cancel()
            self._task = None

    async def fresh(self) -> FeedState:
        """A state that is at most a little older than now, for a page that is being built."""
        now_s = _now_s()
        if self.state.reading is None or now_s - self.state.reading.read_at_s > LATE_AFTER_S:
            self.state = await self._next_state()
        self.state = replace(self.state, now_s=now_s)
        return self.state

    async def close(self) -> None:
        """Stop."""
        self._listeners.clear()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self.api.close()

    async def _loop(self) -> None:
        while True:
            started_s = _now_s()
            reading = asyncio.ensure_future(self._next_state())
            try:
                while not (await asyncio.wait({reading}, timeout=POLL_EVERY_S))[0]:
                    self._publish(self._waiting())
            finally:
                reading.cancel()
            self._publish(reading.result())
            await asyncio.sleep(max(0.1, POLL_EVERY_S - (_now_s() - started_s)))

    def _waiting(self) -> FeedState:
        now = replace(self.state, now_s=_now_s())
        if now.error is None and now.age_s > LATE_AFTER_S:
            return replace(now, error="The controller has not answered yet.")
        return now

    def _publish(self, state: FeedState) -> None:
        self.state = replace(state, now_s=_now_s())
        for listener in list(self._listeners):
            try:
                listener(self.state)
            except Exception:  # One broken page must not stop the reading for the others.
                log.exception("a dashboard page could not be updated")

    async def _next_state(self) -> FeedState:
        try:
            return FeedState(reading=await self._read())
        except _SignedOutError:
            return FeedState(signed_out=True)
        except RetryableError as error:
            return replace(self.state, error=str(error))
        except ValidationError as error:
            log.warning("the API answered something unknown: %s", error)
            return replace(self.state, error="The controller answered something that this page does not understand.")

    async def _read(self) -> Reading:
        status, slas, agents, plans, decisions, events = await asyncio.gather(
            self._get("/v1/status"),
            self._get("/v1/slas"),
            self._get("/v1/agents"),
            self._get("/v1/plans", limit=PLANS),
            self._get("/v1/decisions", limit=DECISIONS),
            self._get("/v1/events", limit=EVENTS),
        )
        report, advices, intents = await asyncio.gather(
            self.api.get("/v1/llm/report"), self.api.get("/v1/llm/advice"), self.api.get("/v1/intents")
        )
        contracts = _SLAS.validate_json(slas)
        return Reading(
            status=_STATUS.validate_json(status),
            slas=contracts,
            agents=_AGENTS.validate_json(agents),
            running=await self._running_plans(contracts, _PLANS.validate_json(plans)),
            decisions=_DECISIONS.validate_json(decisions)[::-1],
            events=_EVENTS.validate_json(events)[::-1],
            read_at_s=_now_s(),
            llm=_LLM.validate_json(report.content) if report.ok else None,
            advices=_ADVICES.validate_json(advices.content) if advices.ok else [],
            intents=_INTENTS.validate_json(intents.content) if intents.ok else [],
        )

    async def _running_plans(self, slas: list[SlaOut], newest: list[PlanOut]) -> dict[str, PlanOut]:
        """A service that has been calm for long has its plan beyond the newest ones; then it is asked for, once."""
        found = {plan.service_id: plan for plan in newest if plan.running}
        for sla in slas:
            if sla.running_epoch is None or sla.service_id in found:
                continue
            known = self._running.get(sla.service_id)
            if known is None or known.epoch != sla.running_epoch:
                plans = _PLANS.validate_json(await self._get("/v1/plans", service_id=sla.service_id, limit=200))
                known = next((plan for plan in plans if plan.running), None)
            if known is not None:
                found[sla.service_id] = known
        self._running = found
        return found

    async def _get(self, path: str, **params: str | int) -> bytes:
        answer: Answer = await self.api.get(path, **params)
        if answer.status in (401, 403):
            raise _SignedOutError
        if not answer.ok:
            raise RetryableError(answer.sentence)
        return answer.content


def _now_s() -> float:
    return asyncio.get_running_loop().time()
