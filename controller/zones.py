"""Planning many services at once, zone by zone: what goes into a part, planning it, and putting the parts together again.

Services of one zone meet each other on its agents, so they are planned together; services of different zones meet only in the
clouds. So zones are bundled into *parts*, each a value that a function plans by itself (in a Ray task, in a process, or here):
the outcome does not depend on where. The parts are merged in the order of urgency: a plan that finds no room any more, or a
shared cloud that has become too busy, is a conflict, and is planned again with what was merged booked as load.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from controller.snapshots import plain_encoder, typed_decoder
from policies.bookings import Bookings
from policies.costs import required_rps
from policies.fleet import Booked
from policies.ids import AgentId, ServiceId
from policies.many import Ledger, ManySettings
from policies.neighbourhood import NearSettings, Neighbourhoods
from policies.plan import Plan
from policies.snapshot import ServiceView, Snapshot

BUSY_CLOUD = 0.9
"""A cloud that several parts use may become this busy by what they plan without knowing of each other."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Some services with the agents of their zones and the clouds that those look at."""

    snapshot: Snapshot
    """Its agents carry what services that are not part of it take there."""
    windows: dict[str, tuple[AgentId, ...]]
    """The clouds that each zone looks at."""
    reach: NearSettings = NearSettings()


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with what it takes."""

    plan: Plan
    takes: dict[AgentId, Booked]


class PartPlans(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a part; services that are not named found no plan there."""

    placed: dict[ServiceId, Placed]


def part_bytes(part: Part) -> bytes:
    """A part as it is sent to whoever plans it."""
    return _ENCODER.encode(part)


def plans_from(data: bytes) -> PartPlans:
    """The answer of `plan_part`."""
    return _PLANS_DECODER.decode(data)


def plan_part(data: bytes) -> bytes:
    """Plan the services of a part, which depends on nothing else: encoded `Part` in, encoded `PartPlans` out."""
    part = _PART_DECODER.decode(data)
    ledger = Ledger(part.snapshot, ManySettings(reach=part.reach), windows=part.windows)
    ledger.plan()
    placed = {s: Placed(plan=b.scored.plan, takes=dict(b.takes)) for s, b in ledger.booked.items()}
    return _ENCODER.encode(PartPlans(placed=placed))


def homes(services: Mapping[ServiceId, ServiceView], places: Neighbourhoods) -> dict[ServiceId, str | None]:
    """The zone that each service is planned in: the contract's, else the entry's; None where several would do.

    Services of which no request was seen yet are dealt out over the zones, larger zones taking more.
    """
    found: dict[ServiceId, str | None] = {}
    sizes = places.sizes()
    turns = [(1.0 / size, zone) for zone, size in sizes.items()]
    heapq.heapify(turns)
    for service in by_urgency(services):
        view = services[service]
        if view.contract.zones:
            named = [zone for zone in view.contract.zones if zone in sizes]
            found[service] = named[0] if len(named) == 1 else None
            continue
        zone = places.zone_of(view.entry)
        if zone is None and turns:
            share, zone = heapq.heappop(turns)
            heapq.heappush(turns, (share + 1.0 / sizes[zone], zone))
        found[service] = zone if zone in sizes else None
    return found


def bundled(homes_of: Mapping[ServiceId, str | None], parts: int) -> list[tuple[list[str], list[ServiceId]]]:
    """Zones that have services, bundled into at most so many parts of about the same number of services."""
    by_zone: dict[str, list[ServiceId]] = {}
    for service, zone in homes_of.items():
        if zone is not None:
            by_zone.setdefault(zone, []).append(service)
    bundles: list[tuple[list[str], list[ServiceId]]] = [([], []) for _ in range(min(parts, len(by_zone)))]
    for zone in sorted(by_zone, key=lambda z: (-len(by_zone[z]), z)):
        zones, services = min(bundles, key=lambda bundle: len(bundle[1]))
        zones.append(zone)
        services.extend(by_zone[zone])
    return [(sorted(zones), sorted(services)) for zones, services in bundles]


def by_urgency(services: Mapping[ServiceId, ServiceView]) -> list[ServiceId]:
    """The most important and the heaviest first."""
    return sorted(services, key=lambda s: (-services[s].contract.priority, -required_rps(services[s]), s))


def merged(
    bookings: Bookings, found: Sequence[PartPlans], order: Iterable[ServiceId], room: Mapping[AgentId, int]
) -> tuple[dict[ServiceId, Placed], list[ServiceId]]:
    """Book the plans of all parts, the most urgent first; those that were booked, and those in conflict with them.

    `room` are the usable bytes of each agent. Memory is never overbooked, whatever the parts say.
    """
    placed = {service: one for part in found for service, one in part.placed.items()}
    users: dict[AgentId, set[int]] = {}
    for number, part in enumerate(found):
        for one in part.placed.values():
            for agent in one.takes:
                users.setdefault(agent, set()).add(number)
    taken: dict[ServiceId, Placed] = {}
    conflicts = []
    for service in order:
        if service not in placed:
            continue
        one = placed[service]
        met = [agent for agent in one.takes if len(users[agent]) > 1]
        busy = max(
            (bookings.others(service, a).busy + one.takes[a].busy for a in met if one.takes[a].busy), default=0.0
        )
        if busy <= BUSY_CLOUD and bookings.fits(service, one.takes, room):
            bookings.book(service, one.takes)
            taken[service] = one
        else:
            conflicts.append(service)
    return taken, conflicts


_ENCODER = plain_encoder()
_PART_DECODER = typed_decoder(Part)
_PLANS_DECODER = msgspec.msgpack.Decoder(PartPlans)
