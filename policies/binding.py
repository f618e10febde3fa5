"""Why a contract cannot be kept: in which dimension it falls short, and which stage, link or device is to blame."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import msgspec

from policies.ids import AgentId, ModelName, StageName
from policies.limits import allowed_in, is_fresh, may_see_raw
from policies.plan import GRAIN, Lane, Plan
from policies.predict import Predictor, availability_of
from policies.prices import Prices, cost_per_1k
from policies.queues import Wait, waits_of
from policies.score import Scored
from policies.service import OnnxStage, PythonStage
from sla.contract import SHARE_OF, Percentile, percent

Dimension = Literal["latency", "throughput", "availability", "accuracy", "privacy", "zones", "memory", "energy", "cost", "fleet", "several"]  # fmt: skip


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension in which the fleet falls short of a contract."""

    dimension: Dimension
    text: str
    """A sentence for whoever wrote the contract."""
    asked: float | None = None
    reached: float | None = None
    stage: str | None = None
    device: AgentId | None = None
    link: str | None = None
    """`SRC to DST`."""

    @property
    def severity(self) -> float:
        """How far off it is, as a logarithm; hard limits are endlessly far."""
        if self.asked is None or self.reached is None or min(self.asked, self.reached) <= 0:
            return math.inf
        return abs(math.log(self.asked / self.reached))


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a request's mean time."""

    ms: float
    words: str
    stage: str | None = None
    device: AgentId | None = None
    link: str | None = None


def shortfalls(p: Predictor, entry: Scored, prices: Prices | None = None) -> list[Binding]:
    """Where a plan is predicted to miss the contract; the worst first, empty when it keeps all of it."""
    contract, prediction = p.view.contract, entry.prediction
    found: list[Binding] = []
    if late := _late(p, entry):
        found.append(late)
    if prediction.throughput_rps < p.rate_rps:
        found.append(_throughput(p, entry))
    if prediction.availability < contract.availability_sla:
        found.append(_availability(p, entry))
    if contract.energy_j_per_request is not None and prediction.energy_j > contract.energy_j_per_request:
        text = f"a request takes {prediction.energy_j:.3g} J; {contract.energy_j_per_request:g} J are allowed"
        found.append(
            Binding(
                dimension="energy", text=text, asked=contract.energy_j_per_request, reached=prediction.energy_j
            )
        )  # fmt: skip
    if contract.cost_per_1k_requests is not None:
        cost = cost_per_1k(p, entry.plan, prices)
        if cost > contract.cost_per_1k_requests:
            text = f"1,000 requests cost {cost:.3g}; {contract.cost_per_1k_requests:g} are allowed"
            found.append(Binding(dimension="cost", text=text, asked=contract.cost_per_1k_requests, reached=cost))
    return sorted(found, key=lambda binding: -binding.severity)


def hard_binding(p: Predictor, error: str) -> Binding:
    """Which hard limit left no plan at all; `error` is the solver's sentence."""
    contract, spec = p.view.contract, p.view.spec
    fresh = [a for a in p.costs.agents.values() if is_fresh(a, p.settings)]
    allowed = [a for a in fresh if allowed_in(a, contract)]
    if not fresh:
        return Binding(dimension="fleet", text=error)
    if not allowed:
        in_zone = not contract.zones or any(a.zone in contract.zones for a in fresh)
        return Binding(dimension="privacy" if in_zone else "zones", text=error)
    best = {s.name: max(s.accuracy(p.costs.sums(m).model) for m in s.variants) for s in spec.onnx_stages()}
    if math.prod(best.values()) < (contract.accuracy_floor or 0.0) - 1e-9:
        worst = min(best, key=lambda name: best[name])
        return Binding(
            dimension="accuracy", text=f"{error} The weakest is stage {worst} ({best[worst]:.3g}).", stage=worst,
            asked=contract.accuracy_floor, reached=math.prod(best.values()),
        )  # fmt: skip
    raw = [stage.name for stage in spec.onnx_stages() if stage.raw]
    if raw and not any(may_see_raw(a, contract) for a in allowed):
        return Binding(dimension="privacy", text=error, stage=raw[0])
    return Binding(dimension="memory", text=error, stage=_largest_stage(p))


def where_time_goes(p: Predictor, plan: Plan) -> list[Part]:
    """A request's mean time by device and link, the largest part first; of a stage's lanes the slowest counts."""
    loads = p.costs.background(p.view.spec.id)
    waits = waits_of(p.costs.add_load(loads, p.view, plan), loads)
    planned = {stage.stage: stage for stage in plan.stages}
    parts: list[Part] = []
    for stage in p.view.spec.stages:
        if isinstance(stage, PythonStage):
            ms = p.costs.python_ms(p.view, stage, p.entry)
            words = f"step {stage.name}" + (f" on {p.entry}" if p.entry else "")
            parts.append(Part(ms=ms, words=words, stage=stage.name, device=p.entry))
        elif stage.name in planned:
            items = p.costs.items(p.view, stage)
            lanes = [
                _lane_parts(p, stage, planned[stage.name].model, lane, items, _waits_in(waits, stage.name, number))
                for number, lane in enumerate(planned[stage.name].lanes)
            ]
            parts += max(lanes, key=lambda lane: sum(part.ms for part in lane))
    return sorted(parts, key=lambda part: -part.ms)


def weakest_part(p: Predictor, plan: Plan) -> tuple[AgentId | None, tuple[AgentId, AgentId] | None]:
    """The device, or else the link, whose perfection would gain most availability (Birnbaum's measure)."""
    agents = p.costs.agents
    named = sorted(plan.agents() | {agent for stage in plan.stages for agent in stage.fallback})
    ways = {
        (min(a, b), max(a, b))
        for stage in plan.stages
        for lane in stage.lanes
        for a, b in itertools.pairwise([p.entry or lane.shards[0].agent, *(shard.agent for shard in lane.shards)])
        if a != b
    }
    ways |= {(min(p.entry, a), max(p.entry, a)) for s in plan.stages for a in s.fallback if p.entry and a != p.entry}

    def with_device(name: AgentId) -> float:
        perfect = msgspec.structs.replace(agents[name], availability=1.0)
        return availability_of(plan, {**agents, name: perfect}, p.link_up, p.entry)

    def with_link(way: tuple[AgentId, AgentId]) -> float:
        def link_up(a: AgentId, b: AgentId) -> float:
            return 1.0 if {a, b} == set(way) else p.link_up(a, b)

        return availability_of(plan, agents, link_up, p.entry)

    devices = {name: with_device(name) for name in named if name in agents}
    links = {way: with_link(way) for way in sorted(ways)}
    link = max(links, key=lambda way: links[way], default=None)
    device = max(devices, key=lambda name: devices[name])
    return (None, link) if link is not None and links[link] > devices[device] else (device, None)


def _late(p: Predictor, entry: Scored) -> Binding | None:
    """The promise about times that is missed most."""
    predicted: dict[Percentile, float] = {
        "p50": entry.prediction.p50_ms, "p95": entry.prediction.p95_ms, "p99": entry.prediction.p99_ms
    }  # fmt: skip
    judged = [o for o in p.view.contract.latency_objectives() if o.metric != "inter-token"]
    worst = max(judged, key=lambda o: (predicted[o.percentile] / o.at_most_ms, SHARE_OF[o.percentile]))
    if predicted[worst.percentile] <= worst.at_most_ms:
        return None
    parts = where_time_goes(p, entry.plan)
    whole = sum(part.ms for part in parts)
    text = (
        f"the quickest kept plan has a {worst.percentile} of {predicted[worst.percentile]:.0f} ms; {worst.at_most_ms:g} ms are asked for. "
        f"{100 * parts[0].ms / max(whole, 1e-9):.0f} % of the time goes to {parts[0].words}"
    )
    return Binding(
        dimension="latency", text=text, asked=worst.at_most_ms, reached=predicted[worst.percentile], stage=parts[0].stage,
        device=parts[0].device, link=parts[0].link,
    )  # fmt: skip


def _throughput(p: Predictor, entry: Scored) -> Binding:
    reached, words = entry.prediction.throughput_rps, entry.prediction.bottleneck
    where = words.partition(":")[0]
    stage = device = link = None
    if where.startswith("link "):
        link = where.removeprefix("link ")
    elif " on " in where:
        stage, _, agent = where.partition(" on ")
        device = AgentId(agent)
    text = f"{reached:.3g} of {p.rate_rps:g} requests/s can be carried; the bottleneck is {words}"
    return Binding(
        dimension="throughput", text=text, asked=p.rate_rps, reached=reached, stage=stage, device=device, link=link
    )


def _availability(p: Predictor, entry: Scored) -> Binding:
    asked, reached = p.view.contract.availability_sla, entry.prediction.availability
    device, link = weakest_part(p, entry.plan)
    ends = {device} if device is not None else set(link or ())
    needed = [s.stage for s in entry.plan.stages if ends & {x.agent for lane in s.lanes for x in lane.shards}]
    spare = all(set(stage.fallback) - ends for stage in entry.plan.stages if stage.stage in needed)
    redundancy = "even with its fallbacks" if spare else "and nothing else can take over"
    if device is not None:
        weak = f"the device {device} is up {100 * p.costs.agents[device].availability:.4g} % of the time"
    else:
        assert link is not None
        weak = f"the link between {link[0]} and {link[1]} works {100 * p.link_up(*link):.4g} % of the time"
    text = f"{weak} {redundancy}; the service would reach {percent(round(reached, 6))} of the {percent(asked)} that are asked for"
    return Binding(
        dimension="availability", text=text, asked=1.0 - asked, reached=max(1.0 - reached, 1e-12), device=device,
        stage=needed[0] if needed else None, link=None if link is None else f"{link[0]} to {link[1]}",
    )  # fmt: skip


def _waits_in(waits: list[Wait], stage: StageName, lane: int) -> dict[AgentId, float]:
    """Mean waits (ms) before a lane, by agent."""
    found: dict[AgentId, float] = {}
    for wait in waits:
        if (wait.stage, wait.lane) == (stage, lane):
            found[wait.agent] = found.get(wait.agent, 0.0) + wait.queue.mean_ms
    return found


def _lane_parts(
    p: Predictor, stage: OnnxStage, model: ModelName, lane: Lane, items: float, waits: dict[AgentId, float]
) -> list[Part]:
    sums = p.costs.sums(model)
    share = items * len(lane.share) / GRAIN
    answer = share * sums.bytes_before(sums.whole.stop)
    at = p.entry if p.entry is not None else lane.shards[0].agent
    parts = []
    for shard in lane.shards:
        if shard.agent != at:
            link = p.costs.link(at, shard.agent)
            size = share * sums.bytes_before(shard.blocks.start, stage.activations) + answer
            ms = share * sums.convert_ms(shard.blocks.start, stage.activations) + link.rtt_ms
            ms += 1000.0 * size / max(link.bandwidth_bytes_per_s, 1.0)
            name = f"{at} to {shard.agent}"
            parts.append(Part(ms=ms, words=f"link {name} (stage {shard.stage})", stage=shard.stage, link=name))
        run = p.costs.run_ms(shard.stage, model, shard.agent, shard.blocks, share)
        wait = waits.pop(shard.agent, 0.0)
        words = f"stage {shard.stage} on {shard.agent}" + (" (most of it waiting)" if wait > run else "")
        parts.append(Part(ms=run + wait, words=words, stage=shard.stage, device=shard.agent))
        at = shard.agent
    return parts


def _largest_stage(p: Predictor) -> str:
    smallest = {s.name: min(float(p.costs.sums(m).param_bytes[-1]) for m in s.variants) for s in p.view.spec.onnx_stages()}  # fmt: skip
    return max(smallest, key=lambda name: smallest[name])
