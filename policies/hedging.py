"""What an ingress does by itself while the controller does not know yet: lanes that would break the promise go another way.

No control loop is quicker than the first requests that are late; the ingress sees the first *run* that is. It keeps, per agent, how long
runs take over what the plan expected of them (a *level*), and how much of its own work is under way there. From that it tells what a lane
would take now. A lane that endangers the promise goes to a fallback that is clearly quicker. Otherwise a second copy starts on one
(hedging; Dean and Barroso, The Tail at Scale, 2013) when the first one is clearly late, or at the last moment at which the fallback
still keeps the promise; the first answer counts and the other copy is taken back.

Levels are relative to the plan, not to the nominal speed: what the plan expects is what its controller found best, slow devices included, so a
new plan starts at one. Copies are bounded by a budget, since a fleet with too much work gets no quicker by more of it.
Values in, values out: the clock is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from policies.ids import AgentId
from policies.route_times import StageTime, WayTime

MOST_SLOW = 100.0
"""A level is never more than this."""
Way = AgentId | None
"""None: the lane as it is planned; an agent: that fallback."""


class HedgeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """When a lane goes another way, and when a second copy of it starts."""

    in_danger_at: float = 0.6
    """A lane is moved when its request would take more than this share of the promise ..."""
    quicker_by: float = 0.8
    """... and a fallback takes at most this share of the lane's time."""
    answer_at: float = 0.85
    """A copy starts so that its answer comes at this share of the promise at the latest."""
    late_factor: float = 2.0
    """No copy starts before the run took so many times what is expected now, ..."""
    late_ms: float = 50.0
    """... and so much more than that."""
    rise: float = 0.6
    """Weight of a run that is slower than the level; one slow run says that a device throttles, ..."""
    fall: float = 0.25
    """... a quick one may be luck."""
    full_weight_ms: float = 20.0
    """Shorter runs weigh less: their times say more of the host."""
    slow_level: float = 1.5
    """A way that is avoided and has a level beyond this is still tried once per `probe_every_ms`, so that its level and the controller keep up."""
    probe_every_ms: float = 1_000.0
    copies_per_lane: float = 0.1
    """Copies that one lane adds to the budget, ..."""
    most_copies: float = 10.0
    """... which holds so many at the most."""


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """One copy of a lane that is under way; give it back with `Hedger.ended`."""

    way: WayTime
    items: float
    at_ms: float
    done_ms: dict[AgentId, float]
    """What each agent had run for this ingress by then."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a lane goes."""

    first: Way = None
    second: Way = None
    """Where a copy goes if there is no answer by then."""
    second_after_ms: float = math.inf
    """Never, unless it is finite."""
    is_probe: bool = False
    """The first copy goes where it would not, to see whether that is still slow: it is not taken back."""


@dataclass(slots=True)
class _Agent:
    level: float = 1.0
    under_way: list[Sent] = field(default_factory=list)
    done_ms: float = 0.0
    """Run times of all that it answered."""
    tried_ms: float = -math.inf


class Hedger:
    """What one ingress knows of the agents that run one service for it."""

    def __init__(self, settings: HedgeSettings | None = None) -> None:
        self._settings = settings or HedgeSettings()
        self._agents: dict[AgentId, _Agent] = {}
        self._copies = self._settings.most_copies

    def replanned(self) -> None:
        """A new plan serves: it knew what was slow, so all levels start anew. What is under way still is."""
        self._agents = {name: agent for name, agent in self._agents.items() if agent.under_way}
        for agent in self._agents.values():
            agent.level = 1.0

    def level(self, agent: AgentId) -> float:
        """How long runs take there lately over what the plan expected; 1 for an agent that was never seen."""
        known = self._agents.get(agent)
        return 1.0 if known is None else known.level

    def choose(
        self, now_ms: float, spent_ms: float, promise_ms: float, stage: StageTime, lane: int, items: float,
        usable: Callable[[AgentId], bool] = lambda _: True,
    ) -> Choice:  # fmt: skip
        """Where one lane's `items` go, for a request that came in `spent_ms` ago. `usable` tells whether an agent may be asked."""
        s = self._settings
        self._copies = min(s.most_copies, self._copies + s.copies_per_lane)
        way = stage.lanes[lane]
        own = {shard.agent for shard in way.shards}
        fallbacks = {a: self._outlook_ms(w, items) for a, w in stage.fallbacks.items() if usable(a) and own != {a}}
        if not fallbacks:
            return Choice()
        best = min(fallbacks, key=lambda agent: fallbacks[agent])
        if not all(usable(shard.agent) for shard in way.shards):
            return Choice(first=best)
        planned_ms, left_ms = self._outlook_ms(way, items), promise_ms - spent_ms - stage.rest_ms
        spare_ms = (1.0 - s.in_danger_at) * promise_ms
        if planned_ms > left_ms - spare_ms and fallbacks[best] < s.quicker_by * planned_ms:
            if not self._is_due(way, now_ms):
                # What is worse by now may still be the better one when this fallback's link breaks.
                return Choice(first=best, second=None, second_after_ms=self._late_ms(stage.fallbacks[best], items))
            return Choice(second=best, second_after_ms=0.0, is_probe=True)
        last_ms = left_ms - (1.0 - s.answer_at) * promise_ms - fallbacks[best]
        return Choice(second=best, second_after_ms=max(self._late_ms(way, items), last_ms))

    def sent(self, way: WayTime, items: float, now_ms: float) -> Sent:
        """A copy of a lane leaves on this way."""
        agents = {shard.agent for shard in way.shards}
        copy = Sent(way, items, now_ms, {agent: self._agent(agent).done_ms for agent in agents})
        for agent in agents:
            self._agent(agent).under_way.append(copy)
        return copy

    def may_copy(self) -> bool:
        """Whether the budget allows a second copy now; it is taken from it."""
        if self._copies < 1.0:
            return False
        self._copies -= 1.0
        return True

    def late(self, copy: Sent, now_ms: float) -> None:
        """A copy has no answer yet: its agents are at least as slow as that says.

        What they ran for others meanwhile, and what may be running there now, is waiting and no slowness: in a burst all are late.
        """
        planned_ms = sum(shard.run_ms(copy.items) for shard in copy.way.shards)
        others_ms = sum(self._others_ms(copy, agent) for agent in copy.done_ms)
        ran_ms = now_ms - copy.at_ms - others_ms - copy.way.travel_ms(copy.items)
        for shard in copy.way.shards:
            if ran_ms > planned_ms * self.level(shard.agent):
                share = shard.run_ms(copy.items) / max(planned_ms, 1e-3)
                self._ran(shard.agent, ran_ms * share, shard.run_ms(copy.items))

    def ended(self, copy: Sent, run_ms: Iterable[float] = ()) -> None:
        """A copy came back with its run times, failed, or was taken back (then without)."""
        for agent in copy.done_ms:
            self._agent(agent).under_way.remove(copy)
        seen_ms = list(run_ms)
        for shard, ms in zip(copy.way.shards, seen_ms, strict=False):
            if not 0.0 <= ms < math.inf:
                continue  # Peers say that; nothing they say may stay for ever.
            self._agent(shard.agent).done_ms += ms
            self._ran(shard.agent, ms, shard.run_ms(copy.items))
        for shard in copy.way.shards[len(seen_ms) :]:
            # It may have run all the same.
            self._agent(shard.agent).done_ms += self._run_ms(shard.agent, shard.run_ms(copy.items))

    def _ran(self, agent: AgentId, ms: float, planned_ms: float) -> None:
        s, known = self._settings, self._agent(agent)
        ratio = min(ms / max(planned_ms, 1e-3), MOST_SLOW)
        weight = (s.rise if ratio > known.level else s.fall) * min(1.0, planned_ms / s.full_weight_ms)
        known.level += weight * (ratio - known.level)

    def _outlook_ms(self, way: WayTime, items: float) -> float:
        """Waiting for what this ingress has under way there, running, and the links."""
        runs = sum(self._run_ms(shard.agent, shard.run_ms(items)) for shard in way.shards)
        waits = sum(self._waiting_ms(agent) for agent in {shard.agent for shard in way.shards})
        return way.travel_ms(items) + runs + waits

    def _late_ms(self, way: WayTime, items: float) -> float:
        """When a copy on this way is clearly late."""
        s, run_ms = self._settings, sum(self._run_ms(shard.agent, shard.run_ms(items)) for shard in way.shards)
        return self._outlook_ms(way, items) - run_ms + max(s.late_factor * run_ms, run_ms + s.late_ms)

    def _waiting_ms(self, agent: AgentId) -> float:
        known = self._agents.get(agent)
        if known is None:
            return 0.0
        return sum(
            self._run_ms(agent, shard.run_ms(copy.items))
            for copy in known.under_way for shard in copy.way.shards if shard.agent == agent
        )  # fmt: skip

    def _others_ms(self, copy: Sent, agent: AgentId) -> float:
        """What an agent ran since a copy was sent, and the longest of the others that it may be running now."""
        known = self._agent(agent)
        running_ms = (
            self._run_ms(agent, shard.run_ms(other.items))
            for other in known.under_way if other is not copy for shard in other.way.shards if shard.agent == agent
        )  # fmt: skip
        return known.done_ms - copy.done_ms[agent] + max(running_ms, default=0.0)

    def _run_ms(self, agent: AgentId, planned_ms: float) -> float:
        return planned_ms * self.level(agent)

    def _is_due(self, way: WayTime, now_ms: float) -> bool:
        """Whether a way that is avoided because it is slow shall be tried again all the same."""
        slow = [self._agent(s.agent) for s in way.shards if self.level(s.agent) > self._settings.slow_level]
        if not slow or self._copies < 1.0 or any(now_ms - a.tried_ms < self._settings.probe_every_ms for a in slow):
            return False
        for agent in slow:
            agent.tried_ms = now_ms
        return True

    def _agent(self, agent: AgentId) -> _Agent:
        return self._agents.setdefault(agent, _Agent())
