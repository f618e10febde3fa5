"""How a decided plan becomes the running plan: prepare everywhere, prove end to end, then switch, then clean up.

Invariant: until every serving shard is loaded and compared and the canary was answered, nothing that serves has
changed; stopping after any step and starting over converges, since each step is idempotent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from agents.messages import Activate, Prepare, Prepared, Release, Route, ShardFile, file_key
from agents.wire import Connection
from controller.fleet import FleetRegistry
from controller.settings import LoopSettings
from policies.ids import AgentId, ModelName, ServiceId
from policies.plan import Plan, Span
from policies.route_times import RouteTimes
from policies.service import ServiceSpec
from sla.errors import AgentLostError, OverloadedError, RetryableError, TidegateError

log = logging.getLogger(__name__)

GOLDEN_TOLERANCE = 1e-3
"""Largest relative difference from the whole model's outputs that a loaded shard may show (other CPUs, other kernels)."""


class RolloutError(RetryableError):
    """The plan could not be made to run; what ran before still runs."""

    slug = "rollout-failed"


class ShardFiles(Protocol):
    """Shard files by model and block range; made on demand, so the call may take seconds."""

    def shard_file(self, name: ModelName, blocks: Span) -> ShardFile: ...


KnobValues = Callable[[ServiceSpec, Plan], tuple[dict[str, float], int]]


class Canary(Protocol):
    """Runs one sample request under a route that nobody else uses yet."""

    async def check(self, route: Route, deadline_ms: float) -> None:
        """Returns if the answer is right. Raises TidegateError with the reason if not."""
        ...


@dataclass(frozen=True, slots=True)
class RolledOut:
    """What runs now. `dropped_fallbacks` are (stage, agent) that could not hold their fallback."""

    route: Route
    fetched_bytes: int
    dropped_fallbacks: tuple[tuple[str, AgentId], ...]


class Rollout:
    """Carries plans out. Holds no state of its own: the store has the running plan, the agents have their shards."""

    def __init__(
        self, fleet: FleetRegistry, files: ShardFiles, canary: Canary, settings: LoopSettings,
        knobs: KnobValues = lambda spec, plan: ({}, 0),
    ) -> None:  # fmt: skip
        """`knobs` tells the values of a service's knobs under a plan, and their version."""
        self._fleet = fleet
        self._files = files
        self._canary = canary
        self._settings = settings
        self._knobs = knobs

    async def stage(
        self,
        spec: ServiceSpec,
        plan: Plan,
        *,
        running_epoch: int = 0,
        among: Collection[AgentId] | None = None,
        times: RouteTimes | None = None,
    ) -> RolledOut:
        """Load, warm up and prove the plan without serving by it. Raises RolloutError; `abandon` it then.

        An agent without room may drop what only plans before `running_epoch` needed, sooner than usual. The route tells the
        addresses of the agents `among` which the service may come to run, by default of all, and what the plan should take.
        """
        needed, files = await asyncio.to_thread(self._needed, plan)
        agents = sorted(needed.keys() | self.ingresses())
        results = await asyncio.gather(
            *(self._make_room_and_prepare(spec, plan, agent, needed.get(agent, []), running_epoch) for agent in agents),
            return_exceptions=True,
        )
        fetched = 0
        failed: dict[AgentId, TidegateError] = {}
        for agent, result in zip(agents, results, strict=True):
            if isinstance(result, Prepared):
                fetched += sum(shard.fetched_bytes for shard in result.shards)
            elif isinstance(result, TidegateError):
                failed[agent] = result
            else:
                raise result
        for agent in failed.keys() & plan.agents():
            raise RolloutError(f"{agent} could not prepare its shards: {failed[agent]}")
        plan, dropped = _without_fallbacks(plan, frozenset(failed))
        return RolledOut(self._route(spec, plan, files, among, times), fetched, dropped)

    async def prove(self, route: Route) -> None:
        """Run the service's sample request end to end under the new route. Raises RolloutError."""
        if route.spec.sample is None:
            return
        try:
            await self._canary.check(route, self._settings.canary_deadline_ms)
        except TidegateError as error:
            raise RolloutError(f"the canary request failed: {error}") from error

    async def activate(self, route: Route) -> list[AgentId]:
        """Switch every ingress to the route; the agents that could not be told. They must say hello again, and catch up then."""
        agents = sorted(self.ingresses())
        results = await asyncio.gather(*(self.activate_on(agent, route) for agent in agents), return_exceptions=True)
        missed = []
        for agent, result in zip(agents, results, strict=True):
            if isinstance(result, BaseException):
                log.warning("%s did not take plan %d: %s", agent, route.plan.epoch, result)
                missed.append(agent)
                if (connection := self._fleet.connection(agent)) is not None:
                    connection.abort()
        return missed

    async def activate_on(self, agent: AgentId, route: Route) -> None:
        """Tell one ingress; its own shards must have been prepared. Raises TidegateError."""
        await self._connection(agent).call(Activate(route=route), timeout_s=10.0)

    async def prepare_on(self, agent: AgentId, route: Route) -> Prepared:
        """Bring one agent that came back up to the running route. Raises TidegateError."""
        needed, _ = await asyncio.to_thread(self._needed, route.plan)
        return await self._prepare(route.spec, route.plan, agent, needed.get(agent, []))

    def route(
        self, spec: ServiceSpec, plan: Plan, among: Collection[AgentId] | None = None, times: RouteTimes | None = None
    ) -> Route:
        """The route of a plan as the fleet's addresses are now. May take seconds when shard files must be made."""
        _, files = self._needed(plan)
        return self._route(spec, plan, files, among, times)

    def _route(
        self,
        spec: ServiceSpec,
        plan: Plan,
        files: dict[str, ShardFile],
        among: Collection[AgentId] | None,
        times: RouteTimes | None,
    ) -> Route:
        values, version = self._knobs(spec, plan)
        return Route(
            spec=spec, plan=plan, addresses=self._fleet.addresses(among), files=files, knobs=values, knobs_version=version,
            times=times,
        )  # fmt: skip

    async def release(self, service: ServiceId, below_epoch: int) -> None:
        """Let agents unload what only older epochs needed; best effort, repeated with the next plan."""
        await self._release(Release(service_id=service, below_epoch=below_epoch))

    async def abandon(self, service: ServiceId, epoch: int) -> None:
        """A plan that was staged will not serve: let agents unload what only it needed; best effort."""
        await self._release(Release(service_id=service, below_epoch=0, abandoned=epoch))

    async def _release(self, message: Release) -> None:
        connected = [agent for agent, member in self._fleet.members.items() if member.connection is not None]
        results = await asyncio.gather(
            *(self._connection(agent).call(message, timeout_s=10.0) for agent in connected), return_exceptions=True
        )
        for agent, result in zip(connected, results, strict=True):
            if isinstance(result, BaseException):
                log.info("%s did not release old shards: %s", agent, result)

    def ingresses(self) -> set[AgentId]:
        """Connected agents that take requests from clients."""
        return {
            agent
            for agent, member in self._fleet.members.items()
            if member.connection is not None and member.facts.ingress_port > 0
        }

    def _needed(self, plan: Plan) -> tuple[dict[AgentId, list[ShardFile]], dict[str, ShardFile]]:
        """Shard files per agent (fallbacks hold whole models), and all of them by key."""
        wanted: dict[AgentId, dict[str, tuple[ModelName, Span]]] = defaultdict(dict)
        for shard in plan.shards():
            wanted[shard.agent][file_key(shard.model, shard.blocks)] = (shard.model, shard.blocks)
        for stage in plan.stages:
            whole = Span(0, stage.lanes[0].shards[-1].blocks.stop)
            for agent in stage.fallback:
                wanted[agent][file_key(stage.model, whole)] = (stage.model, whole)
        keys = {key: which for per_agent in wanted.values() for key, which in per_agent.items()}
        files = {key: self._files.shard_file(model, blocks) for key, (model, blocks) in keys.items()}
        return {agent: [files[key] for key in per_agent] for agent, per_agent in wanted.items()}, files

    async def _make_room_and_prepare(
        self, spec: ServiceSpec, plan: Plan, agent: AgentId, files: list[ShardFile], running_epoch: int
    ) -> Prepared:
        try:
            return await self._prepare(spec, plan, agent, files)
        except OverloadedError as error:
            log.info("%s drops what is older than plan %d to make room: %s", agent, running_epoch, error)
            message = Release(service_id=spec.id, below_epoch=running_epoch)
            await self._connection(agent).call(message, timeout_s=10.0)
            return await self._prepare(spec, plan, agent, files)

    async def _prepare(self, spec: ServiceSpec, plan: Plan, agent: AgentId, files: list[ShardFile]) -> Prepared:
        assets = tuple(sorted(spec.assets.values())) if agent in self.ingresses() else ()
        message = Prepare(service_id=spec.id, epoch=plan.epoch, files=tuple(files), assets=assets)
        answer, _ = await self._connection(agent).call(message, timeout_s=self._settings.prepare_timeout_s)
        if not isinstance(answer, Prepared):
            raise RolloutError(f"{agent} answered a prepare with {type(answer).__name__}")
        for shard in answer.shards:
            if not np.isfinite(shard.golden_error) or shard.golden_error > GOLDEN_TOLERANCE:
                raise RolloutError(
                    f"shard {shard.sha256[:12]} on {agent} differs from the whole model by {shard.golden_error:.2g} (relative)"
                )
        return answer

    def _connection(self, agent: AgentId) -> Connection:
        connection = self._fleet.connection(agent)
        if connection is None:
            raise AgentLostError(f"{agent} is not connected")
        return connection


def _without_fallbacks(plan: Plan, failed: frozenset[AgentId]) -> tuple[Plan, tuple[tuple[str, AgentId], ...]]:
    """The plan without the fallbacks on agents that failed to prepare."""
    dropped = tuple((stage.stage, agent) for stage in plan.stages for agent in stage.fallback if agent in failed)
    if not dropped:
        return plan, ()
    stages = tuple(
        msgspec.structs.replace(stage, fallback=tuple(agent for agent in stage.fallback if agent not in failed))
        for stage in plan.stages
    )
    return msgspec.structs.replace(plan, stages=stages), dropped
