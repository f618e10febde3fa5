"""The policies that a simulation compares, as choosers: `decide` as it is, the baselines, and an oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from policies.admit import plan_faults
from policies.baselines import BASELINES
from policies.decide import DecideSettings, Memory, Policy, decide
from policies.decision import Prediction
from policies.fleet import AgentView
from policies.limits import usable_bytes
from policies.predict import Predictor
from policies.scenario import World
from policies.simulate import Choice, Chooser, SimulationSettings, simulate
from policies.simulate_results import Result
from policies.snapshot import Snapshot
from policies.solve import candidates
from sla.errors import InfeasibleError

ORACLE_SECONDS = 30
"""How far the oracle sees."""
ORACLE_GAIN = 0.02
"""Less danger by this much is what the oracle moves for."""
BASELINE_DWELL_MS = 20_000.0


@dataclass(slots=True)
class Deciding:
    """The controller's own loop: `policies.decide` with its memory."""

    settings: DecideSettings = field(default_factory=DecideSettings)
    memory: Memory = field(default_factory=Memory)

    def __call__(self, snapshot: Snapshot, world: World) -> Choice:
        decision, self.memory = decide(snapshot, world.spec.id, self.memory, settings=self.settings)
        if decision.plan is None:
            return Choice(decision=decision)
        move_ms = decision.prediction.move_ms if decision.prediction is not None else 0.0
        repair = decision.trigger in ("agent-lost", "start", "contract")
        return Choice(plan=decision.plan, ready_in_ms=move_ms, counts=not repair, decision=decision)


@dataclass(slots=True)
class Baseline:
    """A baseline by itself: it has what it asks for unless it breaks a hard limit; a moment's dwell is all its calm."""

    policy: Policy
    last_move_ms: float = -1e12

    def __call__(self, snapshot: Snapshot, world: World) -> Choice:
        service = world.spec.id
        running = snapshot.services[service].running
        if running is not None and snapshot.now_ms - self.last_move_ms < BASELINE_DWELL_MS:
            return Choice()
        try:
            scored = candidates(snapshot, service, 1) if running is None else []
        except InfeasibleError:
            return Choice()
        proposal, _ = self.policy(snapshot, service, scored, Memory())
        if proposal is None or (running is not None and proposal.plan.layout() == running.layout()):
            return Choice()
        predictor = Predictor(snapshot, service)
        if plan_faults(proposal.plan, predictor, "start"):
            return Choice()
        prediction = predictor.predict(proposal.plan)
        agents = predictor.costs.agents
        if any(size > usable_bytes(agents[a], predictor.settings) for a, size in prediction.memory_bytes.items()):
            return Choice()
        self.last_move_ms = snapshot.now_ms
        return Choice(plan=proposal.plan, ready_in_ms=prediction.move_ms)


@dataclass(slots=True)
class Oracle:
    """Knows what the next half minute brings, and moves for nothing: what no policy can beat by much."""

    def __call__(self, snapshot: Snapshot, world: World) -> Choice:
        service = world.spec.id
        ahead = _foreseen(snapshot, world)
        predictor = Predictor(ahead, service)
        running = snapshot.services[service].running
        now = math.inf
        if running is not None and not plan_faults(running, predictor, "start"):
            now = _danger(predictor.predict(running), predictor.rate_rps)
            if now <= ORACLE_GAIN:
                return Choice()  # Danger is never negative, so no plan could gain that much.
        try:
            found = candidates(ahead, service, 8, predictor=predictor)
        except InfeasibleError:
            return Choice()
        best = min(found, key=lambda entry: _danger(entry.prediction, predictor.rate_rps))
        if running is not None and best.plan.layout() == running.layout():
            return Choice()
        if _danger(best.prediction, predictor.rate_rps) > now - ORACLE_GAIN:
            return Choice()
        return Choice(plan=best.plan)


def _danger(prediction: Prediction, rate_rps: float) -> float:
    """Risk, and what is not carried: where no plan keeps the promise, the one that carries most breaks it least."""
    return prediction.risk + max(0.0, 1.0 - prediction.throughput_rps / max(rate_rps, 1e-9))


def _foreseen(snapshot: Snapshot, world: World) -> Snapshot:
    second = min(int(snapshot.now_ms / 1000), world.seconds - 1)
    span = slice(second, second + ORACLE_SECONDS)

    def agent(view: AgentView) -> AgentView:
        lost = bool(world.lost[view.id][span].any())
        factor, busy = float(world.slow[view.id][span].max()), float(world.busy[view.id][span].max())
        return msgspec.structs.replace(
            view, state="lost" if lost else "live", slowdown=world.agents[view.id].slowdown * factor, age_ms=0.0, cpu_saturation=busy
        )  # fmt: skip

    agents = {a: agent(view) for a, view in snapshot.fleet.agents.items()}
    rtt, rate, down = world.rtt_ms[span], world.bytes_per_s[span], world.down[span]
    links = {
        key: link if agents[link.src].is_cloud == agents[link.dst].is_cloud else msgspec.structs.replace(
            link, rtt_ms=float(rtt.mean()) + 1000.0 * float(down.mean()), jitter_ms=float(rtt.std()) + 2000.0 * float(down.mean()),
            bandwidth_bytes_per_s=float(rate.min()), age_ms=0.0,
        )
        for key, link in snapshot.fleet.links.items()
    }  # fmt: skip
    coming = (
        (world.arrivals_ms >= snapshot.now_ms) & (world.arrivals_ms < snapshot.now_ms + 1e3 * ORACLE_SECONDS)
    ).sum()
    views = {
        name: msgspec.structs.replace(view, offered_rps=float(coming) / ORACLE_SECONDS, measures={}, measured_p99_ms=None)
        for name, view in snapshot.services.items()
    }  # fmt: skip
    fleet = msgspec.structs.replace(snapshot.fleet, agents=agents, links=links)
    return msgspec.structs.replace(snapshot, fleet=fleet, services=views)


def chooser_of(name: str) -> Chooser:
    """A fresh chooser by name. Raises KeyError."""
    return CHOOSERS[name]()


def simulate_policy(name: str, world: World, seed: int, settings: SimulationSettings | None = None) -> Result:
    """What a policy makes of a world, with ingresses that hedge if it is one of `HEDGED`. Raises KeyError for an unknown name."""
    settings = msgspec.structs.replace(settings or SimulationSettings(), hedges=name in HEDGED)
    return simulate(world, chooser_of(name), seed, settings)


CHOOSERS: dict[str, Callable[[], Chooser]] = {
    "solver": Deciding,
    "solver-unhedged": Deciding,
    "static-hedged": lambda: Baseline(BASELINES["static"]),
    **{name: (lambda policy=policy: Baseline(policy)) for name, policy in BASELINES.items()},  # type: ignore[misc]
    "oracle": Oracle,
}
"""The policies by name; each call makes one with an empty memory."""
HEDGED = ("solver", "static-hedged")
"""Policies under which ingresses hedge. Peers' do not, which the baselines stand for; the oracle is where it should be already."""
