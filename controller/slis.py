"""Service-level indicators: what the ingresses reported, folded into rolling windows that survive restarts."""

from __future__ import annotations

from agents.messages import ServiceReport
from controller.clock import Clock
from controller.state import State
from policies.ids import ServiceId
from sla.contract import Contract
from sla.window import ServiceWindow, WindowStatus


class Slis:
    """One window per service. The controller's clock decides which minute a report belongs to."""

    def __init__(self, state: State, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._windows: dict[ServiceId, ServiceWindow] = {}
        self._dirty: set[ServiceId] = set()

    async def restore(self, services: list[ServiceId]) -> None:
        """Load what was saved."""
        for service in services:
            saved = await self._state.load_window(service)
            if saved is not None:
                self._windows[service] = ServiceWindow.from_bytes(saved)

    def fold(self, services: tuple[ServiceReport, ...]) -> None:
        """Count the requests that ended at one ingress."""
        for service in services:
            if service.ok or service.failed:
                window = self._windows.setdefault(service.service_id, ServiceWindow())
                window.fold(self._clock.wall_s(), service.ok, service.failed, service.latency_buckets)
                self._dirty.add(service.service_id)

    async def save(self) -> None:
        """Write the windows that changed."""
        for service in sorted(self._dirty):
            await self._state.save_window(service, self._windows[service].to_bytes())
            self._dirty.discard(service)

    def status(self, service: ServiceId, contract: Contract) -> WindowStatus:
        """The contract's window as it stands now."""
        window = self._windows.get(service) or ServiceWindow()
        return window.status(self._clock.wall_s(), contract.window_days * 86_400.0)
