"""Where parts of a large plan are planned: in Ray tasks when there is a Ray, else in processes of this machine.

`controller.zones.plan_part` is a function of bytes to bytes, so the answer does not depend on where it ran.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from controller.cloud import Cloud
from controller.together import run_here
from controller.zones import plan_part

log = logging.getLogger(__name__)

WORTH_PROCESSES_BYTES = 256 << 10
"""Parts that are smaller in sum are planned sooner than a process starts."""
DEADLINE_S = 120.0


class PartRunner:
    """Runs parts side by side; `last` says where they ran last."""

    def __init__(self, cloud: Cloud, worth_bytes: int = WORTH_PROCESSES_BYTES) -> None:
        self._cloud = cloud
        self._worth_bytes = worth_bytes
        self.last = ""

    async def __call__(self, parts: Sequence[bytes]) -> list[bytes]:
        """The answers in the order of the parts. A Ray that fails is no reason to have no plan."""
        if sum(map(len, parts)) < self._worth_bytes:
            self.last = "here"
            return await run_here(parts)
        if self._cloud.is_up:
            try:
                answers = await asyncio.to_thread(on_ray, parts, cpus=self._cloud.task_cpus)
            except ray_errors() as error:
                log.warning("Ray did not plan %d parts: %s", len(parts), error)
            else:
                self.last = "ray"
                return answers
        try:
            answers = await asyncio.to_thread(in_processes, parts)
        except BrokenProcessPool as error:  # Killed for want of memory, for instance.
            log.warning("processes did not plan %d parts: %s", len(parts), error)
            self.last = "here"
            return await run_here(parts)
        self.last = "processes"
        return answers


def in_processes(parts: Sequence[bytes]) -> list[bytes]:
    """One process per core for as long as it takes. Raises BrokenProcessPool."""
    workers = min(len(parts), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(plan_part, parts))


def on_ray(parts: Sequence[bytes], *, cpus: float, deadline_s: float = DEADLINE_S) -> list[bytes]:
    """One Ray task per part; tasks that claim no core are started as many at once as this machine has cores.

    Raises RayError, ConnectionError.
    """
    import ray

    if not ray.is_initialized():
        raise ConnectionError("this controller is not connected to Ray")  # Ray itself would start another one.
    task: Any = ray.remote(num_cpus=cpus, max_retries=2)(plan_part)
    width = len(parts) if cpus > 0 else os.cpu_count() or 1
    ends_s = time.monotonic() + deadline_s
    answers: dict[int, bytes] = {}
    waiting = list(enumerate(parts))[::-1]
    running: dict[Any, int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < width:
                number, part = waiting.pop()
                running[task.remote(part)] = number
            ready, _ = ray.wait(list(running), num_returns=1, timeout=max(0.0, ends_s - time.monotonic()))
            if not ready:
                raise ray.exceptions.GetTimeoutError(f"{len(running) + len(waiting)} parts after {deadline_s:g} s")
            for done in ready:
                answers[running.pop(done)] = ray.get(done)
    finally:
        for left in running:
            ray.cancel(left, force=True)
    return [answers[number] for number in range(len(parts))]


def ray_errors() -> tuple[type[Exception], ...]:
    """What Ray raises when it cannot do something."""
    import ray

    return (ray.exceptions.RayError, ConnectionError)
