"""Groups of services are components of overlapping footprints."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from policies.groups import footprint_of, group_of
from policies.ids import AgentId, ServiceId
from policies.plan import Plan
from policies.snapshot import ServiceView, Snapshot
from policies.solve import candidates

READER = ServiceId("document-reader")


def on(plan: Plan, name: str, spare: str = "") -> Plan:
    """The plan's stages on one agent."""
    agent = AgentId(name)
    stages = tuple(
        msgspec.structs.replace(
            stage, fallback=(AgentId(spare),) if spare else (),
            lanes=tuple(
                msgspec.structs.replace(lane, shards=tuple(msgspec.structs.replace(s, agent=agent) for s in lane.shards))
                for lane in stage.lanes
            ),
        )
        for stage in plan.stages
    )  # fmt: skip
    return msgspec.structs.replace(plan, stages=stages)


def test_services_hang_together_through_agents_that_they_share(demo: Callable[..., Snapshot]) -> None:
    snapshot = demo()
    plan, view = candidates(snapshot, READER)[0].plan, snapshot.services[READER]

    def group(views: dict[ServiceId, ServiceView], name: str) -> frozenset[ServiceId]:
        world = msgspec.structs.replace(snapshot, services=views)
        return group_of(ServiceId(name), {service: footprint_of(service, world) for service in views})

    def running(name: str, spare: str = "") -> ServiceView:
        return msgspec.structs.replace(view, running=on(plan, name, spare))

    services = {
        ServiceId("a"): running("rk-1", spare="rk-2"), ServiceId("b"): running("rk-2"), ServiceId("c"): running("rk-2"),
        ServiceId("d"): running("imx"),
    }  # fmt: skip
    assert group(services, "a") == {"a", "b", "c"}
    assert group(services, "d") == {"d"}
    waiting = msgspec.structs.replace(view, running=None)
    assert group({**services, ServiceId("e"): waiting}, "d") == {"a", "b", "c", "d", "e"}
