"""Can a contract be kept, and if not: what binds, and what is the nearest contract in each dimension that could be?

One dimension is relaxed at a time and the solver is asked again; a contract is only offered when a plan was found that keeps
all of it. The number of solver runs is bounded (`MAX_SOLVES`), so that an answer takes less than a second on the demo's fleet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from policies.admit import nearest_latency_ms
from policies.binding import Binding, Dimension, hard_binding, shortfalls
from policies.costs import PredictSettings
from policies.decide import DecideSettings
from policies.ids import ServiceId
from policies.plan import Plan
from policies.predict import Predictor
from policies.prices import Prices, cost_per_1k
from policies.score import Scored
from policies.snapshot import Snapshot
from policies.solve import candidates
from sla.contract import Contract, Objective, Percentile, percent
from sla.errors import InfeasibleError

MAX_SOLVES = 16
CANDIDATES = 8
Z80 = 1.2816
"""Four of five normal values lie within this many standard deviations."""


class Nearest(msgspec.Struct, frozen=True, kw_only=True):
    """What would have to change, in one dimension only, for the contract to be kept."""

    dimension: Dimension
    possible: bool
    """False: no value of this dimension alone would do."""
    changes: dict[str, Any] = {}
    """Fields of the contract with their new values."""
    text: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said about a contract before anything moves."""

    best: Scored | None
    """The plan that keeps the contract, or the one that comes closest; None if none is legal."""
    bindings: tuple[Binding, ...]
    """In what it falls short, the worst first; empty when it is feasible."""
    nearest: tuple[Nearest, ...] = ()
    together: Nearest | None = None
    """Where no dimension alone would do: what several of them would have to be."""
    p99_low_ms: float | None = None
    p99_high_ms: float | None = None
    """Four of five plans that were predicted so end up between these two."""
    cost_per_1k: float | None = None

    @property
    def feasible(self) -> bool:
        return not self.bindings


def examine(
    snapshot: Snapshot,
    service_id: ServiceId,
    *,
    settings: DecideSettings | None = None,
    prices: Prices | None = None,
) -> Answer:
    """The answer for the contract that stands in the snapshot. Raises NotFoundError for an unknown service."""
    return _Search(snapshot, service_id, settings or DecideSettings(), prices or Prices()).answer()


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the solver finds under one contract."""

    predictor: Predictor
    plans: tuple[tuple[Scored, tuple[Binding, ...]], ...]
    """Best first, each with where it falls short."""
    error: str = ""

    def kept(self) -> Scored | None:
        return next((entry for entry, bindings in self.plans if not bindings), None)


class _Search:
    def __init__(self, snapshot: Snapshot, service_id: ServiceId, settings: DecideSettings, prices: Prices) -> None:
        self.snapshot = snapshot
        self.service_id = service_id
        self.settings = settings
        self.prices = prices
        self.contract = snapshot.services[service_id].contract if service_id in snapshot.services else None
        self.solves = 0

    def answer(self) -> Answer:
        asked = Predictor(self.snapshot, self.service_id, self.settings.predict).view.contract
        found = self._solve(asked)
        assert found is not None
        p = found.predictor
        if kept := found.kept():
            return self._told(p, kept, ())
        nearest = tuple(self._nearest(asked, found))
        if not found.plans:
            return Answer(best=None, bindings=(hard_binding(p, found.error),), nearest=nearest)
        best, bindings = min(found.plans, key=lambda pair: (len(pair[1]), pair[1][0].severity))
        together = None if any(each.possible for each in nearest) else self._together(asked, found)
        return msgspec.structs.replace(self._told(p, best, bindings, nearest), together=together)

    def _told(
        self, p: Predictor, best: Scored, bindings: tuple[Binding, ...], nearest: tuple[Nearest, ...] = ()
    ) -> Answer:
        spread = math.exp(Z80 * log_error(p, best.plan))
        p99 = best.prediction.p99_ms
        return Answer(
            best=best, bindings=bindings, nearest=nearest, p99_low_ms=p99 / spread, p99_high_ms=p99 * spread,
            cost_per_1k=cost_per_1k(p, best.plan, self.prices),
        )  # fmt: skip

    def _solve(self, contract: Contract) -> _Found | None:
        """None when there were too many runs already."""
        if self.solves >= MAX_SOLVES:
            return None
        self.solves += 1
        view = msgspec.structs.replace(self.snapshot.services[self.service_id], contract=contract)
        snapshot = msgspec.structs.replace(self.snapshot, services={**self.snapshot.services, self.service_id: view})
        p = Predictor(snapshot, self.service_id, self.settings.predict)
        try:
            scored = candidates(
                snapshot, self.service_id, CANDIDATES, predictor=p, weights=self.settings.weights,
                settings=self.settings.solver,
            )  # fmt: skip
        except InfeasibleError as error:
            return _Found(predictor=p, plans=(), error=str(error))
        return _Found(predictor=p, plans=tuple((s, tuple(shortfalls(p, s, self.prices))) for s in scored))

    # --- one dimension at a time

    def _nearest(self, asked: Contract, found: _Found) -> Iterator[Nearest]:
        if self.service_id not in self.snapshot.services or not found.predictor.costs.agents:
            return
        ways: tuple[tuple[Dimension, bool, Callable[[Contract, _Found], dict[str, Any] | None]], ...] = (
            ("latency", True, self._latency),
            ("throughput", True, self._throughput),
            ("availability", True, self._availability),
            ("accuracy", asked.accuracy_floor is not None, self._accuracy),
            ("privacy", asked.privacy != "any", self._privacy),
            ("zones", bool(asked.zones), self._zones),
            ("energy", asked.energy_j_per_request is not None, self._energy),
            ("cost", asked.cost_per_1k_requests is not None, self._cost),
        )
        for dimension, is_limited, way in ways:
            if not is_limited:
                continue
            changes = way(asked, found)
            if changes is None:
                yield Nearest(dimension=dimension, possible=False, text=f"no {_WORDS[dimension]} alone would do")
            else:
                yield Nearest(dimension=dimension, possible=True, changes=changes, text=_feasible_with(changes))

    def _latency(self, asked: Contract, found: _Found) -> dict[str, Any] | None:
        """What the quickest plan needs: of those known, else of those found under generous limits; then half-way back once."""
        pool: _Found | None = found
        for factor in (1.0, 4.0, 40.0):
            if factor > 1.0:
                generous = min(1e9, factor * asked.latency_p99_ms)
                pool = self._solve(_changed(asked, {"latency_p99_ms": generous, "objectives": ()}))
            quick = None if pool is None else self._quickest(pool)
            if quick is None:
                if not found.plans:
                    return None  # A hard limit binds; time is not the reason.
                continue
            changes = _latency_changes(asked, quick)
            if self._keeps(asked, changes):
                return self._nearer(asked, changes)
        return None

    def _nearer(self, asked: Contract, changes: dict[str, Any]) -> dict[str, Any]:
        """The same, or less if a plan is found half-way between what is asked for and what is known to do."""
        if set(changes) != {"latency_p99_ms"} or changes["latency_p99_ms"] < 1.3 * asked.latency_p99_ms:
            return changes
        middle = _ceiled(math.sqrt(asked.latency_p99_ms * changes["latency_p99_ms"]))
        return {"latency_p99_ms": middle} if self._keeps(asked, {"latency_p99_ms": middle}) else changes

    def _quickest(self, found: _Found) -> Scored | None:
        """The quickest plan that keeps everything but the latency."""
        fits = [entry for entry, bindings in found.plans if all(b.dimension == "latency" for b in bindings)]
        return min(fits, key=lambda entry: entry.prediction.p99_ms, default=None)

    def _throughput(self, asked: Contract, found: _Found) -> dict[str, Any] | None:
        """From what the strongest plan carries downwards; less load also means shorter queues."""
        strongest = max((entry.prediction.throughput_rps for entry, _ in found.plans), default=asked.throughput_rps)
        start = min(0.9 * strongest, asked.throughput_rps)
        for factor in (1.0, 0.6, 0.2, 0.02):
            rps = _floored(factor * start)
            if rps >= asked.throughput_rps or rps <= 0:
                continue
            if self._keeps(asked, {"throughput_rps": rps}):
                return {"throughput_rps": rps}
            if not found.plans:
                return None  # A hard limit binds; load is not the reason.
        return None

    def _availability(self, asked: Contract, found: _Found) -> dict[str, Any] | None:
        fits = [entry for entry, bindings in found.plans if all(b.dimension == "availability" for b in bindings)]
        if not fits:
            return None
        changes = _availability_changes(max(entry.prediction.availability for entry in fits))
        return changes if _changed(asked, changes).availability_sla < asked.availability_sla else None

    def _accuracy(self, asked: Contract, found: _Found) -> dict[str, Any] | None:
        """The highest floor below the asked one that some variants reach, halving among all of them."""
        p = found.predictor
        reachable = {1.0}
        for stage in p.view.spec.onnx_stages():
            reachable = {
                a * b for a in reachable for b in {stage.accuracy(p.costs.sums(m).model) for m in stage.variants}
            }
        floors = sorted({_floored(a, 4) for a in reachable if a < (asked.accuracy_floor or 0.0) - 1e-9})
        best, low, high = None, 0, len(floors) - 1
        while low <= high:
            middle = (low + high) // 2 if best is not None else low  # If the lowest does not help, none does.
            if self._keeps(asked, {"accuracy_floor": floors[middle]}):
                best, low = floors[middle], middle + 1
            elif best is None:
                return None
            else:
                high = middle - 1
        return None if best is None else {"accuracy_floor": best}

    def _privacy(self, asked: Contract, found: _Found) -> dict[str, Any] | None:
        looser = ("features-may-leave", "any") if asked.privacy == "raw-stays-on-edge" else ("any",)
        return next(({"privacy": each} for each in looser if self._keeps(asked, {"privacy": each})), None)

    def _zones(self, asked: Contract, found: _Found) -> dict[str, Any] | None:
        return {"zones": ()} if self._keeps(asked, {"zones": ()}) else None

    def _energy(self, asked: Contract, found: _Found) -> dict[str, Any] | None:
        fits = [e.prediction.energy_j for e, bindings in found.plans if all(b.dimension == "energy" for b in bindings)]
        return {"energy_j_per_request": _ceiled(1.1 * min(fits))} if fits else None

    def _cost(self, asked: Contract, found: _Found) -> dict[str, Any] | None:
        fits = [
            cost_per_1k(found.predictor, entry.plan, self.prices)
            for entry, bindings in found.plans
            if all(b.dimension == "cost" for b in bindings)
        ]
        return {"cost_per_1k_requests": _ceiled(1.1 * min(fits))} if fits else None

    def _together(self, asked: Contract, found: _Found) -> Nearest | None:
        """Several promises at once: the load that can be carried, then whatever the quickest plan under that load needs."""
        strongest = max(entry.prediction.throughput_rps for entry, _ in found.plans)
        for factor in (0.7, 0.2):
            changes: dict[str, Any] = {}
            if strongest < found.predictor.rate_rps:
                changes["throughput_rps"] = _floored(factor * strongest)
            generous = {
                **changes, "latency_p99_ms": min(1e9, 40.0 * asked.latency_p99_ms), "objectives": (), "availability_sla": "1%",
                "energy_j_per_request": None, "cost_per_1k_requests": None,
            }  # fmt: skip
            relaxed = self._solve(_changed(asked, generous))
            entry = None if relaxed is None else self._quickest(relaxed)
            if relaxed is None or entry is None:
                continue
            changes |= _latency_changes(asked, entry)
            if entry.prediction.availability < asked.availability_sla:
                changes |= _availability_changes(entry.prediction.availability)
            if (asked.energy_j_per_request or math.inf) < entry.prediction.energy_j:
                changes["energy_j_per_request"] = _ceiled(1.25 * entry.prediction.energy_j)
            cost = cost_per_1k(relaxed.predictor, entry.plan, self.prices)
            if (asked.cost_per_1k_requests or math.inf) < cost:
                changes["cost_per_1k_requests"] = _ceiled(1.25 * cost)
            if self._keeps(asked, changes):
                return Nearest(dimension="several", possible=True, changes=changes, text=_feasible_with(changes))
        return None

    def _keeps(self, asked: Contract, changes: dict[str, Any]) -> bool:
        found = self._solve(_changed(asked, changes))
        return found is not None and found.kept() is not None


def log_error(p: Predictor, plan: Plan, settings: PredictSettings | None = None) -> float:
    """Standard deviation of the logarithm of a predicted p99: smaller the more of the plan was measured."""
    s = settings or p.settings
    measured = whole = 0.0
    for stage, agent, model, span, items in p.costs.runs(p.view, plan):
        run_ms = p.costs.run_ms(stage, model, agent, span, items)
        whole += run_ms
        measured += run_ms * p.costs.trust(stage, agent, span)
    trusted = measured / whole if whole else 0.0
    return s.sigma_unmeasured + trusted * (s.sigma_measured - s.sigma_unmeasured)


def _latency_changes(asked: Contract, entry: Scored) -> dict[str, Any]:
    p = entry.prediction
    predicted: dict[Percentile, float] = {"p50": p.p50_ms, "p95": p.p95_ms, "p99": p.p99_ms}
    changes: dict[str, Any] = {}
    if p.p99_ms > asked.latency_p99_ms:
        changes["latency_p99_ms"] = nearest_latency_ms(p)
    late = [o for o in asked.objectives if o.metric != "inter-token" and predicted[o.percentile] > o.at_most_ms]
    if late:
        changes["objectives"] = tuple(
            o.model_copy(update={"at_most_ms": _ceiled(1.25 * predicted[o.percentile])}) if o in late else o
            for o in asked.objectives
        )
    return changes


def _availability_changes(reached: float) -> dict[str, Any]:
    """A little less than what is reached, in one digit after the nines."""
    missing = max(1e-6, 1.1 * (1.0 - reached))
    digit = 10.0 ** math.floor(math.log10(missing))
    return {"availability_sla": percent(max(0.01, round(1.0 - math.ceil(missing / digit - 1e-9) * digit, 9)))}


def _feasible_with(changes: dict[str, Any]) -> str:
    return "feasible with " + ", ".join(f"{name} {_said(name, value)}" for name, value in changes.items())


def _changed(contract: Contract, changes: dict[str, Any]) -> Contract:
    return contract.model_copy(
        update={k: float(str(v).rstrip("%")) / 100 if k == "availability_sla" else v for k, v in changes.items()}
    )


def _said(name: str, value: Any) -> str:
    if name == "objectives":
        return ", ".join(f"{o.percentile} {o.at_most_ms:g} ms" for o in value if isinstance(o, Objective))
    if name == "zones":
        return "empty"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _floored(value: float, digits: int = 2) -> float:
    """Rounded down to so many significant digits."""
    if value <= 0:
        return 0.0
    digit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return round(math.floor(value / digit + 1e-9) * digit, 12)


def _ceiled(value: float) -> float:
    """Rounded up to two significant digits."""
    digit = 10.0 ** (math.floor(math.log10(max(value, 1e-9))) - 1)
    return round(math.ceil(value / digit - 1e-9) * digit, 12)


_WORDS: dict[Dimension, str] = {
    "latency": "higher latency", "throughput": "lower throughput", "availability": "lower availability",
    "accuracy": "lower accuracy floor", "privacy": "looser privacy", "zones": "other zones", "energy": "more energy",
    "cost": "higher cost",
}  # fmt: skip
