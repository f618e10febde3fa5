"""Many services on many agents: each planned among the agents near its entry, with what the others take booked on them.

A ledger holds the load and the memory that every plan puts on each agent. Services are planned one after the other, the most
important and the heaviest first, each against the ledger of all others; then those at risk are planned again, and a plan is
only replaced by one that scores better under the same ledger, so that the rounds end. Losing an agent plans only its services anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from policies.costs import PredictSettings, required_rps
from policies.fleet import AgentView, Fleet, link_key
from policies.ids import AgentId, ServiceId
from policies.limits import held_by
from policies.predict import Predictor
from policies.score import Scored, Weights, score
from policies.snapshot import ServiceView, Snapshot
from policies.solve import SolverSettings, candidates
from sla.errors import InfeasibleError


class ManySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How far the search for one of many services looks."""

    near: int = 24
    """Agents of the entry's zone that are considered, the least loaded ones ..."""
    clouds: int = 4
    """... and cloud agents besides."""
    rounds: int = 2
    """How often services at risk are planned again."""
    risky: float = 0.3
    solver: SolverSettings = SolverSettings(full_predictions=3)
    predict: PredictSettings = PredictSettings(foreign_load_cap=0.95)


@dataclass(slots=True)
class Booked:
    """What one plan takes on each of its agents."""

    scored: Scored
    busy: dict[AgentId, float]
    bytes_held: dict[AgentId, int]


@dataclass(slots=True)
class Ledger:
    """All plans, and what they take together."""

    snapshot: Snapshot
    settings: ManySettings = field(default_factory=ManySettings)
    booked: dict[ServiceId, Booked] = field(default_factory=dict)
    infeasible: dict[ServiceId, str] = field(default_factory=dict)
    busy: dict[AgentId, float] = field(default_factory=dict)
    bytes_held: dict[AgentId, int] = field(default_factory=dict)
    zones: dict[str, list[AgentView]] = field(default_factory=dict)
    clouds: list[AgentView] = field(default_factory=list)

    def __post_init__(self) -> None:
        for agent in self.snapshot.fleet.agents.values():
            if agent.is_cloud:
                self.clouds.append(agent)
            else:
                self.zones.setdefault(agent.zone, []).append(agent)

    def plan(self, services: Iterable[ServiceId] | None = None) -> None:
        """Plan these services (default: all), then those at risk again."""
        wanted = list(self.snapshot.services if services is None else services)
        wanted.sort(key=lambda s: self._urgency(self.snapshot.services[s]))
        for service in wanted:
            self._place(service)
        for _ in range(self.settings.rounds):
            risky = [s for s in wanted if s in self.booked and self._risk(s) > self.settings.risky]
            if sum(self._improve(service) for service in risky) == 0:
                return

    def lose(self, agent: AgentId) -> list[ServiceId]:
        """The services that ran on an agent that is gone, planned anew without it; no other plan moves."""
        hit = [s for s, b in self.booked.items() if agent in b.bytes_held]
        agents = {a: v for a, v in self.snapshot.fleet.agents.items() if a != agent}
        fleet = msgspec.structs.replace(self.snapshot.fleet, agents=agents)
        self.snapshot = msgspec.structs.replace(self.snapshot, fleet=fleet)
        for group in (*self.zones.values(), self.clouds):
            group[:] = [a for a in group if a.id != agent]
        for service in hit:
            self._release(service)
        self.plan(hit)
        return hit

    def near(self, service: ServiceId) -> Snapshot:
        """The part of the world that a service is planned in, with what all other services take as load and memory that is gone."""
        s, view = self.settings, self.snapshot.services[service]
        entry = self.snapshot.fleet.agents.get(view.entry) if view.entry is not None else None
        zone = self.zones.get(entry.zone if entry is not None else "", []) or [
            a for z in self.zones.values() for a in z
        ]
        some = {a.id: a for a in sorted(zone, key=self._tempting)[: s.near]}
        some.update((a.id, a) for a in sorted(self.clouds, key=self._tempting)[: s.clouds])
        if entry is not None:
            some[entry.id] = entry
        links = self.snapshot.fleet.links
        keys = (link_key(a, b) for a in some for b in some if a != b)
        fleet = Fleet(
            agents={a: self._burdened(v) for a, v in some.items()}, links={k: links[k] for k in keys if k in links}
        )  # fmt: skip
        return msgspec.structs.replace(self.snapshot, fleet=fleet, services={service: view})

    def _tempting(self, agent: AgentView) -> tuple[float, AgentId]:
        free = max(0.05, 1.0 - agent.cpu_saturation - self.busy.get(agent.id, 0.0))
        return agent.slowdown / free, agent.id

    def _burdened(self, agent: AgentView) -> AgentView:
        taken = self.bytes_held.get(agent.id, 0) / (1.0 - self.settings.predict.memory_headroom)
        load = min(1.0, agent.cpu_saturation + self.busy.get(agent.id, 0.0))
        budget = max(0, int(agent.memory_budget_bytes - taken))
        return msgspec.structs.replace(agent, cpu_saturation=load, memory_budget_bytes=budget)

    def _urgency(self, view: ServiceView) -> tuple[int, float, str]:
        return -view.contract.priority, -required_rps(view), view.contract.service_id

    def _place(self, service: ServiceId) -> None:
        world = self.near(service)
        p = Predictor(world, service, self.settings.predict)
        try:
            best = candidates(world, service, 1, predictor=p, settings=self.settings.solver)[0]
        except InfeasibleError as error:
            self.infeasible[service] = str(error)
            return
        self.infeasible.pop(service, None)
        self._book(service, best, p)

    def _improve(self, service: ServiceId) -> bool:
        """Whether a plan was found that is better than the booked one where the others are now."""
        old = self.booked[service]
        self._release(service)
        world = self.near(service)
        p = Predictor(world, service, self.settings.predict)
        known = set(world.fleet.agents)
        now = 1.0
        if set(old.bytes_held) <= known:
            now = score(p.predict(old.scored.plan), p.view.contract, Weights())
        try:
            best = candidates(world, service, 1, predictor=p, settings=self.settings.solver)[0]
        except InfeasibleError:
            best = None
        if best is not None and best.score < now - self.settings.solver.tie:
            self._book(service, best, p)
            return True
        self._rebook(service, old)
        return False

    def _risk(self, service: ServiceId) -> float:
        return self.booked[service].scored.prediction.risk

    def _book(self, service: ServiceId, scored: Scored, p: Predictor) -> None:
        rate = p.rate_rps / 1000.0
        busy: dict[AgentId, float] = {}
        for stage, agent, model, span, items in p.costs.runs(p.view, scored.plan):
            busy[agent] = busy.get(agent, 0.0) + rate * p.costs.run_ms(stage, model, agent, span, items)
        held = {a: sum(files.values()) for a, files in held_by(p.costs, p.view, scored.plan).items()}
        self._rebook(service, Booked(scored, busy, held))

    def _rebook(self, service: ServiceId, booked: Booked) -> None:
        self.booked[service] = booked
        for agent, load in booked.busy.items():
            self.busy[agent] = self.busy.get(agent, 0.0) + load
        for agent, size in booked.bytes_held.items():
            self.bytes_held[agent] = self.bytes_held.get(agent, 0) + size

    def _release(self, service: ServiceId) -> None:
        booked = self.booked.pop(service)
        for agent, load in booked.busy.items():
            self.busy[agent] -= load
        for agent, size in booked.bytes_held.items():
            self.bytes_held[agent] -= size
