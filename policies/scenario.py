"""Scenarios: a fleet, a service, a load, a link to the cloud and what goes wrong, as values that a simulation plays.

A scenario is a document (TOML on disk); `world_of` turns it into arrays, with made-up series where no recorded trace is given. The
same scenario, seed and traces give the same world.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from policies.fleet import AgentView
from policies.ids import AgentId, BlobHash, ModelName, ServiceId, StageName
from policies.latency import Floats
from policies.layouts import Ints
from policies.platforms import PLATFORMS
from policies.service import Axis, BlockProfile, ModelProfile, OnnxStage, PythonStage, ServiceSpec
from sla.contract import Contract, contract_from
from sla.errors import InvalidInputError

Flags = npt.NDArray[np.bool_]
MAX_SECONDS = 14 * 86_400.0
MAX_ALIKE, MAX_ZONES = 500, 100_000


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent of the fleet."""

    name: str
    platform: str
    slowdown: float | None = None
    """Default: the platform's."""
    memory_mb: float | None = None
    zone: str = "site"
    count: int = 1
    """So many alike; they are called NAME-1, NAME-2, ... if it is more than one."""


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way between agents; for the way to the cloud a trace may say more."""

    rtt_ms: float
    jitter_ms: float
    mbit_per_s: float
    trace: str | None = None
    """Name of a recorded trace of round trips, losses or bandwidth."""
    outages_per_hour: float = 0.0
    """Made-up outages of 2 to 12 s."""
    swing: float = 0.0
    """Made-up slow change of round trip and bandwidth: the share by which they swing within a quarter of an hour."""


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When requests come."""

    rps: float
    trace: str | None = None
    """Name of a recorded trace of arrivals; it is stretched to `rps` on average and repeated."""
    crowds: tuple[tuple[float, float, float], ...] = ()
    """From second, to second, times the load."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happens to one agent."""

    at_s: float
    for_s: float
    agent: str
    kind: Literal["lost", "slow", "busy"]
    factor: float = 2.0
    """`slow`: runs take this many times as long; `busy`: this share of the device is taken by others."""
    every_s: float | None = None
    """Again and again, this far apart."""


class StageOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage: a Python step of `typical_ms`, or a model cut into equal blocks."""

    name: str
    typical_ms: float | None = None
    ms_per_item: float = 0.0
    items: float = 1.0
    blocks: int = 8
    weights_mb: float = 10.0
    input_kb: float = 200.0
    cut_kb: float = 150.0
    axis: Axis | None = None
    raw: bool = False
    small_variant: float | None = None
    """Share of the time that a smaller variant with 0.9 of the accuracy takes."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one simulation but its seed and its policy."""

    name: str
    seconds: float
    devices: tuple[Device, ...]
    stages: tuple[StageOf, ...]
    contract: dict[str, Any]
    load: Load
    lan: Link
    uplink: Link
    troubles: tuple[Trouble, ...] = ()
    zones: int = 1
    """So many sites like this one, each with its own service, load and luck; they share nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A recorded series at one value per second; `rtt_ms`, `bytes_per_s` may be None. Arrivals are seconds."""

    rtt_ms: Floats | None = None
    down: Flags | None = None
    bytes_per_s: Floats | None = None
    arrivals_s: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """What truly happens, second by second; no policy sees it but the oracle."""

    scenario: Scenario
    spec: ServiceSpec
    contract: Contract
    models: dict[ModelName, ModelProfile]
    agents: dict[AgentId, AgentView]
    arrivals_ms: Floats
    rtt_ms: Floats
    """[S] of the way to the cloud."""
    bytes_per_s: Floats
    down: Flags
    slow: dict[AgentId, Floats]
    """[S] each: times the nominal run time."""
    busy: dict[AgentId, Floats]
    lost: dict[AgentId, Flags]

    @property
    def seconds(self) -> int:
        return len(self.rtt_ms)


def scenario_from(document: Mapping[str, Any]) -> Scenario:
    """The scenario in a parsed document. Raises InvalidInputError naming what is wrong with it."""
    try:
        scenario = msgspec.convert(dict(document), Scenario)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"This scenario cannot be used: {error}.") from None
    unknown = [d.platform for d in scenario.devices if d.platform not in PLATFORMS]
    if unknown:
        raise InvalidInputError(f"There is no platform {unknown[0]!r}; there are {', '.join(PLATFORMS)}.")
    if not 10 <= scenario.seconds <= MAX_SECONDS:
        raise InvalidInputError(f"seconds must be 10 to {MAX_SECONDS:g}, not {scenario.seconds:g}.")
    wrong = [d.name for d in scenario.devices if not 1 <= d.count <= MAX_ALIKE]
    if wrong or not 1 <= scenario.zones <= MAX_ZONES:
        raise InvalidInputError(f"count must be 1 to {MAX_ALIKE}, and zones 1 to {MAX_ZONES}.")
    scenario = msgspec.structs.replace(scenario, devices=tuple(itertools.chain(*map(_alike, scenario.devices))))
    names = {d.name for d in scenario.devices}
    if len(names) != len(scenario.devices) or not names:
        raise InvalidInputError("A scenario needs devices, each with its own name.")
    strangers = [t.agent for t in scenario.troubles if t.agent not in names]
    if strangers:
        raise InvalidInputError(f"A trouble names {strangers[0]!r}, which is not a device of the scenario.")
    return scenario


def _alike(device: Device) -> list[Device]:
    if device.count == 1:
        return [device]
    return [
        msgspec.structs.replace(device, name=f"{device.name}-{number}", count=1)
        for number in range(1, device.count + 1)
    ]


def world_of(scenario: Scenario, seed: int, traces: Mapping[str, Trace] | None = None) -> World:
    """The world of a scenario. A trace that is not given is made up, so that a scenario runs anywhere."""
    rng, known = np.random.default_rng(seed), traces or {}
    seconds = int(scenario.seconds)
    agents = {a.id: a for a in map(_agent, scenario.devices)}
    spec, models = service_of(scenario)
    rtt, rate, down = _uplink(scenario.uplink, seconds, rng, known)
    slow = {a: np.ones(seconds) for a in agents}
    busy = {a: np.zeros(seconds) for a in agents}
    lost = {a: np.zeros(seconds, dtype=np.bool_) for a in agents}
    for trouble in scenario.troubles:
        for begin in _times(trouble, seconds):
            span = slice(int(begin), int(begin + trouble.for_s))
            agent = AgentId(trouble.agent)
            if trouble.kind == "lost":
                lost[agent][span] = True
            elif trouble.kind == "slow":
                slow[agent][span] *= trouble.factor
            else:
                busy[agent][span] = np.minimum(0.95, busy[agent][span] + trouble.factor)
    return World(
        scenario, spec, contract_from({"service_id": spec.id, **scenario.contract}), models, agents,
        _arrivals(scenario.load, seconds, rng, known), rtt, rate, down, slow, busy, lost,
    )  # fmt: skip


def service_of(scenario: Scenario) -> tuple[ServiceSpec, dict[ModelName, ModelProfile]]:
    """The service and its models."""
    models: dict[ModelName, ModelProfile] = {}
    stages: list[OnnxStage | PythonStage] = []
    for s in scenario.stages:
        if s.typical_ms is not None:
            stages.append(PythonStage(name=StageName(s.name), step=f"sim.{s.name}", typical_ms=s.typical_ms))
            continue
        variants = [_model(s, "", 1.0, 1.0)]
        if s.small_variant is not None:
            variants.append(_model(s, "-small", s.small_variant, 0.9))
        models.update({m.name: m for m in variants})
        stages.append(
            OnnxStage(
                name=StageName(s.name), variants=tuple(m.name for m in variants), inputs={"x": f"{s.name}_in"},
                outputs={"y": f"{s.name}_out"}, axis=s.axis, items=s.items, raw=s.raw,
            )
        )  # fmt: skip
    return ServiceSpec(id=ServiceId("simulated"), inputs=(), outputs=(), stages=tuple(stages)), models


def _model(s: StageOf, suffix: str, share: float, accuracy: float) -> ModelProfile:
    block = BlockProfile(
        name="b", fixed_ms=0.0, per_item_ms=share * s.ms_per_item / s.blocks,
        param_bytes=int(share * s.weights_mb * 1e6 / s.blocks), cut_bytes_per_item=int(1e3 * s.cut_kb),
    )  # fmt: skip
    return ModelProfile(
        name=ModelName(s.name + suffix), sha256=BlobHash("0" * 64), blocks=(block,) * s.blocks, split_axis=s.axis,
        input_bytes_per_item=int(1e3 * s.input_kb), accuracy=accuracy,
    )  # fmt: skip


def _agent(device: Device) -> AgentView:
    p = PLATFORMS[device.platform]
    budget = p.emulated_budget_bytes if device.memory_mb is None else int(device.memory_mb * 2**20)
    return AgentView(
        id=AgentId(device.name), platform=device.platform, evidence="estimated", is_cloud=p.is_cloud, zone=device.zone,
        slowdown=p.emulated_slowdown if device.slowdown is None else device.slowdown, memory_budget_bytes=budget,
        power_w=p.power_w,
    )  # fmt: skip


def _times(trouble: Trouble, seconds: int) -> list[float]:
    if trouble.every_s is None:
        return [trouble.at_s] if trouble.at_s < seconds else []
    return list(np.arange(trouble.at_s, seconds, max(trouble.every_s, trouble.for_s, 1.0)))


def _arrivals(load: Load, seconds: int, rng: np.random.Generator, traces: Mapping[str, Trace]) -> Floats:
    """Milliseconds, ascending: Poisson, or a recorded trace stretched to the same mean; crowds are thinned in."""
    peak = max([1.0, *(factor for _, _, factor in load.crowds)])
    trace = traces.get(load.trace or "")
    if trace is not None and trace.arrivals_s is not None and len(trace.arrivals_s) > 1:
        gaps = np.diff(trace.arrivals_s)
        gaps = gaps / max(float(gaps.mean()), 1e-9) / (load.rps * peak)
        wanted = int(seconds * load.rps * peak * 1.2) + 10
        start = int(rng.integers(len(gaps)))
        times = np.cumsum(np.take(gaps, np.arange(start, start + wanted), mode="wrap"))
    else:
        times = np.cumsum(rng.exponential(1.0 / (load.rps * peak), int(seconds * load.rps * peak * 1.2) + 10))
    times = times[times < seconds]
    level = np.ones(seconds)
    for begin, end, factor in load.crowds:
        level[int(begin) : int(end)] = factor
    kept = times[rng.random(len(times)) * peak < level[times.astype(np.int64)]]
    return np.asarray(1000.0 * kept)


def _uplink(
    link: Link, seconds: int, rng: np.random.Generator, traces: Mapping[str, Trace]
) -> tuple[Floats, Floats, Flags]:  # fmt: skip
    """Round trip, bytes per second and outages, one value per second."""
    trace = traces.get(link.trace or "", Trace())
    phase = rng.uniform(0, 2 * np.pi)
    wave = 1.0 + link.swing * np.sin(np.arange(seconds) * 2 * np.pi / 900.0 + phase)
    rtt = np.maximum(1.0, link.rtt_ms * wave + rng.gamma(1.0, link.jitter_ms, seconds) - link.jitter_ms)
    rate = np.full(seconds, link.mbit_per_s * 1e6 / 8.0) / wave
    down = np.zeros(seconds, dtype=np.bool_)
    for begin in rng.uniform(0, seconds, rng.poisson(link.outages_per_hour * seconds / 3600.0)):
        down[int(begin) : int(begin + rng.uniform(2.0, 12.0))] = True
    known = max((len(x) for x in (trace.rtt_ms, trace.down, trace.bytes_per_s) if x is not None), default=0)
    if known:
        rows: Ints = (int(rng.integers(known)) + np.arange(seconds)) % known
        rtt = rtt if trace.rtt_ms is None else np.maximum(1.0, trace.rtt_ms[rows])
        rate = rate if trace.bytes_per_s is None else np.maximum(1e3, trace.bytes_per_s[rows])
        down = down if trace.down is None else trace.down[rows]
    return rtt, rate, down
