"""The ledger: what every running plan takes on each agent, so that one service can be decided about without all the others.

A snapshot that holds all services says exactly what they do to each other, and costs as much as there are of them. A *near*
snapshot holds one service, and each of its agents carries what all other services take there (`AgentView.booked`): the same
load, the same memory, the same calibration, whatever the number of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from policies.costs import CostModel
from policies.fleet import NOTHING, AgentView, Booked, Fleet
from policies.ids import AgentId, ServiceId
from policies.limits import held_by, memory_of
from policies.plan import Plan
from policies.queues import Load
from policies.snapshot import ServiceView, Snapshot

Takes = Mapping[AgentId, Booked]
"""What one service takes on each agent."""


def takes_of(costs: CostModel, view: ServiceView, plan: Plan) -> dict[AgentId, Booked]:
    """What `plan` takes at the load that its service must carry, on the agents that are part of the snapshot."""
    loads: dict[AgentId, Load] = {agent: Load() for agent in costs.agents}
    costs.add_load(loads, view, plan)
    held = memory_of(held_by(costs, view, plan))
    measured: dict[AgentId, tuple[float, float]] = {}
    for ran in costs.measured_of(view):
        total, weights = measured.get(ran.agent, (0.0, 0.0))
        measured[ran.agent] = total + ran.log_ratio * ran.weight, weights + ran.weight
    taken = {}
    for agent, load in loads.items():
        total, weights = measured.get(agent, (0.0, 0.0))
        one = Booked(
            busy=load.busy, second_ms=load.second_ms, third_ms2=load.third_ms2, yielding=load.yielding, beside=load.beside,
            held_bytes=held.get(agent, 0), log_ratio=total,
            weight=weights,
        )  # fmt: skip
        if one != NOTHING:
            taken[agent] = one
    return taken


def meanwhile(costs: CostModel, view: ServiceView, plan: Plan) -> dict[AgentId, Booked]:
    """What a service takes while it moves to `plan`: on each agent the work of the busier of both plans, and the files of both."""
    then = takes_of(costs, view, plan)
    if view.running is None:
        return then
    now, files = takes_of(costs, view, view.running), held_by(costs, view, view.running)
    for agent, more in held_by(costs, view, plan).items():
        mine = files.setdefault(agent, {})
        for file, size in more.items():
            mine[file] = max(size, mine.get(file, 0))
    held = memory_of(files)
    both = {}
    for agent in {*now, *then}:
        busier = max((one[agent] for one in (now, then) if agent in one), key=lambda one: one.busy)
        both[agent] = msgspec.structs.replace(busier, held_bytes=held.get(agent, 0))
    return both


class Bookings:
    """What all services take: per service, and summed per agent."""

    def __init__(self) -> None:
        self.services: dict[ServiceId, Takes] = {}
        self.totals: dict[AgentId, Booked] = {}
        self._users: dict[AgentId, int] = {}
        self._measured = NOTHING

    def copy(self) -> Bookings:
        """The same books, to go on from without touching these."""
        made = Bookings()
        made.services, made.totals, made._measured = dict(self.services), dict(self.totals), self._measured
        made._users = dict(self._users)
        return made

    def book(self, service: ServiceId, takes: Takes) -> None:
        """From now on the service takes this, and nothing of what it took before."""
        self.release(service)
        if takes:
            self.services[service] = takes
        for agent, one in takes.items():
            self.totals[agent] = self.totals.get(agent, NOTHING).plus(one)
            self._users[agent] = self._users.get(agent, 0) + 1
            self._measured = self._measured.plus(_measured_part(one))

    def release(self, service: ServiceId) -> Takes:
        """The service takes nothing any more; what it took."""
        takes = self.services.pop(service, {})
        for agent, one in takes.items():
            self._users[agent] -= 1
            if self._users[agent]:
                self.totals[agent] = self.totals[agent].minus(one)
            else:
                del (
                    self.totals[agent],
                    self._users[agent],
                )  # Nobody is there any more: no rounding is left behind either.
            self._measured = self._measured.minus(_measured_part(one))
        return takes

    def others(self, service: ServiceId, agent: AgentId) -> Booked:
        """What all services but this one take on an agent."""
        total = self.totals.get(agent, NOTHING)
        mine = self.services.get(service, {}).get(agent)
        return total if mine is None else total.minus(mine)

    def elsewhere(self, service: ServiceId) -> Booked:
        """What was measured of all services but this one, on all agents together."""
        found = self._measured
        for one in self.services.get(service, {}).values():
            found = found.minus(_measured_part(one))
        return found

    def near(self, service: ServiceId, fleet: Fleet, world: Snapshot) -> Snapshot:
        """`world` with this service and its models only, on `fleet`, whose agents carry what all others take there."""
        view = world.services[service]
        agents = {name: self._burdened(service, agent) for name, agent in fleet.agents.items()}
        names = {name for stage in view.spec.onnx_stages() for name in stage.variants}
        return Snapshot(
            now_ms=world.now_ms,
            fleet=Fleet(agents=agents, links=fleet.links, elsewhere=fleet.elsewhere.plus(self.elsewhere(service))),
            models={name: world.models[name] for name in sorted(names) if name in world.models},
            services={service: view},
            learned=msgspec.structs.replace(
                world.learned, models={name: off for name, off in world.learned.models.items() if name in names}
            ),
            device_profiles={
                name: world.device_profiles[name] for name in sorted(names) if name in world.device_profiles
            },
        )

    def burdened(self, fleet: Fleet) -> Fleet:
        """`fleet` for services that take nothing yet: its agents carry what everybody takes there."""
        agents = {
            a: msgspec.structs.replace(agent, booked=agent.booked.plus(self.totals[a])) if a in self.totals else agent
            for a, agent in fleet.agents.items()
        }
        return Fleet(agents=agents, links=fleet.links, elsewhere=fleet.elsewhere.plus(self._measured))

    def fits(self, service: ServiceId, takes: Takes, room: Mapping[AgentId, int]) -> bool:
        """Whether every agent has room (usable bytes, by agent) for what a service would take beside all others."""
        return all(
            self.others(service, agent).held_bytes + one.held_bytes <= room.get(agent, 0)
            for agent, one in takes.items()
            if one.held_bytes
        )

    def _burdened(self, service: ServiceId, agent: AgentView) -> AgentView:
        others = self.others(service, agent.id)
        return agent if others == NOTHING else msgspec.structs.replace(agent, booked=agent.booked.plus(others))

    def on(self, agents: Iterable[AgentId]) -> list[ServiceId]:
        """The services that take something on any of these agents."""
        wanted = set(agents)
        return [service for service, takes in self.services.items() if not wanted.isdisjoint(takes)]


def _measured_part(one: Booked) -> Booked:
    return Booked(log_ratio=one.log_ratio, weight=one.weight)
