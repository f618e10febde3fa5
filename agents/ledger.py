"""What was measured since the last report: counters and sketches, emptied when they are reported."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from agents.messages import ServiceReport, ShardReport, StepReport
from policies.ids import ServiceId
from policies.plan import Span
from sla.sketch import LatencySketch

MAX_FAULTS = 32
MAX_ENTRIES = 256
"""Bounds what one report can hold when the controller is away for long."""


@dataclass(slots=True)
class _Sum:
    count: int = 0
    sum_ms: float = 0.0
    sum_sq_ms: float = 0.0
    items: int = 0
    provider: str = ""

    def add(self, ms: float, items: int = 1) -> None:
        self.count += 1
        self.sum_ms += ms
        self.sum_sq_ms += ms * ms
        self.items += items


@dataclass(slots=True)
class _Service:
    ok: int = 0
    failed: int = 0
    fell_back: int = 0
    copies: int = 0
    latency: LatencySketch = field(default_factory=LatencySketch)
    shards: dict[tuple[str, Span], _Sum] = field(default_factory=dict)
    steps: dict[str, _Sum] = field(default_factory=dict)

    def report(self, service_id: ServiceId, epoch: int) -> ServiceReport:
        return ServiceReport(
            service_id=service_id, epoch=epoch, ok=self.ok, failed=self.failed, fell_back=self.fell_back,
            copies=self.copies,
            latency_buckets=self.latency.to_buckets(),
            shards=tuple(
                ShardReport(
                    stage=stage, blocks=blocks, count=it.count, sum_ms=it.sum_ms, sum_sq_ms=it.sum_sq_ms, items=it.items,
                    provider=it.provider,
                )
                for (stage, blocks), it in self.shards.items()
            ),
            steps=tuple(StepReport(stage=stage, count=it.count, sum_ms=it.sum_ms) for stage, it in self.steps.items()),
        )  # fmt: skip


class Ledger:
    """Filled by the event loop only, so nothing here needs a lock."""

    def __init__(self) -> None:
        self._services: dict[tuple[ServiceId, int], _Service] = {}
        self._faults: deque[str] = deque(maxlen=MAX_FAULTS)

    def request_ended(
        self, service_id: ServiceId, epoch: int, *, ms: float, ok: bool, fell_back: bool, copies: int = 0
    ) -> None:
        """One request that came in here ended; `ms` counts only if it was answered."""
        entry = self._entry(service_id, epoch)
        entry.fell_back += fell_back
        entry.copies += copies
        if ok:
            entry.ok += 1
            entry.latency.add(ms)
        else:
            entry.failed += 1

    def shard_ran(
        self, service_id: ServiceId, epoch: int, *, stage: str, blocks: Span, ms: float, items: int, provider: str
    ) -> None:
        """One shard ran here for `ms`."""
        shards = self._entry(service_id, epoch).shards
        if (stage, blocks) in shards or len(shards) < MAX_ENTRIES:
            it = shards.setdefault((stage, blocks), _Sum())
            it.provider = provider
            it.add(ms, items)

    def step_ran(self, service_id: ServiceId, epoch: int, *, stage: str, ms: float) -> None:
        """One Python stage ran here for `ms`."""
        self._entry(service_id, epoch).steps.setdefault(stage, _Sum()).add(ms)

    def fault(self, sentence: str) -> None:
        """Something that an operator should see; the same sentence is reported once per report."""
        if sentence not in self._faults:
            self._faults.append(sentence[:400])

    def take(self) -> tuple[tuple[ServiceReport, ...], tuple[str, ...]]:
        """All that was measured since the last call, and the faults."""
        services = tuple(entry.report(*key) for key, entry in self._services.items())
        faults = tuple(self._faults)
        self._services.clear()
        self._faults.clear()
        return services, faults

    def _entry(self, service_id: ServiceId, epoch: int) -> _Service:
        key = (service_id, epoch)
        if key not in self._services and len(self._services) >= MAX_ENTRIES:
            self._services.pop(next(iter(self._services)))
        return self._services.setdefault(key, _Service())
