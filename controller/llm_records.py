"""What is kept of every question to the model: prompt, replies, what they came to, and how the running plan did afterwards.

Prompts hold no names and no addresses; replies are redacted before they are read, so that a replay reads what was read.
"""

from __future__ import annotations

import logging
import zlib
from typing import Literal

import msgspec

from controller.records import decode, encode
from controller.state import State
from policies.effects import Effect
from policies.ids import ServiceId
from policies.llm import Message, Outcome
from policies.llm_reply import Answer
from policies.plan import Plan
from sla.errors import TidegateError

MAX_EXCHANGES = 200
"""Per service."""
_MAX_SNAPSHOT_BYTES = 64 << 20

Verdict = Literal["won", "agreed", "refused", "fallback"]
"""`won`: the gate let its own choice through; `agreed`: it wants what the solver wants; `fallback`: there was no usable answer."""

_log = logging.getLogger(__name__)


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the two would run, and what is expected of it."""

    what: str
    predicted_p99_ms: float | None = None
    score: float | None = None
    plan: Plan | None = None


class Effects(msgspec.Struct, frozen=True, kw_only=True):
    """What the two choices turned out to do, once the plan that ran had served for a while."""

    exchange_id: str = ""
    solver: Effect | None = None
    llm: Effect | None = None


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One question and what became of it."""

    at_s: float
    service_id: ServiceId
    epoch: int
    mode: str
    model: str
    seed: int
    minute_of_day: float
    messages: tuple[Message, ...]
    replies: tuple[str, ...] = ()
    """One, or two where there was a repair round."""
    answer: Answer | None = None
    verdict: Verdict
    reason: str = ""
    """Of a refusal the gate's first code, of a fallback why there was no answer."""
    acted: bool = False
    """It was passed on to the loop (mode `control`, or an operator's consent)."""
    solver: Side
    llm: Side | None = None
    behind: float | None = None
    """Score of its choice minus the solver's, before the gate."""
    regret: float = 0.0
    """The same after the gate; never more than the tolerance."""
    outcomes: tuple[Outcome, ...] = ()
    candidates: int = 8
    """How many plans it could be shown."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    cached_tokens: int = 0
    """Of the prompt's, those that the endpoint had in its prompt cache, where it says so."""
    measured_p99_ms: float | None = None
    """Of the running plan when it was asked."""
    effects: Effects | None = None
    id: str = ""


class LlmLog:
    """Exchanges in the store, each with the snapshot that it was about."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def append(self, exchange: Exchange, snapshot: bytes) -> str:
        """The id of the new entry."""
        return await self._state.store.append(
            f"llm/{exchange.service_id}", encode(exchange), MAX_EXCHANGES, attachment=zlib.compress(snapshot, 1),
            fence=self._state.fence,
        )  # fmt: skip

    async def note_effects(self, service: str, effects: Effects) -> None:
        """Note what an exchange turned out to bring."""
        await self._state.store.append(
            f"llm-effects/{service}", encode(effects), MAX_EXCHANGES, fence=self._state.fence
        )

    async def tail(self, service: str, count: int) -> list[Exchange]:
        """The newest exchanges about a service, oldest of them first, with what they turned out to bring."""
        found = []
        notes = await self._state.store.tail(f"llm-effects/{service}", MAX_EXCHANGES)
        effects = {note.exchange_id: note for note in (decode(each.value, Effects, each.id) for each in notes)}
        for entry in await self._state.store.tail(f"llm/{service}", count):
            try:
                exchange = decode(entry.value, Exchange, f"llm/{service}/{entry.id}")
            except TidegateError as error:
                _log.warning("an exchange with the LLM is left out: %s", error)
                continue
            found.append(msgspec.structs.replace(exchange, id=entry.id, effects=effects.get(entry.id)))
        return found

    async def services(self) -> list[str]:
        """Services that a model was asked about."""
        return sorted(n.removeprefix("llm/") for n in await self._state.store.streams() if n.startswith("llm/"))

    async def snapshot_of(self, service: str, exchange_id: str) -> bytes | None:
        """The snapshot of an exchange, if it was kept."""
        packed = await self._state.store.attachment(f"llm/{service}", exchange_id)
        return None if packed is None else zlib.decompressobj().decompress(packed, _MAX_SNAPSHOT_BYTES)
