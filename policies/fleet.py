"""What a fleet is at one moment: agents, links, and how old each number is."""

from __future__ import annotations

from typing import Literal

import msgspec

from policies.ids import AgentId
from policies.roofline import DeviceCalibration

AgentState = Literal["live", "suspect", "lost", "draining"]
Evidence = Literal["measured", "simulated", "contract", "estimated", "emulated"]
"""How a claim about hardware is known; `emulated` marks a device that this machine's CPU plays."""


class Booked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What services that are not part of a snapshot take on one agent, and what was measured of them there."""

    busy: float = 0.0
    """Utilisation of the agent by them ..."""
    second_ms: float = 0.0
    third_ms2: float = 0.0
    """... and the sums of rate x E[work^2] (ms) and of rate x E[work^3] (ms^2), as in `policies.queues.Load`."""
    yielding: float = 0.0
    beside: float = 0.0
    """How much of `busy` is text, and how much are steps beside the accelerator."""
    held_bytes: int = 0
    """What their shards take in memory."""
    log_ratio: float = 0.0
    """Log-ratios of measured over modelled run time, each times its weight, summed ..."""
    weight: float = 0.0
    """... and the sum of those weights."""

    def plus(self, other: Booked) -> Booked:
        return Booked(
            busy=self.busy + other.busy, second_ms=self.second_ms + other.second_ms, third_ms2=self.third_ms2 + other.third_ms2,
            yielding=self.yielding + other.yielding, beside=self.beside + other.beside,
            held_bytes=self.held_bytes + other.held_bytes, log_ratio=self.log_ratio + other.log_ratio,
            weight=self.weight + other.weight,
        )  # fmt: skip

    def minus(self, other: Booked) -> Booked:
        """Without a part of it; what rounding leaves below nothing is nothing."""
        return Booked(
            busy=max(0.0, self.busy - other.busy), second_ms=max(0.0, self.second_ms - other.second_ms),
            third_ms2=max(0.0, self.third_ms2 - other.third_ms2),
            yielding=max(0.0, self.yielding - other.yielding), beside=max(0.0, self.beside - other.beside),
            held_bytes=self.held_bytes - other.held_bytes, log_ratio=self.log_ratio - other.log_ratio,
            weight=max(0.0, self.weight - other.weight),
        )  # fmt: skip


NOTHING = Booked()


class AgentView(msgspec.Struct, frozen=True, kw_only=True):
    """One agent as the controller last saw it."""

    id: AgentId
    platform: str
    evidence: Evidence
    zone: str = "default"
    is_cloud: bool = False
    state: AgentState = "live"
    host: str = "127.0.0.1"
    port: int = 0
    """Where peers reach its tensor door."""
    ingress_port: int = 0
    """Where clients reach its Open Inference Protocol ingress; 0 if it has none."""
    slowdown: float = 1.0
    """Time of a shard on this agent divided by its time on the profile's reference core (calibrated at enrollment)."""
    memory_budget_bytes: int = 1 << 30
    """What shards may use in total, before headroom."""
    cpu_saturation: float = 0.0
    """Share of the device that is busy with work other than ours, [0, 1]."""
    availability: float = 0.999
    """Measured share of time the agent was reachable; a prior until enough was seen."""
    power_w: float = 5.0
    """Draw while busy, watts (platform table until measured)."""
    age_ms: float = 0.0
    """Age of the newest report."""
    warmed: frozenset[str] = frozenset()
    """The shard files that the agent has on disk (`plan.file_key`): they need no push, only loading."""
    device_type: str = ""
    """What devices that run shards alike have in common; profiles are kept by it. Empty if the agent did not say."""
    calibration: DeviceCalibration | None = None
    """What it was measured to do; None until then."""
    booked: Booked = NOTHING
    """What services that are not part of this snapshot take there; nothing where it holds all of them."""


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """The way from one agent to another; numbers are measured by `src`."""

    src: AgentId
    dst: AgentId
    rtt_ms: float = 1.0
    jitter_ms: float = 0.1
    """Standard deviation of the round-trip time."""
    bandwidth_bytes_per_s: float = 125e6
    age_ms: float = 0.0
    availability: float = 1.0
    """Measured share of time in which it worked while both ends were up; 1 while nothing is known."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """All agents and the links between them that were measured."""

    agents: dict[AgentId, AgentView]
    links: dict[str, LinkView] = {}
    """Keyed by `link_key(src, dst)`."""
    elsewhere: Booked = NOTHING
    """Of the services that are not part of this snapshot: what was measured of them on all agents together (`log_ratio`, `weight`)."""

    def link(self, src: AgentId, dst: AgentId) -> LinkView:
        """The measured link; a loop-back link when `src` is `dst`; a cautious guess when never measured."""
        if src == dst:
            return LinkView(src=src, dst=dst, rtt_ms=0.0, jitter_ms=0.0, bandwidth_bytes_per_s=float("inf"))
        there = self.links.get(link_key(src, dst)) or self.links.get(link_key(dst, src))
        if there is not None:
            return there
        crosses = self.agents[src].is_cloud != self.agents[dst].is_cloud
        return LinkView(
            src=src, dst=dst, rtt_ms=20.0 if crosses else 2.0, jitter_ms=5.0 if crosses else 0.5,
            bandwidth_bytes_per_s=12.5e6 if crosses else 60e6, age_ms=float("inf"),
        )  # fmt: skip


def link_key(src: AgentId, dst: AgentId) -> str:
    """The key of a directed link."""
    return f"{src}>{dst}"
