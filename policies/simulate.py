"""A discrete-event simulator of one service: requests, queues, links, failures and roll-outs, second by second of a world.

It runs the very same `policies.decide` as the controller, from snapshots that hold only what a controller would have measured:
nominal speeds, windows of round trips, shares of foreign load, times per shard, and ages. What truly happens (`World`) decides
how long things take. Pure: the same world, chooser and seed give the same result.

One agent is one queue in the order of the real one (`policies.simulate_queue`). A transfer waits while the link is down. A plan that was
decided serves after the time its move is predicted to take.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import msgspec
import numpy as np

from policies.decision import Decision
from policies.expected_times import expected_times
from policies.fleet import AgentView, Fleet, LinkView, link_key
from policies.ids import AgentId
from policies.plan import Plan
from policies.predict import Predictor
from policies.scenario import World
from policies.simulate_devices import Devices, Events
from policies.simulate_ingress import Ingress
from policies.simulate_results import Result, Tally, result_of
from policies.snapshot import ServiceView, Snapshot

DETECT_MS = 3_000.0
"""How long a silent agent counts as live."""
WINDOW_S = 10
LOAD_WINDOW_S = 15.0
"""Over which the offered load is counted, as `controller.telemetry` does."""
KEEP_PER_S = 0.955
"""Share of the measured times that is kept from second to second."""


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the simulated controller works."""

    look_every_s: float = 2.0
    hedges: bool = True
    """Whether ingresses hedge (`policies.hedging`), or send every lane where it is planned while that works."""
    entry: AgentId | None = None
    """Where requests come in; by default at the quickest device that is not in the cloud."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chooser wants: a plan (None: keep what runs), and how long until it serves."""

    plan: Plan | None = None
    ready_in_ms: float = 0.0
    counts: bool = True
    """Whether it is a move that an operator would see as one (not the repair after a loss)."""
    decision: Decision | None = None


Chooser = Callable[[Snapshot, World], Choice]
"""A policy with its own memory; the world is for the oracle alone."""


class Simulation:
    """One run of one world under one chooser."""

    def __init__(self, world: World, chooser: Chooser, seed: int, settings: SimulationSettings | None = None) -> None:
        self.world, self.chooser = world, chooser
        self.settings = settings or SimulationSettings()
        self.events, self.tally = Events(), Tally()
        self.devices = Devices(world, self.events, seed)
        entry = self.settings.entry or min(world.agents.values(), key=lambda a: (a.is_cloud, a.slowdown, a.id)).id
        self.ingress = Ingress(world, self.devices, self.events, self.tally, entry=entry, hedges=self.settings.hedges)
        self._near = _near_links(world)
        self._crossing = [
            (a.id, b.id) for a, b in itertools.permutations(world.agents.values(), 2) if a.is_cloud != b.is_cloud
        ]
        self._moving_until_ms = -1.0

    def run(self) -> Result:
        """Play the whole world."""
        self._look(0.0)
        for at in self.world.arrivals_ms:
            self.events.at(float(at), self.ingress.arrive)
        for at in np.arange(self.settings.look_every_s, self.world.seconds, self.settings.look_every_s):
            self.events.at(1000.0 * float(at), self._look)
        self.events.play()
        return result_of(self.tally, self.world, self.devices.energy_j)

    # --- looking and moving

    def _look(self, now: float) -> None:
        if now < self._moving_until_ms:
            return
        for measure in self.devices.measured.values():
            measure.fade(KEEP_PER_S**self.settings.look_every_s)
        snapshot = self.snapshot(now)
        choice = self.chooser(snapshot, self.world)
        if choice.decision is not None and (choice.plan is not None or not self.tally.decisions):
            self.tally.decisions.append(choice.decision)
        if choice.plan is None:
            return
        ready = 0.0 if self.ingress.running is None else choice.ready_in_ms
        plan = msgspec.structs.replace(choice.plan, epoch=len(self.tally.plans) + 1)
        if self.ingress.running is not None:
            self.tally.moves += choice.counts
        if choice.decision is not None and choice.decision.prediction is not None:
            self.tally.predicted_p99_ms = choice.decision.prediction.p99_ms
        self._moving_until_ms = now + ready
        times = expected_times(Predictor(snapshot, self.world.spec.id), plan)

        def switch(at: float) -> None:
            self.ingress.serve(plan, times)
            self.tally.switched_ms.append(at)
            self.devices.measured.clear()
            self.tally.plans.append(plan)

        if ready <= 0.0:
            switch(now)
        else:
            self.events.at(now + ready, switch)

    def snapshot(self, now: float) -> Snapshot:
        """What a controller would know now."""
        world, second = self.world, min(int(now / 1000), self.world.seconds - 1)
        # Links were measured before the service began; their first seconds stand for that.
        back = slice(max(0, second - WINDOW_S), max(second, WINDOW_S) + 1)
        agents = {a.id: self._seen(a, now, second) for a in world.agents.values()}
        arrived = np.searchsorted(world.arrivals_ms, [now - 1000.0 * LOAD_WINDOW_S, now])
        offered = float(arrived[1] - arrived[0]) / max(1.0, min(LOAD_WINDOW_S, now / 1000.0))
        measures = {key: seen for key, m in self.devices.measured.items() if (seen := m.view()) is not None}
        p99 = float(np.quantile(self.ingress.since_plan[-500:], 0.99)) if len(self.ingress.since_plan) >= 20 else None
        view = ServiceView(
            spec=world.spec, contract=world.contract, running=self.ingress.running, entry=self.ingress.id, offered_rps=offered,
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
