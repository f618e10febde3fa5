"""How a simulated ingress carries requests through their pipeline, as `agents.driver` and `agents.lanes` do.

A lane whose agent fails runs again on the first way that is up and was not tried. Where the ingress hedges, it asks the very same `policies.hedging`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.costs import ProfileSums
from policies.hedging import Choice, Hedger, Sent, Way
from policies.ids import AgentId, ModelName
from policies.plan import Plan, Span, mean_items
from policies.route_times import RouteTimes, StageTime
from policies.scenario import World
from policies.service import OnnxStage, PythonStage
from policies.simulate_devices import Devices, Events
from policies.simulate_queue import Job
from policies.simulate_results import TIMEOUT_TIMES_P99, Tally
from policies.snapshot import measure_key

BREAK_MS = 100.0
"""How long a request takes to notice that a hop is gone."""
SILENCE_S = 3
"""As `agents.peers.PeerSettings` has it."""
DEADLINE_MS = 30_000.0
PATIENCE_MS, PATIENCE_FACTOR = 3_000.0, 8.0
"""As `agents.lanes.LaneSettings` has them."""
HOP_MS = 1.0
"""Framing, scheduling and copying of one hop, as in `PredictSettings`."""
Hops = tuple[tuple[AgentId, Span], ...]


@dataclass(slots=True)
class _Request:
    at_ms: float
    stage: int
    plan: Plan
    lanes: list[_Lane] = field(default_factory=list)
    """Of the stage that it is in."""
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Lane:
    """One lane of one request's stage, and the ways that it may go."""

    request: _Request
    stage: OnnxStage
    model: ModelName
    items: float
    ways: dict[Way, Hops]
    """None: as it is planned; then its fallbacks."""
    times: StageTime | None
    """None where nobody hedges, and for a request that came in under an older plan."""
    number: int
    tried: set[Way] = field(default_factory=set)
    copies: list[_Copy] = field(default_factory=list)
    """Those under way."""
    is_over: bool = False

    @property
    def counted(self) -> float:
        """Items as an ingress counts them."""
        return self.items if self.stage.axis is not None else 1.0


@dataclass(slots=True, eq=False)
class _Copy:
    lane: _Lane
    hops: Hops
    sent: Sent | None
    is_probe: bool
    is_over: bool = False
    run_ms: list[float] = field(default_factory=list)


class Ingress:
    """The agent that requests come in at."""

    def __init__(
        self, world: World, devices: Devices, events: Events, tally: Tally, *, entry: AgentId, hedges: bool
    ) -> None:  # fmt: skip
        self._world, self._devices, self._events, self._tally, self._hedges = world, devices, events, tally, hedges
        self.id = entry
        self._stages = world.spec.stages
        self._sums = {name: ProfileSums.of(model) for name, model in world.models.items()}
        self.running: Plan | None = None
        self._times: RouteTimes | None = None
        self._hedger = Hedger()
        self.since_plan: list[float] = []
        """Latency of the requests that ended since the running plan took over."""

    def serve(self, plan: Plan, times: RouteTimes) -> None:
        """New requests go by this plan."""
        self.running, self._times, self.since_plan = plan, times if self._hedges else None, []
        self._hedger.replanned()

    def arrive(self, now: float) -> None:
        """A request comes in."""
        if self.running is None:
            self._tally.done.append((now, math.inf))
            return
        self._next(_Request(now, -1, self.running), now)

    def _next(self, request: _Request, now: float) -> None:
        if request.is_over:
            return
        if now - request.at_ms > TIMEOUT_TIMES_P99 * self._world.contract.latency_p99_ms:
            self._end(request, math.inf)
            return
        request.stage += 1
        if request.stage == len(self._stages):
            self._end(request, now - request.at_ms)
            return
        stage = self._stages[request.stage]
        if isinstance(stage, PythonStage):
            end = self._devices.step(self.id, stage.typical_ms, now)
            if self._devices.is_lost(self.id, now) or self._devices.is_lost(self.id, end):
                self._end(request, math.inf)
            else:
                self._events.at(end, lambda t: self._next(request, t))
            return
        planned = next(s for s in request.plan.stages if s.stage == stage.name)
        times = self._times.stages[stage.name] if self._times is not None and request.plan is self.running else None
        whole = self._sums[planned.model].whole
        spare: dict[Way, Hops] = {agent: ((agent, whole),) for agent in planned.fallback}
        request.lanes = [
            _Lane(
                request, stage, planned.model, items,
                {None: tuple((shard.agent, shard.blocks) for shard in lane.shards), **spare}, times, number,
            )
            for number, lane in enumerate(planned.lanes)
            if (items := mean_items(lane.share, stage.items)) > 0
        ]  # fmt: skip
        for lane in request.lanes:
            self._send(lane, now)

    def _end(self, request: _Request, latency_ms: float) -> None:
        request.is_over = True
        for copy in [copy for lane in request.lanes for copy in lane.copies if not copy.is_probe]:
            self._over(copy)
        self._tally.done.append((request.at_ms, latency_ms))
        self.since_plan.append(min(latency_ms, TIMEOUT_TIMES_P99 * self._world.contract.latency_p99_ms))

    def _send(self, lane: _Lane, now: float) -> None:
        """A lane leaves, on the way that the ingress thinks best now, as `agents.lanes` does it."""
        choice = Choice()
        if self._times is not None and lane.times is not None:
            choice = self._hedger.choose(
                now, now - lane.request.at_ms, self._times.promise_ms, lane.times, lane.number, lane.counted,
                lambda agent: not self._is_known_gone(agent, now),
            )  # fmt: skip
        self._start(lane, choice.first, now, is_probe=choice.is_probe)
        if math.isfinite(choice.second_after_ms):
            self._events.at(now + choice.second_after_ms, lambda t: self._copy(lane, choice.second, t))

    def _copy(self, lane: _Lane, where: Way, now: float) -> None:
        """A second copy of a lane that has no answer yet."""
        if lane.is_over or lane.request.is_over or where in lane.tried or not self._hedger.may_copy():
            return
        self._tally.copies += 1
        for copy in lane.copies:
            if copy.sent is not None:
                self._hedger.late(copy.sent, now)
        self._start(lane, where, now)

    def _start(self, lane: _Lane, where: Way, now: float, *, is_probe: bool = False) -> None:
        lane.tried.add(where)
        way = None if lane.times is None else lane.times.way(lane.number, where)
        sent = None if way is None else self._hedger.sent(way, lane.counted, now)
        copy = _Copy(lane, lane.ways[where], sent, is_probe)
        lane.copies.append(copy)
        self._hop(copy, 0, self.id, now)

    def _hop(self, copy: _Copy, number: int, at: AgentId, now: float) -> None:
        """Carry a lane's items to the next shard of their way, run it there, and go on; after the last one, back."""
        lane, sums = copy.lane, self._sums[copy.lane.model]
        agent, blocks = copy.hops[number]
        how = lane.stage.activations
        ready = now + HOP_MS + (lane.items * sums.convert_ms(blocks.start, how) if at != agent else 0.0)

        def ran(end: float | None, ms: float, now: float) -> None:
            if end is None:
                self._events.at(now + BREAK_MS, lambda t: self._broke(copy, t))
                return
            copy.run_ms.append(ms)
            if copy.is_over:
                return
            if number + 1 < len(copy.hops):
                self._hop(copy, number + 1, agent, end)
            else:
                way = [self.id, *(agent for agent, _ in copy.hops)]
                answer_bytes = lane.items * sums.bytes_before(sums.whole.stop)
                self._devices.bring_back(way, answer_bytes, end, lambda t: self._answered(copy, t))

        nominal_ms = sums.run_ms(blocks, lane.items)
        is_last = all(way in lane.tried for way in lane.ways)
        job = Job(
            nominal_ms, self._due_ms(lane.request, agent, nominal_ms, now, is_last=is_last), lane.stage.yields, ran,
            lambda: copy.is_over,
            measure_key(lane.stage.name, agent, blocks.start, blocks.stop), lane.items,
        )  # fmt: skip
        sent_bytes = lane.items * sums.bytes_before(blocks.start, how)
        self._devices.carry(at, agent, sent_bytes, ready, lambda t: self._devices.queue(agent, job, t))

    def _answered(self, copy: _Copy, now: float) -> None:
        if copy.is_over:
            return
        lane = copy.lane
        self._over(copy, copy.run_ms)
        if lane.is_over:
            return
        lane.is_over = True
        for other in [other for other in lane.copies if not other.is_probe]:
            if other.sent is not None:
                self._hedger.late(other.sent, now)
            self._over(other)
        if all(each.is_over for each in lane.request.lanes):
            self._next(lane.request, now)

    def _over(self, copy: _Copy, run_ms: Sequence[float] = ()) -> None:
        """A copy was answered, lost, or is taken back: what of it waits in a queue leaves it."""
        copy.is_over = True
        copy.lane.copies.remove(copy)
        if copy.sent is not None:
            self._hedger.ended(copy.sent, run_ms)

    def _broke(self, copy: _Copy, now: float) -> None:
        """A copy's agent is gone: unless another copy is under way, the first way that is up and was not tried is next."""
        if copy.is_over:
            return
        lane = copy.lane
        self._over(copy)
        if lane.is_over or lane.request.is_over or lane.copies:
            return
        for way, hops in lane.ways.items():
            if way not in lane.tried and not any(self._devices.is_lost(agent, now) for agent, _ in hops):
                self._start(lane, way, now)
                return
        self._end(lane.request, math.inf)

    def _due_ms(self, request: _Request, agent: AgentId, nominal_ms: float, now: float, *, is_last: bool) -> float:
        """Until when the ingress waits for a lane: as long as the request has time if there is nothing else to try."""
        left = request.at_ms + DEADLINE_MS - now
        expected = nominal_ms * self._world.agents[agent].slowdown
        return now + (left if is_last else min(left / 2, max(PATIENCE_MS, PATIENCE_FACTOR * expected)))

    def _is_known_gone(self, agent: AgentId, now: float) -> bool:
        """Whether the ingress was told that it cannot reach an agent: lost, or its link silent for as long as probes wait."""
        if self._devices.is_lost(agent, now):
            return True
        if self._world.agents[agent].is_cloud == self._world.agents[self.id].is_cloud:
            return False
        second = min(int(now / 1000), self._world.seconds - 1)
        return bool(self._world.down[max(0, second - SILENCE_S) : second + 1].all())
