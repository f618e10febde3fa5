"""What a plan was expected to take when it was made, per way that a lane may go: what an ingress holds its requests against."""

from __future__ import annotations

import msgspec

from policies.ids import AgentId, StageName


class ShardTime(msgspec.Struct, frozen=True, kw_only=True):
    """One run on one agent, without waiting: a fixed part and one per item of its lane (a stage without an axis has one item)."""

    agent: AgentId
    fixed_ms: float
    per_item_ms: float

    def run_ms(self, items: float) -> float:
        return self.fixed_ms + self.per_item_ms * items


class WayTime(msgspec.Struct, frozen=True, kw_only=True):
    """A chain of shards from the ingress and back to it."""

    shards: tuple[ShardTime, ...]
    link_ms: float = 0.0
    """Round trips and hops, there and back."""
    link_per_item_ms: float = 0.0

    def travel_ms(self, items: float) -> float:
        return self.link_ms + self.link_per_item_ms * items


class StageTime(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's lanes in the order of its plan, its fallbacks, and what usually follows it."""

    lanes: tuple[WayTime, ...]
    fallbacks: dict[AgentId, WayTime] = {}
    rest_ms: float = 0.0
    """All later stages, if nobody waits there."""

    def way(self, lane: int, fallback: AgentId | None) -> WayTime | None:
        """A lane as it is planned, or through a fallback; None for an agent that is no fallback."""
        return self.lanes[lane] if fallback is None else self.fallbacks.get(fallback)


class RouteTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One plan's expectations, and the promise that they serve."""

    promise_ms: float
    """The contract's p99."""
    stages: dict[StageName, StageTime]
