"""A request, from its first tensor to its answer: steps here, lanes of shards wherever the route says (`agents.lanes`)."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from agents.lanes import Chains, LaneRunner, LaneSettings, LaneWork
from agents.ledger import Ledger
from agents.messages import Route
from agents.routes import RouteTable
from agents.steps import StepContext, run_step
from policies.ids import AgentId, BlobHash, ServiceId
from policies.knobs import bounded, knob_key
from policies.plan import Span, StagePlan, items_of
from policies.service import OnnxStage, PythonStage, ServiceSpec
from sla.errors import (
    DeadlineExceededError,
    InvalidInputError,
    ModelError,
    NotFoundError,
    OverloadedError,
    RetryableError,
    TidegateError,
)

log = logging.getLogger("tidegate.driver")
Tensors = Mapping[str, np.ndarray]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """How a request is carried through."""

    max_in_flight: int = 64
    """Requests that may be under way; more are shed."""
    lanes: LaneSettings = field(default_factory=LaneSettings)
    step_threads: int = 2


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one request."""

    tensors: dict[str, np.ndarray]
    """The service's outputs by name."""
    epoch: int
    fell_back: bool
    """True if any part ran elsewhere than the plan says."""
    timings_ms: dict[str, float]
    """Wall time per stage."""


@dataclass(slots=True)
class _Request:
    id: str
    route: Route
    """Replaced when the request goes on under a newer route."""
    tensors: dict[str, np.ndarray]
    began_s: float
    deadline_s: float
    models: dict[str, str]
    fell_back: bool = False
    copies: int = 0
    timings_ms: dict[str, float] = field(default_factory=dict)


class Driver:
    """Carries requests through the pipeline of their service."""

    def __init__(
        self,
        *,
        routes: RouteTable,
        chain: Chains,
        ledger: Ledger,
        asset_path: Callable[[BlobHash], Path | None],
        is_broken: Callable[[AgentId], bool],
        settings: DriverSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routes = routes
        self._ledger = ledger
        self._asset_path = asset_path
        self._settings = settings or DriverSettings()
        self._clock = clock
        self._lanes = LaneRunner(chain, is_broken, self._settings.lanes, clock)
        self._steps = ThreadPoolExecutor(self._settings.step_threads, thread_name_prefix="step")
        self._draining = False
        self.in_flight = 0

    def drain(self) -> None:
        """Take nothing new; what is under way goes on."""
        self._draining = True

    def close(self) -> None:
        """Give the threads back."""
        self._steps.shutdown(wait=False, cancel_futures=True)

    async def infer(
        self, service_id: ServiceId, tensors: Tensors, deadline_ms: float, *, request_id: str | None = None
    ) -> Result:
        """The service's answer, within `deadline_ms` from now.

        Raises NotFoundError (no such service here), InvalidInputError (bad request), OverloadedError (shed),
        DeadlineExceededError, and RetryableError when no agent that could run a stage was left.
        """
        route = self._routes.current(service_id)
        if self._draining:
            raise OverloadedError("This agent is leaving and takes no new requests.", retry_after_s=5.0)
        if self.in_flight >= self._settings.max_in_flight:
            raise OverloadedError(f"{self.in_flight} requests are under way here already.", retry_after_s=1.0)
        began_s = self._clock()
        request = _Request(
            id=request_id or uuid.uuid4().hex, route=route, tensors=_inputs(route.spec, tensors),
            began_s=began_s, deadline_s=began_s + deadline_ms / 1000, models={s.stage: s.model for s in route.plan.stages},
        )  # fmt: skip
        self.in_flight += 1
        try:
            async with asyncio.timeout(deadline_ms / 1000):
                outputs = await self._carry(request)
        except TimeoutError:
            self._ended(request, began_s, ok=False)
            raise DeadlineExceededError(f"The request had no answer within its {deadline_ms:.0f} ms.") from None
        except (InvalidInputError, NotFoundError):
            raise  # the caller's fault spends nobody's error budget
        except Exception:
            self._ended(request, began_s, ok=False)
            raise
        finally:
            self.in_flight -= 1
        self._ended(request, began_s, ok=True)
        return Result(outputs, request.route.plan.epoch, request.fell_back, request.timings_ms)

    def _ended(self, request: _Request, began_s: float, *, ok: bool) -> None:
        self._ledger.request_ended(
            request.route.spec.id, request.route.plan.epoch, ms=(self._clock() - began_s) * 1000, ok=ok,
            fell_back=request.fell_back, copies=request.copies,
        )  # fmt: skip

    async def _carry(self, request: _Request) -> dict[str, np.ndarray]:
        spec = request.route.spec
        for stage in spec.stages:
            began_s = self._clock()
            if isinstance(stage, PythonStage):
                await self._python_stage(request, stage)
            else:
                await self._onnx_stage(request, stage)
            request.timings_ms[stage.name] = (self._clock() - began_s) * 1000
        missing = [spec_out.name for spec_out in spec.outputs if spec_out.name not in request.tensors]
        if missing:
            raise ModelError(f"The pipeline of {spec.id} ended without its output {missing[0]!r}.")
        return {output.name: request.tensors[output.name] for output in spec.outputs}

    # Python stages

    async def _python_stage(self, request: _Request, stage: PythonStage) -> None:
        context = StepContext(assets=self._assets(request.route.spec), models=dict(request.models))
        tensors = dict(request.tensors)
        try:
            new, ms = await asyncio.get_running_loop().run_in_executor(
                self._steps, lambda: _timed(lambda: run_step(stage.step, tensors, context))
            )
        except TidegateError:
            raise
        except Exception as error:  # image and tokenizer libraries raise anything; it ends this request only
            log.exception("step %s failed", stage.step)
            raise ModelError(f"Step {stage.step} failed: {type(error).__name__}: {str(error)[:200]}.") from error
        request.tensors.update(new)
        plan = request.route.plan
        self._ledger.step_ran(plan.service_id, plan.epoch, stage=stage.name, ms=ms)

    def _assets(self, spec: ServiceSpec) -> dict[str, Path]:
        paths = {name: self._asset_path(sha256) for name, sha256 in spec.assets.items()}
        found = {name: path for name, path in paths.items() if path is not None}
        if len(found) < len(paths):
            missing = next(name for name, path in paths.items() if path is None)
            raise RetryableError(f"This agent does not hold the file {missing!r} of {spec.id} yet.", retry_after_s=2.0)
        return found

    # ONNX stages

    async def _onnx_stage(self, request: _Request, stage: OnnxStage) -> None:
        """Run the stage under the request's route; when that fails for good, under a newer route if one comes in time."""
        while True:
            try:
                outputs = await self._stage_once(request, stage)
                break
            except OverloadedError:
                raise
            except RetryableError as error:
                plan = request.route.plan
                left_s = request.deadline_s - self._clock()
                newer = await self._routes.newer_than(plan.service_id, plan.epoch, timeout_s=max(0.0, left_s * 0.6))
                if newer is None:
                    raise
                log.info("request %s goes on under epoch %d: %s", request.id, newer.plan.epoch, error)
                request.route, request.fell_back = newer, True
        request.models[stage.name] = _planned(request.route, stage).model
        for graph_name, name in stage.outputs.items():
            request.tensors[name] = outputs[graph_name]

    async def _stage_once(self, request: _Request, stage: OnnxStage) -> dict[str, np.ndarray]:
        """The stage's graph outputs, the items of all lanes in order."""
        planned = _planned(request.route, stage)
        feed = {graph_name: _tensor(request, name, stage) for graph_name, name in stage.inputs.items()}
        turned = _turned(request.route, stage)
        if stage.axis is None:
            return await self._lane(request, stage, planned, 0, feed | turned, items=1)
        count = _item_count(feed, stage)
        spans = [items_of(lane.share, count) for lane in planned.lanes]
        parts = await _all_or_first_error(
            self._lane(request, stage, planned, number, _cut(feed, span) | turned, items=len(span))
            for number, span in enumerate(spans)
            if len(span) > 0
        )
        return parts[0] if len(parts) == 1 else {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    async def _lane(
        self, request: _Request, stage: OnnxStage, planned: StagePlan, number: int, feed: Tensors, *, items: int
    ) -> dict[str, np.ndarray]:
        work = LaneWork(
            request_id=request.id, route=request.route, stage=stage, planned=planned, number=number, feed=feed, items=items,
            began_s=request.began_s, deadline_s=request.deadline_s,
        )  # fmt: skip
        result = await self._lanes.run(work)
        request.fell_back |= result.fell_back
        request.copies += result.copies
        return result.outputs


def _inputs(spec: ServiceSpec, tensors: Tensors) -> dict[str, np.ndarray]:
    missing = [item.name for item in spec.inputs if item.name not in tensors]
    if missing:
        raise InvalidInputError(
            f"The request to {spec.id} lacks the input {missing[0]!r}.", pointer="/inputs", found=", ".join(tensors) or "nothing",
            accepted=", ".join(item.name for item in spec.inputs),
        )  # fmt: skip
    return {item.name: tensors[item.name] for item in spec.inputs}


def _planned(route: Route, stage: OnnxStage) -> StagePlan:
    for planned in route.plan.stages:
        if planned.stage == stage.name:
            return planned
    raise ModelError(f"Epoch {route.plan.epoch} of {route.spec.id} places stage {stage.name!r} nowhere.")


def _tensor(request: _Request, name: str, stage: OnnxStage) -> np.ndarray:
    tensor = request.tensors.get(name)
    if tensor is None:
        raise ModelError(f"Stage {stage.name} needs the tensor {name!r}, which no earlier stage made.")
    return tensor


def _turned(route: Route, stage: OnnxStage) -> dict[str, np.ndarray]:
    """The stage's knobs as they stand in the request's route."""
    values = {
        knob.input: (knob, route.knobs.get(knob_key(stage.name, knob.name), knob.default)) for knob in stage.knobs
    }
    return {name: np.array(bounded(knob, value), np.float32) for name, (knob, value) in values.items()}


def _item_count(feed: Tensors, stage: OnnxStage) -> int:
    counts = {tensor.shape[0] if tensor.ndim else 0 for tensor in feed.values()}
    if len(counts) != 1 or 0 in counts:
        raise ModelError(f"The inputs of stage {stage.name} must have one and the same number of items, at least 1.")
    return int(counts.pop())


def _cut(feed: Tensors, span: Span) -> dict[str, np.ndarray]:
    return {name: tensor[span.start : span.stop] for name, tensor in feed.items()}


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    began_s = time.perf_counter()
    value = run()
    return value, (time.perf_counter() - began_s) * 1000


async def _all_or_first_error(work: Iterable[Awaitable[T]]) -> list[T]:
    """The values of all in order; on the first error the others are cancelled and that error is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
