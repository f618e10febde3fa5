"""Which services hang together: those that could get in each other's way, directly or through others between them.

A service's footprint is where its running plan serves and falls back to; while nothing runs, it is every agent that its contract's zones and
privacy allow. Services whose footprints overlap form a group, so that a zone of its own makes a group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from policies.ids import AgentId, ServiceId
from policies.limits import allowed_in
from policies.snapshot import Snapshot

Footprint = frozenset[AgentId]


def footprint_of(service_id: ServiceId, snapshot: Snapshot) -> Footprint:
    """The agents that the service has to do with."""
    view = snapshot.services[service_id]
    if view.running is not None:
        return view.running.agents() | {agent for stage in view.running.stages for agent in stage.fallback}
    return frozenset(name for name, agent in snapshot.fleet.agents.items() if allowed_in(agent, view.contract))


def group_of(service_id: ServiceId, footprints: Mapping[ServiceId, Footprint]) -> frozenset[ServiceId]:
    """The group of one of these services, itself included."""
    left = dict(footprints)
    found, reach = {service_id}, set(left.pop(service_id))
    while near := [name for name, agents in left.items() if agents & reach]:
        for name in near:
            reach |= left.pop(name)
        found.update(near)
    return frozenset(found)
