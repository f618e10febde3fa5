"""What happened, newest last: a short memory for people, not the source of any decision."""

from __future__ import annotations

from collections import deque
from typing import Literal

import msgspec

from controller.clock import Clock

EventKind = Literal[
    "agent-enrolled", "agent-live", "agent-suspect", "agent-lost", "agent-draining", "agent-fault", "agent-throttled", "contract", "service",
    "decision", "rollout", "rollout-failed", "plan-active", "cloud", "llm", "link", "loop-fault", "sla-alert", "model", "knob",
]  # fmt: skip


class Event(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    """Seconds since 1970, the controller's clock."""
    kind: EventKind
    text: str
    agent: str | None = None
    service: str | None = None
    epoch: int | None = None


class EventLog:
    """The newest events; older ones fall out."""

    def __init__(self, clock: Clock, keep: int = 1000) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=keep)

    def add(
        self,
        kind: EventKind,
        text: str,
        *,
        agent: str | None = None,
        service: str | None = None,
        epoch: int | None = None,
    ) -> Event:
        """Note that something happened now."""
        event = Event(at_s=self._clock.wall_s(), kind=kind, text=text, agent=agent, service=service, epoch=epoch)
        self._events.append(event)
        return event

    def tail(self, limit: int = 200) -> list[Event]:
        """The newest events, oldest of them first."""
        return list(self._events)[-limit:]
