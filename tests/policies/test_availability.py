from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from policies.fleet import AgentView
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.predict import availability_of
from policies.snapshot import Snapshot

A, B, C = AgentId("rk-1"), AgentId("rk-2"), AgentId("ascend")


@pytest.fixture
def agents(demo: Callable[..., Snapshot]) -> dict[AgentId, AgentView]:
    """Three devices that are up nine tenths of the time."""
    return {a: msgspec.structs.replace(demo().fleet.agents[a], availability=0.9) for a in (A, B, C)}


def plan(*hops: AgentId, fallback: tuple[AgentId, ...] = ()) -> Plan:
    stage, model = StageName("s"), ModelName("m")
    cut = tuple((agent, Span(at, at + 1)) for at, agent in enumerate(hops))
    lane = make_lane(stage, model, None, WHOLE_AXIS, cut)
    return Plan(service_id=ServiceId("x"), epoch=0, stages=(StagePlan(stage=stage, model=model, axis=None, lanes=(lane,), fallback=fallback),))  # fmt: skip


def link_up(src: AgentId, dst: AgentId) -> float:
    return {frozenset({A, B}): 0.8, frozenset({A, C}): 0.5}.get(frozenset({src, dst}), 1.0)


@pytest.mark.parametrize(
    ("served", "share"),
    [
        (plan(A), 0.9),  # It comes in where it runs: no link is needed.
        (plan(B), 0.9 * 0.8),
        (plan(A, B), 0.9 * 0.9 * 0.8),
        (plan(A, B, A), 0.9 * 0.9 * 0.8),  # There and back over the same link.
        (plan(B, fallback=(A,)), 1 - (1 - 0.72) * (1 - 0.9)),
        (plan(A, fallback=(C,)), 1 - (1 - 0.9) * (1 - 0.9 * 0.5)),
        # B carries it 72 % of the time; while A is up it can be the fallback, whatever B does.
        (plan(A, B, fallback=(A,)), 0.9),
    ],
)
def test_links_count_beside_devices(agents: dict[AgentId, AgentView], served: Plan, share: float) -> None:
    assert availability_of(served, agents, link_up, A) == pytest.approx(share)


def test_without_links_only_devices_count(agents: dict[AgentId, AgentView]) -> None:
    assert availability_of(plan(A, B), agents) == pytest.approx(0.81)
