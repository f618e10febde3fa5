"""Counts and the newest comparisons of the LLM with the solver: what the report, the metrics and the dashboard show."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from controller.llm_records import Effects, Exchange

KEEP = 200


class LlmLedger:
    """Owned by the event loop. Counts begin with the process; comparisons are restored from the store."""

    def __init__(self) -> None:
        self.asked = 0
        self.verdicts: Counter[tuple[str, str]] = Counter()
        """(verdict, reason) -> how often; reasons of refusals and fallbacks."""
        self.acted = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.cost = 0.0
        self.seconds = 0.0
        self.recent: deque[Exchange] = deque(maxlen=KEEP)

    def restore(self, exchanges: Iterable[Exchange]) -> None:
        """What earlier processes recorded, oldest first."""
        self.recent.extend(sorted(exchanges, key=lambda exchange: exchange.at_s))

    def note(self, exchange: Exchange) -> None:
        """One question is done with."""
        self.asked += 1
        self.verdicts[(exchange.verdict, exchange.reason)] += 1
        self.acted += exchange.acted
        self.prompt_tokens += exchange.prompt_tokens
        self.cached_tokens += exchange.cached_tokens
        self.output_tokens += exchange.output_tokens
        self.cost += exchange.cost
        self.seconds += exchange.seconds
        self.recent.append(exchange)

    def settle(self, exchange: Exchange, effects: Effects) -> None:
        """What an exchange turned out to bring, if it is still among the newest."""
        for at, each in enumerate(self.recent):
            if (each.service_id, each.at_s, each.seed) == (exchange.service_id, exchange.at_s, exchange.seed):
                self.recent[at] = msgspec.structs.replace(each, effects=effects)

    def passed_over(self, reason: str) -> None:
        """It was time to ask, and nobody was asked, or the answer came too late for its plan."""
        self.verdicts[("fallback", reason)] += 1

    def answered(self) -> int:
        """Questions that got an answer that could be read, admissible or not."""
        return sum(count for (verdict, _), count in self.verdicts.items() if verdict != "fallback")

    def count(self, verdict: str) -> int:
        """How often it came to this."""
        return sum(count for (each, _), count in self.verdicts.items() if each == verdict)
