"""The controller as a client of the fleet: the canary of every new plan, and an ingress for those who know only the controller.

No shard ever runs here: stages go to the agents over the same mutual TLS as between agents.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from agents.driver import Driver, DriverSettings, Result
from agents.identity import CONTROLLER_ID
from agents.lanes import LaneSettings
from agents.ledger import Ledger
from agents.messages import ChainDone, Route, RunChain, ServiceReport, Tune
from agents.peers import PeerPool
from agents.routes import RouteTable
from agents.wire import decode_tensors
from controller.models.registry import ModelRegistry
from controller.pki import CertificateAuthority
from policies.ids import ServiceId
from policies.service import ServiceSpec
from sla.errors import PermanentError

TOLERANCE = 1e-3
"""Largest relative difference of a canary's float outputs from the known answer."""


class CanaryError(PermanentError):
    """The sample request was answered wrongly."""

    slug = "canary"


class _RemoteChains:
    """Chains that always start at some agent."""

    def __init__(self, peers: PeerPool) -> None:
        self._peers = peers

    async def run(
        self, message: RunChain, tensors: Mapping[str, np.ndarray]
    ) -> tuple[ChainDone, dict[str, np.ndarray]]:
        first = message.hops[0]
        answer, outputs = await self._peers.call(
            first.agent, first.address, message, tensors, timeout_s=message.remaining_ms / 1000
        )
        if not isinstance(answer, ChainDone):
            raise CanaryError(f"{first.agent} answered a chain with {type(answer).__name__}")
        return answer, outputs


class Gateway:
    """Runs requests from the controller. `serve` sets what its ingress uses; `check` tries a route that nobody uses yet."""

    def __init__(self, ca: CertificateAuthority, registry: ModelRegistry, directory: Path) -> None:
        self._registry = registry
        self._directory = directory
        self._ca = ca
        self._ledger = Ledger()
        self._canary_ledger = Ledger()

    async def start(self) -> None:
        """Dial on demand from now on."""
        identity = await asyncio.to_thread(self._ca.identity_for, CONTROLLER_ID)
        self._peers = PeerPool(CONTROLLER_ID, identity.client_context)
        self._routes = RouteTable(self._directory / "routes")
        self._driver = self._driver_for(self._routes, self._ledger)

    async def stop(self) -> None:
        """Close the connections to agents."""
        self._driver.close()
        await self._peers.close()

    def serve(self, route: Route) -> None:
        """Requests to the controller's own ingress follow this route."""
        self._routes.activate(route)

    def tune(self, message: Tune) -> None:
        """Requests to the controller's own ingress are fed these values from now on."""
        self._routes.tune(message.service_id, message.epoch, message.version, message.knobs)

    def drop(self, service: ServiceId) -> None:
        """Serve it no longer."""
        route = next((route for route in self._routes.all() if route.spec.id == service), None)
        if route is not None:
            self._routes.drop(service, route.plan.epoch + 1)

    @property
    def is_ready(self) -> bool:
        """See `agents.ingress.InferenceService`."""
        return bool(self._routes.all())

    def models(self) -> Mapping[ServiceId, ServiceSpec]:
        """The services that the ingress can answer now."""
        return {route.spec.id: route.spec for route in self._routes.all()}

    async def infer(
        self,
        service_id: ServiceId,
        tensors: Mapping[str, np.ndarray],
        deadline_ms: float,
        *,
        request_id: str | None = None,
    ) -> Result:
        """One request through the controller's ingress; see `Driver.infer`."""
        return await self._driver.infer(service_id, tensors, deadline_ms, request_id=request_id)

    def take_services(self) -> tuple[ServiceReport, ...]:
        """What came in at the controller's own ingress since the last call."""
        return self._ledger.take()[0]

    async def check(self, route: Route, deadline_ms: float) -> None:
        """Run the service's sample under the route. Raises CanaryError when the answer is wrong, or what failed."""
        sample = self._sample(route.spec)
        given = {name.removeprefix("in:"): value for name, value in sample.items() if name.startswith("in:")}
        expected = {name.removeprefix("out:"): value for name, value in sample.items() if name.startswith("out:")}
        with tempfile.TemporaryDirectory(prefix="tidegate-canary-") as directory:
            routes = RouteTable(Path(directory))
            routes.activate(route)
            # The first runs of a plan are slow, and a fallback's answer would prove nothing.
            driver = self._driver_for(routes, self._canary_ledger, DriverSettings(lanes=LaneSettings(hedge=None)))
            try:
                result = await driver.infer(route.spec.id, given, deadline_ms)
            finally:
                driver.close()
                self._canary_ledger.take()  # A canary is nobody's request.
        if result.fell_back:
            raise CanaryError("the sample request was answered only by the fallback")
        for name, value in expected.items():
            difference = _difference(result.tensors.get(name), value)
            if difference > TOLERANCE:
                raise CanaryError(
                    f"the sample's output {name!r} differs from the known answer by {difference:.2g} (relative)"
                )

    def _sample(self, spec: ServiceSpec) -> dict[str, np.ndarray]:
        path = self._registry.blob_path(spec.sample) if spec.sample is not None else None
        if path is None:
            raise CanaryError(f"the sample request of {spec.id} is missing from the model registry")
        return decode_tensors(path.read_bytes())

    def _driver_for(self, routes: RouteTable, ledger: Ledger, settings: DriverSettings | None = None) -> Driver:
        return Driver(
            routes=routes, chain=_RemoteChains(self._peers), ledger=ledger, asset_path=self._registry.blob_path,
            is_broken=self._peers.is_broken, settings=settings, clock=time.monotonic,
        )  # fmt: skip


def _difference(found: np.ndarray | None, expected: np.ndarray) -> float:
    """Largest difference relative to the largest expected magnitude; infinite when kinds or shapes differ."""
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(found, expected) else float("inf")
    scale = max(float(np.abs(expected).max(initial=0.0)), 1e-9)
    worst = float(np.abs(found - expected).max(initial=0.0)) / scale
    return worst if np.isfinite(worst) else float("inf")
