"""What a plan would do under a snapshot's load: the whole latency distribution, and everything else that is judged.

Stages run one after the other (their times convolve), the lanes of a stage side by side (the slowest counts), the shards of a
lane one after the other. Each hop pays a link (round trip, bytes over bandwidth, jitter) and a run; what a request does on one agent in one go
also pays its queue (`policies.queues`, loaded by all services). Answers return along the chain, so a link is crossed both ways.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from policies.costs import CostModel, PredictSettings, required_rps
from policies.decision import Prediction
from policies.fleet import AgentView
from policies.ids import AgentId, ServiceId, StageName
from policies.latency import Course, Distribution, Grid, Queue, Track, normal_cdf_at, pipelines
from policies.limits import Held, accuracy_of, foreign_memory, held_by, memory_of, usable_bytes
from policies.plan import Lane, Plan, Span, StagePlan, file_key, mean_items
from policies.queues import MAX_BUSY, Load, Spell, waits_of
from policies.service import OnnxStage, PythonStage
from policies.snapshot import Snapshot
from sla.contract import SHARE_OF, Percentile

TAILNESS: dict[Percentile, float] = {
    name: NormalDist().inv_cdf(share) / NormalDist().inv_cdf(0.99) for name, share in SHARE_OF.items()
}
"""How far out each percentile lies: 0 for the median, 1 for the p99."""
EXACT_AVAILABILITY_AGENTS = 8
MET_AGAIN = 1.0 / 3.0
"""Correlation of the waits of one request on one link. Fitted to requests that queue one by one on links of plans with four to six transfers each
way, at utilisations of 0.1 to 0.75: their standard deviation lies between that of waits that are independent and of such that are all alike."""
LinkUp = Callable[[AgentId, AgentId], float]
"""Share of time in which the way between two agents works."""


@dataclass(slots=True)
class _LaneTime:
    """One lane before it is put on a grid: what adds up, and the queues it stands in."""

    mean_ms: float = 0.0
    variance: float = 0.0
    jitter_variance: float = 0.0
    queues: list[Queue] = field(default_factory=list)
    """Those that it stands in, see `policies.queues.waits_of`."""

    def expected_ms(self) -> float:
        return self.mean_ms + sum(queue.mean_ms for queue in self.queues)

    def spread(self) -> float:
        return self.variance + sum(queue.second_ms2() for queue in self.queues)


@dataclass(slots=True)
class _Wire:
    """All transfers of one request in one direction of a link, which wait for those of other requests, first come, first served."""

    transfers: int = 0
    total_ms: float = 0.0
    squares_ms2: float = 0.0
    cubes_ms3: float = 0.0
    wait_ms: float = 0.0
    """Mean wait of one transfer, and its part in the variance of all of them, once `settle` was called."""
    wait_variance: float = 0.0

    def add(self, transfer_ms: float) -> None:
        square = transfer_ms * transfer_ms
        self.transfers += 1
        self.total_ms += transfer_ms
        self.squares_ms2 += square
        self.cubes_ms3 += square * transfer_ms

    def settle(self, rate_rps: float) -> None:
        """Source: Pollaczek-Khinchine for E[W], Takacs for E[W^2] = 2 E[W]^2 + rate E[S^3] / (3 (1 - busy)).

        Requests that meet once meet again at their next transfers, so the waits of one request are partly alike.
        """
        rate_per_ms = rate_rps / 1000.0
        free = 1.0 - min(rate_per_ms * self.total_ms, MAX_BUSY)
        self.wait_ms = rate_per_ms * self.squares_ms2 / (2.0 * free)
        alone = self.wait_ms * self.wait_ms + rate_per_ms * self.cubes_ms3 / (3.0 * free)
        self.wait_variance = alone * (1.0 + MET_AGAIN * (self.transfers - 1))


@dataclass(slots=True)
class _Totals:
    """What a walk over a plan adds up."""

    rate_rps: float
    stages: list[list[_LaneTime]] = field(default_factory=list)
    wires: dict[tuple[AgentId, AgentId], _Wire] = field(default_factory=dict)
    """What a request carries over each link, by direction ..."""
    carried: list[tuple[_LaneTime, _Wire]] = field(default_factory=list)
    """... and every transfer of a lane, which waits there."""
    busy_ms: dict[AgentId, float] = field(default_factory=dict)
    """Run time per request on each agent."""
    by_stage: dict[tuple[AgentId, str], float] = field(default_factory=dict)
    measured_ms: float = 0.0
    run_ms: float = 0.0
    energy_j: float = 0.0


@dataclass(frozen=True, slots=True)
class Walked:
    """What the lanes of a plan add up to, before any distribution."""

    loads: dict[AgentId, Load]
    totals: _Totals

    @property
    def saturation(self) -> float:
        """Utilisation of the busiest agent of the plan, at most 1."""
        return max((min(1.0, self.loads[a].busy) for a in self.totals.busy_ms), default=0.0)

    @property
    def jitter_ms(self) -> float:
        return math.sqrt(
            sum(max((lane.jitter_variance for lane in lanes), default=0.0) for lanes in self.totals.stages)
        )


class Predictor:
    """Predicts plans of one service under one snapshot; build it once, ask it for many plans."""

    def __init__(
        self,
        snapshot: Snapshot,
        service_id: ServiceId,
        settings: PredictSettings | None = None,
        rate_rps: float | None = None,
    ) -> None:
        """`rate_rps`: predict for this load, whatever is promised or offered. Raises NotFoundError for an unknown service."""
        self.costs = CostModel(snapshot, settings)
        self.settings = self.costs.settings
        self.view = self.costs.view(service_id)
        self.entry = self.costs.entry(self.view)
        self.rate_rps = required_rps(self.view) if rate_rps is None else rate_rps
        self.background = self.costs.background(service_id)
        self.foreign_memory = foreign_memory(self.costs, service_id)
        running = self.view.running
        self.running_held: Held = held_by(self.costs, self.view, running) if running is not None else {}
        self._stages = {stage.name: stage for stage in self.view.spec.onnx_stages()}
        self._bias = self._model_bias()

    def predict(self, plan: Plan) -> Prediction:
        """Raises NotFoundError when the plan names an agent or a model that the snapshot does not have."""
        return self.predict_all([plan])[0]

    def predict_all(self, plans: Sequence[Plan]) -> list[Prediction]:
        """`predict` of each plan, with their distributions in one pass."""
        return self.judged([(plan, self.walked(plan)) for plan in plans])

    def walked(self, plan: Plan) -> Walked:
        """What a plan's lanes add up to, whatever its fallbacks: the cheap part of a prediction."""
        loads, spells = self._loads(plan, self.rate_rps)
        return Walked(loads, self._walk(plan, loads, spells, self.rate_rps))

    def judged(self, walked: Sequence[tuple[Plan, Walked]]) -> list[Prediction]:
        """The predictions of plans whose lanes were walked, with their distributions in one pass."""
        times = pipelines([self._course(one.totals) for _, one in walked]) if walked else []
        return [self._judged(plan, one, spread) for (plan, one), spread in zip(walked, times, strict=True)]

    def _judged(self, plan: Plan, walked: Walked, times: Distribution) -> Prediction:
        loads, totals = walked.loads, walked.totals
        body, tail = self._log_scales(plan)
        held = held_by(self.costs, self.view, plan)
        memory = {a: size + self.foreign_memory.get(a, 0) for a, size in sorted(memory_of(held).items())}
        capacity, bottleneck = self._capacity(totals, loads)
        availability = availability_of(plan, self.costs.agents, self.link_up, self.entry)
        found = times.quantiles_ms(tuple(SHARE_OF.values()))
        quantiles: dict[Percentile, float] = {
            name: at * math.exp(body + TAILNESS[name] * (tail - body)) for name, at in zip(SHARE_OF, found, strict=True)
        }
        energy = totals.energy_j
        move_bytes, move_ms = self._move(held)
        return Prediction(
            p50_ms=quantiles["p50"],
            p95_ms=quantiles["p95"],
            p99_ms=quantiles["p99"],
            mean_ms=times.mean_ms() * math.exp(body),
            throughput_rps=capacity,
            saturation=walked.saturation,
            jitter_ms=walked.jitter_ms,
            risk=self._risk(quantiles, capacity, availability, energy, totals),
            availability=availability,
            accuracy=accuracy_of(self.costs, self.view, plan),
            energy_j=energy,
            memory_bytes=memory,
            move_bytes=move_bytes,
            move_ms=move_ms,
            bottleneck=bottleneck,
        )

    def link_up(self, src: AgentId, dst: AgentId) -> float:
        """Share of time in which the way between two agents works, the worse direction."""
        return min(self.costs.link(src, dst).availability, self.costs.link(dst, src).availability)

    def room_bytes(self, agent: AgentView) -> int:
        """What this service's shards may take on an agent; none where others have taken more than there is."""
        return max(0, usable_bytes(agent, self.settings) - self.foreign_memory.get(agent.id, 0))

    def moving_memory(self, plan: Plan) -> dict[AgentId, int]:
        """Bytes per agent while the running plan still serves and this one is already loaded."""
        both: Held = {agent: dict(files) for agent, files in self.running_held.items()}
        for agent, files in held_by(self.costs, self.view, plan).items():
            mine = both.setdefault(agent, {})
            for file, size in files.items():
                mine[file] = max(size, mine.get(file, 0))
        return {agent: size + self.foreign_memory.get(agent, 0) for agent, size in memory_of(both).items()}

    def _loads(self, plan: Plan, rate_rps: float) -> tuple[dict[AgentId, Load], list[Spell]]:
        """What keeps the agents of a plan and the entry busy when the plan runs, and what one request does there."""
        involved = plan.agents() if self.entry is None else plan.agents() | {self.entry}
        before = ((agent, self.background.get(agent)) for agent in sorted(involved))
        loads = {agent: load.copy() for agent, load in before if load is not None}
        return loads, self.costs.add_load(loads, self.view, plan, rate_rps)

    def _walk(self, plan: Plan, loads: dict[AgentId, Load], spells: list[Spell], rate_rps: float) -> _Totals:
        totals = _Totals(rate_rps)
        planned = {stage.stage: stage for stage in plan.stages}
        lanes: dict[StageName, list[_LaneTime]] = {}
        for stage in self.view.spec.stages:
            if isinstance(stage, PythonStage):
                self._walk_python(stage, totals)
            elif stage.name in planned:
                lanes[stage.name] = self._walk_stage(stage, planned[stage.name], totals)
        for wire in totals.wires.values():
            wire.settle(rate_rps)
        for time, wire in totals.carried:
            time.mean_ms += wire.wait_ms
            time.variance += wire.wait_variance
        for wait in waits_of(spells, loads):
            lanes[wait.stage][wait.lane].queues.append(wait.queue)
        return totals

    def _walk_python(self, stage: PythonStage, totals: _Totals) -> None:
        mean = self.costs.python_ms(self.view, stage, self.entry)
        totals.stages.append([_LaneTime(mean, (mean * self.settings.run_variation) ** 2)])
        if self.entry is not None:
            self._count(totals, self.entry, stage.name, mean)

    def _walk_stage(self, stage: OnnxStage, planned: StagePlan, totals: _Totals) -> list[_LaneTime]:
        items = self.costs.items(self.view, stage)
        totals.stages.append([self._lane(planned, lane, items, totals) for lane in planned.lanes])
        return totals.stages[-1]

    def _lane(self, planned: StagePlan, lane: Lane, items: float, totals: _Totals) -> _LaneTime:
        sums = self.costs.sums(planned.model)
        share = mean_items(lane.share, items)
        answer_bytes = share * sums.bytes_before(sums.whole.stop)
        how = self._stages[planned.stage].activations
        time = _LaneTime()
        at = self.entry if self.entry is not None else lane.shards[0].agent
        for shard in lane.shards:
            if at != shard.agent:
                time.mean_ms += share * sums.convert_ms(shard.blocks.start, how)
                sent_bytes = share * sums.bytes_before(shard.blocks.start, how)
                self._cross(at, shard.agent, (sent_bytes, answer_bytes), time, totals)
            run = self.costs.run_ms(planned.stage, planned.model, shard.agent, shard.blocks, share)
            time.mean_ms += run + self.settings.hop_overhead_ms
            time.variance += (run * self.costs.variation(planned.stage, shard.agent, shard.blocks)) ** 2
            self._count(totals, shard.agent, planned.stage, run)
            totals.measured_ms += run * self.costs.trust(planned.stage, shard.agent, shard.blocks)
            totals.run_ms += run
            at = shard.agent
        return time

    def _cross(self, src: AgentId, dst: AgentId, sizes: tuple[float, float], time: _LaneTime, totals: _Totals) -> None:
        """There and back again over one link; what a transfer waits for is known when all are."""
        link = self.costs.link(src, dst)
        per_byte_ms = 1000.0 / max(link.bandwidth_bytes_per_s, 1.0)
        time.mean_ms += link.rtt_ms
        time.variance += link.jitter_ms**2
        time.jitter_variance += link.jitter_ms**2
        for size, way in ((sizes[0], (src, dst)), (sizes[1], (dst, src))):
            transfer = size * per_byte_ms
            time.mean_ms += transfer
            time.variance += 0.01 * transfer * transfer
            wire = totals.wires.get(way)
            if wire is None:
                wire = totals.wires[way] = _Wire()
            wire.add(transfer)
            totals.carried.append((time, wire))

    def _count(self, totals: _Totals, agent: AgentId, stage: str, run_ms: float) -> None:
        totals.busy_ms[agent] = totals.busy_ms.get(agent, 0.0) + run_ms
        totals.by_stage[agent, stage] = totals.by_stage.get((agent, stage), 0.0) + run_ms
        totals.energy_j += self.costs.agents[agent].power_w * run_ms / 1000.0

    def _latency(self, totals: _Totals) -> Distribution:
        return pipelines([self._course(totals)])[0]

    def _course(self, totals: _Totals) -> Course:
        lanes = [max(lanes, key=_LaneTime.expected_ms) for lanes in totals.stages if lanes]
        expected = sum(lane.expected_ms() for lane in lanes)
        grid = Grid.up_to(1.5 * expected + 6.0 * math.sqrt(sum(lane.spread() for lane in lanes)) + 1.0)
        alone = _track([lanes[0] for lanes in totals.stages if len(lanes) == 1])
        return Course(grid, alone, [[_track([lane]) for lane in s] for s in totals.stages if len(s) > 1])

    def _capacity(self, totals: _Totals, loads: dict[AgentId, Load]) -> tuple[float, str]:
        """Requests per second that the tightest agent or link carries, and its name in words."""
        best, words = math.inf, "nothing"
        for agent, ours in sorted(totals.busy_ms.items()):
            free = max(1e-3, 1.0 - self.background[agent].busy)
            limit = 1000.0 * free / max(ours, 1e-6)
            if limit < best:
                stage = max((s for a, s in totals.by_stage if a == agent), key=lambda s: totals.by_stage[agent, s])
                best, words = limit, f"{stage} on {agent}: {100 * min(loads[agent].busy, 9.99):.0f} % busy"
        for (src, dst), wire in sorted(totals.wires.items()):
            limit = 1000.0 / max(wire.total_ms, 1e-6)
            if limit < best:
                best = limit
                words = f"link {src} to {dst}: {100 * min(self.rate_rps / limit, 9.99):.0f} % busy"
        return best, words

    def _risk(
        self, quantiles_ms: Mapping[Percentile, float], capacity: float, availability: float, energy_j: float, totals: _Totals
    ) -> float:  # fmt: skip
        """Probability that one of the promises is broken; each prediction is off by a log-normal factor."""
        contract, s = self.view.contract, self.settings
        trusted = totals.measured_ms / totals.run_ms if totals.run_ms else 0.0
        sigma = s.sigma_unmeasured + trusted * (s.sigma_measured - s.sigma_unmeasured)
        # Promises about times of one distribution are kept or broken together: the tightest one counts.
        times = [o for o in contract.latency_objectives() if o.metric != "inter-token"]
        kept = min(shortfall_kept(o.at_most_ms, quantiles_ms[o.percentile], sigma) for o in times)
        kept *= shortfall_kept(capacity, self.rate_rps, s.sigma_capacity)
        kept *= shortfall_kept(1.0 - contract.availability_sla, 1.0 - availability, s.sigma_availability)
        if contract.energy_j_per_request is not None:
            kept *= shortfall_kept(contract.energy_j_per_request, energy_j, s.sigma_unmeasured)
        return min(1.0, max(0.0, 1.0 - kept))

    def _move(self, held: Held) -> tuple[int, float]:
        """Bytes to push and time until all agents are ready; agents fetch side by side. What one has on disk is only loaded."""
        pushed_bytes, slowest_ms = 0, 0.0
        for agent, files in held.items():
            has, cached = self.running_held.get(agent, {}), self.costs.agents[agent].warmed
            missing = loaded = 0
            for model, start, stop in files:
                if (model, start, stop) in has:
                    continue
                span = Span(start, stop)
                size = self.costs.sums(model).pushed(span)
                loaded += size
                if file_key(model, span) not in cached:
                    missing += size
            pushed_bytes += missing
            fetch_ms = 1000.0 * missing / self.settings.push_bytes_per_s
            slowest_ms = max(slowest_ms, fetch_ms + loaded * self.settings.load_ms_per_mb / 1e6)
        return pushed_bytes, slowest_ms

    def _log_scales(self, plan: Plan) -> tuple[float, float]:
        """How much the model was off on the running plan, as logarithms at the median and at the p99.

        A plan keeps some of what was off at its own median, and other plans half of that. What its tail was off beyond that tells of the
        requests that were ahead of those few, of stalls and of busier minutes, and little of the next hundred requests. The shares
        were fitted on live runs (`benchmarks/prediction_live.py`).
        """
        running, (tail, middle) = self.view.running, self._bias
        if running is None or tail == middle == 0.0:
            return 0.0, 0.0
        if running.layout() != plan.layout():
            return 0.25 * middle, 0.25 * middle
        return 0.5 * middle, 0.5 * middle + 0.1 * (tail - middle)

    def _model_bias(self) -> tuple[float, float]:
        """Log-ratios of measured over predicted latency of the running plan, at its p99 and at its median.

        A p99 is a fact about the running plan, and its worst requests have reasons of their own: other plans inherit what is off
        at the median, where that was measured. Few requests tell little.
        """
        view, running, measured = self.view, self.view.running, self.view.measured_p99_ms
        if running is None or measured is None or not measured > 0 or not math.isfinite(measured):
            return 0.0, 0.0
        if not running.agents() <= self.costs.agents.keys():
            return 0.0, 0.0
        # It was measured at the load of that time, which may be another than the one to predict for.
        rate = view.measured_rps or view.offered_rps or self.rate_rps
        loads, spells = self._loads(running, rate)
        middle, tail = self._latency(self._walk(running, loads, spells, rate)).quantiles_ms((0.5, 0.99))
        count, few = view.measured_requests, self.settings.requests_to_trust
        trust = count / (count + few) if count else 1.0
        own = trust * _log_ratio(measured, tail)
        return own, own if view.measured_p50_ms is None else trust * _log_ratio(view.measured_p50_ms, middle)


def _log_ratio(measured_ms: float, predicted_ms: float) -> float:
    """Bounded: what is off by more than that has another reason than the model."""
    return min(max(math.log(max(measured_ms, 1e-3) / max(predicted_ms, 1e-3)), -0.7), 1.1)


def predict(plan: Plan, snapshot: Snapshot, settings: PredictSettings | None = None) -> Prediction:
    """What `plan` would do; to compare many plans of one service, build one `Predictor`."""
    return Predictor(snapshot, plan.service_id, settings).predict(plan)


def shortfall_kept(accepted: float, predicted: float, sigma: float) -> float:
    """Probability that a quantity stays within `accepted` when its logarithm is predicted with error `sigma`."""
    if predicted <= 0.0:
        return 1.0
    if accepted <= 0.0:
        return 0.0
    return normal_cdf_at(math.log(accepted / predicted) / sigma)


def availability_of(
    plan: Plan, agents: dict[AgentId, AgentView], link_up: LinkUp | None = None, entry: AgentId | None = None
) -> float:
    """Share of time in which every stage has all agents and links of its lanes, or one of its fallbacks and the link to it.

    Exact over the up and down states of the plan's agents, which fail independently; beyond `EXACT_AVAILABILITY_AGENTS`
    agents, and where no agent serves twice, stages are taken as independent. Links fail independently of all else, per stage.
    """
    ways = [_Ways.of(stage, link_up, entry) for stage in plan.stages]
    involved = sorted(frozenset().union(*(way.lane for way in ways), *(way.backups for way in ways)))
    apart = sum(len(way.lane) + len(way.backups) for way in ways) == len(involved)
    if apart or len(involved) > EXACT_AVAILABILITY_AGENTS:
        return math.prod(_alone(way, agents) for way in ways)
    up = np.array([_share_up(agents, agent) for agent in involved])
    states = _up_and_down(len(involved))
    chance = np.where(states, up, 1.0 - up).prod(axis=1)
    column = {agent: at for at, agent in enumerate(involved)}
    for way in ways:
        backed = np.zeros(len(states))
        for agent, link in way.backups.items():
            backed = 1.0 - (1.0 - backed) * (1.0 - link * states[:, column[agent]])
        lanes = states[:, [column[a] for a in way.lane]].all(axis=1) * way.lane_links
        chance = chance * (lanes + (1.0 - lanes) * backed)
    return float(min(1.0, chance.sum()))


@functools.cache
def _up_and_down(count: int) -> npt.NDArray[np.bool_]:
    """[2^count, count] every way in which so many agents are up or down."""
    states: npt.NDArray[np.bool_] = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1 == 1
    states.setflags(write=False)
    return states


@dataclass(frozen=True, slots=True)
class _Ways:
    """How one stage can be served."""

    lane: frozenset[AgentId]
    lane_links: float
    """Probability that all links of the lanes work."""
    backups: dict[AgentId, float]
    """Each fallback with the probability that the link to it works."""

    @staticmethod
    def of(stage: StagePlan, link_up: LinkUp | None, entry: AgentId | None) -> _Ways:
        hops = set()
        for lane in stage.lanes:
            way = [entry or lane.shards[0].agent, *(shard.agent for shard in lane.shards)]
            hops |= {(min(a, b), max(a, b)) for a, b in itertools.pairwise(way) if a != b}
        return _Ways(
            frozenset(shard.agent for lane in stage.lanes for shard in lane.shards),
            1.0 if link_up is None else math.prod(link_up(a, b) for a, b in hops),
            {a: 1.0 if link_up is None or entry in (None, a) else link_up(entry, a) for a in stage.fallback},
        )


def _alone(way: _Ways, agents: dict[AgentId, AgentView]) -> float:
    served = way.lane_links * math.prod(_share_up(agents, agent) for agent in way.lane)
    unserved = math.prod(1.0 - link * _share_up(agents, agent) for agent, link in way.backups.items())
    return 1.0 - (1.0 - served) * unserved


def _share_up(agents: dict[AgentId, AgentView], agent: AgentId) -> float:
    device = agents.get(agent)
    return 0.0 if device is None or device.state == "lost" else min(max(device.availability, 0.0), 1.0)


def _track(lanes: list[_LaneTime]) -> Track:
    """Lanes one after the other: their runs and links as one log-normal, and all their queues."""
    mean, variance = sum(lane.mean_ms for lane in lanes), sum(lane.variance for lane in lanes)
    queues = tuple(queue for lane in lanes for queue in lane.queues if queue.mean_ms > 0.0)
    return Track(mean, math.sqrt(variance), queues)
