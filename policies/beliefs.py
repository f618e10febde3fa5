"""What a service's looks have shown over the last minutes, and the same snapshot seen with that in mind.

The newest numbers of a link, a load or a device say how it is now; a plan must also stand what they were minutes ago, or it is
replaced as soon as they come back. So a decision is made under the worst that was seen within a window: a link that just broke
is left at once, and is trusted again once it was good for the whole window. A device that was measured to be slow is
remembered to be so after it was left, since nothing runs there that could be measured; the memory of that fades.

All of it is values: `learned` gives the beliefs after a look, `cautious` the snapshot under them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec

from policies.costs import CostModel
from policies.fleet import Booked, LinkView
from policies.ids import AgentId, ServiceId
from policies.snapshot import ServiceView, Snapshot
from sla.errors import SettingsError

Measured = Mapping[AgentId, tuple[float, float]]
"""Log-ratio of measured over modelled run time of an agent, and how far it is trusted, [0, 1]."""
MAX_LINKS = 64
"""Links that are remembered; where there are more, those of the entry."""
SURPRISE = 3.0
BELIEF_WEIGHT = 180.0
"""A memory counts as so many measured runs, less as newer ones come in."""
SLOW = 0.1
"""Logarithm of measured over modelled run time from which a device is remembered as slow."""


class CautionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long the past counts."""

    window_ms: float = 300_000.0
    """The worst of a link and of the load within this counts; 0: only what is now."""
    steps: int = 5
    """The window slides in so many steps."""
    load_window_ms: float = 15_000.0
    """Over which the offered load is counted."""
    slow_half_life_ms: float = 900_000.0
    """A device that was left because it was slow counts half as slow (in logarithms) after this long."""

    def __post_init__(self) -> None:
        if not self.window_ms >= 0 or self.steps < 1 or not min(self.slow_half_life_ms, self.load_window_ms) > 0:
            raise SettingsError("window_ms must not be negative, steps at least 1, the other times above 0.")


class Rough(msgspec.Struct, frozen=True, array_like=True):
    """One link within one step of the window: round trip and bandwidth at the worst look and at the second worst, which is
    what is remembered (one odd number proves nothing), and the sum of the jitter over all looks."""

    step: int
    worst_rtt_ms: float
    rtt_ms: float
    worst_bytes_per_s: float
    bytes_per_s: float
    jitter_sum_ms: float
    looks: int


class Level(msgspec.Struct, frozen=True, array_like=True):
    """A number within one step of the window: its sum over some looks."""

    step: int
    total: float
    looks: int


class Slowed(msgspec.Struct, frozen=True, array_like=True):
    """Logarithm of measured over modelled run time of one agent, and when it was last measured."""

    log_ratio: float
    at_ms: float


class Beliefs(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one service's surroundings; losing it costs caution for a few minutes."""

    links: dict[str, tuple[Rough, ...]] = {}
    loads: tuple[Level, ...] = ()
    """Offered requests per second, oldest step first."""
    slowed: dict[AgentId, Slowed] = {}


def learned(
    beliefs: Beliefs, snapshot: Snapshot, service_id: ServiceId, measured: Measured, s: CautionSettings
) -> Beliefs:
    """The beliefs after a look; `measured` are log-ratio and trust of the agents whose runs were measured under the running plan."""
    slowed = _slowed(beliefs, snapshot.now_ms, measured, s)
    if s.window_ms == 0:
        return Beliefs(slowed=slowed)
    step = int(snapshot.now_ms // (s.window_ms / s.steps))
    first = step - s.steps + 1
    loads = [level for level in beliefs.loads if first <= level.step <= step]
    last = loads.pop() if loads and loads[-1].step == step else Level(step, 0.0, 0)
    loads.append(Level(step, last.total + snapshot.services[service_id].offered_rps, last.looks + 1))
    links = {
        key: _rougher(beliefs.links.get(key, ()), link, step, first)
        for key, link in _remembered(snapshot, service_id)
    }  # fmt: skip
    return Beliefs(links=links, loads=tuple(loads), slowed=slowed)


def _slowed(beliefs: Beliefs, now_ms: float, measured: Measured, s: CautionSettings) -> dict[AgentId, Slowed]:
    """What is measured replaces what is remembered as far as it is trusted; the rest of the memory fades."""
    found = {}
    for agent in beliefs.slowed.keys() | measured.keys():
        before = beliefs.slowed.get(agent)
        left = 0.0 if before is None else ratio_left(before, now_ms, s)
        ratio, trust = measured.get(agent, (0.0, 0.0))
        believed = Slowed(left + trust * (ratio - left), now_ms) if trust > 0.0 else before
        if believed is not None and ratio_left(believed, now_ms, s) > SLOW:
            found[agent] = believed
    return found


def cautious(
    snapshot: Snapshot, service_id: ServiceId, beliefs: Beliefs, measured: Measured, s: CautionSettings
) -> Snapshot:
    """The snapshot as a careful planner sees it; itself when the past was no worse than now.

    Links are the worst of the window (jitter: at least its mean), the load is `likely_rps`, and devices as slow as they are remembered, as far
    as measurements do not say otherwise. Ages, states and what is measured stay as they are.
    """
    fleet, view = snapshot.fleet, snapshot.services[service_id]
    links = {key: _worst(fleet.links[key], seen) for key, seen in beliefs.links.items() if seen and key in fleet.links}
    links = {key: link for key, link in links.items() if link is not fleet.links[key]}
    slower = {}
    for name, slow in beliefs.slowed.items():
        agent, weight = fleet.agents.get(name), BELIEF_WEIGHT * (1.0 - measured.get(name, (0.0, 0.0))[1])
        if agent is not None and weight > 0.0:
            remembered = Booked(log_ratio=weight * ratio_left(slow, snapshot.now_ms, s), weight=weight)
            slower[name] = msgspec.structs.replace(agent, booked=agent.booked.plus(remembered))
    rate = likely_rps(view.offered_rps, beliefs.loads, s)
    promised_rps = view.contract.throughput_rps
    if not links and not slower and max(rate, promised_rps) == max(view.offered_rps, promised_rps):
        return snapshot  # What must be carried is the same: see `costs.required_rps`.
    fleet = msgspec.structs.replace(fleet, agents={**fleet.agents, **slower}, links={**fleet.links, **links})
    services = {**snapshot.services, service_id: msgspec.structs.replace(view, offered_rps=rate)}
    return msgspec.structs.replace(snapshot, fleet=fleet, services=services)


def likely_rps(now_rps: float, loads: Sequence[Level], s: CautionSettings) -> float:
    """The load to plan for: the newest count where it is more than chance explains, else the most of any minute of the window.

    Counts of independent arrivals vary by their square root; `SURPRISE` times that is no chance.
    """
    looks = sum(level.looks for level in loads)
    if not looks:
        return now_rps
    mean = sum(level.total for level in loads) / looks
    expected = max(mean, now_rps * 0.1) * s.load_window_ms / 1000.0
    if (now_rps * s.load_window_ms / 1000.0 - expected) > SURPRISE * math.sqrt(expected):
        return now_rps
    return max([mean, *(level.total / level.looks for level in loads[:-1])])


def ratio_left(slow: Slowed, now_ms: float, s: CautionSettings) -> float:
    """Logarithm of measured over modelled run time that a device is still believed to have, at least 0."""
    return max(0.0, slow.log_ratio) * math.pow(0.5, max(0.0, (now_ms - slow.at_ms) / s.slow_half_life_ms))


def measured_by(costs: CostModel, view: ServiceView) -> Measured:
    """What the running plan's measured runs say of each of its agents."""
    sums: dict[AgentId, tuple[float, float]] = {}
    for ran in costs.measured_of(view):
        total, weights = sums.get(ran.agent, (0.0, 0.0))
        sums[ran.agent] = (total + ran.log_ratio * ran.weight, weights + ran.weight)
    prior = costs.settings.prior_samples
    return {a: (total / weights, weights / (weights + prior)) for a, (total, weights) in sums.items() if weights > 0}


def _remembered(snapshot: Snapshot, service_id: ServiceId) -> list[tuple[str, LinkView]]:
    """The links worth remembering, at most `MAX_LINKS`."""
    links = snapshot.fleet.links
    if len(links) <= MAX_LINKS:
        return list(links.items())
    entry = snapshot.services[service_id].entry
    near = ((key, link) for key, link in links.items() if link.src == entry or link.dst == entry)
    return list(itertools.islice(near, MAX_LINKS))


def _worst(link: LinkView, seen: tuple[Rough, ...]) -> LinkView:
    """The link with the worst of its numbers; itself when they are its newest ones."""
    rtt, rate = max(r.rtt_ms for r in seen), min(r.bytes_per_s for r in seen)
    jitter = sum(r.jitter_sum_ms for r in seen) / sum(r.looks for r in seen)
    if rtt <= link.rtt_ms and jitter <= link.jitter_ms and rate >= link.bandwidth_bytes_per_s:
        return link
    return msgspec.structs.replace(
        link, rtt_ms=max(rtt, link.rtt_ms), jitter_ms=max(jitter, link.jitter_ms),
        bandwidth_bytes_per_s=min(rate, link.bandwidth_bytes_per_s),
    )  # fmt: skip


def _rougher(seen: tuple[Rough, ...], link: LinkView, step: int, first: int) -> tuple[Rough, ...]:
    last = seen[-1] if seen and seen[-1].step == step else Rough(step, 0.0, 0.0, math.inf, math.inf, 0.0, 0)
    rtt, rate = link.rtt_ms, link.bandwidth_bytes_per_s
    now = Rough(
        step,
        max(last.worst_rtt_ms, rtt), max(last.rtt_ms, min(last.worst_rtt_ms, rtt)),
        min(last.worst_bytes_per_s, rate), min(last.bytes_per_s, max(last.worst_bytes_per_s, rate)),
        last.jitter_sum_ms + link.jitter_ms, last.looks + 1,
    )  # fmt: skip
    return (*(r for r in seen if first <= r.step < step), now)
