"""What truly happens in a simulated world: runs on accelerators that throttle and are shared, steps, transfers, and what an agent would
measure of them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from policies.ids import AgentId
from policies.scenario import World
from policies.simulate_queue import Job, Line, Threads
from policies.snapshot import StageMeasure

RUN_NOISE = 0.12
RETRY_DOWN_MS = 200.0
STEP_THREADS = 2
"""As `agents.driver.DriverSettings` has it."""


@dataclass(slots=True)
class Events:
    """What is to happen, in the order of time; what is due at once, in the order of its entry."""

    _heap: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _number: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, when_ms: float, act: Callable[[float], None]) -> None:
        """Call `act(when_ms)` then."""
        heapq.heappush(self._heap, (when_ms, next(self._number), act))

    def play(self) -> None:
        """Until nothing is left."""
        while self._heap:
            now, _, act = heapq.heappop(self._heap)
            act(now)


@dataclass(slots=True)
class Measured:
    """Runs of one shard on one agent, older ones fading."""

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


class Devices:
    """The agents of a world and the ways between them."""

    def __init__(self, world: World, events: Events, seed: int) -> None:
        self._world, self._events = world, events
        self._lines = {agent: Line() for agent in world.agents}
        self._threads = Threads([0.0] * STEP_THREADS)
        noise = np.random.default_rng(seed).normal(0.0, RUN_NOISE, 4096)
        self._noise: Iterator[float] = itertools.cycle(np.exp(noise - RUN_NOISE**2 / 2).tolist())
        self.measured: dict[str, Measured] = {}
        """Of runs, by `policies.snapshot.measure_key`."""
        self.energy_j = 0.0
        self._link_free_ms: dict[tuple[AgentId, AgentId], float] = {}

    def step(self, agent: AgentId, typical_ms: float, now: float) -> float:
        """When a Python step that comes now is done."""
        return self._threads.end_ms(now, self._spent(agent, typical_ms, now))

    def queue(self, agent: AgentId, job: Job, now: float) -> None:
        """Let a run that arrived take its place."""
        self._lines[agent].push(job, job.nominal_ms * self._world.agents[agent].slowdown)
        self._serve(agent, now)

    def _serve(self, agent: AgentId, now: float) -> None:
        """Begin the next run of an accelerator that is free; those who wait for one that is lost are told."""
        line = self._lines[agent]
        while not line.is_busy and (job := line.pop(now)) is not None:
            if self.is_lost(agent, now):
                job.then(None, 0.0, now)
            else:
                self._begin(agent, line, job, now)

    def _begin(self, agent: AgentId, line: Line, job: Job, now: float) -> None:
        ms = self._spent(agent, job.nominal_ms, now)
        line.is_busy = True

        def ended(at: float) -> None:
            line.is_busy = False
            if self.is_lost(agent, at):
                job.then(None, 0.0, at)
            else:
                self.measured.setdefault(job.key, Measured()).add(ms, job.items)
                job.then(at, ms, at)
            self._serve(agent, at)

        self._events.at(now + ms, ended)

    def _spent(self, agent: AgentId, nominal_ms: float, begin: float) -> float:
        """What a run that begins now takes, and its energy."""
        world = self._world
        second = min(int(begin / 1000), world.seconds - 1)
        factor = world.agents[agent].slowdown * world.slow[agent][second] / (1.0 - world.busy[agent][second])
        ms = float(nominal_ms * factor * next(self._noise))
        self.energy_j += world.agents[agent].power_w * ms / 1000.0
        return ms

    def is_lost(self, agent: AgentId, now: float) -> bool:
        """Whether an agent is off now."""
        return bool(self._world.lost[agent][min(int(now / 1000), self._world.seconds - 1)])

    def carry(self, src: AgentId, dst: AgentId, size_bytes: float, when: float, then: Callable[[float], None]) -> None:
        """Send bytes at `when`; `then` is called when they have arrived.

        One transfer after the other in each direction of a link, after it is up, and half a round trip.
        """
        if src == dst:
            self._events.at(when, then)
            return

        def leave(now: float) -> None:
            rtt_ms, bytes_per_ms, up_ms = self._way(src, dst, now)
            begin = max(up_ms, self._link_free_ms.get((src, dst), 0.0))
            sent = self._link_free_ms[src, dst] = begin + size_bytes / bytes_per_ms
            self._events.at(sent + rtt_ms / 2, then)

        self._events.at(when, leave)

    def bring_back(self, way: Sequence[AgentId], size_bytes: float, now: float, then: Callable[[float], None]) -> None:
        """Send an answer back along a chain of agents to its first."""
        if len(way) < 2:
            then(now)
            return
        self.carry(way[-1], way[-2], size_bytes, now, lambda at: self.bring_back(way[:-1], size_bytes, at, then))

    def _way(self, src: AgentId, dst: AgentId, now: float) -> tuple[float, float, float]:
        """Round trip, bytes per millisecond and when it works, of a link that is used now."""
        world = self._world
        if world.agents[src].is_cloud == world.agents[dst].is_cloud:
            return world.scenario.lan.rtt_ms, 125.0 * world.scenario.lan.mbit_per_s, now
        second = min(int(now / 1000), world.seconds - 1)
        while world.down[second] and second < world.seconds - 1:
            second += 1
            now = 1000.0 * second + RETRY_DOWN_MS
        return float(world.rtt_ms[second]), float(world.bytes_per_s[second]) / 1000.0, now
