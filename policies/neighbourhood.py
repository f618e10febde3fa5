"""Which agents one of many services is planned among: the most promising ones of its zone, some clouds, and those that it has.

The fleet stands in columns, so that the choice among thousands of agents costs microseconds. Each zone looks at a *window* of the
clouds: where there are many clouds, zones look at different ones, so that they hardly meet there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from policies.ids import AgentId
from policies.latency import Floats
from policies.plan import Plan
from policies.snapshot import ServiceView

Rows = npt.NDArray[np.int64]
_NONE: Rows = np.empty(0, dtype=np.int64)
Reach = Literal["zone", "fleet"]
"""`zone`: the entry's zone, or those that the contract names; `fleet`: all zones, for when nothing in there would do."""


class Place(Protocol):
    """What decides where an agent stands among the others; an `AgentView` says all of it."""

    @property
    def id(self) -> AgentId: ...
    @property
    def zone(self) -> str: ...
    @property
    def is_cloud(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def slowdown(self) -> float: ...
    @property
    def cpu_saturation(self) -> float: ...


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """The same without the rest of an `AgentView`."""

    id: AgentId
    zone: str
    is_cloud: bool
    state: str
    slowdown: float
    cpu_saturation: float = 0.0


class NearSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How many agents a service is planned among."""

    near: int = 16
    """Agents at the edge, the least loaded quick ones ..."""
    clouds: int = 4
    """... and cloud agents besides."""


class Neighbourhoods:
    """A fleet in columns: who is where, how quick, and how busy. The order of the agents' names decides between equals."""

    def __init__(
        self, agents: Iterable[Place], settings: NearSettings | None = None,
        windows: Mapping[str, Sequence[AgentId]] | None = None,
    ) -> None:  # fmt: skip
        """`windows` are the clouds that each zone looks at, where they were dealt before."""
        known = sorted(agents, key=lambda a: a.id)
        self.settings = settings or NearSettings()
        self.ids: list[AgentId] = [a.id for a in known]
        self.row: dict[AgentId, int] = {name: row for row, name in enumerate(self.ids)}
        self._zone_of = [a.zone for a in known]
        self._slowdown = np.array([a.slowdown for a in known])
        self._foreign = np.array([a.cpu_saturation for a in known])
        self._booked = np.zeros(len(known))
        self._usable = np.array([a.state == "live" for a in known], dtype=bool)
        edge: dict[str, list[int]] = {}
        clouds: list[int] = []
        for row, agent in enumerate(known):
            (clouds if agent.is_cloud else edge.setdefault(agent.zone, [])).append(row)
        self._edge = {zone: np.array(rows, dtype=np.int64) for zone, rows in sorted(edge.items())}
        self._everywhere = np.array(sorted(row for rows in edge.values() for row in rows), dtype=np.int64)
        self._clouds = np.array(clouds, dtype=np.int64)
        self._clouds_in = {zone: self._clouds[[self._zone_of[row] == zone for row in clouds]] for zone in
                           {self._zone_of[row] for row in clouds}}  # fmt: skip
        self._windows = {
            zone: np.array([self.row[a] for a in named], dtype=np.int64) for zone, named in windows.items()
        } if windows is not None else self._dealt()  # fmt: skip

    @property
    def zones(self) -> list[str]:
        """Those that have agents at the edge, in order."""
        return list(self._edge)

    def sizes(self) -> dict[str, int]:
        """How many agents at the edge each zone has."""
        return {zone: len(rows) for zone, rows in self._edge.items()}

    def in_zones(self, zones: Iterable[str]) -> list[AgentId]:
        """The agents at the edge of these zones."""
        return [self.ids[row] for zone in zones for row in self._edge.get(zone, ())]

    @property
    def usable(self) -> int:
        """How many agents may be used now."""
        return int(self._usable.sum())

    def zone_of(self, agent: AgentId | None) -> str | None:
        row = None if agent is None else self.row.get(agent)
        return None if row is None else self._zone_of[row]

    def see(self, agent: AgentId, *, booked: float | None = None, usable: bool | None = None) -> None:
        """What is known of one agent changed: the utilisation by our services, or whether it may be used."""
        row = self.row.get(agent)
        if row is None:
            return
        if booked is not None:
            self._booked[row] = booked
        if usable is not None:
            self._usable[row] = usable

    def see_all(self, foreign: Floats, usable: npt.NDArray[np.bool_]) -> None:
        """[A] how busy the agents are with what is not ours, and whether they may be used now, in the order of `ids`."""
        self._foreign, self._usable = foreign, usable

    def is_usable(self, agent: AgentId) -> bool:
        row = self.row.get(agent)
        return row is not None and bool(self._usable[row])

    def near(self, view: ServiceView, keep: Iterable[AgentId] = (), reach: Reach = "zone") -> list[AgentId]:
        """The agents that a service is planned among, sorted: the most promising ones, its entry, its plan's, and `keep`."""
        zones = self._zones(view, reach)
        rows = self._everywhere if zones is None else self._rows_of(zones)
        some = {self.ids[row] for row in self._best(rows, self.settings.near)}
        clouds = self._clouds_named(view.contract.zones) if view.contract.zones else self._window(zones)
        some.update(self.ids[row] for row in self._best(clouds, self.settings.clouds))
        some.update(agent for agent in (*keep, *involved(view)) if agent in self.row)
        return sorted(some)

    def clouds_of(self, zones: Sequence[str] | None) -> list[AgentId]:
        """The clouds that services of these zones look at; all of them for services of no zone."""
        if zones is None:
            return [self.ids[row] for row in self._clouds]
        return sorted({self.ids[row] for zone in zones for row in self._window([zone])})

    def _zones(self, view: ServiceView, reach: Reach) -> list[str] | None:
        """None: all of them."""
        if view.contract.zones:
            return [zone for zone in view.contract.zones if zone in self._edge] or None
        zone = self.zone_of(view.entry)
        return None if reach == "fleet" or zone is None or zone not in self._edge else [zone]

    def _rows_of(self, zones: Sequence[str]) -> Rows:
        rows: Rows = self._edge[zones[0]] if len(zones) == 1 else np.concatenate([self._edge[z] for z in zones])
        return rows

    def _window(self, zones: Sequence[str] | None) -> Rows:
        if zones is None:
            return self._clouds
        rows: Rows = np.unique(np.concatenate([_NONE, *(self._windows.get(zone, self._clouds) for zone in zones)]))
        return rows

    def _dealt(self) -> dict[str, Rows]:
        """The clouds that each zone looks at: all where they are few, a share of its own where there are enough, else some that others see too."""
        count, wanted = len(self._clouds), self.settings.clouds
        if count <= 2 * wanted or not self._edge:
            return dict.fromkeys(self._edge, self._clouds)
        if count >= wanted * len(self._edge):
            return dict(zip(self._edge, np.array_split(self._clouds, max(1, len(self._edge))), strict=True))
        starts = np.arange(len(self._edge)) * wanted
        return {
            zone: self._clouds[np.sort((start + np.arange(wanted)) % count)]
            for zone, start in zip(self._edge, starts, strict=True)
        }

    def _clouds_named(self, zones: Sequence[str]) -> Rows:
        """The clouds that a contract's zones hold."""
        rows: Rows = np.concatenate([_NONE, *(self._clouds_in.get(zone, _NONE) for zone in zones)])
        return rows

    def _best(self, rows: Rows, limit: int) -> Rows:
        """The usable ones among `rows` with the smallest time of a run over the share of the agent that is free."""
        rows = rows[self._usable[rows]]
        if len(rows) <= limit:
            return rows
        free = np.maximum(0.05, 1.0 - self._foreign[rows] - self._booked[rows])
        return rows[np.argsort(self._slowdown[rows] / free, kind="stable")[:limit]]


def involved(view: ServiceView) -> list[AgentId]:
    """Where a service comes in and where it runs now, fallbacks included."""
    entry = [] if view.entry is None else [view.entry]
    return entry if view.running is None else [*entry, *places_of(view.running)]


def places_of(plan: Plan) -> list[AgentId]:
    """The agents of a plan, fallbacks included."""
    lanes = [shard.agent for shard in plan.shards()]
    return [*lanes, *(agent for stage in plan.stages for agent in stage.fallback)]
