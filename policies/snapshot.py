"""An immutable picture of everything a decision may depend on."""

from __future__ import annotations

import msgspec

from policies.constraints import Rule
from policies.fleet import Fleet
from policies.ids import AgentId, ModelName, ServiceId
from policies.plan import Plan
from policies.service import DeviceProfile, ModelProfile, ServiceSpec
from sla.contract import Contract


class StageMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one stage on one agent for one block range, in the newest window."""

    count: int
    mean_ms: float
    std_ms: float
    items: float
    """Mean number of items per run."""
    age_ms: float = 0.0


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    """One service with its contract, its running plan and what it did lately."""

    spec: ServiceSpec
    contract: Contract
    running: Plan | None = None
    entry: AgentId | None = None
    """The agent at which most requests come in; None before the first request."""
    offered_rps: float = 0.0
    measures: dict[str, StageMeasure] = {}
    """Keyed by `measure_key`."""
    measured_p99_ms: float | None = None
    """p99 of the requests since the running plan took effect; None while there are too few."""
    measured_p50_ms: float | None = None
    measured_requests: int = 0
    """How many requests these two are of; 0 if that is not known."""
    measured_rps: float = 0.0
    """The load at which they were measured, over all that time; 0 if that is not known."""
    pinned: bool = False
    """An operator pinned the running plan; only the loss of a device moves it."""
    constraints: tuple[Rule, ...] = ()
    """Wishes of persons that are in force now (see `policies.constraints`)."""
    advised: tuple[Rule, ...] = ()
    """Wishes of the LLM that no person confirmed; they count as far as `policies.advised` lets them."""


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What all that ever ran on this fleet taught, see `policies.learning`."""

    models: dict[ModelName, float] = {}
    """Log-ratio of a model's measured over its profiled times, whatever the agent."""
    run_variation: float | None = None
    """Standard deviation of runs over their means; None until enough was seen."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of every policy."""

    now_ms: float
    """The caller's clock, milliseconds; only differences matter."""
    fleet: Fleet
    models: dict[ModelName, ModelProfile]
    services: dict[ServiceId, ServiceView]
    learned: Learned = Learned()
    device_profiles: dict[ModelName, dict[str, DeviceProfile]] = {}
    """What each model takes on the types of devices on which it was timed, by device type."""


def measure_key(stage: str, agent: str, start: int, stop: int) -> str:
    """The key under which a shard's measured times are found."""
    return f"{stage}@{agent}[{start}:{stop}]"
