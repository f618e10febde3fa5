"""What plans turned out to do."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from policies.effects import effect_of, shared
from policies.ids import AgentId, ServiceId
from policies.plan import Plan
from policies.predict import Predictor
from policies.snapshot import Snapshot
from policies.solve import candidates

READER = ServiceId("document-reader")
Demo = Callable[..., Snapshot]


@pytest.fixture
def plans(demo: Demo) -> list[Plan]:
    return [entry.plan for entry in candidates(demo(), READER)]


def test_the_running_plan_is_measured_and_any_other_estimated(demo: Demo, plans: list[Plan]) -> None:
    running, other = msgspec.structs.replace(plans[0], epoch=3), plans[-1]
    bare = demo(running=running)
    predicted = Predictor(bare, READER).predict_all([running, other])
    world = demo(running=running, measured_p99_ms=2.0 * predicted[0].p99_ms)
    ran, wanted = effect_of(running, world, READER), effect_of(other, world, READER)
    assert ran is not None
    assert wanted is not None
    assert (ran.p99_ms, ran.how, wanted.how) == (2.0 * predicted[0].p99_ms, "measured", "estimated")
    assert wanted.p99_ms == pytest.approx(predicted[1].p99_ms * 2.0 ** shared(other, running))


def test_what_has_nothing_in_common_is_not_corrected(demo: Demo, plans: list[Plan]) -> None:
    assert shared(plans[0], plans[0]) == 1.0
    elsewhere = msgspec.structs.replace(plans[0], stages=())
    assert (shared(plans[0], elsewhere), shared(elsewhere, plans[0])) == (0.0, 0.0)


def test_nothing_is_known_before_it_was_measured_or_when_an_agent_is_gone(demo: Demo, plans: list[Plan]) -> None:
    running = msgspec.structs.replace(plans[0], epoch=3)
    assert effect_of(running, demo(running=running), READER) is None
    assert effect_of(running, demo(measured_p99_ms=5.0), READER) is None
    world = demo(running=running, measured_p99_ms=900.0)
    lost = AgentId(sorted(running.agents())[0])
    agents = {name: agent for name, agent in world.fleet.agents.items() if name != lost}
    world = msgspec.structs.replace(world, fleet=msgspec.structs.replace(world.fleet, agents=agents))
    assert effect_of(running, world, READER) is None
