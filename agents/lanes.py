"""One lane of one stage: its items through the chain that the plan names, or another way when that fails or would be late."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from agents.messages import ChainDone, Hop, Route, RunChain
from agents.queue import RunTimes
from agents.routes import fallback_hops, lane_hops
from policies.hedging import Choice, Hedger, HedgeSettings, Sent, Way
from policies.ids import AgentId, ServiceId
from policies.plan import StagePlan
from policies.route_times import StageTime
from policies.service import OnnxStage
from sla.errors import DeadlineExceededError, InvalidInputError, OverloadedError, TidegateError

log = logging.getLogger("tidegate.lanes")
Tensors = Mapping[str, np.ndarray]
Outputs = dict[str, np.ndarray]
Answer = tuple[ChainDone, Outputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """When another way is tried."""

    patience_floor_s: float = 3.0
    """A lane is given at least this long before it counts as hanging: a peer that hangs is found by its probes, and a
    fallback that is tried too early doubles the load just when there is too much of it."""
    patience_factor: float = 8.0
    """A lane is given this many times its usual duration before it counts as hanging."""
    hedge: HedgeSettings | None = field(default_factory=HedgeSettings)
    """None: every lane goes where it is planned as long as that works."""


class Chains(Protocol):
    """How a stage's shards are run; `agents.chain.ChainRunner` on an agent."""

    async def run(self, message: RunChain, tensors: Tensors) -> Answer:
        """The last hop's outputs. Raises TidegateError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneWork:
    """One lane of one request; times are seconds of the runner's clock."""

    request_id: str
    route: Route
    stage: OnnxStage
    planned: StagePlan
    number: int
    """Of the lane in its stage."""
    feed: Tensors
    items: int
    began_s: float
    """When the request came in."""
    deadline_s: float


@dataclass(frozen=True, slots=True)
class LaneResult:
    """What a lane gave."""

    outputs: Outputs
    fell_back: bool
    """Whether a fallback answered."""
    copies: int = 0
    """Second copies that were sent."""


_Task = asyncio.Task[Answer]


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A lane under way on one way."""

    way: Way
    sent: Sent | None
    """None where nothing is known to compare it with."""
    is_probe: bool


class LaneRunner:
    """Carries lanes of requests that came in here, and learns how long each way takes."""

    def __init__(
        self, chains: Chains, is_broken: Callable[[AgentId], bool], settings: LaneSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.chains = chains
        self.is_broken = is_broken
        self.settings = settings
        self.clock = clock
        self.times = RunTimes()
        """Of whole ways, by service, stage and agents."""
        self._hedgers: dict[ServiceId, tuple[Route, Hedger]] = {}
        self._probes: set[_Task] = set()

    async def run(self, work: LaneWork) -> LaneResult:
        """The lane's outputs.

        Raises the last failure of its ways, or rather one that is no overload: those that are lost may be replaced by a newer
        route, while an overload is to be told at once.
        """
        lane = _Lane(self, work, self._hedger(work.route))
        try:
            return await lane.run()
        finally:
            self._probes.update(probes := lane.leave())
            for probe in probes:
                probe.add_done_callback(self._probes.discard)

    def _hedger(self, route: Route) -> Hedger | None:
        """What is known of the service's agents against this route's expectations; None for an older route, or one without any."""
        if route.times is None or self.settings.hedge is None:
            return None
        held, hedger = self._hedgers.get(route.spec.id) or (route, Hedger(self.settings.hedge))
        if held.plan.epoch > route.plan.epoch:
            return None
        if held.times is not route.times:
            hedger.replanned()
        self._hedgers[route.spec.id] = (route, hedger)
        return hedger


class _Lane:
    """The ways of one lane, and its copies under way. The first answer counts."""

    def __init__(self, runner: LaneRunner, work: LaneWork, hedger: Hedger | None) -> None:
        self._runner, self._work, self._hedger = runner, work, hedger
        outputs = tuple(work.stage.outputs)
        lane = work.planned.lanes[work.number]
        self._ways: dict[Way, tuple[Hop, ...]] = {None: lane_hops(work.route, lane, outputs)}
        for agent in work.planned.fallback:
            self._ways[agent] = fallback_hops(work.route, work.planned, agent, outputs)
        self._times = self._expected() if hedger is not None else None
        # Those with a broken link come only when all others failed.
        self._untried: list[Way] = sorted(self._ways, key=self._is_broken)
        self._under_way: dict[_Task, _Copy] = {}
        self._failure: TidegateError | None = None
        self._copies = 0

    async def run(self) -> LaneResult:
        """See `LaneRunner.run`."""
        if len(self._ways) == 1:
            self._untried.clear()
            _, outputs = await self._attempt(None)
            return LaneResult(outputs, fell_back=False)
        choice = self._choose()
        copy_at_s = self._runner.clock() + choice.second_after_ms / 1000
        self._start(choice.first, is_probe=choice.is_probe)
        while self._under_way:
            may_copy = choice.second in self._untried and math.isfinite(copy_at_s)
            wait_s = max(0.0, copy_at_s - self._runner.clock()) if may_copy else None
            done, _ = await asyncio.wait(self._under_way, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                copy_at_s = math.inf
                self._copy(choice.second)
            for task in done:
                if (answer := self._taken(task)) is not None:
                    return answer
            if not self._under_way and self._untried and self._left_s() > 0:
                self._start(self._untried[0])
        raise self._failure or DeadlineExceededError(f"No time is left for stage {self._work.stage.name}.")

    def leave(self) -> set[_Task]:
        """Take back what is still under way, but for those that were sent to see how long they take: these are returned."""
        now_ms = self._runner.clock() * 1000
        probes = {task for task, copy in self._under_way.items() if copy.is_probe}
        for task, copy in self._under_way.items():
            if copy.is_probe or task.done():
                task.add_done_callback(functools.partial(self._ended, copy))
                continue
            task.cancel()
            if self._hedger is not None and copy.sent is not None:
                self._hedger.late(copy.sent, now_ms)
                self._hedger.ended(copy.sent)
        return probes

    def _expected(self) -> StageTime | None:
        """The stage's times, without fallbacks that the plan lost when it was rolled out."""
        times = None if self._work.route.times is None else self._work.route.times.stages.get(self._work.stage.name)
        if times is None or times.fallbacks.keys() <= self._ways.keys():
            return times
        kept = {agent: way for agent, way in times.fallbacks.items() if agent in self._ways}
        return msgspec.structs.replace(times, fallbacks=kept)

    def _choose(self) -> Choice:
        """The way to begin with, and a second one."""
        work, hedger, times = self._work, self._hedger, self._times
        if hedger is None or times is None or work.route.times is None:
            return Choice(first=self._untried[0])
        now_s = self._runner.clock()
        return hedger.choose(
            now_s * 1000, (now_s - work.began_s) * 1000, work.route.times.promise_ms, times, work.number, work.items,
            lambda agent: not self._runner.is_broken(agent),
        )  # fmt: skip

    def _start(self, way: Way, *, is_probe: bool = False) -> None:
        self._untried.remove(way)
        sent = None
        if self._hedger is not None and self._times is not None:
            time = self._times.way(self._work.number, way)
            sent = None if time is None else self._hedger.sent(time, self._work.items, self._runner.clock() * 1000)
        task = asyncio.ensure_future(self._attempt(way))
        self._under_way[task] = _Copy(way, sent, is_probe)

    def _copy(self, way: Way) -> None:
        """Start a second copy, if the budget has one left; what is under way is late."""
        if self._hedger is None or not self._hedger.may_copy():
            return
        for copy in self._under_way.values():
            if copy.sent is not None:
                self._hedger.late(copy.sent, self._runner.clock() * 1000)
        self._copies += 1
        self._start(way)

    def _taken(self, task: _Task) -> LaneResult | None:
        """What a copy answered; None if it failed. Raises InvalidInputError, which would come from everywhere."""
        copy = self._under_way.pop(task)
        self._ended(copy, task)
        try:
            _, outputs = task.result()
        except InvalidInputError:
            raise
        except TidegateError as error:
            work, agents = self._work, ">".join(hop.agent for hop in self._ways[copy.way])
            log.info("stage %s of %s failed on %s: %s", work.stage.name, work.request_id, agents, error)
            if self._failure is None or isinstance(self._failure, OverloadedError):
                self._failure = error
            return None
        return LaneResult(outputs, fell_back=copy.way is not None, copies=self._copies)

    def _ended(self, copy: _Copy, task: _Task) -> None:
        """Learn from what a copy took."""
        if self._hedger is None or copy.sent is None:
            return
        is_answer = not task.cancelled() and task.exception() is None
        self._hedger.ended(copy.sent, task.result()[0].run_ms if is_answer else ())

    async def _attempt(self, way: Way) -> Answer:
        work, runner, hops = self._work, self._runner, self._ways[way]
        began_s = runner.clock()
        key = f"{work.route.spec.id}/{work.stage.name}/{'>'.join(hop.agent for hop in hops)}"
        patience_s = self._patience_s(key) if self._untried else self._left_s()
        message = RunChain(
            service_id=work.route.spec.id, epoch=work.route.plan.epoch, request_id=work.request_id,
            remaining_ms=patience_s * 1000, hops=hops, modality="text" if work.stage.yields else "vision",
        )  # fmt: skip
        try:
            async with asyncio.timeout(patience_s):
                answer = await runner.chains.run(message, work.feed)
        except TimeoutError:
            raise DeadlineExceededError(f"{hops[0].agent} did not finish within {patience_s * 1000:.0f} ms.") from None
        runner.times.ran(key, runner.clock() - began_s, work.items)
        return answer

    def _patience_s(self, key: str) -> float:
        """How long to wait before a way counts as hanging: a hop that hangs must not eat the whole deadline."""
        settings, left_s = self._runner.settings, self._left_s()
        expected_s = self._runner.times.expected_s(key, self._work.items)
        if expected_s == 0.0:
            return left_s / 2
        return min(left_s / 2, max(settings.patience_factor * expected_s, settings.patience_floor_s))

    def _left_s(self) -> float:
        return self._work.deadline_s - self._runner.clock()

    def _is_broken(self, way: Way) -> bool:
        return any(self._runner.is_broken(hop.agent) for hop in self._ways[way])
