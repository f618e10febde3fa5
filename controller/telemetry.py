"""Telemetry in columns: one row per agent or link, each number with the time it was received.

The receiver's clock decides: agents' clocks may be years off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from agents.messages import REPORT_EVERY_MS, PeerReport, Report, ServiceReport, ShardReport
from controller.suspicion import fold_delay, phi
from policies.fleet import LinkView, link_key
from policies.ids import AgentId, ServiceId
from policies.snapshot import StageMeasure, measure_key
from sla.errors import InvalidInputError
from sla.sketch import LatencySketch, check_buckets

Floats = NDArray[np.float64]

MEASURE_WINDOW_MS = 30_000.0
"""Shard times older than this no longer describe the present."""
MAX_COUNT = 10**9
"""Requests, runs or items that one report may claim."""
MAX_SUM = 1e16
"""Milliseconds (or their squares) that one report may claim."""
EPOCHS_KEPT = 64
"""Latency sketches per service are kept for this many of the newest epochs."""

_AGENT_COLUMNS = (
    "seen_ms", "delay_mean_ms", "delay_var_ms2", "cpu", "foreign", "memory_free_bytes", "loaded_bytes", "queue_depth",
    "temperature_c", "closed_ms", "bandwidth_use",
)  # fmt: skip
_LINK_COLUMNS = ("seen_ms", "rtt_ms", "jitter_ms", "bandwidth_bytes_per_s", "broken", "reports", "reports_up")
LINK_PRIOR = (1.2, 12_000.0)
"""A new link is taken to have been broken in 1.2 of its last 12,000 reports (100 minutes)."""


class Table:
    """Rows by key over equally long float columns; rows are added, found and removed in constant time."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = {name: np.full(64, np.nan) for name in columns}
        self._row: dict[str, int] = {}
        self._keys: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._row

    def rows(self) -> tuple[str, ...]:
        """Keys in row order."""
        return tuple(self._keys)

    def key(self, row: int) -> AgentId:
        """The key of a row of agents."""
        return AgentId(self._keys[row])

    def put(self, key: str, **values: float) -> None:
        """Set some columns of a row, adding the row (NaN elsewhere) if it is new."""
        row = self._row.get(key)
        if row is None:
            row = len(self._keys)
            self._row[key] = row
            self._keys.append(key)
            if row == len(next(iter(self._columns.values()))):
                self._columns = {n: np.concatenate([c, np.full(len(c), np.nan)]) for n, c in self._columns.items()}
        for name, value in values.items():
            self._columns[name][row] = value

    def get(self, key: str, column: str) -> float:
        """One number; NaN when it was never reported."""
        return float(self._columns[column][self._row[key]])

    def gather(self, keys: Iterable[str], column: str) -> Floats:
        """One number per key, in their order; NaN for rows that do not exist."""
        rows = np.fromiter((self._row.get(key, -1) for key in keys), dtype=np.int64)
        return np.where(rows < 0, np.nan, self._columns[column][rows])

    def column(self, name: str) -> Floats:
        """A view of one column, in row order."""
        return self._columns[name][: len(self._keys)]

    def remove(self, key: str) -> None:
        """Forget a row (the last row takes its place)."""
        row = self._row.pop(key, None)
        if row is None:
            return
        last = self._keys.pop()
        for column in self._columns.values():
            if last != key:
                column[row] = column[len(self._keys)]
            column[len(self._keys)] = np.nan
        if last != key:
            self._keys[row] = last
            self._row[last] = row


def is_sound(report: ServiceReport) -> bool:
    """True if every number of a service report is one that half a second of work can give."""
    counts = [
        report.ok,
        report.failed,
        report.fell_back,
        report.copies,
        *(s.count for s in report.shards),
        *(s.items for s in report.shards),
    ]
    counts += [step.count for step in report.steps]
    sums = [n for s in report.shards for n in (s.sum_ms, s.sum_sq_ms)] + [step.sum_ms for step in report.steps]
    try:
        check_buckets(report.latency_buckets)
    except InvalidInputError:
        return False
    return all(0 <= n <= MAX_COUNT for n in counts) and all(0.0 <= n <= MAX_SUM for n in sums)


@dataclass(slots=True)
class _Runs:
    """Shard runs of the newest window as (received_ms, count, sum_ms, sum_sq_ms, items, epoch)."""

    stage: str
    entries: deque[tuple[float, int, float, float, int, int]] = field(default_factory=lambda: deque(maxlen=128))
    provider: str = ""

    def measure(self, now_ms: float, epochs: Collection[int] | None) -> StageMeasure | None:
        """Of the runs under plans of these epochs; None: of all."""
        fresh = [
            entry
            for entry in self.entries
            if now_ms - entry[0] <= MEASURE_WINDOW_MS and (epochs is None or entry[5] in epochs)
        ]
        count = sum(entry[1] for entry in fresh)
        if count == 0:
            return None
        mean = sum(entry[2] for entry in fresh) / count
        square = sum(entry[3] for entry in fresh) / count
        return StageMeasure(
            count=count,
            mean_ms=mean,
            std_ms=max(0.0, square - mean * mean) ** 0.5,
            items=sum(entry[4] for entry in fresh) / count,
            age_ms=now_ms - fresh[-1][0],
        )


@dataclass(slots=True)
class _Traffic:
    """Requests of one service: arrivals of the newest window, where they came in, and a sketch per plan epoch."""

    arrivals: deque[tuple[float, AgentId, int]] = field(default_factory=lambda: deque(maxlen=1024))
    per_epoch: dict[int, LatencySketch] = field(default_factory=dict)
    since_ms: dict[int, float] = field(default_factory=dict)
    """When the first request under each plan was reported."""
    fell_back: int = 0
    copies: int = 0


class Telemetry:
    """What agents reported, newest first in mind. Not thread-safe: owned by the event loop."""

    def __init__(self) -> None:
        self.agents = Table(_AGENT_COLUMNS)
        self.links = Table(_LINK_COLUMNS)
        self._links_from: dict[str, set[str]] = {}
        self._links_to: dict[str, set[str]] = {}
        """Keys of links by either end, so that nobody walks over all of them."""
        self._runs: dict[ServiceId, dict[str, _Runs]] = {}
        self._traffic: dict[ServiceId, _Traffic] = {}
        self.dropped = 0
        """Numbers that were out of bounds and not taken."""

    def fold(self, agent: AgentId, report: Report, now_ms: float) -> tuple[ServiceReport, ...]:
        """Take one report; numbers out of bounds are dropped and counted, never propagated. The service reports that were taken."""
        self._fold_arrival(agent, now_ms)
        self.agents.put(
            agent,
            cpu=self._bounded(report.cpu_saturation, 0.0, 1.0),
            foreign=self._bounded(report.foreign_saturation, 0.0, 1.0),
            memory_free_bytes=self._bounded(report.memory_free_bytes, 0.0, 1e15),
            loaded_bytes=self._bounded(report.loaded_bytes, 0.0, 1e15),
            queue_depth=self._bounded(report.queue_depth, 0.0, 1e6),
            temperature_c=self._bounded(report.temperature_c, -60.0, 200.0),
            bandwidth_use=self._bounded(report.memory_bandwidth_use, 0.0, 1.0),
        )
        for peer in report.peers:
            if ">" in peer.peer:
                self.dropped += 1
            else:
                self._fold_link(agent, peer, now_ms)
        sound = tuple(service for service in report.services if is_sound(service))
        self.dropped += len(report.services) - len(sound)
        for service in sound:
            self._fold_service(agent, service, now_ms)
        return sound

    def heard(self, agent: AgentId, now_ms: float) -> None:
        """The agent said hello: it is reachable now, whatever it was before."""
        self.agents.put(
            agent, seen_ms=now_ms, closed_ms=np.nan, delay_mean_ms=REPORT_EVERY_MS, delay_var_ms2=REPORT_EVERY_MS**2 / 4
        )

    def closed(self, agent: AgentId, now_ms: float) -> None:
        """Its control connection broke."""
        if agent in self.agents:
            self.agents.put(agent, closed_ms=now_ms)

    def forget(self, agent: AgentId) -> None:
        """Drop an agent and its links."""
        self.agents.remove(agent)
        for key in self._links_from.pop(agent, set()) | self._links_to.pop(agent, set()):
            src, dst = key.split(">")
            self._links_from.get(src, set()).discard(key)
            self._links_to.get(dst, set()).discard(key)
            self.links.remove(key)

    def suspicion(self, now_ms: float, at_least: float = 0.0) -> dict[AgentId, float]:
        """phi of every agent for which it is at least so much, computed over the columns at once."""
        silence = now_ms - self.agents.column("seen_ms")
        # Reports that queued up behind a pause arrive at once; that does not make the agent a faster one.
        mean = np.maximum(self.agents.column("delay_mean_ms"), REPORT_EVERY_MS)
        values = phi(silence, mean, np.sqrt(self.agents.column("delay_var_ms2")))
        return {self.agents.key(int(row)): float(values[row]) for row in np.flatnonzero(values >= at_least)}

    def broken_towards(self, agent: AgentId, now_ms: float) -> bool:
        """True if some peer reported in the last seconds that it can no longer reach the agent."""
        return any(
            self.links.get(key, "broken") == 1.0 and now_ms - self.links.get(key, "seen_ms") < 5_000
            for key in self._links_to.get(agent, ())
        )

    def link_views(self, now_ms: float, among: Collection[AgentId] | None = None) -> dict[str, LinkView]:
        """The links whose round trip was measured: all of them, or those between two of the agents given."""
        views = {}
        for key in self.links.rows() if among is None else self._links_among(among):
            rtt = self.links.get(key, "rtt_ms")
            if np.isnan(rtt):
                continue
            src, dst = key.split(">")
            views[key] = LinkView(
                src=AgentId(src),
                dst=AgentId(dst),
                rtt_ms=rtt,
                jitter_ms=self._or(self.links.get(key, "jitter_ms"), 0.0),
                bandwidth_bytes_per_s=self._or(self.links.get(key, "bandwidth_bytes_per_s"), 60e6),
                age_ms=now_ms - self.links.get(key, "seen_ms"),
                availability=self._link_availability(key),
            )
        return views

    def _links_among(self, agents: Collection[AgentId]) -> list[str]:
        some = frozenset(agents)
        keys = (key for agent in agents for key in sorted(self._links_from.get(agent, ())))
        return [key for key in keys if key.split(">")[1] in some]

    def measures(
        self, service: ServiceId, now_ms: float, alike: Mapping[str, Collection[int]] = MappingProxyType({})
    ) -> dict[str, StageMeasure]:
        """What was measured of a service's shards and steps, by `measure_key`.

        Of the stages in `alike` only runs under plans of these epochs count (see `PlanBook.alike`).
        """
        found = {key: runs.measure(now_ms, alike.get(runs.stage)) for key, runs in self._runs.get(service, {}).items()}
        return {key: measure for key, measure in found.items() if measure is not None}

    def provider(self, service: ServiceId, key: str) -> str:
        """The execution provider that really ran a shard, '' when unknown."""
        runs = self._runs.get(service, {}).get(key)
        return runs.provider if runs else ""

    def offered_rps(self, service: ServiceId, now_ms: float, window_ms: float = 15_000.0) -> float:
        """Requests per second that ended in the newest window, over all ingresses."""
        traffic = self._traffic.get(service)
        if traffic is None:
            return 0.0
        return sum(n for at, _, n in traffic.arrivals if now_ms - at <= window_ms) / (window_ms / 1000)

    def entry(self, service: ServiceId, now_ms: float, window_ms: float = 30_000.0) -> AgentId | None:
        """The agent at which most requests of the newest window came in."""
        traffic = self._traffic.get(service)
        counts: dict[AgentId, int] = {}
        for at, agent, n in traffic.arrivals if traffic else ():
            if now_ms - at <= window_ms:
                counts[agent] = counts.get(agent, 0) + n
        return max(counts, key=lambda agent: counts[agent]) if counts else None

    def epoch_sketch(self, service: ServiceId, epoch: int) -> LatencySketch | None:
        """Latencies of the requests that ran under one plan."""
        traffic = self._traffic.get(service)
        return traffic.per_epoch.get(epoch) if traffic else None

    def epoch_rps(self, service: ServiceId, epoch: int, now_ms: float) -> float:
        """Requests per second since the first one under a plan; 0 before."""
        traffic = self._traffic.get(service)
        since_ms = traffic.since_ms.get(epoch) if traffic else None
        if traffic is None or since_ms is None:
            return 0.0
        return float(traffic.per_epoch[epoch].count) / max(1.0, (now_ms - since_ms) / 1000.0)

    def fell_back(self, service: ServiceId) -> int:
        """Requests that needed a fallback, ever."""
        traffic = self._traffic.get(service)
        return traffic.fell_back if traffic else 0

    def copies(self, service: ServiceId) -> int:
        """Second copies of lanes that ingresses sent, ever."""
        traffic = self._traffic.get(service)
        return traffic.copies if traffic else 0

    def _fold_arrival(self, agent: AgentId, now_ms: float) -> None:
        if agent not in self.agents:
            self.heard(agent, now_ms)
        mean, var = fold_delay(
            self.agents.get(agent, "delay_mean_ms"),
            self.agents.get(agent, "delay_var_ms2"),
            now_ms - self.agents.get(agent, "seen_ms"),
        )
        self.agents.put(agent, seen_ms=now_ms, delay_mean_ms=mean, delay_var_ms2=var)

    def _fold_link(self, agent: AgentId, peer: PeerReport, now_ms: float) -> None:
        key = link_key(agent, peer.peer)
        if key not in self.links:
            self._links_from.setdefault(agent, set()).add(key)
            self._links_to.setdefault(peer.peer, set()).add(key)
        self.links.put(key, seen_ms=now_ms, broken=float(peer.broken))
        if not peer.broken or self._is_heard(peer.peer, now_ms):
            # A peer that is gone takes its links with it: that is the device's failure, not the link's.
            reports, up = (self._or(self.links.get(key, column), 0.0) for column in ("reports", "reports_up"))
            self.links.put(key, reports=reports + 1, reports_up=up + (not peer.broken))
        if not peer.broken:
            self.links.put(
                link_key(agent, peer.peer),
                rtt_ms=self._bounded(peer.rtt_ms, 0.0, 1e5),
                jitter_ms=self._bounded(peer.jitter_ms, 0.0, 1e5),
                bandwidth_bytes_per_s=self._bounded(peer.bandwidth_bytes_per_s, 1.0, 1e12),
            )

    def _fold_service(self, agent: AgentId, report: ServiceReport, now_ms: float) -> None:
        traffic = self._traffic.setdefault(report.service_id, _Traffic())
        if report.ok or report.failed:
            traffic.arrivals.append((now_ms, agent, report.ok + report.failed))
            traffic.fell_back += report.fell_back
            traffic.copies += report.copies
            sketch = traffic.per_epoch.setdefault(report.epoch, LatencySketch())
            traffic.since_ms.setdefault(report.epoch, now_ms)
            sketch.add_buckets(report.latency_buckets)
            while len(traffic.per_epoch) > EPOCHS_KEPT:
                oldest = min(traffic.per_epoch)
                del traffic.per_epoch[oldest], traffic.since_ms[oldest]
        runs = self._runs.setdefault(report.service_id, {})
        for shard in report.shards:
            self._fold_runs(runs, agent, shard, report.epoch, now_ms)
        for step in report.steps:
            entry = runs.setdefault(measure_key(step.stage, agent, 0, 0), _Runs(step.stage))
            square = step.sum_ms**2 / max(1, step.count)
            entry.entries.append((now_ms, step.count, step.sum_ms, square, step.count, report.epoch))

    def _fold_runs(self, runs: dict[str, _Runs], agent: AgentId, shard: ShardReport, epoch: int, now_ms: float) -> None:
        key = measure_key(shard.stage, agent, shard.blocks.start, shard.blocks.stop)
        entry = runs.setdefault(key, _Runs(shard.stage))
        entry.entries.append((now_ms, shard.count, shard.sum_ms, shard.sum_sq_ms, shard.items, epoch))
        entry.provider = shard.provider

    def _is_heard(self, agent: str, now_ms: float) -> bool:
        """Whether the agent itself reported just now."""
        return agent in self.agents and now_ms - self.agents.get(agent, "seen_ms") <= 2.0 * REPORT_EVERY_MS

    def _link_availability(self, key: str) -> float:
        """Share of the reports in which a link worked."""
        reports, up = (self._or(self.links.get(key, column), 0.0) for column in ("reports", "reports_up"))
        broken, prior = LINK_PRIOR
        return (prior - broken + up) / (prior + reports)

    def _bounded(self, value: float | None, low: float, high: float) -> float:
        if value is None:
            return float("nan")
        if not low <= value <= high:
            self.dropped += 1
            return float("nan")
        return float(value)

    @staticmethod
    def _or(value: float, default: float) -> float:
        return default if np.isnan(value) else value
