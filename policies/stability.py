"""What keeps decisions calm: thresholds with hysteresis, repeated agreement, a gain that pays for the move, a flap budget.

All of it is values: `Memory` is what one service's looks have shown so far, `StabilitySettings` the limits. The loss of a
device overrides them all (see `policies.decide`).
"""

from __future__ import annotations

import msgspec

from policies.advised import Heeded
from policies.beliefs import Beliefs
from policies.ids import AgentId
from policies.plan import Plan
from sla.contract import Contract
from sla.errors import SettingsError

HOUR_MS = 3_600_000.0


class StabilitySettings(msgspec.Struct, frozen=True, kw_only=True):
    """When a plan that is better is better enough."""

    risk_enter: float = 0.3
    """The running plan is at risk from here ..."""
    risk_leave: float = 0.1
    """... until its risk has fallen below this."""
    worsened: float = 0.08
    """It is also at risk when its score is this much above the best that it had: the world changed under it (a link, a device). Half
    of it ends that."""
    looks: int = 4
    """A plan must win this many looks in a row before it replaces one that is not at risk ..."""
    risky_looks: int = 2
    """... and this many before it replaces one that is."""
    min_gain: float = 0.02
    """Score that a move must bring beyond its price ..."""
    min_gain_share: float = 0.15
    """... and as a share of the running plan's score, whichever is more."""
    risky_min_gain: float = 0.01
    """The same when the running plan is at risk."""
    pay_back_ms: float = 1_000_000.0
    """A move that takes this long costs a score of 1; one of ten seconds costs 0.01."""
    dwell_ms: float = 20_000.0
    """A plan runs at least this long before a better one may replace it ..."""
    risky_dwell_ms: float = 5_000.0
    """... or one with less risk."""
    free_moves: int = 2
    """After so many moves within an hour, each further one doubles the time that a plan runs before a merely better one may replace
    it: where the world goes back and forth, going back is what may wait."""
    max_dwell_ms: float = 1_800_000.0
    """No dwell is doubled beyond this."""
    moves_per_hour: int = 6
    """Moves in any hour, not counting those after the loss of a device."""
    calm_moves_per_hour: int = 3
    """How many of them may be for a plan that is merely better; the rest is kept for plans at risk."""
    budget_price: float = 0.08
    """Score that the last move of the hour must bring beyond everything else; the first is free, and between them the price of
    what is left rises with the square of what was used."""
    tie: float = 0.01
    """The plan that won before stays the favourite while its score is within this of the best."""
    solve_every_ms: float = 30_000.0
    """While the running plan does not get worse and the same agents are live, the solver is asked this often ..."""
    risky_solve_every_ms: float = 5_000.0
    """... and when it is at risk and the solver just found nothing better."""
    keep_ms: float = 60_000.0
    """How long an advice to keep the running plan holds back plans that are merely better."""

    @property
    def calm_moves(self) -> int:
        """Moves within an hour that plans may make that are merely better."""
        return min(self.calm_moves_per_hour, self.moves_per_hour)

    def __post_init__(self) -> None:
        if not 0 <= self.risk_leave < self.risk_enter <= 1:
            raise SettingsError(
                f"risk_leave={self.risk_leave} must be below risk_enter={self.risk_enter}, or every look changes its mind."
            )
        if self.looks < 1 or self.risky_looks < 1 or self.moves_per_hour < 1:
            raise SettingsError("looks, risky_looks and moves_per_hour must be at least 1.")
        if not self.calm_moves_per_hour >= 0:
            raise SettingsError(f"calm_moves_per_hour={self.calm_moves_per_hour} must not be negative.")
        if self.min_gain < self.tie:
            raise SettingsError(
                f"min_gain={self.min_gain} must not be below tie={self.tie}: plans that tie would replace each other."
            )
        if self.risky_looks > self.looks or self.risky_dwell_ms > self.dwell_ms:
            raise SettingsError(
                f"A plan at risk must not be held longer than one that is not: risky_looks={self.risky_looks} of "
                f"looks={self.looks}, risky_dwell_ms={self.risky_dwell_ms:g} of dwell_ms={self.dwell_ms:g}."
            )
        if self.free_moves < 0:
            raise SettingsError(f"free_moves={self.free_moves} must not be negative.")
        if self.worsened <= self.tie:
            raise SettingsError(
                f"worsened={self.worsened} must be above tie={self.tie}: the noise of a plan's own score would count as risk."
            )
        if (
            min(
                self.dwell_ms,
                self.risky_dwell_ms,
                self.keep_ms,
                self.risky_min_gain,
                self.min_gain_share,
                self.budget_price,
            )
            < 0
            or not self.pay_back_ms > 0
        ):
            raise SettingsError("Times and gains of the stability settings must not be negative.")


class Solved(msgspec.Struct, frozen=True, kw_only=True):
    """What the solver last looked at when it found nothing better."""

    at_ms: float
    score: float
    live: frozenset[AgentId]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one service between looks; losing it costs only a few looks."""

    contract: Contract | None = None
    """The contract that the running plan was decided under."""
    favourite: Plan | None = None
    """The plan that won the last looks ..."""
    favourite_of: str = "solver"
    rationale: str = ""
    looks: int = 0
    """... and how many in a row."""
    is_risky: bool = False
    best_score: float | None = None
    """The lowest score of the running plan since it took over."""
    last_move_ms: float | None = None
    moves_ms: tuple[float, ...] = ()
    """When it moved within the last hour, losses of devices not counted."""
    keep_until_ms: float | None = None
    heeded: Heeded | None = None
    """What counted of the LLM's wishes when that was last looked at."""
    solved: Solved | None = None
    beliefs: Beliefs = Beliefs()
    """What the last minutes showed of links, load and devices; it outlives moves."""


def saw_risk(memory: Memory, risk: float, score: float, settings: StabilitySettings) -> Memory:
    """After a look at the running plan's risk and score, with the hysteresis of both thresholds applied."""
    risk_limit = settings.risk_leave if memory.is_risky else settings.risk_enter
    rise_limit = settings.worsened / 2 if memory.is_risky else settings.worsened
    best = score if memory.best_score is None else min(score, memory.best_score)
    is_risky = risk >= risk_limit or score - best >= rise_limit
    return msgspec.structs.replace(memory, is_risky=is_risky, best_score=best)


def agreed(memory: Memory, plan: Plan, proposer: str, rationale: str = "") -> Memory:
    """After a look that `plan` won."""
    again = memory.favourite is not None and memory.favourite.layout() == plan.layout()
    return msgspec.structs.replace(
        memory,
        favourite=plan,
        favourite_of=memory.favourite_of if again and proposer == "solver" else proposer,
        rationale=memory.rationale if again and not rationale else rationale,
        looks=memory.looks + 1 if again else 1,
    )


def disagreed(memory: Memory) -> Memory:
    """After a look that the running plan won."""
    return msgspec.structs.replace(memory, favourite=None, looks=0, rationale="", favourite_of="solver")


def nothing_changed(
    memory: Memory, now_ms: float, score: float, live: frozenset[AgentId], s: StabilitySettings
) -> bool:
    """Whether the solver would most likely say what it said last time: nothing better."""
    last = memory.solved
    if last is None or memory.favourite is not None or live != last.live:
        return False
    patience_ms = s.risky_solve_every_ms if memory.is_risky else s.solve_every_ms
    return now_ms - last.at_ms < patience_ms and score - last.score < s.tie / 2


def moved(memory: Memory, now_ms: float, contract: Contract, *, counts: bool) -> Memory:
    """After a move; `counts` tells whether it spends flap budget."""
    moves = (*recent_moves(memory, now_ms), *((now_ms,) if counts else ()))
    return Memory(contract=contract, last_move_ms=now_ms, moves_ms=moves, beliefs=memory.beliefs)


def budget_price(memory: Memory, now_ms: float, settings: StabilitySettings) -> float:
    """What a move must bring because it uses up one of the hour's: a shadow price that rises as they run out."""
    used = len(recent_moves(memory, now_ms)) / settings.moves_per_hour
    return settings.budget_price * min(1.0, used) ** 2


def calm_dwell_ms(memory: Memory, now_ms: float, settings: StabilitySettings) -> float:
    """How long a plan runs before a merely better one may replace it: longer, the more moves the last hour saw."""
    beyond = max(0, len(recent_moves(memory, now_ms)) - settings.free_moves)
    return max(settings.dwell_ms, min(settings.max_dwell_ms, settings.dwell_ms * 2.0 ** min(beyond, 30)))


def recent_moves(memory: Memory, now_ms: float) -> tuple[float, ...]:
    return tuple(at for at in memory.moves_ms if now_ms - at < HOUR_MS)
