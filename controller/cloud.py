"""The cloud side, on Ray: cloud agents are Ray actors that run the same agent as a board does.

Ray places, restarts and (on a cluster) scales them; it never crosses the edge link. Ray takes seconds to start, so
the controller answers before it is up, and the cloud agent joins when it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.settings import CloudSettings

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20
"""Ray's smallest: tensors travel through Tidegate's own transport, not through Ray's object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOffer:
    """All that a cloud agent needs to enroll."""

    controller: str
    token: str
    ca_fingerprint: str
    directory: Path


class Cloud:
    """Starts Ray and the cloud agents; `state` is a sentence for people."""

    def __init__(self, settings: CloudSettings) -> None:
        self._settings = settings
        self._actors: list[Any] = []
        self.state = "off" if settings.ray == "none" else "starting"
        self.versions: dict[str, str] = {}
        self.is_up = False
        """Whether there is a Ray that takes tasks."""

    @property
    def task_cpus(self) -> float:
        """Cores that a task claims: none of a local Ray, whose only core belongs to the cloud agent."""
        return 0.0 if self._settings.ray == "local" else 1.0

    async def start(self, offers: list[JoinOffer]) -> None:
        """Returns when all cloud agents were started. A cloud that can't be had is a state, not an error."""
        if self._settings.ray == "none":
            return
        try:
            await asyncio.to_thread(self._start, offers)
            self.state = f"{len(self._actors)} cloud agent{'s' if len(self._actors) != 1 else ''} on Ray"
        except Exception as error:  # Ray raises many kinds; without a cloud the edge still serves.
            log.exception("Ray did not start")
            self.state = f"unavailable: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}"

    def _start(self, offers: list[JoinOffer]) -> None:
        # Ray reads these when it is imported.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_TPU_MAX_CONCURRENT_CONNECTIONS", "1")
        import ray

        self.versions = {"ray": ray.__version__}
        if not ray.is_initialized():
            if self._settings.ray == "local":
                ray.init(
                    num_cpus=1,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    configure_logging=False,
                )
            else:
                ray.init(address=self._settings.ray, log_to_driver=False, configure_logging=False)
        self.is_up = True
        actor = ray.remote(num_cpus=self._settings.num_cpus, max_restarts=-1)(CloudAgent)
        self._actors = [actor.remote(offer) for offer in offers[: self._settings.agents]]
        ray.get([a.ready.remote() for a in self._actors], timeout=60)

    async def stop(self) -> None:
        """Stop the agents, and Ray if it was started here."""
        if not self.is_up:
            return
        self.is_up = False
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        import ray

        if self._settings.ray == "local":
            ray.shutdown()


class CloudAgent:
    """The actor: one Tidegate agent on an event loop of its own."""

    def __init__(self, offer: JoinOffer) -> None:
        import threading

        self._thread = threading.Thread(target=self._run, args=(offer,), daemon=True)
        self._thread.start()

    def _run(self, offer: JoinOffer) -> None:
        from agents.agent import main

        status = main(
            [
                "--controller", offer.controller, "--token", offer.token, "--ca-fingerprint", offer.ca_fingerprint,
                "--platform", "ray", "--cloud", "--dir", str(offer.directory), "--embedded",
            ]
        )  # fmt: skip
        log.warning("the cloud agent ended with status %s", status)
        os._exit(status or 1)  # Ray restarts the actor.

    def ready(self) -> bool:
        """True once the actor's process runs."""
        return self._thread.is_alive()
