"""The first plans of many services, made in one go instead of one by one: after a restart with an empty plan book, for instance.

One by one, a thousand services would each choose the agents that look free to all of them. Together they are planned by zone, side
by side (`controller.zones`), and what comes of it is booked; each service is then judged and rolled out when it is its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from controller.settings import ScaleSettings
from controller.world import World
from controller.zones import PartPlans, bundled, by_urgency, homes, merged, part_bytes, plan_part, plans_from
from policies.bookings import Bookings, Takes
from policies.costs import PredictSettings
from policies.ids import AgentId, ServiceId
from policies.limits import usable_bytes
from policies.plan import Plan
from policies.snapshot import ServiceView

RunParts = Callable[[Sequence[bytes]], Awaitable[list[bytes]]]
"""Plans encoded parts (`controller.zones.plan_part`), wherever there is room for it; answers in the order of the parts."""

ROUNDS = 3
"""Rounds in which parts are planned side by side; what is still in conflict then is planned in one piece."""
ASSEMBLES_MS = 10_000.0
"""A fleet that keeps growing is waited for this long."""
GROWS = 1.05


async def run_here(parts: Sequence[bytes]) -> list[bytes]:
    """One after the other, in a thread of this process."""
    return await asyncio.to_thread(lambda: [plan_part(part) for part in parts])


class Together:
    """Owned by the event loop."""

    def __init__(self, run: RunParts, settings: ScaleSettings) -> None:
        self._run = run
        self._settings = settings
        self._held: frozenset[ServiceId] = frozenset()
        self._running = False
        self._tried: set[ServiceId] = set()
        self._planned: dict[ServiceId, Plan] = {}
        self._since_ms: float | None = None
        self._usable = 0

    def begins(self, fresh: Sequence[ServiceId], usable: int, now_ms: float) -> list[ServiceId]:
        """The services to plan together now, of those without a plan; empty: none, or not yet.

        A service is planned together with others once; where that came to nothing it is decided about by itself.
        """
        if self._running:
            return []
        untried = [service for service in fresh if service not in self._tried]
        if len(untried) < self._settings.plan_together:
            self._held = frozenset()
            return []
        self._since_ms = now_ms if self._since_ms is None else self._since_ms
        grows, self._usable = usable > GROWS * self._usable, usable
        self._held = frozenset(untried)
        if usable == 0 or (grows and now_ms - self._since_ms < ASSEMBLES_MS):
            return []
        self._since_ms, self._running = None, True
        self._tried.update(untried)
        return untried

    def is_planning(self, service: ServiceId) -> bool:
        """Whether the service is waiting for the plan that is made together with others."""
        return service in self._held

    def take(self, service: ServiceId) -> Plan | None:
        """The plan that was made for the service, once."""
        return self._planned.pop(service, None)

    async def plan(self, world: World, services: Sequence[ServiceId]) -> dict[ServiceId, Takes]:
        """Plan these services; what the plans take. The plans themselves are `take`n one by one."""
        try:
            found = await self._plan(world, services)
        finally:
            self._held, self._running = frozenset(), False
        self._planned.update((service, plan) for service, (plan, _) in found.items())
        return {service: takes for service, (_, takes) in found.items()}

    async def _plan(self, world: World, services: Sequence[ServiceId]) -> dict[ServiceId, tuple[Plan, Takes]]:
        seen = {service: world.view(service) for service in services}
        views = {service: view for service, view in seen.items() if view is not None}
        books, done = world.bookings.copy(), dict[ServiceId, tuple[Plan, Takes]]()
        places = world.places
        homes_of = homes(views, places)
        left = [service for service in views if homes_of[service] is not None]
        for _ in range(ROUNDS):
            parts = bundled({service: homes_of[service] for service in left}, self._settings.parts)
            if not parts:
                break
            left = await self._round(world, books, views, parts, done)
        rest = sorted(views.keys() - done.keys())
        if rest:
            await self._round(world, books, views, [(places.zones, rest)], done)
        return done

    async def _round(
        self, world: World, books: Bookings, views: dict[ServiceId, ServiceView],
        parts: Sequence[tuple[Sequence[str], Sequence[ServiceId]]], done: dict[ServiceId, tuple[Plan, Takes]],
    ) -> list[ServiceId]:  # fmt: skip
        """Plan the parts side by side and merge them into `books` and `done`; the services that were in conflict."""
        encoded = []
        room: dict[AgentId, int] = {}
        for zones, services in parts:
            part = world.part(zones, {service: views[service] for service in services}, books)
            agents = part.snapshot.fleet.agents
            room.update((a, usable_bytes(agent, PredictSettings())) for a, agent in agents.items())
            encoded.append(await asyncio.to_thread(part_bytes, part))
        found: list[PartPlans] = [plans_from(answer) for answer in await self._run(encoded)]
        order = by_urgency({service: views[service] for _, services in parts for service in services})
        placed, conflicts = merged(books, found, order, room)
        done.update((service, (one.plan, one.takes)) for service, one in placed.items())
        return conflicts
