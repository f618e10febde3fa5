"""The shell around `policies.llm`: one call to an OpenAI-compatible endpoint, never waited for by the loop.

The solver's plan goes first. When nothing is urgent, the model is asked in the background; its answer becomes a suggestion
that the next look passes through the same gate as everything else. A late, wrong or missing answer changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controller.clock import Clock
from controller.events import EventLog
from controller.settings import LlmSettings
from policies.decide import Keep, Memory
from policies.decision import Proposal
from policies.ids import ServiceId
from policies.llm import Malformed, Message, Question, ask, parse, repair, to_suggestion
from policies.snapshot import Snapshot

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

BREAK_AFTER = 3
BREAK_S = 120.0


@dataclass(slots=True)
class _Pending:
    task: asyncio.Task[None] | None = None
    suggestion: Proposal | Keep | None = None
    epoch: int = 0
    asked_ms: float = float("-inf")


class LlmAdvisor:
    """Asks and keeps suggestions, one call at a time per service, with a circuit breaker."""

    def __init__(self, settings: LlmSettings, events: EventLog, clock: Clock) -> None:
        self._settings = settings
        self._events = events
        self._clock = clock
        self._pending: dict[ServiceId, _Pending] = {}
        self._failures = 0
        self._open_until_ms = float("-inf")
        self._client: AsyncOpenAI | None = None
        self.asked = 0
        self.answered = 0

    def policy(self) -> str:
        """Who decides, in words."""
        if self._settings.base_url is None:
            return "solver (no LLM is configured)"
        if self._clock.now_ms() < self._open_until_ms:
            return "solver (the LLM endpoint failed several times; it is asked again later)"
        return f"llm {self._settings.model}, behind the solver and the gate"

    def take(self, service: ServiceId, epoch: int) -> Proposal | Keep | None:
        """The suggestion that came in since the last look, if any; one about an older plan than `epoch` is dropped."""
        pending = self._pending.get(service)
        if pending is None:
            return None
        suggestion, pending.suggestion = pending.suggestion, None
        return suggestion if pending.epoch == epoch else None

    def consider(self, service: ServiceId, snapshot: Snapshot, memory: Memory) -> None:
        """Ask the model about a quiet service, if one is configured and it is time."""
        now_ms = self._clock.now_ms()
        pending = self._pending.setdefault(service, _Pending())
        busy = pending.task is not None and not pending.task.done()
        too_soon = now_ms - pending.asked_ms < self._settings.min_interval_s * 1000
        if self._settings.base_url is None or busy or too_soon or now_ms < self._open_until_ms:
            return
        pending.asked_ms = now_ms
        pending.task = asyncio.create_task(self._ask(service, snapshot, pending), name=f"llm-{service}")

    async def _ask(self, service: ServiceId, snapshot: Snapshot, pending: _Pending) -> None:
        question = await asyncio.to_thread(ask, snapshot, service, seed=self.asked)
        if question is None:
            return
        from openai import OpenAIError

        self.asked += 1
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                pending.suggestion = await self._answer(question)
            pending.epoch = question.epoch
            self._failures = 0
            self.answered += 1
        except (OpenAIError, TimeoutError, Malformed) as error:
            self._failures += 1
            if self._failures >= BREAK_AFTER:
                self._open_until_ms = self._clock.now_ms() + BREAK_S * 1000
            self._events.add(
                "llm",
                f"{service}: no use of the LLM ({type(error).__name__}); the solver's plan stands.",
                service=service,
            )

    async def _answer(self, question: Question) -> Proposal | Keep:
        """The model's choice, after at most one repair round. Raises Malformed."""
        reply = await self._complete(question.messages)
        try:
            return to_suggestion(question, parse(reply, question))
        except Malformed as error:
            return to_suggestion(question, parse(await self._complete(repair(question, reply, error)), question))

    async def _complete(self, messages: list[Message]) -> str:
        from openai import AsyncOpenAI  # only when an endpoint is configured: it takes a second and 60 MB

        if self._client is None:
            self._client = AsyncOpenAI(
                base_url=self._settings.base_url,
                api_key=self._settings.api_key or "none",
                timeout=self._settings.deadline_s,
                max_retries=0,
            )
        completion = await self._client.chat.completions.create(
            model=self._settings.model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=self._settings.max_output_tokens,
            temperature=0.0,
        )
        try:
            choice = completion.choices[0]
            content, cut_off = choice.message.content, choice.finish_reason == "length"
        except (AttributeError, IndexError, TypeError):
            raise Malformed("the endpoint's answer is no chat completion") from None
        if cut_off:
            raise Malformed("the reply was cut off")
        return content or ""

    async def close(self) -> None:
        """Ask nothing more."""
        tasks = [pending.task for pending in self._pending.values() if pending.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
