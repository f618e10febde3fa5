"""The queue of one simulated accelerator, in the order of the real one (`agents.queue`): what runs is not interrupted, then the least
slack goes first, divided by the weight of its modality. Steps of an ingress run beside it, in threads of their own.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

VISION_WEIGHT, TEXT_WEIGHT = 1.5, 1.0
"""As in `agents.queue.MODALITY_WEIGHT`."""
Then = Callable[[float | None, float, float], None]
"""Called with (end, ms that it ran, now) of a run: no end if the agent was lost before."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run that waits."""

    nominal_ms: float
    """On the reference core."""
    due_ms: float
    """Until when its sender waits for it."""
    yields: bool
    """Whether it is text, which lets pictures go ahead."""
    then: Then
    is_void: Callable[[], bool] = lambda: False
    """Whether its sender took it back."""
    key: str = ""
    """What it is measured as."""
    items: float = 1.0


@dataclass(slots=True)
class Line:
    """Who waits for one accelerator."""

    is_busy: bool = False
    _waiting: tuple[list[tuple[float, int, Job]], list[tuple[float, int, Job]]] = field(
        default_factory=lambda: ([], [])
    )
    """Pictures and text; within each the one that is due first is the first."""
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def push(self, job: Job, expected_ms: float) -> None:
        """Take a place in line."""
        heapq.heappush(self._waiting[job.yields], (job.due_ms - expected_ms, next(self._number), job))

    def pop(self, now: float) -> Job | None:
        """The next to run."""
        for line in self._waiting:
            while line and line[0][2].is_void():
                heapq.heappop(line)
        pictures, texts = self._waiting
        if not pictures or not texts:
            line = pictures or texts
            return heapq.heappop(line)[2] if line else None
        is_text = _rank(texts[0][0] - now, TEXT_WEIGHT) < _rank(pictures[0][0] - now, VISION_WEIGHT)
        return heapq.heappop(texts if is_text else pictures)[2]


def _rank(slack_ms: float, weight: float) -> float:
    return slack_ms / weight if slack_ms > 0 else slack_ms * weight


@dataclass(slots=True)
class Threads:
    """Workers that serve first come, first served."""

    free_at_ms: list[float]

    def end_ms(self, now: float, ms: float) -> float:
        """When work that comes now is done; to be called in the order of time."""
        begin = max(now, heapq.heappop(self.free_at_ms))
        heapq.heappush(self.free_at_ms, begin + ms)
        return begin + ms
