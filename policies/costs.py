"""What one shard, one link and everybody else's work cost: the numbers that prediction and solver share.

Run times come from the model's profile on the agent's type of device; without one from its profile on the reference machine, transferred
by the roofline where the device is calibrated (see `policies.device_times`), else scaled by the agent's slowdown. What was measured of
running plans corrects them. Corrections are ratios, shrunk in three steps while samples are few: a shard toward its agent, an agent
toward the fleet, the fleet toward one. So an agent that was never measured does not look better than the others merely because nobody looked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np

from policies.device_times import block_times
from policies.fleet import NOTHING, AgentView, Booked, LinkView
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.latency import Floats
from policies.plan import Lane, Plan, Span, StagePlan, mean_items
from policies.queues import Load, Spell, Visit, spells_of
from policies.roofline import DeviceCalibration
from policies.service import ActivationFormat, BlockTime, ModelProfile, OnnxStage, PythonStage
from policies.snapshot import ServiceView, Snapshot, StageMeasure, measure_key
from sla.errors import NotFoundError

CONVERT_MS_PER_MB: Final[dict[ActivationFormat, float]] = {"fp32": 0.0, "fp16": 2.5, "int8": 0.6}
"""Packing and unpacking 1 MB of float32 on one core; measured by `agents.activations` on the machine of docs/benchmarks.md."""


class PredictSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How plans are predicted; shares are in [0, 1]."""

    memory_headroom: float = 0.15
    """Share of an agent's budget that no plan may use: a plan that fits by a hair dies at warm-up."""
    run_variation: float = 0.25
    """Standard deviation of a run over its mean, before it was measured."""
    hop_overhead_ms: float = 1.0
    """Framing, scheduling and copying of one hop."""
    prior_samples: float = 20.0
    """How many samples weigh as much as the model."""
    requests_to_trust: float = 50.0
    """So many requests make a measured p50 and p99 half trusted."""
    measure_half_life_ms: float = 60_000.0
    """A measurement of this age counts half."""
    foreign_load_cap: float = 0.6
    """A device that is busy with others' work still gives us this much less than all: the system's fair share."""
    sigma_unmeasured: float = 0.25
    """Log-error of a predicted p99 before anything was measured ..."""
    sigma_measured: float = 0.15
    """... and when all of the plan's shards were."""
    sigma_capacity: float = 0.2
    """Log-error of a predicted throughput."""
    sigma_availability: float = 0.7
    """Log-error of a predicted unavailability."""
    push_bytes_per_s: float = 25e6
    """Speed at which shards are pushed to an agent."""
    load_ms_per_mb: float = 4.0
    """Time to open, warm up and check a shard."""
    stale_after_ms: float = 5_000.0
    """An agent's report older than this may raise doubt but justifies no move."""
    link_stale_after_ms: float = 30_000.0


@dataclass(frozen=True, slots=True)
class ProfileSums:
    """Prefix sums over a model's blocks, so that any span costs two look-ups."""

    model: ModelProfile
    fixed_ms: Floats
    per_item_ms: Floats
    param_bytes: Floats
    file_bytes: Floats
    sent_bytes: Floats
    """[B+1] `bytes_before` of every block, and of the end, in fp32."""

    @staticmethod
    def of(model: ModelProfile) -> ProfileSums:
        return ProfileSums(
            model,
            _prefix([b.fixed_ms for b in model.blocks]),
            _prefix([b.per_item_ms for b in model.blocks]),
            _prefix([float(b.param_bytes) for b in model.blocks]),
            _prefix([float(b.file_bytes or b.param_bytes) for b in model.blocks]),
            np.array([model.input_bytes_per_item, *(b.cut_bytes_per_item for b in model.blocks)], dtype=np.float64),
        )

    def timed(self, times: Sequence[BlockTime]) -> ProfileSums:
        """The same blocks with other times."""
        fixed, per_item = _prefix([t.fixed_ms for t in times]), _prefix([t.per_item_ms for t in times])
        return replace(self, fixed_ms=fixed, per_item_ms=per_item)

    def run_ms(self, span: Span, items: float) -> float:
        """Time of one run where the times are from: on the reference core unless they were replaced."""
        fixed = self.fixed_ms[span.stop] - self.fixed_ms[span.start]
        return float(fixed + (self.per_item_ms[span.stop] - self.per_item_ms[span.start]) * items)

    def params(self, span: Span) -> int:
        return int(self.param_bytes[span.stop] - self.param_bytes[span.start])

    def pushed(self, span: Span) -> int:
        """Bytes to send to an agent that lacks these blocks; as many as they use in memory where the files' sizes are not known."""
        return int(self.file_bytes[span.stop] - self.file_bytes[span.start])

    def fits_one_file(self, span: Span) -> bool:
        """Whether these blocks can be one shard; always, unless the model is larger than one file may be."""
        return not self.model.shard_limit_bytes or self.pushed(span) <= self.model.shard_limit_bytes

    def files(self, span: Span) -> tuple[Span, ...]:
        """The fewest consecutive runs of these blocks that each fit into one file (or are a single block)."""
        runs = [Span(span.start, span.start + 1)]
        for block in range(span.start + 1, span.stop):
            longer = Span(runs[-1].start, block + 1)
            if self.fits_one_file(longer):
                runs[-1] = longer
            else:
                runs.append(Span(block, block + 1))
        return tuple(runs)

    def bytes_before(self, block: int, how: ActivationFormat = "fp32") -> int:
        """Bytes per item that a shard starting at `block` is sent, where shards of a chain send values as `how`.

        The model's inputs (block 0) and outputs (behind the last block) always travel as they are.
        """
        if block == 0:
            return self.model.input_bytes_per_item
        before = self.model.blocks[block - 1]
        is_inner = block < len(self.model.blocks)
        return before.cut_bytes_as.get(how, before.cut_bytes_per_item) if is_inner else before.cut_bytes_per_item

    def convert_ms(self, block: int, how: ActivationFormat) -> float:
        """Time per item to pack what crosses the cut before `block`, and to unpack it behind."""
        is_inner = 0 < block < len(self.model.blocks)
        return CONVERT_MS_PER_MB[how] * self.bytes_before(block) / 1e6 if is_inner else 0.0

    def cut_bytes(self, how: ActivationFormat) -> Floats:
        """[B+1] `bytes_before` of every block, and of the end."""
        if how == "fp32":
            return self.sent_bytes
        inner = [self.bytes_before(block, how) for block in range(1, len(self.model.blocks))]
        return np.array([self.sent_bytes[0], *inner, self.sent_bytes[-1]], dtype=np.float64)

    def convert_times(self, how: ActivationFormat) -> Floats:
        """[B+1] `convert_ms` of every block, and of the end."""
        times = self.sent_bytes * (CONVERT_MS_PER_MB[how] / 1e6)
        times[0] = times[-1] = 0.0
        return times

    @property
    def whole(self) -> Span:
        return Span(0, len(self.model.blocks))


def _prefix(values: list[float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.array(values, dtype=np.float64))))


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one shard of a running plan."""

    key: str
    model: ModelName
    agent: AgentId
    log_ratio: float
    """Of the measured over the modelled run time."""
    weight: float
    """In samples, less the older they are."""
    variation: float
    """Standard deviation over mean."""


@dataclass(slots=True)
class Calibration:
    """Log-ratios of measured over modelled run time."""

    fleet: float = 0.0
    agents: dict[AgentId, float] = field(default_factory=dict)
    """The fleet's and the agent's own part together."""
    shards: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Measure key -> log-ratio, trust in [0, 1], measured variation (std over mean)."""


class CostModel:
    """Costs under one snapshot; build it once per decision, it caches what does not depend on the plan."""

    def __init__(self, snapshot: Snapshot, settings: PredictSettings | None = None) -> None:
        self.snapshot = snapshot
        self.settings = settings or PredictSettings()
        self.agents: dict[AgentId, AgentView] = snapshot.fleet.agents
        self._sums: dict[ModelName, ProfileSums] = {}
        self._links: dict[tuple[AgentId, AgentId], LinkView] = {}
        self._items: dict[tuple[ServiceId, StageName], float] = {}
        self._timed: dict[tuple[ModelName, AgentId], tuple[ProfileSums, float]] = {}
        self._timed_by_kind: dict[tuple[ModelName, str, DeviceCalibration | None], ProfileSums | None] = {}
        self._factors: dict[AgentId, float] = {}
        self.calibration = self._calibrate()

    def view(self, service_id: ServiceId) -> ServiceView:
        """Raises NotFoundError."""
        view = self.snapshot.services.get(service_id)
        if view is None:
            raise NotFoundError(f"There is no service {service_id!r}.")
        return view

    def sums(self, model: ModelName) -> ProfileSums:
        """Raises NotFoundError for a model that is not registered."""
        found = self._sums.get(model)
        if found is None:
            profile = self.snapshot.models.get(model)
            if profile is None:
                raise NotFoundError(f"There is no model {model!r}.")
            found = self._sums[model] = ProfileSums.of(profile)
        return found

    def link(self, src: AgentId, dst: AgentId) -> LinkView:
        found = self._links.get((src, dst))
        if found is None:
            found = self._links[src, dst] = self.snapshot.fleet.link(src, dst)
        return found

    def entry(self, view: ServiceView) -> AgentId | None:
        """Where requests come in: as measured, else the fastest live agent, at the edge if there is one."""
        if view.entry is not None and view.entry in self.agents:
            return view.entry
        live = [a for a in self.agents.values() if a.state == "live"] or list(self.agents.values())
        return min(live, key=lambda a: (a.is_cloud, a.slowdown, a.id)).id if live else None

    def run_ms(self, stage: StageName, model: ModelName, agent: AgentId, span: Span, items: float) -> float:
        """Mean time of one run of a shard on an agent."""
        return self.modelled_ms(model, agent, span, items) * math.exp(self._ratio(stage, agent, span))

    def modelled_ms(self, model: ModelName, agent: AgentId, span: Span, items: float) -> float:
        """Time of one run before anything that was measured of running plans corrects it."""
        sums, scale = self._timed.get((model, agent)) or self._time(model, agent)
        return sums.run_ms(span, items) * scale

    def times_on(self, model: ModelName, agents: Sequence[AgentId]) -> tuple[Floats, Floats]:
        """[A, B+1] prefix sums of the fixed and the per-item times of a model's blocks on each agent, where no shard was measured yet."""
        timed = [self._timed.get((model, agent)) or self._time(model, agent) for agent in agents]
        factors = np.array([scale * self._correction(a) for a, (_, scale) in zip(agents, timed, strict=True)])[:, None]
        fixed, per_item = np.stack([s.fixed_ms for s, _ in timed]), np.stack([s.per_item_ms for s, _ in timed])
        return fixed * factors, per_item * factors

    def agent_factor(self, agent: AgentId) -> float:
        """Time on this agent over time on the reference core, over all models, for shards that were never measured there."""
        factor = self._factors.get(agent)
        if factor is None:
            factor = self._factors[agent] = self._speed(agent) * self._correction(agent)
        return factor

    def variation(self, stage: StageName, agent: AgentId, span: Span) -> float:
        """Standard deviation of a run over its mean."""
        known = self._known(stage, agent, span)
        learned = self.snapshot.learned.run_variation
        prior = self.settings.run_variation if learned is None else learned
        return prior if known is None else prior + known[1] * (known[2] - prior)

    def trust(self, stage: StageName, agent: AgentId, span: Span) -> float:
        """How much of a shard's time is measurement rather than model, [0, 1]."""
        known = self._known(stage, agent, span)
        return 0.0 if known is None else known[1]

    def python_ms(self, view: ServiceView, stage: PythonStage, agent: AgentId | None) -> float:
        measure = view.measures.get(measure_key(stage.name, agent, 0, 0)) if agent is not None else None
        if measure is None or measure.count <= 0:
            return stage.typical_ms
        trust = self._weight(measure) / (self._weight(measure) + self.settings.prior_samples)
        return stage.typical_ms + trust * (measure.mean_ms - stage.typical_ms)

    def items(self, view: ServiceView, stage: OnnxStage) -> float:
        """Items of one request: the profile's typical number until the running plan's lanes were all measured."""
        key = (view.spec.id, stage.name)
        if key not in self._items:
            self._items[key] = self._items_of(view, stage)
        return self._items[key]

    def foreign_busy(self, agent: AgentId) -> float:
        return min(max(self.agents[agent].cpu_saturation, 0.0), self.settings.foreign_load_cap)

    def background(self, service_id: ServiceId) -> dict[AgentId, Load]:
        """What other services' running plans and work that is not ours put on each agent."""
        loads = {name: Load.booked(agent.booked, self.foreign_busy(name)) for name, agent in self.agents.items()}
        for other, view in self.snapshot.services.items():
            if other != service_id and view.running is not None:
                self.add_load(loads, view, view.running)
        return loads

    def add_load(
        self, loads: dict[AgentId, Load], view: ServiceView, plan: Plan, rate_rps: float | None = None
    ) -> list[Spell]:
        """Add what `plan` puts on each agent, by default at the load that `view` must carry; agents that are gone are left out.

        What one request does there, which is what was added.
        """
        rate_per_ms = (required_rps(view) if rate_rps is None else rate_rps) / 1000.0
        entry = self.entry(view)
        spells = spells_of(self._visits(view, plan, entry))
        for spell in spells:
            loads[spell.agent].add_spell(rate_per_ms, spell)
        if entry is not None and entry in loads:
            for step in view.spec.stages:
                if isinstance(step, PythonStage):
                    loads[entry].add_step(rate_per_ms, self.python_ms(view, step, entry))
        return spells

    def _visits(self, view: ServiceView, plan: Plan, entry: AgentId | None) -> Iterator[Visit]:
        """Every shard of a plan that one request runs, in their order; agents that are gone are left out."""
        planned = {stage.stage: stage for stage in plan.stages}
        number, steps_ms = 0, 0.0
        for stage in view.spec.stages:
            if isinstance(stage, PythonStage):
                steps_ms += self.python_ms(view, stage, entry)
            elif stage.name in planned and planned[stage.name].model in self.snapshot.models:
                for lane in range(len(planned[stage.name].lanes)):
                    yield from self._lane_visits(view, stage, planned[stage.name], lane, entry, number, steps_ms)
                number, steps_ms = number + 1, 0.0

    def _lane_visits(
        self, view: ServiceView, stage: OnnxStage, planned: StagePlan, number: int, entry: AgentId | None, stage_number: int,
        steps_ms: float,
    ) -> Iterator[Visit]:  # fmt: skip
        lane = planned.lanes[number]
        items = mean_items(lane.share, self.items(view, stage))
        apart_ms = steps_ms + self._way_ms(planned, lane, entry, items)
        for at, shard in enumerate(lane.shards):
            if shard.agent not in self.agents:
                continue
            run = self.run_ms(planned.stage, planned.model, shard.agent, shard.blocks, items)
            std = run * self.variation(planned.stage, shard.agent, shard.blocks)
            yield Visit(
                stage_number, stage.name, number, shard.agent, run, std * std, stage.yields, at == 0, at == len(lane.shards) - 1,
                apart_ms,
            )  # fmt: skip

    def _way_ms(self, planned: StagePlan, lane: Lane, entry: AgentId | None, items: float) -> float:
        """From the entry to the first shard of a lane and back, without any wait."""
        way_ms, first = self.settings.hop_overhead_ms, lane.shards[0].agent
        if entry is None or first == entry or first not in self.agents or entry not in self.agents:
            return way_ms
        sums, link = self.sums(planned.model), self.link(entry, first)
        size = items * (sums.bytes_before(0) + sums.bytes_before(sums.whole.stop))
        return way_ms + link.rtt_ms + 1000.0 * size / max(link.bandwidth_bytes_per_s, 1.0)

    def runs(self, view: ServiceView, plan: Plan) -> Iterator[tuple[StageName, AgentId, ModelName, Span, float]]:
        """Every shard of a plan that one request runs, with its items; agents that are gone are left out."""
        stages = {stage.name: stage for stage in view.spec.onnx_stages()}
        for planned in plan.stages:
            stage = stages.get(planned.stage)
            if stage is None or planned.model not in self.snapshot.models:
                continue
            items = self.items(view, stage)
            for lane in planned.lanes:
                share = mean_items(lane.share, items)
                for shard in lane.shards:
                    if shard.agent in self.agents:
                        yield planned.stage, shard.agent, planned.model, shard.blocks, share

    def _time(self, model: ModelName, agent: AgentId) -> tuple[ProfileSums, float]:
        """Times of a model's blocks, and the factor to take them by on this agent. Computed once for devices that are alike."""
        device, reference = self.agents[agent], self.sums(model)
        profiles = self.snapshot.device_profiles.get(model, {})
        if device.calibration is None and device.device_type not in profiles:
            found = None
        else:
            kind = (model, device.device_type, device.calibration)
            if kind not in self._timed_by_kind:
                times = block_times(reference.model, device, profiles)
                self._timed_by_kind[kind] = None if times is None else reference.timed(times)
            found = self._timed_by_kind[kind]
        learned = math.exp(self.snapshot.learned.models.get(model, 0.0))
        timed = (reference, learned * device.slowdown) if found is None else (found, learned)
        self._timed[model, agent] = timed
        return timed

    def _speed(self, agent: AgentId) -> float:
        """Time of one item of every model on this agent over that on the reference core; its slowdown where nothing better is known."""
        device = self.agents[agent]
        if device.calibration is None and not self.snapshot.device_profiles:
            return device.slowdown
        here = there = 0.0
        for model in self.snapshot.models:
            reference = self.sums(model)
            here += self.modelled_ms(model, agent, reference.whole, 1.0)
            there += reference.run_ms(reference.whole, 1.0)
        return here / there if there > 0 else device.slowdown

    def _correction(self, agent: AgentId) -> float:
        """What measured runs on the agent say of shards that were not measured there, as a factor."""
        return math.exp(self.calibration.agents.get(agent, self.calibration.fleet))

    def _known(self, stage: StageName, agent: AgentId, span: Span) -> tuple[float, float, float] | None:
        """What was measured of a shard, see `Calibration.shards`."""
        if not self.calibration.shards:  # Saves building the key, of which a search would build thousands.
            return None
        return self.calibration.shards.get(measure_key(stage, agent, span.start, span.stop))

    def _ratio(self, stage: StageName, agent: AgentId, span: Span) -> float:
        known = self._known(stage, agent, span)
        if known is not None:
            return known[0]
        return self.calibration.agents.get(agent, self.calibration.fleet)

    def _weight(self, measure: StageMeasure) -> float:
        age_ms = max(0.0, measure.age_ms)
        return min(200.0, measure.count) * math.pow(0.5, min(60.0, age_ms / self.settings.measure_half_life_ms))

    def _items_of(self, view: ServiceView, stage: OnnxStage) -> float:
        planned = next((s for s in view.running.stages if s.stage == stage.name), None) if view.running else None
        if planned is None or stage.axis is None:
            return stage.items
        total, trust = 0.0, 1.0
        for lane in planned.lanes:
            head = lane.shards[0]
            measure = view.measures.get(measure_key(stage.name, head.agent, head.blocks.start, head.blocks.stop))
            if measure is None or measure.count <= 0 or not math.isfinite(measure.items):
                return stage.items
            weight = self._weight(measure)
            trust = min(trust, weight / (weight + self.settings.prior_samples))
            total += measure.items
        return stage.items + trust * (max(total, 1.0) - stage.items)

    def measured_of(self, view: ServiceView) -> Iterator[Ran]:
        """Everything that was measured of a running plan."""
        if view.running is None or not view.measures:
            return
        for planned in view.running.stages:
            if planned.model not in self.snapshot.models:
                continue
            sums = self.sums(planned.model)
            places = {(shard.agent, shard.blocks) for lane in planned.lanes for shard in lane.shards}
            places |= {(agent, sums.whole) for agent in planned.fallback}
            for agent, span in sorted(places):
                key = measure_key(planned.stage, agent, span.start, span.stop)
                measure = view.measures.get(key)
                if measure is None or measure.count <= 0 or not measure.mean_ms > 0 or agent not in self.agents:
                    continue
                modelled = self.modelled_ms(planned.model, agent, span, measure.items)
                if modelled > 0:
                    ratio = min(max(math.log(measure.mean_ms / modelled), -2.0), 2.0)
                    yield Ran(
                        key=key, model=planned.model, agent=agent, log_ratio=ratio, weight=self._weight(measure),
                        variation=min(measure.std_ms / measure.mean_ms, 3.0),
                    )  # fmt: skip

    def _calibrate(self) -> Calibration:
        seen = [one for view in self.snapshot.services.values() for one in self.measured_of(view)]
        elsewhere = self.snapshot.fleet.elsewhere
        by_agent: dict[AgentId, list[tuple[float, float]]] = {a.id: [] for a in self.agents.values() if a.booked.weight}
        if not seen and not elsewhere.weight and not by_agent:
            return Calibration()
        fleet = self._shrunk([(one.log_ratio, one.weight) for one in seen], 0.0, elsewhere)
        for one in seen:
            by_agent.setdefault(one.agent, []).append((one.log_ratio, one.weight))
        agents = {agent: self._shrunk(pairs, fleet, self.agents[agent].booked) for agent, pairs in by_agent.items()}
        prior = self.settings.prior_samples
        shards = {
            one.key: (
                self._shrunk([(one.log_ratio, one.weight)], agents[one.agent]),
                one.weight / (one.weight + prior),
                one.variation,
            )
            for one in seen
        }
        return Calibration(fleet, agents, shards)

    def _shrunk(self, pairs: list[tuple[float, float]], toward: float, more: Booked = NOTHING) -> float:
        """Weighted mean of (value, weight) pairs, drawn toward a value as if that had been seen `prior_samples` times."""
        prior = self.settings.prior_samples
        total, weights = sum(r * w for r, w in pairs) + more.log_ratio, sum(w for _, w in pairs) + more.weight
        return (total + prior * toward) / (weights + prior)


def required_rps(view: ServiceView) -> float:
    """What must be carried: what the contract promises, or what is offered if that is more."""
    return max(view.contract.throughput_rps, view.offered_rps)
