"""Many services on many agents: each planned among the agents near its entry, with what the others take booked on them.

Services are planned one after the other, the most important and the heaviest first, each against the bookings of all others;
then those at risk are planned again, and a plan is only replaced by one that scores better under the same bookings, so that
the rounds end. Losing an agent plans only its services anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from policies.bookings import Bookings, Takes, takes_of
from policies.costs import PredictSettings, required_rps
from policies.fleet import NOTHING, AgentView, Fleet, LinkView
from policies.ids import AgentId, ServiceId
from policies.neighbourhood import NearSettings, Neighbourhoods, Reach
from policies.predict import Predictor
from policies.score import Scored, Weights, score
from policies.snapshot import Snapshot
from policies.solve import SolverSettings, candidates
from sla.errors import InfeasibleError


class ManySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How far the search for one of many services looks."""

    reach: NearSettings = NearSettings()
    rounds: int = 2
    """How often services at risk are planned again."""
    risky: float = 0.3
    first: SolverSettings = SolverSettings(full_predictions=1)
    """The rough score alone says which plan is best; one prediction says whether it is at risk ..."""
    again: SolverSettings = SolverSettings(full_predictions=4)
    """... and those that are get a closer look."""
    predict: PredictSettings = PredictSettings()


@dataclass(slots=True)
class Booked:
    """A plan with what it takes on each of its agents."""

    scored: Scored
    takes: Takes

    @property
    def busy(self) -> dict[AgentId, float]:
        """Utilisation by it of each agent that serves normally."""
        return {agent: one.busy for agent, one in self.takes.items() if one.busy}

    @property
    def bytes_held(self) -> dict[AgentId, int]:
        """Memory that it takes, fallbacks included."""
        return {agent: one.held_bytes for agent, one in self.takes.items() if one.held_bytes}


@dataclass(slots=True)
class Ledger:
    """All plans, and what they take together. A plan that runs already counts until its service is planned."""

    snapshot: Snapshot
    settings: ManySettings = field(default_factory=ManySettings)
    booked: dict[ServiceId, Booked] = field(default_factory=dict)
    infeasible: dict[ServiceId, str] = field(default_factory=dict)
    bookings: Bookings = field(default_factory=Bookings)
    windows: Mapping[str, Sequence[AgentId]] | None = None
    """The clouds that each zone looks at, where the snapshot is part of a larger world."""
    places: Neighbourhoods = field(init=False)
    agents: dict[AgentId, AgentView] = field(init=False)
    links: dict[AgentId, dict[str, LinkView]] = field(init=False)

    def __post_init__(self) -> None:
        self.agents = dict(self.snapshot.fleet.agents)
        self.places = Neighbourhoods(self.snapshot.fleet.agents.values(), self.settings.reach, self.windows)
        self.links = links_by_source(self.snapshot.fleet)
        for agent in self.snapshot.fleet.agents.values():
            if agent.booked.busy:
                self.places.see(agent.id, booked=agent.booked.busy)

    @property
    def busy(self) -> dict[AgentId, float]:
        """What all plans together keep each agent busy with."""
        return {agent: one.busy for agent, one in self.bookings.totals.items() if one.busy}

    @property
    def bytes_held(self) -> dict[AgentId, int]:
        """What all plans together hold in memory."""
        return {agent: one.held_bytes for agent, one in self.bookings.totals.items() if one.held_bytes}

    def plan(self, services: Iterable[ServiceId] | None = None) -> None:
        """Plan these services (default: all), then those at risk again."""
        wanted = sorted(self.snapshot.services if services is None else services, key=self._urgency)
        for service in wanted:
            self._place(service)
        for _ in range(self.settings.rounds):
            risky = [s for s in wanted if s in self.booked and self._risk(s) > self.settings.risky]
            if sum(self._improve(service) for service in risky) == 0:
                return

    def lose(self, agent: AgentId) -> list[ServiceId]:
        """The services that ran on an agent that is gone, planned anew without it; no other plan moves."""
        hit = self.bookings.on([agent])
        self.places.see(agent, usable=False)
        self.agents.pop(agent, None)
        for service in hit:
            self.release(service)
        self.plan(hit)
        return hit

    def near(self, service: ServiceId, reach: Reach = "zone") -> Snapshot:
        """The part of the world that a service is planned in, with what all other services take booked on its agents."""
        view = self.snapshot.services[service]
        names = [name for name in self.places.near(view, reach=reach) if name in self.agents]
        here = Fleet(
            agents={name: self.agents[name] for name in names}, links=links_among(self.links, names),
            elsewhere=self.snapshot.fleet.elsewhere,
        )  # fmt: skip
        return self.bookings.near(service, here, self.snapshot)

    def book(self, service: ServiceId, booked: Booked) -> None:
        """From now on the service has this plan."""
        self.bookings.book(service, booked.takes)
        self.booked[service] = booked
        self._see(booked.takes)

    def release(self, service: ServiceId) -> Booked | None:
        """The service has no plan any more; the one that it had."""
        self._see(self.bookings.release(service))
        return self.booked.pop(service, None)

    def _see(self, agents: Iterable[AgentId]) -> None:
        for name in agents:
            agent = self.agents.get(name)
            before = agent.booked.busy if agent is not None else 0.0
            self.places.see(name, booked=before + self.bookings.totals.get(name, NOTHING).busy)

    def _urgency(self, service: ServiceId) -> tuple[int, float, str]:
        view = self.snapshot.services[service]
        return -view.contract.priority, -required_rps(view), service

    def _place(self, service: ServiceId) -> None:
        self.release(service)
        for reach in REACHES:
            world = self.near(service, reach)
            p = Predictor(world, service, self.settings.predict)
            try:
                best = candidates(world, service, 1, predictor=p, settings=self.settings.first)[0]
            except InfeasibleError as error:
                self.infeasible[service] = str(error)
                continue
            self.infeasible.pop(service, None)
            self.book(service, booked_as(p, best))
            return

    def _improve(self, service: ServiceId) -> bool:
        """Whether a plan was found that is better than the booked one where the others are now."""
        old = self.release(service)
        assert old is not None
        world = self.near(service)
        p = Predictor(world, service, self.settings.predict)
        now = 1.0
        if old.takes.keys() <= world.fleet.agents.keys():
            now = score(p.predict(old.scored.plan), p.view.contract, Weights())
        try:
            best = candidates(world, service, 1, predictor=p, settings=self.settings.again)[0]
        except InfeasibleError:
            best = None
        if best is not None and best.score < now - self.settings.again.tie:
            self.book(service, booked_as(p, best))
            return True
        self.book(service, old)
        return False

    def _risk(self, service: ServiceId) -> float:
        return self.booked[service].scored.prediction.risk


REACHES: tuple[Reach, ...] = ("zone", "fleet")


def booked_as(p: Predictor, scored: Scored) -> Booked:
    """A plan as it is booked."""
    return Booked(scored, takes_of(p.costs, p.view, scored.plan))


def links_by_source(fleet: Fleet) -> dict[AgentId, dict[str, LinkView]]:
    """The measured links from each agent, by their keys."""
    found: dict[AgentId, dict[str, LinkView]] = {}
    for key, link in fleet.links.items():
        found.setdefault(link.src, {})[key] = link
    return found


def links_among(links: dict[AgentId, dict[str, LinkView]], agents: Sequence[AgentId]) -> dict[str, LinkView]:
    """The measured links between these agents."""
    some = frozenset(agents)
    return {key: link for a in agents for key, link in links.get(a, {}).items() if link.dst in some}
