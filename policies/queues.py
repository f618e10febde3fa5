"""How long requests wait for accelerators: the load of each, and the waits of a request that visits several of them, or one several times.

Requests of a service come back to the same accelerator stage after stage. It takes the oldest request first, so what a request does there
without going elsewhere in between is one piece of work, a *spell*: whoever comes next waits for all of it, and it waits once. Text gives way to
pictures (`agents.queue`): a spell that ends with text also waits for the pictures of requests that came later. Both make tails that a queue of
single runs, first come, first served, does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from policies.fleet import Booked
from policies.ids import AgentId, StageName
from policies.latency import Queue

MAX_BUSY = 0.98
"""Waits are computed for at most this utilisation; beyond it the queue has no steady state and risk says so."""
GIVEN_WAY: Final = 0.7
"""Share of what text would wait for later pictures if these never paused: while a lone request is between two of its stages, text slips in.
This and the next are fitted to requests that queue one by one (`policies.simulate`), over plans of all kinds and three loads."""
BEHIND_THE_SLOWEST: Final = 0.5
"""What is left of the waits in all other queues of a pipeline but the longest. What comes out of a queue of steady runs comes in steps, so a quicker
queue behind it holds nobody up; one beside it, in another lane of the same stage, counts in full. Source of the limit: Friedman (1965), "Reduction methods for tandem queuing systems"."""


class Visit(NamedTuple):
    """One shard that a request runs."""

    stage: int
    """The how manieth of the stages that can be sharded."""
    name: StageName
    lane: int
    agent: AgentId
    run_ms: float
    variance: float
    yields: bool
    """Whether it is text."""
    is_first: bool
    is_last: bool
    """Of its lane."""
    apart_ms: float
    """What the request does elsewhere between the stage before and this visit, if it is the first of its lane."""


@dataclass(slots=True)
class Spell:
    """What a request does on one agent without visiting another one in between."""

    agent: AgentId
    begins: list[tuple[StageName, int]] = field(default_factory=list)
    """Stage and lanes of its first visits: they wait side by side ..."""
    texts: list[tuple[StageName, int]] = field(default_factory=list)
    """... and of its first ones that are text."""
    visits: int = 0
    urgent_ms: float = 0.0
    yielding_ms: float = 0.0
    variance: float = 0.0
    apart_ms: float = 0.0
    """What it does between its visits: steps, links."""
    squares: float = 0.0
    cubes: float = 0.0
    """Of its single runs: the sums of E[run^2] and of E[run^3]."""
    last_stage: int = -1
    is_open: bool = False
    """Whether one of its visits ended a lane of the last stage."""

    def add(self, visit: Visit) -> None:
        """Go on with another visit."""
        self.apart_ms += visit.apart_ms if self.visits else 0.0
        self.visits += 1
        self.is_open = visit.is_last or (self.is_open and visit.stage == self.last_stage)
        self.last_stage = visit.stage
        _note(self.begins, visit)
        if visit.yields:
            _note(self.texts, visit)
            self.yielding_ms += visit.run_ms
        else:
            self.urgent_ms += visit.run_ms
        self.variance += visit.variance
        square, cube = _powers(visit.run_ms, visit.variance)
        self.squares += square
        self.cubes += cube

    @property
    def work_ms(self) -> float:
        return self.urgent_ms + self.yielding_ms

    @property
    def holds(self) -> float:
        """How much of it is one piece of work, [0, 1]: others slip in while it is elsewhere."""
        return 1.0 if self.visits == 1 else self.work_ms / max(self.work_ms + self.apart_ms, 1e-9)

    @property
    def waits(self) -> float:
        """How often it waits: once as far as it is one piece of work."""
        return 1.0 + (1.0 - self.holds) * (self.visits - 1)


def _note(places: list[tuple[StageName, int]], visit: Visit) -> None:
    """Add a visit's lane if it is of the stage that is noted already, or of the first one."""
    if (not places or places[0][0] == visit.name) and (visit.name, visit.lane) not in places:
        places.append((visit.name, visit.lane))


def spells_of(visits: Iterable[Visit]) -> list[Spell]:
    """A request's visits, in their order, gathered: those of one stage on one agent, and of the next one if it begins where this one ended."""
    spells: list[Spell] = []
    latest: dict[AgentId, Spell] = {}
    for visit in visits:
        spell = latest.get(visit.agent)
        if spell is None or not _goes_on(spell, visit):
            spell = latest[visit.agent] = Spell(visit.agent)
            spells.append(spell)
        spell.add(visit)
    return spells


def _goes_on(spell: Spell, visit: Visit) -> bool:
    return visit.stage == spell.last_stage or (spell.is_open and visit.is_first and visit.stage == spell.last_stage + 1)


@dataclass(slots=True)
class Load:
    """Work that keeps one agent busy: its utilisation, and the sums of rate x E[work^2] (ms) and rate x E[work^3] (ms^2)."""

    busy: float = 0.0
    second_ms: float = 0.0
    third_ms2: float = 0.0
    yielding: float = 0.0
    """How much of `busy` is text, which lets everything else go ahead."""
    beside: float = 0.0
    """How much of `busy` are steps of an ingress, which run beside the accelerator."""

    @staticmethod
    def booked(others: Booked, foreign_busy: float) -> Load:
        """What others take, and a share of the time that is not ours at all."""
        return Load(
            foreign_busy + others.busy, others.second_ms, others.third_ms2, others.yielding, others.beside
        )  # fmt: skip

    def add(self, rate_per_ms: float, mean_ms: float, std_ms: float) -> None:
        """More runs that are spells by themselves."""
        square, cube = _powers(mean_ms, std_ms * std_ms)
        self.busy += rate_per_ms * mean_ms
        self.second_ms += rate_per_ms * square
        self.third_ms2 += rate_per_ms * cube

    def add_spell(self, rate_per_ms: float, spell: Spell) -> None:
        """More spells."""
        square, cube, holds = spell.squares, spell.cubes, 1.0
        if spell.visits > 1:
            holds = spell.holds
            whole_square, whole_cube = _powers(spell.work_ms, spell.variance)
            square += holds * (whole_square - square)
            cube += holds * (whole_cube - cube)
        self.busy += rate_per_ms * spell.work_ms
        self.yielding += rate_per_ms * spell.yielding_ms
        self.second_ms += rate_per_ms * square
        self.third_ms2 += rate_per_ms * cube

    def add_step(self, rate_per_ms: float, mean_ms: float) -> None:
        """More steps, which nobody in the queue waits for."""
        self.busy += rate_per_ms * mean_ms
        self.beside += rate_per_ms * mean_ms

    def copy(self) -> Load:
        return Load(self.busy, self.second_ms, self.third_ms2, self.yielding, self.beside)

    @property
    def queued(self) -> float:
        """Utilisation of the accelerator itself, at most `MAX_BUSY`."""
        return min(self.busy - self.beside, MAX_BUSY)


def _powers(mean_ms: float, variance: float) -> tuple[float, float]:
    """E[X^2] and E[X^3] of log-normal times: E[X^n] = mean^n (1 + cv^2)^(n (n - 1) / 2)."""
    spread = 1.0 + variance / (mean_ms * mean_ms) if mean_ms > 0.0 else 1.0
    square = mean_ms * mean_ms * spread
    return square, square * mean_ms * spread * spread


class Wait(NamedTuple):
    """A wait on one agent, before a stage's lane."""

    agent: AgentId
    stage: StageName
    lane: int
    queue: Queue


class Moments(NamedTuple):
    """A wait: the chance that there is any, and its mean and mean square over all requests."""

    chance: float
    first_ms: float
    second_ms2: float

    def times(self, share: float) -> Moments:
        """The same for a share of the requests, and none for the others."""
        return Moments(share * self.chance, share * self.first_ms, share * self.second_ms2)


def mean_wait_ms(load: Load) -> float:
    """Mean time in the queue of an M/G/1 server. Source: Pollaczek-Khinchine formula."""
    return load.second_ms / (2.0 * (1.0 - load.queued))


def waits_of(spells: Sequence[Spell], loads: dict[AgentId, Load]) -> list[Wait]:
    """What a request waits for before each of its spells, and before the text in it."""
    ahead = [work_ahead(loads[spell.agent], spell) for spell in spells]
    longest = max(range(len(ahead)), key=lambda at: ahead[at].first_ms, default=0)
    slowest = spells[longest].begins[0][0] if spells else None
    waits: list[Wait] = []
    for spell, wait in zip(spells, ahead, strict=True):
        queue = shaped(wait if spell.begins[0][0] == slowest else wait.times(BEHIND_THE_SLOWEST))
        waits += [Wait(spell.agent, stage, lane, queue) for stage, lane in spell.begins]
    for at, spell in enumerate(spells):
        if spell.texts:
            steps_ms = max((other.work_ms for other in spells[:at] if other.agent != spell.agent), default=0.0)
            queue = shaped(later_pictures(loads[spell.agent], spell, steps_ms))
            waits += [Wait(spell.agent, stage, lane, queue) for stage, lane in spell.texts]
    return waits


def work_ahead(load: Load, spell: Spell) -> Moments:
    """The wait for the work that is there before a spell. Pictures wait for pictures, and for the text that runs (Cobham 1954)."""
    once = _wait(load, load.queued if spell.texts else load.queued - load.yielding)
    mean, variance = spell.waits * once.first_ms, spell.waits * (once.second_ms2 - once.first_ms**2)
    return Moments(1.0 - (1.0 - once.chance) ** spell.waits, mean, variance + mean * mean)


def later_pictures(load: Load, spell: Spell, steps_ms: float) -> Moments:
    """The wait of text for pictures of requests that came later.

    Text waits until no picture is left: the work V that was there when its request came, its own pictures included, drawn out by those
    that come meanwhile, a delay busy period: E = E[V] / (1 - p), Var = Var[V] / (1 - p)^2 + E[V] rate E[S^2] / (1 - p)^3, with p the pictures'
    utilisation. What came through a slower queue before comes `steps_ms` apart, and too late to get in between.
    """
    busy = load.queued
    pictures = max(0.0, busy - load.yielding)
    between = GIVEN_WAY * spell.holds * (max(0.0, 1.0 - steps_ms / spell.work_ms) if spell.urgent_ms else 1.0)
    if pictures <= 0.0 or between <= 0.0:
        return Moments(0.0, 0.0, 0.0)
    once = _wait(load, busy)
    variance = once.second_ms2 - once.first_ms**2
    ahead = once.first_ms + spell.urgent_ms
    second_ms = load.second_ms * (pictures / busy) ** 2
    mean = between * (ahead / (1.0 - pictures) - ahead)
    spread = variance / (1.0 - pictures) ** 2 + ahead * second_ms / (1.0 - pictures) ** 3 - variance
    spread *= between
    return Moments(between * pictures, mean, spread + mean * mean)


def _wait(load: Load, busy: float) -> Moments:
    """The wait for work of which a share `busy` goes ahead.

    Source: Pollaczek-Khinchine for E[W], Takacs for E[W^2] = 2 E[W]^2 + rate E[S^3] / (3 (1 - busy)).
    """
    mean = load.second_ms / (2.0 * (1.0 - busy))
    return Moments(load.queued, mean, 2.0 * mean * mean + load.third_ms2 / (3.0 * (1.0 - busy)))


SHAPES: Final = np.linspace(0.4, 4.0, 181)
_SPREADS = np.array([math.gamma(1.0 + 2.0 / k) / math.gamma(1.0 + 1.0 / k) ** 2 for k in SHAPES])[::-1]
"""E[W^2] / E[W]^2 of a Weibull distribution, rising, for shapes that fall."""


def shaped(wait: Moments) -> Queue:
    """No wait, or one with a Weibull tail, with this chance and these moments.

    Exponential runs make an exponential tail (shape 1) and steady ones at a light load a short one: whoever waits, waits for what is left of one run.
    """
    if wait.first_ms <= 0.0:
        return Queue(wait.chance, 0.0)
    spread = wait.chance * wait.second_ms2 / wait.first_ms**2
    shape = float(np.interp(spread, _SPREADS, SHAPES[::-1]))
    if not _SPREADS[0] <= spread <= _SPREADS[-1]:  # Beyond them the chance gives in.
        spread = min(max(spread, float(_SPREADS[0])), float(_SPREADS[-1]))
    return Queue(min(1.0, spread * wait.first_ms**2 / wait.second_ms2), wait.first_ms, shape)
