"""The queue in front of one accelerator: who runs next, and who is told to come back later.

Speech is an interrupt and overtakes; the others go by what is left of their deadline, divided by the weight of their modality.
The queue is bounded. What cannot meet its deadline any more is shed with a time to retry after, never silently late.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from sla.errors import OverloadedError

Modality = Literal["vision", "speech", "text"]
MODALITY_WEIGHT: dict[Modality, float] = {"vision": 1.5, "speech": 1.2, "text": 1.0}
BUSY_WINDOW_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Ticket(Generic[T]):
    """One piece of work in line; times are seconds of the queue's clock."""

    payload: T
    modality: Modality
    deadline_s: float
    expected_s: float
    """How long it should run; 0 if unknown."""
    arrived_s: float
    first: bool = False
    """Goes before everything else."""


@dataclass(slots=True)
class WaitingLine(Generic[T]):
    """The order of the queue, without threads and without a clock of its own."""

    max_depth: int
    tickets: list[Ticket[T]] = field(default_factory=list)

    def push(self, ticket: Ticket[T], *, busy_for_s: float = 0.0) -> None:
        """Take a place in line. `busy_for_s` is how long the running work still takes.

        Raises OverloadedError when the line is full, or when the work could not be done within its deadline.
        """
        ahead_s = busy_for_s + sum(
            other.expected_s
            for other in self.tickets
            if _rank(other, ticket.arrived_s) <= _rank(ticket, ticket.arrived_s)
        )
        if len(self.tickets) >= self.max_depth:
            raise OverloadedError(
                f"The accelerator's queue is full: {self.max_depth} runs wait already.", retry_after_s=max(ahead_s, 0.1)
            )
        done_s = ticket.arrived_s + ahead_s + ticket.expected_s
        if done_s > ticket.deadline_s:
            late_ms = (done_s - ticket.deadline_s) * 1000
            raise OverloadedError(
                f"The accelerator's queue is too long for this deadline by {late_ms:.0f} ms.",
                retry_after_s=max(ahead_s, 0.1),
            )
        self.tickets.append(ticket)

    def pop(self, now_s: float) -> tuple[Ticket[T] | None, list[Ticket[T]]]:
        """The next to run (None if nobody waits), and those that can no longer meet their deadline: to be shed."""
        hopeless = [ticket for ticket in self.tickets if now_s + ticket.expected_s > ticket.deadline_s]
        if hopeless:
            self.tickets = [ticket for ticket in self.tickets if ticket not in hopeless]
        if not self.tickets:
            return None, hopeless
        chosen = min(self.tickets, key=lambda ticket: _rank(ticket, now_s))
        self.tickets.remove(chosen)
        return chosen, hopeless


def _rank(ticket: Ticket[Any], now_s: float) -> tuple[bool, bool, float, float]:
    slack_s = ticket.deadline_s - now_s - ticket.expected_s
    weight = MODALITY_WEIGHT[ticket.modality]
    weighted = slack_s / weight if slack_s > 0 else slack_s * weight
    return not ticket.first, ticket.modality != "speech", weighted, ticket.arrived_s


@dataclass(slots=True)
class _Line:
    """Least squares over runs whose weight fades: seconds = fixed + each * items."""

    weight: float = 0.0
    items: float = 0.0
    seconds: float = 0.0
    items_squared: float = 0.0
    items_seconds: float = 0.0

    def add(self, items: int, seconds: float, keep: float) -> None:
        self.weight = self.weight * keep + 1
        self.items = self.items * keep + items
        self.seconds = self.seconds * keep + seconds
        self.items_squared = self.items_squared * keep + items * items
        self.items_seconds = self.items_seconds * keep + items * seconds

    def at(self, items: int) -> float:
        mean_items, mean_s = self.items / self.weight, self.seconds / self.weight
        variance = self.items_squared / self.weight - mean_items**2
        proportional = mean_s / mean_items
        if variance > 1e-6 * mean_items**2:
            covariance = self.items_seconds / self.weight - mean_items * mean_s
            each_s = min(max(covariance / variance, 0.0), proportional)
        else:
            each_s = proportional
        return mean_s + each_s * (items - mean_items)


class RunTimes:
    """How long runs of each kind took lately, to expect how long the next one takes: a fixed part and one per item."""

    def __init__(self, *, keep: float = 0.9, max_keys: int = 1024) -> None:
        """A run's weight is multiplied by `keep` with each later run; the keys that were learned first go first."""
        self._keep = keep
        self._max_keys = max_keys
        self._lines: dict[str, _Line] = {}

    def expected_s(self, key: str, items: int = 1) -> float:
        """Expected seconds of a run with that many items; 0 if that kind never ran."""
        line = self._lines.get(key)
        return 0.0 if line is None else line.at(max(items, 1))

    def ran(self, key: str, seconds: float, items: int = 1) -> None:
        """Learn from one run."""
        if key not in self._lines and len(self._lines) >= self._max_keys:
            self._lines.pop(next(iter(self._lines)))
        self._lines.setdefault(key, _Line()).add(max(items, 1), seconds, self._keep)

    def doubt(self, key: str) -> None:
        """Expect less: work was turned away on the strength of this expectation, so nothing else will correct it."""
        if (line := self._lines.get(key)) is not None:
            line.seconds *= 0.8
            line.items_seconds *= 0.8

    def forget(self, key: str) -> None:
        """Drop what is known of a kind that is gone."""
        self._lines.pop(key, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    run: Callable[[], Any]
    done: asyncio.Future[Any]
    ran: Callable[[Any], None]


class AcceleratorQueue:
    """Runs blocking work of one accelerator in its own thread, in the order of a `WaitingLine`."""

    def __init__(self, *, max_depth: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._line: WaitingLine[_Work] = WaitingLine(max_depth)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="accelerator")
        self._running: Ticket[_Work] | None = None
        self._running_since_s = 0.0
        self._spans: list[tuple[float, float]] = []
        self._is_closed = False

    @property
    def depth(self) -> int:
        """Runs that wait or run."""
        return len(self._line.tickets) + (self._running is not None)

    def now_s(self) -> float:
        """The clock of its deadlines."""
        return self._clock()

    async def submit(
        self,
        run: Callable[[], T],
        *,
        deadline_s: float,
        modality: Modality = "vision",
        expected_s: float = 0.0,
        first: bool = False,
        ran: Callable[[T], None] = lambda _: None,
    ) -> T:
        """The value of `run()`, called in the accelerator's thread; `deadline_s` is on the queue's clock.
        `first` lets it go before everything that waits. `ran` is told the value also when the caller waits no longer.

        Raises OverloadedError if it was never started. Work that was started is not interrupted.
        """
        if self._is_closed:
            raise OverloadedError("The agent is closing.")
        now_s = self._clock()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        ticket = Ticket(_Work(run, done, ran), modality, deadline_s, expected_s, now_s, first)
        self._line.push(ticket, busy_for_s=self._busy_for_s(now_s))
        self._next()
        try:
            return await done
        except asyncio.CancelledError:
            if ticket in self._line.tickets:
                self._line.tickets.remove(ticket)
            raise

    def busy_share(self, *, window_s: float = BUSY_WINDOW_S) -> float:
        """Share of the last `window_s` seconds in which the accelerator ran, [0, 1]."""
        now_s = self._clock()
        self._spans = [span for span in self._spans if span[1] > now_s - window_s]
        spans = [*self._spans, (self._running_since_s, now_s)] if self._running else self._spans
        return min(1.0, sum(stop - max(start, now_s - window_s) for start, stop in spans) / window_s)

    def run_after(self, run: Callable[[], None]) -> None:
        """Call `run` in the accelerator's thread after what runs there now; nobody waits for it.

        Once the queue is closed nothing is called: the process gives everything back when it ends.
        """
        if not self._is_closed:
            self._pool.submit(run)

    def close(self) -> None:
        """Turn away who waits and let the running work end."""
        self._is_closed = True
        waiting, self._line.tickets = self._line.tickets, []
        for ticket in waiting:
            _refuse(ticket, "The agent is closing.", 1.0)
        self._pool.shutdown(wait=False, cancel_futures=False)

    def _busy_for_s(self, now_s: float) -> float:
        if self._running is None:
            return 0.0
        return max(0.0, self._running_since_s + self._running.expected_s - now_s)

    def _next(self) -> None:
        if self._running is not None:
            return
        now_s = self._clock()
        chosen, hopeless = self._line.pop(now_s)
        for ticket in hopeless:
            wait_ms = (now_s - ticket.arrived_s) * 1000
            _refuse(ticket, f"The run waited {wait_ms:.0f} ms and can no longer meet its deadline.", ticket.expected_s)
        if chosen is None:
            return
        self._running, self._running_since_s = chosen, now_s
        started = asyncio.get_running_loop().run_in_executor(self._pool, chosen.payload.run)
        started.add_done_callback(lambda future: self._ended(chosen, future))

    def _ended(self, ticket: Ticket[_Work], future: asyncio.Future[Any]) -> None:
        self._spans.append((self._running_since_s, self._clock()))
        self._running = None
        done = ticket.payload.done
        error = None if future.cancelled() else future.exception()
        if not done.done():
            if future.cancelled():
                done.cancel()
            elif error is not None:
                done.set_exception(error)
            else:
                done.set_result(future.result())
        self._next()
        if error is None and not future.cancelled():
            ticket.payload.ran(future.result())  # At the end: whoever fails here stops nobody.


def _refuse(ticket: Ticket[_Work], sentence: str, retry_after_s: float) -> None:
    if not ticket.payload.done.done():
        ticket.payload.done.set_exception(OverloadedError(sentence, retry_after_s=max(retry_after_s, 0.1)))
