"""Where services run, as this agent was last told: one route per service, newest epoch only, kept on disk."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from agents.messages import Address, Hop, Route, ShardFile, file_key
from policies.ids import AgentId, BlobHash, ServiceId, StageName
from policies.knobs import knobs_of
from policies.plan import Lane, Span, StagePlan
from sla.errors import ConflictError, ModelError, NotFoundError

log = logging.getLogger("tidegate.routes")


class RouteTable:
    """The newest route of each service. What was activated survives a restart of the agent."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._routes = {route.spec.id: route for route in _read_all(directory)}
        self._changed = asyncio.Event()

    def current(self, service_id: ServiceId) -> Route:
        """The newest route. Raises NotFoundError that names the services that are served here."""
        route = self._routes.get(service_id)
        if route is None:
            served = ", ".join(sorted(self._routes)) or "none yet"
            raise NotFoundError(f"No service {service_id!r} is served here; served are: {served}.")
        return route

    def all(self) -> tuple[Route, ...]:
        """One route per service."""
        return tuple(self._routes.values())

    def epochs(self) -> dict[ServiceId, int]:
        """The epoch that is held per service."""
        return {service_id: route.plan.epoch for service_id, route in self._routes.items()}

    def activate(self, route: Route) -> None:
        """Serve new requests by this route; durable when it returns. The same epoch again is fine.

        Raises ConflictError if a newer epoch is held, ModelError if the route contradicts itself.
        """
        held = self._routes.get(route.spec.id)
        if held is not None and route.plan.epoch < held.plan.epoch:
            raise ConflictError(
                f"Epoch {route.plan.epoch} of {route.spec.id} is older than epoch {held.plan.epoch}, which is held here.",
                current_version=held.plan.epoch,
            )
        _check(route)
        if held is not None and held.plan.epoch == route.plan.epoch and held.knobs_version > route.knobs_version:
            # The route was made before the knobs were turned, and came after.
            route = msgspec.structs.replace(route, knobs=held.knobs, knobs_version=held.knobs_version)
        path = _file_of(self._directory, route.spec.id)
        _write_durably(path, msgspec.msgpack.encode(route))
        self._routes[route.spec.id] = route
        self._changed.set()
        self._changed = asyncio.Event()

    def tune(self, service_id: ServiceId, epoch: int, version: int, knobs: Mapping[str, float]) -> bool:
        """Values for the requests that come in from now on; durable when it returns. False if another epoch or newer values are held."""
        held = self._routes.get(service_id)
        if held is None or held.plan.epoch != epoch or version <= held.knobs_version:
            return False
        known = {key for key, _, _ in knobs_of(held.spec)}
        values = {key: value for key, value in knobs.items() if key in known and math.isfinite(value)}
        tuned = msgspec.structs.replace(held, knobs=values, knobs_version=version)
        _write_durably(_file_of(self._directory, service_id), msgspec.msgpack.encode(tuned))
        self._routes[service_id] = tuned
        return True

    def drop(self, service_id: ServiceId, below_epoch: int) -> None:
        """Forget the route of a service if its epoch is below `below_epoch`."""
        held = self._routes.get(service_id)
        if held is not None and held.plan.epoch < below_epoch:
            _file_of(self._directory, service_id).unlink(missing_ok=True)
            del self._routes[service_id]

    async def newer_than(self, service_id: ServiceId, epoch: int, *, timeout_s: float) -> Route | None:
        """The route of a later epoch as soon as there is one; None if none came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    route = self._routes.get(service_id)
                    if route is not None and route.plan.epoch > epoch:
                        return route
                    await self._changed.wait()
        except TimeoutError:
            return None


def whole_span(planned: StagePlan) -> Span:
    """All blocks of the stage's model."""
    first = planned.lanes[0].shards
    return Span(first[0].blocks.start, first[-1].blocks.stop)


def files_for(route: Route, agent: AgentId) -> tuple[ShardFile, ...]:
    """The shard files that `agent` holds under this route: its shards, and the whole models that it is a fallback for."""
    keys = {file_key(shard.model, shard.blocks) for shard in route.plan.shards() if shard.agent == agent}
    keys |= {file_key(s.model, whole_span(s)) for s in route.plan.stages if agent in s.fallback}
    return tuple(route.files[key] for key in sorted(keys))


def lane_hops(route: Route, lane: Lane, final_outputs: tuple[str, ...]) -> tuple[Hop, ...]:
    """The chain of a lane; its last hop answers `final_outputs`."""
    placed = [(shard.stage, shard.model, shard.blocks, shard.agent) for shard in lane.shards]
    return _hops(route, placed, final_outputs)


def fallback_hops(route: Route, planned: StagePlan, agent: AgentId, final_outputs: tuple[str, ...]) -> tuple[Hop, ...]:
    """The chain of one hop in which `agent` runs the whole model."""
    return _hops(route, [(planned.stage, planned.model, whole_span(planned), agent)], final_outputs)


def pinned_blobs(routes: Iterable[Route], agent: AgentId) -> frozenset[BlobHash]:
    """What must stay in the cache so that a restarted agent can serve these routes."""
    pinned: set[BlobHash] = set()
    for route in routes:
        pinned.update(route.spec.assets.values())
        for file in files_for(route, agent):
            pinned.add(file.sha256)
            if file.golden_sha256 is not None:
                pinned.add(file.golden_sha256)
    return frozenset(pinned)


def _hops(
    route: Route, placed: Sequence[tuple[str, str, Span, AgentId]], final_outputs: tuple[str, ...]
) -> tuple[Hop, ...]:
    formats = {stage.name: stage.activations for stage in route.spec.onnx_stages()}
    hops = []
    for index, (stage, model, blocks, agent) in enumerate(placed):
        file = route.files[file_key(model, blocks)]
        outputs = final_outputs if index == len(placed) - 1 else file.outputs
        hops.append(
            Hop(
                agent=agent, address=route.addresses.get(agent, Address("", 0)), stage=stage, blocks=blocks,
                sha256=file.sha256, inputs=file.inputs, outputs=outputs, activations=formats.get(StageName(stage), "fp32"),
            )
        )  # fmt: skip
    return tuple(hops)


def _check(route: Route) -> None:
    """A route that is activated can be followed to its end. Raises ModelError."""
    planned = {stage.stage for stage in route.plan.stages if stage.lanes and all(lane.shards for lane in stage.lanes)}
    for stage in route.spec.onnx_stages():
        if stage.name not in planned:
            raise ModelError(f"The route of {route.spec.id} places stage {stage.name!r} nowhere.")
    for stage_plan in route.plan.stages:
        keys = [file_key(shard.model, shard.blocks) for lane in stage_plan.lanes for shard in lane.shards]
        keys += [file_key(stage_plan.model, whole_span(stage_plan))] if stage_plan.fallback else []
        agents = {shard.agent for lane in stage_plan.lanes for shard in lane.shards} | set(stage_plan.fallback)
        missing = [key for key in keys if key not in route.files] or [a for a in agents if a not in route.addresses]
        if missing:
            raise ModelError(f"The route of {route.spec.id} names {missing[0]} but does not say where it is.")


def _file_of(directory: Path, service_id: str) -> Path:
    return directory / f"{hashlib.sha256(service_id.encode()).hexdigest()[:32]}.route"


def _read_all(directory: Path) -> list[Route]:
    routes = []
    for path in sorted(directory.glob("*.route")):
        try:
            routes.append(msgspec.msgpack.decode(path.read_bytes(), type=Route))
        except (msgspec.DecodeError, OSError) as error:
            # The controller sends it again; an agent that does not start would be worse.
            log.warning("route file %s is unreadable and ignored: %s", path.name, error)
    return routes


def _write_durably(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
