"""Service-level indicators: what the ingresses reported, folded into rolling windows that survive restarts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from agents.messages import ServiceReport
from controller.clock import Clock
from controller.state import State
from policies.ids import ServiceId
from sla.assess import Assessment, assess
from sla.attendance import Attendance
from sla.contract import Contract
from sla.errors import InvalidInputError
from sla.window import SLICE_S, ServiceWindow

log = logging.getLogger(__name__)

GATEWAY = "controller"
"""The name under which the controller's own ingress attends."""


class Slis:
    """One window per service. The controller's clock decides which minute a report belongs to."""

    def __init__(self, state: State, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._windows: dict[ServiceId, ServiceWindow] = {}
        self._attendance: dict[ServiceId, Attendance] = {}
        self._heard_s: dict[str, float] = {}
        self._minute: int | None = None
        self._dirty: set[ServiceId] = set()

    async def restore(self, services: list[ServiceId]) -> None:
        """Load what was saved; what cannot be read is begun anew, since no counter is worth a controller that does not start."""
        for service in services:
            saved = await self._state.load_window(service)
            if saved is None:
                continue
            try:
                self._windows[service] = ServiceWindow.from_bytes(saved)
            except InvalidInputError as error:
                log.warning("the SLI counters of %s are begun anew: %s", service, error)

    def fold(self, services: tuple[ServiceReport, ...], ingress: str = GATEWAY) -> None:
        """An ingress was heard of: count the requests that ended there."""
        now_s = self._clock.wall_s()
        self._heard_s[ingress] = now_s
        for service in services:
            if service.ok or service.failed:
                self.window(service.service_id).fold(now_s, service.ok, service.failed, service.latency_buckets)
                attendance = self._attendance.setdefault(service.service_id, Attendance())
                attendance.carried(ingress, now_s, service.ok + service.failed)
                self._dirty.add(service.service_id)

    def tick(self, contracts: Iterable[Contract]) -> None:
        """Once in a while, at least twice a minute: note the promises, and whether the last minute was observed."""
        now_s = self._clock.wall_s()
        minute = int(now_s // SLICE_S)
        for contract in contracts:
            name = ServiceId(contract.service_name)
            window = self.window(name)
            window.promise(contract.throughput_rps, contract.latency_p99_ms)
            if minute != self._minute:
                attendance = self._attendance.setdefault(name, Attendance())
                window.observe((minute - 1) * SLICE_S, attendance.observed(minute * SLICE_S, self._heard_s))
                self._dirty.add(name)
        self._minute = minute
        self._heard_s = {name: at for name, at in self._heard_s.items() if now_s - at < 3600.0}

    async def save(self) -> None:
        """Write the windows that changed."""
        for service in sorted(self._dirty):
            await self._state.save_window(service, self._windows[service].to_bytes())
            self._dirty.discard(service)

    def window(self, service: ServiceId) -> ServiceWindow:
        """The counters of one service, begun now if there are none."""
        return self._windows.setdefault(service, ServiceWindow())

    def assess(self, contract: Contract) -> Assessment:
        """The contract as it stands now."""
        window = self._windows.get(ServiceId(contract.service_name)) or ServiceWindow()
        return assess(window, contract, self._clock.wall_s())
