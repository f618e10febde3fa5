"""A discrete-event simulator of one service: requests, queues, links, failures and roll-outs, second by second of a world.

It runs the very same `policies.decide` as the controller, from snapshots that hold only what a controller would have measured:
nominal speeds, windows of round trips, shares of foreign load, times per shard, and ages. What truly happens (`World`) decides
how long things take. Pure: the same world, chooser and seed give the same result.

One agent is one queue in the order of the real one (`policies.simulate_queue`). A transfer waits while the link is down. A lane whose agent
fails runs again on the stage's first fallback that is up. A plan that was decided serves after the time its move is predicted to take.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from policies.costs import ProfileSums
from policies.decision import Decision
from policies.expected_times import expected_times
from policies.fleet import AgentView, Fleet, LinkView, link_key
from policies.hedging import Choice as Way
from policies.hedging import Hedger, Sent
from policies.ids import AgentId, ModelName
from policies.latency import Floats
from policies.plan import GRAIN, Plan, Span, StagePlan
from policies.predict import Predictor
from policies.route_times import RouteTimes, StageTime
from policies.scenario import World
from policies.service import OnnxStage, PythonStage
from policies.simulate_queue import Job, Line, Threads
from policies.snapshot import ServiceView, Snapshot, StageMeasure, measure_key

DETECT_MS = 3_000.0
"""How long a silent agent counts as live."""
BREAK_MS = 100.0
"""How long a request takes to notice that a hop is gone."""
WINDOW_S = 10
LOAD_WINDOW_S = 15.0
"""Over which the offered load is counted, as `controller.telemetry` does."""
KEEP_PER_S = 0.955
"""Share of the measured times that is kept from second to second."""
TIMEOUT_TIMES_P99 = 4.0
RUN_NOISE = 0.12
RETRY_DOWN_MS = 200.0
SILENCE_S = 3
"""As `agents.peers.PeerSettings` has it."""
STEP_THREADS = 2
"""As `agents.driver.DriverSettings` has it, and so are the next three."""
DEADLINE_MS = 30_000.0
PATIENCE_MS, PATIENCE_FACTOR = 3_000.0, 8.0
HOP_MS = 1.0
"""Framing, scheduling and copying of one hop, as in `PredictSettings`."""


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the simulated controller works."""

    look_every_s: float = 2.0
    hedges: bool = True
    """Whether ingresses hedge (`policies.hedging`), or send every lane where it is planned while that works."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chooser wants: a plan (None: keep what runs), and how long until it serves."""

    plan: Plan | None = None
    ready_in_ms: float = 0.0
    counts: bool = True
    """Whether it is a move that an operator would see as one (not the repair after a loss)."""
    decision: Decision | None = None


Hops = tuple[tuple[AgentId, Span], ...]
Chooser = Callable[[Snapshot, World], Choice]
"""A policy with its own memory; the world is for the oracle alone."""


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated minute."""

    requests: int = 0
    late: int = 0
    failed: int = 0
    worst_ms: float = 0.0
    plan: int = 0
    """Which plan ran when it began, counted from 1."""
    rtt_ms: float = 0.0
    is_violated: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy made of a world."""

    minutes: tuple[Minute, ...]
    violation_minutes: int
    requests: int
    failed: int
    p50_ms: float
    p99_ms: float
    energy_j: float
    """Per request."""
    moves: int
    moves_per_hour: float
    decisions: tuple[Decision, ...]
    plans: tuple[Plan, ...]
    predicted_p99_ms: float | None = None
    """Of the last plan, when it was chosen."""


@dataclass(slots=True)
class _Request:
    at_ms: float
    stage: int
    plan: Plan
    lanes_left: int = 0
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Lane:
    """One lane of one request's stage, and the ways that it may go."""

    request: _Request
    stage: OnnxStage
    model: ModelName
    items: float
    ways: dict[AgentId | None, Hops]
    """None: as it is planned; then its fallbacks."""
    times: StageTime | None
    """None for a request that came in under an older plan."""
    number: int
    tried: set[AgentId | None] = field(default_factory=set)
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


@dataclass(slots=True)
class _Measured:
    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    items: float = 0.0

    def add(self, ms: float, items: float) -> None:
        self.count += 1
        self.total += ms
        self.squares += ms * ms
        self.items += items

    def fade(self, kept: float) -> None:
        self.count *= kept
        self.total *= kept
        self.squares *= kept
        self.items *= kept

    def view(self) -> StageMeasure | None:
        if self.count < 1:
            return None
        mean = self.total / self.count
        std = math.sqrt(max(0.0, self.squares / self.count - mean * mean))
        return StageMeasure(count=int(self.count), mean_ms=mean, std_ms=std, items=self.items / self.count)


@dataclass(slots=True)
class _Tally:
    """What is counted while the simulation runs."""

    done: list[tuple[float, float]] = field(default_factory=list)
    """(when it came, latency), infinite where it failed."""
    energy_j: float = 0.0
    moves: int = 0
    copies: int = 0
    """Second copies of lanes."""
    decisions: list[Decision] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    switched_ms: list[float] = field(default_factory=list)
    """When each plan took over."""
    predicted_p99_ms: float | None = None


class Simulation:
    """One run of one world under one chooser."""

    def __init__(self, world: World, chooser: Chooser, seed: int, settings: SimulationSettings | None = None) -> None:
        self.world, self.chooser = world, chooser
        self.settings = settings or SimulationSettings()
        self.rng = np.random.default_rng(seed)
        self.entry = min(world.agents.values(), key=lambda a: (a.is_cloud, a.slowdown, a.id)).id
        self.stages = world.spec.stages
        self.sums = {name: ProfileSums.of(model) for name, model in world.models.items()}
        self._near = _near_links(world)
        self._crossing = [
            (a.id, b.id) for a, b in itertools.permutations(world.agents.values(), 2) if a.is_cloud != b.is_cloud
        ]
        self.running: Plan | None = None
        self._lines = {agent: Line() for agent in world.agents}
        self._threads = Threads([0.0] * STEP_THREADS)
        self.measured: dict[str, _Measured] = {}
        self.since_plan: list[float] = []
        self.tally = _Tally()
        self._noise = np.exp(self.rng.normal(0.0, RUN_NOISE, 4096) - RUN_NOISE**2 / 2)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = itertools.count()
        self._arrived = 0
        self._moving_until_ms = -1.0
        self._hedger = Hedger()
        self.times: RouteTimes | None = None
        """Of the running plan."""

    def run(self) -> Result:
        """Play the whole world."""
        self._look(0.0)
        for at in self.world.arrivals_ms:
            self._at(float(at), self._arrive)
        for at in np.arange(self.settings.look_every_s, self.world.seconds, self.settings.look_every_s):
            self._at(1000.0 * float(at), self._look)
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
        return _result(self)

    # --- looking and moving

    def _look(self, now: float) -> None:
        if now < self._moving_until_ms:
            return
        for measure in self.measured.values():
            measure.fade(KEEP_PER_S**self.settings.look_every_s)
        snapshot = self.snapshot(now)
        choice = self.chooser(snapshot, self.world)
        if choice.decision is not None and (choice.plan is not None or not self.tally.decisions):
            self.tally.decisions.append(choice.decision)
        if choice.plan is None:
            return
        ready = 0.0 if self.running is None else choice.ready_in_ms
        plan = msgspec.structs.replace(choice.plan, epoch=len(self.tally.plans) + 1)
        if self.running is not None:
            self.tally.moves += choice.counts
        if choice.decision is not None and choice.decision.prediction is not None:
            self.tally.predicted_p99_ms = choice.decision.prediction.p99_ms
        self._moving_until_ms = now + ready
        times = expected_times(Predictor(snapshot, self.world.spec.id), plan)

        def switch(at: float) -> None:
            self.running, self.times, self.since_plan = plan, times, []
            self._hedger.replanned()
            self.tally.switched_ms.append(at)
            self.measured = {}
            self.tally.plans.append(plan)

        if ready <= 0.0:
            switch(now)
        else:
            self._at(now + ready, switch)

    def snapshot(self, now: float) -> Snapshot:
        """What a controller would know now."""
        world, second = self.world, min(int(now / 1000), self.world.seconds - 1)
        # Links were measured before the service began; their first seconds stand for that.
        back = slice(max(0, second - WINDOW_S), max(second, WINDOW_S) + 1)
        agents = {a.id: self._seen(a, now, second) for a in world.agents.values()}
        arrived = np.searchsorted(world.arrivals_ms, [now - 1000.0 * LOAD_WINDOW_S, now])
        offered = float(arrived[1] - arrived[0]) / max(1.0, min(LOAD_WINDOW_S, now / 1000.0))
        measures = {key: seen for key, m in self.measured.items() if (seen := m.view()) is not None}
        p99 = float(np.quantile(self.since_plan[-500:], 0.99)) if len(self.since_plan) >= 20 else None
        view = ServiceView(
            spec=world.spec, contract=world.contract, running=self.running, entry=self.entry, offered_rps=offered,
            measures=measures, measured_p99_ms=p99 if p99 is not None and math.isfinite(p99) else None,
        )  # fmt: skip
        links = _links(world, back, second, self._near, self._crossing)
        fleet = Fleet(agents=agents, links=links)
        return Snapshot(now_ms=now, fleet=fleet, models=world.models, services={world.spec.id: view})

    def _seen(self, agent: AgentView, now: float, second: int) -> AgentView:
        world, silent_ms = self.world, 0.0
        at = second
        while at >= 0 and silent_ms <= DETECT_MS and world.lost[agent.id][at]:
            silent_ms += 1000.0
            at -= 1
        state = "lost" if silent_ms > DETECT_MS else "suspect" if silent_ms > 1500.0 else "live"
        return msgspec.structs.replace(
            agent, state=state, age_ms=200.0 + silent_ms, cpu_saturation=float(world.busy[agent.id][second])
        )  # fmt: skip

    # --- requests

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), act))

    def _arrive(self, now: float) -> None:
        self._arrived += 1
        if self.running is None:
            self.tally.done.append((now, math.inf))
            return
        self._next(_Request(now, -1, self.running), now)

    def _next(self, request: _Request, now: float) -> None:
        if request.is_over:
            return
        if now - request.at_ms > TIMEOUT_TIMES_P99 * self.world.contract.latency_p99_ms:
            self._end(request, math.inf)
            return
        request.stage += 1
        if request.stage == len(self.stages):
            self._end(request, now - request.at_ms)
            return
        stage = self.stages[request.stage]
        if isinstance(stage, PythonStage):
            end = self._threads.end_ms(now, self._spent(self.entry, stage.typical_ms, now))
            if self._is_lost(self.entry, now) or self._is_lost(self.entry, end):
                self._end(request, math.inf)
            else:
                self._at(end, lambda t: self._next(request, t))
            return
        planned = next(s for s in request.plan.stages if s.stage == stage.name)
        request.lanes_left = len(planned.lanes)
        for number in range(len(planned.lanes)):
            self._send(request, stage, planned, number, now)

    def _end(self, request: _Request, latency_ms: float) -> None:
        request.is_over = True
        self.tally.done.append((request.at_ms, latency_ms))
        self.since_plan.append(min(latency_ms, TIMEOUT_TIMES_P99 * self.world.contract.latency_p99_ms))

    def _send(self, request: _Request, stage: OnnxStage, planned: StagePlan, number: int, now: float) -> None:
        """A lane leaves, on the way that the ingress thinks best now, as `agents.lanes` does it."""
        lane, whole = planned.lanes[number], self.sums[planned.model].whole
        items = stage.items * len(lane.share) / GRAIN
        ways: dict[AgentId | None, Hops] = {None: tuple((shard.agent, shard.blocks) for shard in lane.shards)}
        ways |= {agent: ((agent, whole),) for agent in planned.fallback}
        route = self.times if self.settings.hedges and request.plan is self.running else None
        sent = _Lane(
            request, stage, planned.model, items, ways, None if route is None else route.stages[stage.name], number
        )
        choice = Way()
        if route is not None:
            choice = self._hedger.choose(
                now, now - request.at_ms, route.promise_ms, route.stages[stage.name], number, sent.counted,
                lambda agent: not self._is_known_gone(agent, now),
            )  # fmt: skip
        self._start(sent, choice.first, now, is_probe=choice.is_probe)
        if choice.second is not None and math.isfinite(choice.second_after_ms):
            self._at(now + choice.second_after_ms, lambda t: self._copy(sent, choice.second, t))

    def _copy(self, lane: _Lane, where: AgentId | None, now: float) -> None:
        """A second copy of a lane that has no answer yet."""
        if lane.is_over or lane.request.is_over or where in lane.tried or not self._hedger.may_copy():
            return
        self.tally.copies += 1
        for copy in lane.copies:
            if copy.sent is not None:
                self._hedger.late(copy.sent, now)
        self._start(lane, where, now)

    def _start(self, lane: _Lane, where: AgentId | None, now: float, *, is_probe: bool = False) -> None:
        lane.tried.add(where)
        way = (
            None
            if lane.times is None
            else lane.times.lanes[lane.number]
            if where is None
            else lane.times.fallbacks[where]
        )
        copy = _Copy(
            lane, lane.ways[where], None if way is None else self._hedger.sent(way, lane.counted, now), is_probe
        )
        lane.copies.append(copy)
        self._hop(copy, 0, self.entry, now)

    def _hop(self, copy: _Copy, number: int, at: AgentId, now: float) -> None:
        """Carry a lane's items to the next shard of their way, run it there, and go on; after the last one, back."""
        lane, sums = copy.lane, self.sums[copy.lane.model]
        agent, blocks = copy.hops[number]
        how = lane.stage.activations
        ready = now + HOP_MS + (lane.items * sums.convert_ms(blocks.start, how) if at != agent else 0.0)
        there = self._carried(at, agent, lane.items * sums.bytes_before(blocks.start, how), ready)

        def ran(end: float | None, ms: float, now: float) -> None:
            if end is None:
                self._at(now + BREAK_MS, lambda t: self._broke(copy, t))
                return
            copy.run_ms.append(ms)
            if copy.is_over:
                return
            if number + 1 < len(copy.hops):
                self._hop(copy, number + 1, agent, end)
            else:
                way = [self.entry, *(agent for agent, _ in copy.hops)]
                back = self._returned(way, lane.items * sums.bytes_before(sums.whole.stop), end)
                self._at(back, lambda t: self._answered(copy, t))

        nominal_ms = sums.run_ms(blocks, lane.items)
        is_last = all(way in lane.tried for way in lane.ways)
        job = Job(
            nominal_ms, self._due_ms(lane.request, agent, nominal_ms, now, is_last=is_last), lane.stage.yields, ran,
            lambda: copy.is_over or lane.request.is_over,
            measure_key(lane.stage.name, agent, blocks.start, blocks.stop), lane.items,
        )  # fmt: skip
        self._queue(agent, job, there)

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
        lane.request.lanes_left -= 1
        if lane.request.lanes_left == 0:
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
            if way not in lane.tried and not any(self._is_lost(agent, now) for agent, _ in hops):
                self._start(lane, way, now)
                return
        self._end(lane.request, math.inf)

    def _due_ms(self, request: _Request, agent: AgentId, nominal_ms: float, now: float, *, is_last: bool) -> float:
        """Until when the ingress waits for a lane: as long as the request has time if there is nothing else to try."""
        left = request.at_ms + DEADLINE_MS - now
        expected = nominal_ms * self.world.agents[agent].slowdown
        return now + (left if is_last else min(left / 2, max(PATIENCE_MS, PATIENCE_FACTOR * expected)))

    def _queue(self, agent: AgentId, job: Job, there: float) -> None:
        """Let a run take its place when it has arrived."""

        def arrived(now: float) -> None:
            self._lines[agent].push(job, job.nominal_ms * self.world.agents[agent].slowdown)
            self._serve(agent, now)

        self._at(there, arrived)

    def _serve(self, agent: AgentId, now: float) -> None:
        """Begin the next run of an accelerator that is free; those who wait for one that is lost are told."""
        line = self._lines[agent]
        while not line.is_busy and (job := line.pop(now)) is not None:
            if self._is_lost(agent, now):
                job.then(None, 0.0, now)
            else:
                self._begin(agent, line, job, now)

    def _begin(self, agent: AgentId, line: Line, job: Job, now: float) -> None:
        ms = self._spent(agent, job.nominal_ms, now)
        line.is_busy = True

        def ended(at: float) -> None:
            line.is_busy = False
            if self._is_lost(agent, at):
                job.then(None, 0.0, at)
            else:
                self.measured.setdefault(job.key, _Measured()).add(ms, job.items)
                job.then(at, ms, at)
            self._serve(agent, at)

        self._at(now + ms, ended)

    def _spent(self, agent: AgentId, nominal_ms: float, begin: float) -> float:
        """What a run that begins now takes, and its energy."""
        world = self.world
        second = min(int(begin / 1000), world.seconds - 1)
        factor = world.agents[agent].slowdown * world.slow[agent][second] / (1.0 - world.busy[agent][second])
        ms = nominal_ms * float(factor) * float(self._noise[next(self._number) % len(self._noise)])
        self.tally.energy_j += world.agents[agent].power_w * ms / 1000.0
        return ms

    def _is_known_gone(self, agent: AgentId, now: float) -> bool:
        """Whether the ingress was told that it cannot reach an agent: lost, or its link silent for as long as probes wait."""
        if self._is_lost(agent, now):
            return True
        if self.world.agents[agent].is_cloud == self.world.agents[self.entry].is_cloud:
            return False
        second = min(int(now / 1000), self.world.seconds - 1)
        return bool(self.world.down[max(0, second - SILENCE_S) : second + 1].all())

    def _is_lost(self, agent: AgentId, now: float) -> bool:
        return bool(self.world.lost[agent][min(int(now / 1000), self.world.seconds - 1)])

    def _carried(self, src: AgentId, dst: AgentId, size: float, now: float) -> float:
        """When bytes that leave now have arrived: half a round trip and the transfer, after the link is up."""
        if src == dst:
            return now
        world = self.world
        if world.agents[src].is_cloud == world.agents[dst].is_cloud:
            lan = world.scenario.lan
            return now + lan.rtt_ms / 2 + 8e-3 * size / lan.mbit_per_s
        second = min(int(now / 1000), world.seconds - 1)
        while world.down[second] and second < world.seconds - 1:
            second += 1
            now = 1000.0 * second + RETRY_DOWN_MS
        return now + float(world.rtt_ms[second]) / 2 + 1000.0 * size / float(world.bytes_per_s[second])

    def _returned(self, way: list[AgentId], size: float, now: float) -> float:
        for src, dst in itertools.pairwise(way[::-1]):
            now = self._carried(src, dst, size, now)
        return now


def simulate(world: World, chooser: Chooser, seed: int, settings: SimulationSettings | None = None) -> Result:
    """What `chooser` makes of `world`."""
    return Simulation(world, chooser, seed, settings).run()


def _links(
    world: World, back: slice, second: int, near: dict[str, LinkView], crossing: list[tuple[AgentId, AgentId]]
) -> dict[str, LinkView]:  # fmt: skip
    """Links as they were measured in a window: round trips of what came through, and how old that is."""
    up = ~world.down[back]
    rtt = world.rtt_ms[back][up]
    age_ms = 300.0
    at = second
    while at >= 0 and world.down[at]:
        age_ms, at = age_ms + 1000.0, at - 1
    # Lost seconds are delay that a window of round trips does not show.
    down = 1.0 - float(up.mean())
    mean, std = (float(rtt.mean()), float(rtt.std())) if len(rtt) else (1000.0, 500.0)
    rate = float(world.bytes_per_s[back].mean()) * max(0.05, 1.0 - down)
    found = dict(near)
    for a, b in crossing:
        found[link_key(a, b)] = LinkView(
            src=a, dst=b, rtt_ms=mean + 500.0 * down, jitter_ms=std + 1000.0 * down, bandwidth_bytes_per_s=rate,
            age_ms=min(age_ms, 25_000.0),
        )  # fmt: skip
    return found


def _near_links(world: World) -> dict[str, LinkView]:
    """The links that stay as they are: between agents of the site, and within the cloud."""
    lan, pairs = world.scenario.lan, itertools.permutations(world.agents.values(), 2)
    return {
        link_key(a.id, b.id): LinkView(
            src=a.id, dst=b.id, rtt_ms=lan.rtt_ms, jitter_ms=lan.jitter_ms, bandwidth_bytes_per_s=lan.mbit_per_s * 125e3
        )
        for a, b in pairs if a.is_cloud == b.is_cloud
    }  # fmt: skip


def _result(sim: Simulation) -> Result:
    done = sorted(sim.tally.done)
    latency: Floats = np.array([ms for _, ms in done])
    hours = sim.world.seconds / 3600.0
    minutes = _minutes(sim, done)
    finite = np.where(np.isfinite(latency), latency, TIMEOUT_TIMES_P99 * sim.world.contract.latency_p99_ms)
    return Result(
        minutes=minutes, violation_minutes=sum(m.is_violated for m in minutes), requests=len(done),
        failed=int((~np.isfinite(latency)).sum()),
        p50_ms=float(np.quantile(finite, 0.5)) if len(done) else 0.0,
        p99_ms=float(np.quantile(finite, 0.99)) if len(done) else 0.0,
        energy_j=sim.tally.energy_j / max(1, len(done)), moves=sim.tally.moves, moves_per_hour=sim.tally.moves / hours,
        decisions=tuple(sim.tally.decisions), plans=tuple(sim.tally.plans), predicted_p99_ms=sim.tally.predicted_p99_ms,
    )  # fmt: skip


def _minutes(sim: Simulation, done: list[tuple[float, float]]) -> tuple[Minute, ...]:
    """A minute is violated when more than 1 % of its requests, and at least two, were late or failed."""
    world, limit = sim.world, sim.world.contract.latency_p99_ms
    by_minute: dict[int, list[float]] = {}
    for at, ms in done:
        by_minute.setdefault(int(at // 60_000), []).append(ms)
    found = []
    for number in range(math.ceil(world.seconds / 60)):
        times = by_minute.get(number, [])
        failed = sum(not math.isfinite(ms) for ms in times)
        late = sum(ms > limit for ms in times) - failed
        span = slice(60 * number, 60 * number + 60)
        found.append(
            Minute(
                requests=len(times), plan=bisect.bisect_right(sim.tally.switched_ms, 60_000.0 * number), late=late, failed=failed, rtt_ms=float(world.rtt_ms[span].mean()),
                worst_ms=max((ms for ms in times if math.isfinite(ms)), default=0.0),
                is_violated=late + failed >= max(2, 0.01 * len(times)),
            )
        )  # fmt: skip
    return tuple(found)
