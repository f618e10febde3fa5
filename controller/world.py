"""What a decision sees: the whole world where it is small, else one service in its neighbourhood with all others booked as load.

On a fleet of some tens of agents every decision sees everything. Beyond that a look must not grow with the fleet or with the
number of services, so the controller keeps a ledger of what each running plan takes (`policies.bookings`) and an index of who is
where (`policies.neighbourhood`); a service is decided about among the most promising agents of its entry's zone, some clouds,
and those that it runs on. What is kept here may be lost without harm: it is made again from what runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from controller.clock import Clock
from controller.desired import Desired
from controller.fleet import FleetRegistry
from controller.settings import ScaleSettings
from controller.telemetry import Telemetry
from controller.zones import Part
from policies.bookings import Bookings, Takes, takes_of
from policies.constraints import Rule
from policies.costs import CostModel, PredictSettings
from policies.expected_times import expected_times
from policies.fleet import Fleet
from policies.ids import AgentId, ModelName, ServiceId
from policies.learning import Learner
from policies.limits import usable_bytes
from policies.neighbourhood import NearSettings, Neighbourhoods, Reach, Spot, involved, places_of
from policies.plan import Plan
from policies.predict import Predictor
from policies.route_times import RouteTimes
from policies.service import DeviceProfile
from policies.snapshot import ServiceView, Snapshot
from sla.errors import NotFoundError

MIN_REQUESTS_FOR_P99 = 20
LEARN_EVERY_MS = 5_000.0
LEARN_FROM = 20
"""Services from whose measures is learned at once; on a large fleet they take turns."""
KnownProfiles = Callable[[], dict[ModelName, dict[str, DeviceProfile]]]
"""What models take on the types of devices, by model and type."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A neighbourhood that was chosen; it stays for a while, so that a decision is not made anew only because others moved."""

    agents: tuple[AgentId, ...]
    at_ms: float
    entry: AgentId | None
    reach: Reach


class World:
    """Snapshots of what is now. Owned by the event loop."""

    def __init__(
        self, *, desired: Desired, fleet: FleetRegistry, telemetry: Telemetry, clock: Clock, settings: ScaleSettings,
        wishes: Callable[[ServiceId], tuple[Rule, ...]], advised: Callable[[ServiceId], tuple[Rule, ...]] = lambda _: (),
        device_profiles: KnownProfiles = dict,
    ) -> None:  # fmt: skip
        self._desired = desired
        self._fleet = fleet
        self._telemetry = telemetry
        self._clock = clock
        self._settings = settings
        self._wishes = wishes
        self._advised = advised
        self._device_profiles = device_profiles
        self._chosen: dict[ServiceId, _Chosen] = {}
        self._places = Neighbourhoods(())
        self._indexed = -1
        self.bookings = Bookings()
        self._learner = Learner()
        self._learned_ms = -math.inf
        self._to_learn: deque[ServiceId] = deque()

    @property
    def is_small(self) -> bool:
        """Whether every decision may see everything."""
        most = self._settings.whole_up_to
        return len(self._fleet.members) <= most and len(self._desired.contracts) <= most

    @property
    def places(self) -> Neighbourhoods:
        """Who is where, as of the last `look`."""
        if self._indexed < 0:
            self.look()
        return self._places

    # --- kept up to date

    def look(self) -> None:
        """Once per round: learn, see who may be used and how busy everybody is, book what runs and was not booked yet."""
        self._learn()
        if self.is_small:
            return
        if self._indexed != self._fleet.changes:
            self._places = Neighbourhoods(self._spots(), self._near_settings())
            self._indexed = self._fleet.changes
            for agent, booked in self.bookings.totals.items():
                self._places.see(agent, booked=booked.busy)
        ids, members = self._places.ids, self._fleet.members
        foreign = np.nan_to_num(self._telemetry.agents.gather(ids, "foreign"))
        self._places.see_all(foreign, np.fromiter((members[a].state == "live" for a in ids), dtype=np.bool_))
        for service in self._desired.contracts:
            if service not in self.bookings.services and self._desired.book(service).running is not None:
                self.settle(service)
        for service in self.bookings.services.keys() - self._desired.contracts.keys():
            self.forget(service)

    def book(self, service: ServiceId, takes: Takes) -> None:
        """From now on the service takes this."""
        before = self.bookings.services.get(service, {})
        self.bookings.book(service, takes)
        self._see({*before, *takes})

    def settle(self, service: ServiceId) -> None:
        """Book what the service's running plan takes now, measured as it is."""
        view = self.view(service)
        if view is None or view.running is None or self.is_small:
            self.forget(service)
            return
        here = self._fleet.view(sorted(set(involved(view))))
        near = self.bookings.near(service, here, self._with(here, {service: view}))
        self.book(service, takes_of(CostModel(near), view, view.running))

    def forget(self, service: ServiceId) -> None:
        """The service takes nothing any more."""
        self._chosen.pop(service, None)
        self._see(self.bookings.release(service))

    def fits(self, service: ServiceId, takes: Takes) -> bool:
        """Whether what a plan takes has room beside all that is booked by now: others decided meanwhile."""
        predict = PredictSettings()
        views = self._fleet.view(takes.keys()).agents
        return self.bookings.fits(service, takes, {a: usable_bytes(view, predict) for a, view in views.items()})

    # --- snapshots

    def snapshot(self) -> Snapshot:
        """The whole world as it is now."""
        views = {service: self.view(service) for service in self._desired.contracts}
        services = {service: view for service, view in views.items() if view is not None}
        return self._with(self._fleet.view(), services)

    def near(self, service: ServiceId, keep: Iterable[AgentId] = (), reach: Reach = "zone") -> Snapshot:
        """The world as a decision about this service sees it; without the service when it is not there (any more)."""
        if self.is_small:
            return self.snapshot()
        view = self.view(service)
        if view is None:
            return self._with(Fleet(agents={}), {})
        return self.around(service, view, keep, reach)

    def around(
        self, service: ServiceId, view: ServiceView, keep: Iterable[AgentId] = (), reach: Reach = "zone"
    ) -> Snapshot:  # fmt: skip
        """The same for a service as `view` says it is, whether it is there or not."""
        if self.is_small:
            now = self.snapshot()
            return msgspec.structs.replace(now, services={**now.services, service: view})
        names = dict.fromkeys((*self._neighbours(service, view, reach), *keep, *involved(view)))
        here = self._fleet.view(sorted(names))
        return self.bookings.near(service, here, self._with(here, {service: view}))

    def part(self, zones: Sequence[str], services: Mapping[ServiceId, ServiceView], books: Bookings) -> Part:
        """Some services, which take nothing yet, with the agents of these zones and their clouds, on which `books` are booked."""
        windows = {zone: tuple(self.places.clouds_of([zone])) for zone in zones}
        everywhere = len(windows) == len(self.places.zones)
        clouds = self.places.clouds_of(None if everywhere else zones)
        fleet = books.burdened(self._fleet.view([*self.places.in_zones(zones), *clouds]))
        names = {m for v in services.values() for stage in v.spec.onnx_stages() for m in stage.variants}
        models = {name: self._desired.models[name] for name in sorted(names) if name in self._desired.models}
        profiles = {name: here for name, here in self._device_profiles().items() if name in models}
        snapshot = Snapshot(
            now_ms=self._clock.now_ms(),
            fleet=fleet,
            models=models,
            services=dict(services),
            learned=self._learner.learned(),
            device_profiles=profiles,
        )
        return Part(snapshot=snapshot, windows=windows, reach=self._near_settings())

    def view(self, service: ServiceId) -> ServiceView | None:
        """One service as it is now; None while it is not registered."""
        stored = self._desired.contracts.get(service)
        spec = None if stored is None else self._desired.spec_of(stored.contract)
        if stored is None or spec is None:
            return None
        now_ms, book = self._clock.now_ms(), self._desired.book(service)
        running = book.running
        sketch = self._telemetry.epoch_sketch(spec.id, running.epoch) if running else None
        enough = sketch is not None and sketch.count >= MIN_REQUESTS_FOR_P99
        return ServiceView(
            spec=spec,
            contract=stored.contract,
            running=running,
            entry=self._telemetry.entry(spec.id, now_ms),
            offered_rps=self._telemetry.offered_rps(spec.id, now_ms),
            measures=self._telemetry.measures(spec.id, now_ms, book.alike()),
            measured_p99_ms=sketch.quantile(0.99) if sketch is not None and enough else None,
            measured_p50_ms=sketch.quantile(0.5) if sketch is not None and enough else None,
            measured_requests=int(sketch.count) if sketch is not None and enough else 0,
            measured_rps=self._telemetry.epoch_rps(spec.id, running.epoch, now_ms) if running is not None else 0.0,
            pinned=book.pinned,
            constraints=self._wishes(service),
            advised=self._advised(service),
        )

    def reach(self, service: ServiceId, plan: Plan) -> list[AgentId] | None:
        """The agents that a service may come to run on, those of `plan` among them; None: all of them."""
        view = None if self.is_small else self.view(service)
        if view is None:
            return None
        return sorted({*self._neighbours(service, view, "zone"), *involved(view), *places_of(plan)})

    def times(self, service: ServiceId, plan: Plan) -> RouteTimes | None:
        """What `plan` is expected to take as things are now; None where it names what is not there any more."""
        snapshot = self.near(service, keep=places_of(plan))
        try:
            return expected_times(Predictor(snapshot, service), plan)
        except NotFoundError:
            return None

    def choose_again(self, service: ServiceId) -> None:
        """The next snapshot of this service looks for its neighbourhood anew."""
        self._chosen.pop(service, None)

    # --- parts

    def _neighbours(self, service: ServiceId, view: ServiceView, reach: Reach) -> tuple[AgentId, ...]:
        now_ms, known = self._clock.now_ms(), self._chosen.get(service)
        if (
            known is not None and known.entry == view.entry and known.reach == reach
            and now_ms - known.at_ms < self._settings.choose_again_ms and all(map(self.places.is_usable, known.agents))
        ):  # fmt: skip
            return known.agents
        beyond = set(involved(view))
        named = (a for a in self.places.near(view, reach=reach) if a not in beyond)
        chosen = _Chosen(tuple(named), now_ms, view.entry, reach)
        if service in self._desired.contracts:
            self._chosen[service] = chosen
        return chosen.agents

    def _with(self, fleet: Fleet, services: dict[ServiceId, ServiceView]) -> Snapshot:
        return Snapshot(
            now_ms=self._clock.now_ms(), fleet=fleet, models=self._desired.models, services=services,
            learned=self._learner.learned(), device_profiles=self._device_profiles(),
        )  # fmt: skip

    def _learn(self) -> None:
        """Every few seconds: how far profiles are off, from what some services measured lately."""
        passed_ms = self._clock.now_ms() - self._learned_ms
        if passed_ms < LEARN_EVERY_MS:
            return
        self._learned_ms = self._clock.now_ms()
        self._to_learn = self._to_learn or deque(self._desired.contracts)
        chosen = [self._to_learn.popleft() for _ in range(min(LEARN_FROM, len(self._to_learn)))]
        views = {service: view for service in chosen if (view := self.view(service)) is not None and view.measures}
        agents = {agent for view in views.values() for agent in involved(view)}
        if views:
            passed_s = min(passed_ms, LEARN_EVERY_MS) / 1000.0
            self._learner.see(self._with(self._fleet.view(sorted(agents)), views), passed_s)

    def _see(self, agents: Iterable[AgentId]) -> None:
        for agent in agents:
            booked = self.bookings.totals.get(agent)
            self._places.see(agent, booked=booked.busy if booked is not None else 0.0)

    def _spots(self) -> Iterable[Spot]:
        for agent, member in self._fleet.members.items():
            facts = member.facts
            yield Spot(id=agent, zone=facts.zone, is_cloud=facts.is_cloud, state=member.state, slowdown=facts.slowdown)

    def _near_settings(self) -> NearSettings:
        return NearSettings(near=self._settings.near, clouds=self._settings.clouds)
