"""A plan takes effect as a whole or not at all, and stopping after any step and starting over converges."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agents.messages import Activate, Address, Message, Prepare, Prepared, Release, Route, ShardFile, ShardReady
from controller.events import EventLog
from controller.fleet import FleetRegistry
from controller.records import AgentRecord
from controller.rollout import GOLDEN_TOLERANCE, Rollout, RolloutError
from controller.settings import LoopSettings, SuspicionSettings
from controller.telemetry import Telemetry
from policies.ids import AgentId, BlobHash, ModelName, ServiceId
from policies.plan import Plan, Span
from policies.service import ServiceSpec
from sla.errors import AgentLostError, DeadlineExceededError, OverloadedError, RefusedError, TidegateError


class Files:
    """Shard files that are named by what they hold."""

    def shard_file(self, name: ModelName, blocks: Span) -> ShardFile:
        return ShardFile(
            model=name, blocks=blocks, sha256=BlobHash(f"{name}-{blocks.start}-{blocks.stop}"), size_bytes=100,
            inputs=("x",), outputs=("y",),
        )  # fmt: skip


class Canary:
    """Answers rightly, or fails as told."""

    def __init__(self) -> None:
        self.error: TidegateError | None = None
        self.checked: list[int] = []

    async def check(self, route: Route, deadline_ms: float) -> None:
        self.checked.append(route.plan.epoch)
        if self.error is not None:
            raise self.error


class Device:
    """What an agent keeps: loaded shards, and the epoch it serves by; older epochs are refused."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.loaded: set[str] = set()
        self.epoch = 0

    def obey(self, message: Message, answer: Any) -> Any:
        if isinstance(answer, TidegateError):
            return answer
        match message:
            case Prepare(files=files):
                self.loaded |= {file.sha256 for file in files}
            case Activate(route=route):
                if route.plan.epoch < self.epoch:
                    return RefusedError("a newer plan serves already")
                self.epoch = route.plan.epoch
        return answer


class World:
    """A fleet of devices, two of them with an ingress, and a rollout that moves them."""

    def __init__(self, clock: Any, make_facts: Any, make_connection: Any, good_script: Any) -> None:
        telemetry, events = Telemetry(), EventLog(clock)
        self.fleet = FleetRegistry(telemetry, clock, events, SuspicionSettings())
        self.canary = Canary()
        self.rollout = Rollout(self.fleet, Files(), self.canary, LoopSettings())
        self.devices: dict[AgentId, Device] = {}
        self.good_script = good_script
        self.trouble: dict[tuple[str, type[Message]], Any] = {}
        self.budget: int | None = None
        """After this many messages every connection is gone, as if the controller had been killed."""
        self.sent = 0
        for number, name in enumerate(("a", "b", "c", "d")):
            facts = make_facts(ingress_port=8001 if number < 2 else 0)
            agent = AgentId(name)
            self.fleet.admit(AgentRecord(id=agent, facts=facts, public_key_fingerprint=name, enrolled_at_s=0.0))
            connection = make_connection(self._script(agent))
            self.devices[agent] = Device(connection)
            self.fleet.connected(agent, connection, facts, Address(f"10.0.0.{number}", 9000))

    def _script(self, agent: AgentId) -> Any:
        def answer(message: Message) -> Any:
            self.sent += 1
            if self.budget is not None and self.sent > self.budget:
                return AgentLostError("the controller was killed here")
            trouble = self.trouble.get((agent, type(message)))
            return self.devices[agent].obey(message, trouble or self.good_script(message))

        return answer

    async def move(self, spec: ServiceSpec, plan: Plan) -> Route:
        """All steps, as the loop does them."""
        staged = await self.rollout.stage(spec, plan)
        await self.rollout.prove(staged.route)
        await self.rollout.activate(staged.route)
        return staged.route

    def epochs(self) -> list[int]:
        return [device.epoch for device in self.devices.values()]

    def asked(self, agent: str, kind: type[Message]) -> list[Any]:
        found: list[Any] = self.devices[AgentId(agent)].connection.asked(kind)
        return found


@pytest.fixture
def world(clock: Any, make_facts: Any, make_connection: Any, good_script: Any) -> World:
    return World(clock, make_facts, make_connection, good_script)


@pytest.fixture
def sampled(spec: ServiceSpec) -> ServiceSpec:
    """The service with a sample request, so that a canary runs."""
    return msgspec.structs.replace(spec, sample=BlobHash("5" * 64), assets={"words": BlobHash("a" * 64)})


async def test_shards_and_fallbacks_are_prepared_and_ingresses_switched(
    world: World, sampled: ServiceSpec, make_plan: Any
) -> None:
    route = await world.move(sampled, make_plan(7, "a", "c", fallback=("d",)))
    assert world.devices[AgentId("a")].loaded == {"det-0-1"}
    assert world.devices[AgentId("c")].loaded == {"det-1-3"}
    assert world.devices[AgentId("d")].loaded == {"det-0-3"}, "a fallback runs the whole stage"
    assert world.epochs() == [7, 7, 0, 0], "only agents with an ingress need the route"
    assert set(route.files) == {"det[0:1]", "det[1:3]", "det[0:3]"}
    assert set(route.addresses) == {"a", "b", "c", "d"}
    assert world.canary.checked == [7]
    assert world.asked("b", Prepare)[0].assets == ("a" * 64,), "an ingress runs the Python steps"
    assert world.asked("c", Prepare)[0].assets == ()


@pytest.mark.parametrize(
    "trouble",
    [
        AgentLostError("gone"),
        DeadlineExceededError("too slow"),
        Prepared(
            shards=(ShardReady(sha256=BlobHash("x"), provider="CPU", golden_error=0.5, load_ms=1, fetched_bytes=0),)
        ),
        Prepared(
            shards=(
                ShardReady(sha256=BlobHash("x"), provider="CPU", golden_error=float("nan"), load_ms=1, fetched_bytes=0),
            )
        ),
        Activate,
    ],
    ids=["lost", "late", "wrong-numbers", "nan", "wrong-answer"],
)
async def test_nothing_that_serves_changes_when_a_shard_cannot_be_proven(
    world: World, sampled: ServiceSpec, make_plan: Any, trouble: Any
) -> None:
    route = await world.move(sampled, make_plan(1, "a", "c"))
    world.trouble["c", Prepare] = Activate(route=route) if trouble is Activate else trouble
    with pytest.raises(RolloutError, match=r"\bc\b"):
        await world.move(sampled, make_plan(2, "b", "c"))
    assert world.epochs() == [1, 1, 0, 0]
    assert world.canary.checked == [1]
    assert not any(world.asked(agent, Release) for agent in "abcd")


async def test_small_differences_between_kernels_are_no_fault(
    world: World, sampled: ServiceSpec, make_plan: Any
) -> None:
    ready = ShardReady(sha256=BlobHash("x"), provider="CPU", golden_error=GOLDEN_TOLERANCE, load_ms=1, fetched_bytes=9)
    world.trouble["c", Prepare] = Prepared(shards=(ready,))
    await world.move(sampled, make_plan(1, "a", "c"))
    assert world.epochs() == [1, 1, 0, 0]


async def test_a_canary_that_fails_stops_the_plan_before_anything_serves_by_it(
    world: World, sampled: ServiceSpec, make_plan: Any
) -> None:
    await world.move(sampled, make_plan(1, "a"))
    world.canary.error = RefusedError("another answer than expected")
    with pytest.raises(RolloutError, match="canary request failed: another answer"):
        await world.move(sampled, make_plan(2, "c"))
    assert world.epochs() == [1, 1, 0, 0]


async def test_an_agent_that_is_not_connected_cannot_be_part_of_a_plan(
    world: World, sampled: ServiceSpec, make_plan: Any
) -> None:
    world.fleet.disconnected(AgentId("c"), world.devices[AgentId("c")].connection)
    with pytest.raises(RolloutError, match="c is not connected"):
        await world.move(sampled, make_plan(1, "a", "c"))


async def test_a_fallback_that_cannot_hold_its_model_is_left_out_and_the_plan_goes_on(
    world: World, sampled: ServiceSpec, make_plan: Any
) -> None:
    world.trouble["d", Prepare] = RefusedError("out of memory")
    staged = await world.rollout.stage(sampled, make_plan(1, "a", fallback=("c", "d")))
    assert staged.dropped_fallbacks == (("detect", "d"),)
    assert staged.route.plan.stages[0].fallback == ("c",)
    assert staged.fetched_bytes == 200


async def test_an_ingress_that_misses_the_switch_is_made_to_come_back(
    world: World, sampled: ServiceSpec, make_plan: Any
) -> None:
    world.trouble["b", Activate] = DeadlineExceededError("too slow")
    staged = await world.rollout.stage(sampled, make_plan(1, "a"))
    assert await world.rollout.activate(staged.route) == ["b"]
    assert world.devices[AgentId("b")].connection.closed
    assert not world.devices[AgentId("a")].connection.closed


@pytest.mark.parametrize("stop_after", range(14))
async def test_stopping_after_any_message_and_starting_over_converges(
    world: World, sampled: ServiceSpec, make_plan: Any, stop_after: int
) -> None:
    before = {agent: device.epoch for agent, device in world.devices.items()}
    assert set(before.values()) == {0}
    world.budget = stop_after
    staged = None
    try:
        staged = await world.rollout.stage(sampled, make_plan(1, "a", "c", fallback=("d",)))
        await world.rollout.prove(staged.route)
        await world.rollout.activate(staged.route)
    except RolloutError:
        assert set(world.epochs()) == {0}, "what failed before it was proven has changed nothing that serves"
    world.budget = None
    for agent, device in world.devices.items():
        if device.connection.closed:  # It redials and says hello.
            device.connection.closed = False
            world.fleet.members[agent].connection = device.connection
    await world.move(sampled, make_plan(2, "a", "c", fallback=("d",)))
    assert world.epochs() == [2, 2, 0, 0]
    assert world.devices[AgentId("d")].loaded == {"det-0-3"}


async def test_old_shards_are_released_on_every_connected_agent_and_failures_do_not_matter(world: World) -> None:
    world.trouble["c", Release] = AgentLostError("gone")
    await world.rollout.release(ServiceId("reader"), 3)
    assert [world.asked(agent, Release)[0].below_epoch for agent in "abcd"] == [3, 3, 3, 3]


async def test_an_agent_that_comes_back_gets_its_shards_of_the_running_plan_again(
    world: World, sampled: ServiceSpec, make_plan: Any
) -> None:
    route = await world.move(sampled, make_plan(1, "a", "c"))
    world.devices[AgentId("c")].loaded.clear()
    await world.rollout.prepare_on(AgentId("c"), route)
    assert world.devices[AgentId("c")].loaded == {"det-1-3"}


async def test_an_agent_without_room_drops_what_older_plans_needed_and_is_asked_again(
    world: World, sampled: ServiceSpec, make_plan: Any
) -> None:
    await world.move(sampled, make_plan(2, "a", "c"))
    connection = world.devices[AgentId("c")].connection
    willing = connection.script

    def full(message: Message) -> Any:
        if isinstance(message, Prepare) and not world.asked("c", Release):
            return OverloadedError("needs 132 MB, but only 74 MB are free")
        return willing(message)

    connection.script = full
    await world.rollout.stage(sampled, make_plan(3, "b", "c"), running_epoch=2)
    assert [message.below_epoch for message in world.asked("c", Release)] == [2]
    assert len(world.asked("c", Prepare)) == 3
