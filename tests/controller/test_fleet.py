"""Who is live, suspected and lost: by distribution of past delays, within seconds, and never by jitter."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.messages import REPORT_EVERY_MS, Address, DeviceFacts, PeerReport, Report
from controller.events import EventLog
from controller.fleet import FleetRegistry
from controller.records import AgentRecord
from controller.settings import SuspicionSettings
from controller.telemetry import Telemetry
from policies.ids import AgentId
from policies.roofline import DeviceCalibration

A, B = AgentId("a"), AgentId("b")
SETTINGS = SuspicionSettings()
_FACTS = DeviceFacts(platform="rk3588", evidence="emulated", hostname="board")


class Fleet:
    """A registry with members that the test lets report."""

    def __init__(self, clock: Any, make_facts: Any, make_connection: Any) -> None:
        self.clock, self.make_connection = clock, make_connection
        self.telemetry = Telemetry()
        self.events = EventLog(clock)
        self.registry = FleetRegistry(self.telemetry, clock, self.events, SETTINGS)
        self.facts = make_facts()

    def record(self, agent: AgentId, **changed: Any) -> AgentRecord:
        return AgentRecord(
            id=agent, facts=self.facts, public_key_fingerprint=f"key-{agent}", enrolled_at_s=0.0, **changed
        )

    def join(self, agent: AgentId) -> Any:
        if agent not in self.registry.members:
            self.registry.admit(self.record(agent))
        return self.hello(agent)

    def hello(self, agent: AgentId) -> Any:
        connection = self.make_connection()
        self.registry.connected(agent, connection, self.facts, Address("10.0.0.1", 9000))
        connection.on_close(lambda: self.registry.disconnected(agent, connection))
        return connection

    def report(self, agent: AgentId, *peers: PeerReport) -> None:
        plain = Report(
            sequence=1,
            cpu_saturation=0.6,
            foreign_saturation=0.1,
            memory_free_bytes=1,
            queue_depth=0,
            loaded_bytes=0,
            peers=peers,
        )
        self.telemetry.fold(agent, plain, self.clock.now_ms())

    def steady(self, agent: AgentId, reports: int = 30) -> None:
        for _ in range(reports):
            self.clock.advance(REPORT_EVERY_MS)
            self.report(agent)

    def state(self, agent: AgentId) -> str:
        return str(self.registry.members[agent].state)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.tail()]


@pytest.fixture
def fleet(clock: Any, make_facts: Any, make_connection: Any) -> Fleet:
    return Fleet(clock, make_facts, make_connection)


def test_a_connected_agent_that_falls_silent_is_suspected_then_lost_within_seconds(fleet: Fleet) -> None:
    connection = fleet.join(A)
    fleet.steady(A)
    fleet.clock.advance(1500)
    assert fleet.registry.look() == []
    assert fleet.state(A) == "suspect"
    fleet.clock.advance(2500)
    assert fleet.registry.look() == [A]
    assert fleet.state(A) == "lost"
    assert connection.closed, "it must say hello again, which brings it up to date"
    assert fleet.registry.look() == [], "it is lost once"
    assert fleet.kinds().count("agent-lost") == 1


def test_devices_of_one_type_are_taken_to_be_alike_by_the_tightest_calibration(fleet: Fleet) -> None:
    rough, tight = (
        DeviceCalibration(
            matmul_flops_per_s=rate, conv_flops_per_s=rate, copy_bytes_per_s=1e9, launch_ms=1.0, spread=spread
        )
        for rate, spread in ((1e9, 0.3), (2e9, 0.02))
    )
    for agent, found in ((A, rough), (B, tight)):
        fleet.facts = msgspec.structs.replace(fleet.facts, device_type="rk3588-1")
        fleet.join(agent)
        fleet.registry.calibrated(agent, found)
    seen = fleet.registry.view().agents
    assert [seen[agent].calibration for agent in (A, B)] == [tight, tight]
    assert fleet.registry.members[A].facts.calibration == rough, "what it said itself is kept and shown"


def test_a_late_report_clears_the_suspicion(fleet: Fleet) -> None:
    fleet.join(A)
    fleet.steady(A)
    fleet.clock.advance(1500)
    fleet.registry.look()
    fleet.report(A)
    fleet.registry.look()
    assert fleet.state(A) == "live"


def test_a_broken_connection_that_a_peer_confirms_is_a_loss_at_once(fleet: Fleet) -> None:
    fleet.join(A)
    connection = fleet.join(B)
    connection.abort()
    fleet.report(A, PeerReport(peer=B, rtt_ms=0, jitter_ms=0, bandwidth_bytes_per_s=0, broken=True))
    fleet.clock.advance(50)
    assert fleet.registry.look() == [B]


def test_a_broken_connection_that_nobody_confirms_may_come_back(fleet: Fleet) -> None:
    fleet.join(A).abort()
    fleet.clock.advance(SETTINGS.reconnect_grace_ms - 1)
    assert fleet.registry.look() == []
    fleet.hello(A)
    fleet.clock.advance(SETTINGS.reconnect_grace_ms)
    fleet.report(A)
    assert fleet.registry.look() == []
    assert fleet.state(A) == "live"


def test_a_broken_connection_that_does_not_come_back_is_a_loss(fleet: Fleet) -> None:
    fleet.join(A).abort()
    fleet.clock.advance(SETTINGS.reconnect_grace_ms)
    assert fleet.registry.look() == [A]
    fleet.hello(A)
    assert fleet.state(A) == "live", "whoever says hello is back"


def test_an_old_connection_that_closes_late_does_not_count(fleet: Fleet) -> None:
    old = fleet.join(A)
    fleet.hello(A)
    old.abort()
    assert fleet.registry.connection(A) is not None
    fleet.clock.advance(SETTINGS.reconnect_grace_ms)
    fleet.report(A)
    assert fleet.registry.look() == []


def _uniform(rng: random.Random, widest_ms: float) -> float:
    return rng.uniform(1.0, widest_ms)


def _mostly_calm(rng: random.Random, widest_ms: float) -> float:
    return widest_ms if rng.random() < 0.02 else rng.gauss(500, 5)


def _heavy(rng: random.Random, widest_ms: float) -> float:
    return min(widest_ms, 500 * rng.lognormvariate(0, 1))


def _bunched(rng: random.Random, widest_ms: float) -> float:
    """What a link does that stops and then delivers everything at once."""
    return widest_ms if rng.random() < 0.2 else 0.1


@given(
    seed=st.integers(0, 10**6), widest_ms=st.floats(600, 2990), draw=st.sampled_from([_uniform, _mostly_calm, _heavy, _bunched])
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_jitter_alone_never_evicts(seed: int, widest_ms: float, draw: Any) -> None:
    rng = random.Random(seed)
    world = _World()
    for _ in range(120):
        world.clock.advance(max(0.1, draw(rng, widest_ms)))
        assert world.fleet.registry.look() == [], "a report is late, not missing"
        world.fleet.report(A)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_delays_longer_than_the_fixed_patience_are_learned(seed: int) -> None:
    """ray-project/ray issue 54035: late checks in a row are no death where lateness is normal."""
    rng = random.Random(seed)
    world = _World()
    for step in range(150):
        world.clock.advance(rng.uniform(500, 1000 + min(5000, 60 * step)))
        assert world.fleet.registry.look() == []
        world.fleet.report(A)


class _World:
    """A fleet with one live agent, made without fixtures so that hypothesis may make many."""

    def __init__(self) -> None:
        self.clock = _Clock()
        self.fleet = Fleet(self.clock, lambda: _FACTS, _Quiet)
        self.fleet.join(A)


def test_after_a_restart_agents_are_awaited_without_being_given_up(fleet: Fleet) -> None:
    fleet.registry.restore([fleet.record(A), fleet.record(B), fleet.record(AgentId("gone"), revoked=True)])
    assert set(fleet.registry.members) == {A, B}, "a revoked agent does not come back with a restart"
    assert fleet.registry.look() == []
    assert fleet.state(A) == "suspect", "no work before it says hello"
    fleet.hello(A)
    fleet.clock.advance(SETTINGS.restart_grace_ms - 100)
    fleet.report(A)
    assert fleet.registry.look() == []
    assert (fleet.state(A), fleet.state(B)) == ("live", "suspect")
    fleet.clock.advance(200)
    assert fleet.registry.look() == [B]


def test_draining_holds_through_a_look_and_an_agent_that_was_never_heard_can_be_drained(fleet: Fleet) -> None:
    fleet.join(A)
    fleet.registry.drain(A)
    fleet.registry.look()
    assert fleet.state(A) == "draining"
    fleet.registry.admit(fleet.record(B))
    fleet.registry.drain(B)
    assert fleet.registry.look() == [B]
    fleet.hello(A)
    assert fleet.state(A) == "draining", "saying hello again does not end a drain"


def test_the_view_has_ages_and_says_what_is_not_known(fleet: Fleet) -> None:
    fleet.registry.admit(fleet.record(A))
    assert fleet.registry.view().agents[A].age_ms == float("inf")
    fleet.hello(A)
    fleet.report(A, PeerReport(peer=B, rtt_ms=3.0, jitter_ms=1.0, bandwidth_bytes_per_s=1e6))
    fleet.clock.advance(700)
    view = fleet.registry.view()
    assert view.agents[A].age_ms == 700
    assert view.agents[A].cpu_saturation == 0.1
    assert (view.agents[A].host, view.agents[A].port, view.agents[A].power_w) == ("10.0.0.1", 9000, 8.0)
    assert view.links == {}, "a link to somebody who is not enrolled is nobody's link"
    fleet.join(B)
    assert fleet.registry.view().links["a>b"].rtt_ms == 3.0


def test_availability_is_the_share_of_time_an_agent_was_there(fleet: Fleet) -> None:
    fleet.join(A)
    fleet.join(B).abort()
    fleet.registry.look()
    for _ in range(3600):
        fleet.clock.advance(1000)
        fleet.report(A)
        fleet.registry.look()
    agents = fleet.registry.view().agents
    assert 0.9 < agents[B].availability < 0.96 < agents[A].availability < 1


class _Clock:
    def __init__(self) -> None:
        self._now_ms = 0.0

    def now_ms(self) -> float:
        return self._now_ms

    def wall_s(self) -> float:
        return self._now_ms / 1000

    def advance(self, ms: float) -> None:
        self._now_ms += ms


class _Quiet:
    def on_close(self, callback: Any) -> None: ...

    def abort(self) -> None: ...


def test_a_drained_agent_stays_drained_when_it_reconnects_until_an_operator_says_otherwise(fleet: Fleet) -> None:
    fleet.join(A)
    fleet.registry.drain(A)
    fleet.hello(A)
    assert fleet.registry.members[A].state == "draining"
    fleet.registry.undrain(A)
    assert fleet.registry.members[A].state == "live"
