"""The solver: the best plans of one service under one snapshot, best first.

Hard limits first (only live agents with fresh reports, zones, privacy, memory with headroom, accuracy floor), then layouts of
every stage as tables (`policies.layouts`), a joint search under a rough score (`policies.search`), fallbacks, and
the full prediction of the few that are left. Where no plan is legal the error names the limit that binds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from policies.constraints import Rule, bias, bounded, grounds, shifted
from policies.costs import PredictSettings
from policies.fallbacks import Spares, in_files, with_fallbacks
from policies.fleet import AgentView
from policies.ids import ServiceId
from policies.layouts import Table, Terrain, table_of
from policies.limits import allowed_in, is_fresh, may_hold, usable_bytes
from policies.objectives import plan_for
from policies.partition import MAX_DEVICES, Objective
from policies.plan import Plan, StagePlan
from policies.predict import Predictor, Walked
from policies.score import Scored, Weights, least_score, score
from policies.search import HOP_TIE, LATENCY_TIE, Yard, least_scores, prefilter, search
from policies.service import OnnxStage, PythonStage
from policies.snapshot import Snapshot
from sla.errors import InfeasibleError

SPARE_PREDICTIONS = 4
"""So many more plans are predicted in full than are asked for: the rough score may be wrong about the order of the best."""


class SolverSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How far the solver looks."""

    agents: int = 7
    """Agents that are considered at once; the most promising ones when there are more."""
    full_predictions: int = 10
    """Plans that are predicted in full."""
    tie: float = 0.01
    """Among plans whose scores differ by less from the best, the more accurate one wins."""


def candidates(
    snapshot: Snapshot,
    service_id: ServiceId,
    limit: int = 8,
    *,
    predictor: Predictor | None = None,
    weights: Weights | None = None,
    predict_settings: PredictSettings | None = None,
    settings: SolverSettings | None = None,
    among: int | None = None,
    worth: float = math.inf,
) -> list[Scored]:
    """Up to `limit` different legal plans with their predictions, best first; their epoch is 0.

    `among`: look as far as if so many were asked for. The best of so many is then found without predicting those that cannot be it.
    `worth`: the score from which a plan matters. Where the best one's is above it, some other one above it may be returned instead.
    Raises NotFoundError for an unknown service and InfeasibleError, naming the binding limit, when no plan is legal.
    """
    s = settings or SolverSettings()
    among = max(limit, among or 0)
    s = msgspec.structs.replace(s, full_predictions=min(s.full_predictions, among + SPARE_PREDICTIONS))
    p = predictor or Predictor(snapshot, service_id, predict_settings)
    everybody, rules = usable_agents(p), p.view.constraints
    w = shifted(weights or Weights(), rules)
    found: dict[tuple[StagePlan, ...], Scored] = {}
    places = grounds(everybody, rules) if rules else []
    for agents in places:
        try:
            plans = _plans(p, service_id, agents, w, s, Limits(limit, among), rules, spare=places[0])
            found.update((entry.plan.layout(), entry) for entry in plans)
        except InfeasibleError:
            continue  # A wish steers and never breaks: where it leaves no plan, others are looked for.
    scored = list(found.values()) or _unsteered(p, service_id, everybody, w, s, Limits(limit, among, worth))
    if all(entry.prediction.throughput_rps < p.rate_rps for entry in scored):
        known = {entry.plan.layout() for entry in scored}
        scored += [e for e in _longer(p, everybody, "throughput", w, s) if e.plan.layout() not in known]
    return _ranked(scored, s.tie, p.view.contract.latency_p99_ms)[:limit]


def _unsteered(
    p: Predictor, service_id: ServiceId, everybody: Sequence[AgentView], w: Weights, s: SolverSettings, limits: Limits
) -> list[Scored]:  # fmt: skip
    """Legal plans whatever was wished; where layouts of one and two agents do not fit, longer chains. Raises InfeasibleError."""
    try:
        return _plans(p, service_id, everybody, w, s, limits)
    except InfeasibleError:
        if len(everybody) > s.agents:
            # Those with the most room, in case the most promising ones are all too full.
            with contextlib.suppress(InfeasibleError):
                return _plans(p, service_id, _roomiest(p, everybody, s.agents), w, s, limits)
        longer = _longer(p, everybody, "latency", w, s)
        if not longer:
            raise
        return longer


class Limits(NamedTuple):
    """How many of the best plans are wanted, as of how many they are the best, and from which score they matter."""

    wanted: int
    among: int
    worth: float = math.inf


def _plans(
    p: Predictor, service_id: ServiceId, everybody: Sequence[AgentView], w: Weights, s: SolverSettings, limits: Limits,
    rules: Sequence[Rule] = (), spare: Sequence[AgentView] = (),
) -> list[Scored]:  # fmt: skip
    """Legal plans on these agents, in no order, with fallbacks among `spare` (default: the same). Raises InfeasibleError.

    All that could be among the best that are wanted; the others may be left out.
    """
    agents = _narrowed(p, everybody, s.agents)
    terrain, yard = Terrain.of(p.costs, agents, p.entry), _yard(p, agents, w)
    tables = _tables(p, terrain, yard, p.view.contract.accuracy_floor or 0.0, rules)
    choices = _choices(p, tables, yard, terrain, s.full_predictions)
    if not choices:
        raise InfeasibleError(
            f"The models of {service_id} do not fit together on {len(agents)} agents with "
            f"{_headroom(p)} headroom; free memory or a smaller variant would help."
        )
    # Where shards were measured they are quicker or slower than the tables say; elsewhere their bound is exact.
    least = [0.0] * len(choices) if p.costs.calibration.shards else least_scores(choices, tables, yard)
    judge = _Judge(p, w, Spares(p, _narrowed(p, spare, s.agents) if spare else agents))
    fits = _Loadable(p, agents)
    known: dict[int, Scored] = {}

    def judged(some: Iterable[int], at_most: float = math.inf) -> list[Scored]:
        """All that were judged so far, and of these choices those that could score so little."""
        new = [at for at in some if at not in known and least[at] <= at_most]
        plans = [_plan_of(service_id, choices[at], tables, terrain) for at in new]
        known.update((at, one) for at, one in zip(new, judge(plans, at_most), strict=True) if one is not None)
        return [known[at] for at in sorted(known)]

    for limit in sorted({limits.wanted, limits.among}):
        first = judged(range(min(limit, len(choices))))
        # One that does not carry the load, or does not fit beside what runs, may be replaced by one that scores worse.
        if all(map(fits, first)) and any(entry.prediction.throughput_rps >= p.rate_rps for entry in first):
            if limits.worth < math.inf and not _any_within(judged(range(len(choices)), limits.worth), limits.worth):
                return fits.those_of(judged(()))
            return fits.those_of(judged(range(len(choices)), _enough(p, first, s.tie)))
    return fits.those_of(judged(range(len(choices))))


def _any_within(scored: Sequence[Scored], worth: float) -> bool:
    return any(entry.score <= worth for entry in scored)


Choice = tuple[int, ...]
"""A row of the table of each ONNX stage."""


def _choices(p: Predictor, tables: Sequence[Table], yard: Yard, terrain: Terrain, limit: int) -> list[Choice]:
    """What the search finds best, and the best of the most accurate variants."""
    floor, kinds = p.view.contract.accuracy_floor or 0.0, terrain.kinds()
    found = search(tables, yard, floor, limit, kinds)
    top = math.prod(float(table.accuracy.max()) for table in tables)
    if top > max(floor, math.prod(float(table.accuracy.min()) for table in tables)):
        # The most accurate variants once more by themselves: they win where their score is hardly worse.
        found += search(tables, yard, top, limit // 2, kinds)
    return list(dict.fromkeys(rows for _, rows in found))


def _plan_of(service_id: ServiceId, rows: Choice, tables: Sequence[Table], terrain: Terrain) -> Plan:
    stages = tuple(table.stage_plan(row, terrain) for table, row in zip(tables, rows, strict=True))
    return Plan(service_id=service_id, epoch=0, stages=stages)


def _enough(p: Predictor, found: Sequence[Scored], tie: float) -> float:
    """The score above which a further plan is behind all of `found`, as `_ranked` puts them."""
    best, *others = sorted(found, key=lambda entry: entry.score)
    return max([best.score + tie, *(_plain(entry, p.view.contract.latency_p99_ms) for entry in others)])


def _longer(
    p: Predictor, everybody: Sequence[AgentView], objective: Objective, w: Weights, s: SolverSettings
) -> list[Scored]:  # fmt: skip
    """A plan with chains of any length, for when shorter ones do not fit or do not carry the load; at most one."""
    for agents in (_narrowed(p, everybody, MAX_DEVICES), _roomiest(p, everybody, MAX_DEVICES)):
        plan = plan_for(p, agents, objective)
        if plan is not None:
            plan = with_fallbacks(p, plan, _narrowed(p, everybody, s.agents))
            return _scored(p, [(plan, p.walked(plan))], w)
    return []


def usable_agents(p: Predictor) -> list[AgentView]:
    """Live agents with fresh reports where the contract lets something run. Raises InfeasibleError."""
    contract, everybody = p.view.contract, p.costs.agents.values()
    live = [a for a in everybody if a.state == "live"]
    fresh = [a for a in live if is_fresh(a, p.settings)]
    allowed = [a for a in fresh if allowed_in(a, contract)]
    if not live:
        raise InfeasibleError("There is no live agent.")
    if not fresh:
        raise InfeasibleError(f"No agent has reported within {p.settings.stale_after_ms / 1000:g} s.")
    if not allowed:
        raise InfeasibleError(
            f"No live agent is in the contract's zones ({', '.join(contract.zones)})."
            if contract.zones else f"Privacy {contract.privacy!r} leaves no live agent: all of them are in the cloud."
        )  # fmt: skip
    return sorted(allowed, key=lambda a: a.id)


def _narrowed(p: Predictor, agents: Sequence[AgentView], limit: int) -> list[AgentView]:
    """The most promising agents: the entry, where the service runs now, then the quickest with the least other load.

    Where there are too many, those that cannot hold a single block are left out first.
    """
    if len(agents) > limit:
        least = _least_bytes(p)
        agents = [a for a in agents if p.room_bytes(a) >= least] or agents
    if len(agents) <= limit:
        return list(agents)
    running = p.view.running.agents() if p.view.running is not None else frozenset()

    def cost(agent: AgentView) -> tuple[bool, float, str]:
        free = max(0.05, 1.0 - p.background[agent.id].busy)
        near = 0.0 if p.entry is None else p.costs.link(p.entry, agent.id).rtt_ms
        return (
            agent.id != p.entry and agent.id not in running,
            p.costs.agent_factor(agent.id) / free + near / 50,
            agent.id,
        )

    ranked = sorted(agents, key=cost)
    kept = ranked[:limit]
    for is_cloud in (False, True):
        if not any(a.is_cloud == is_cloud for a in kept):
            kept[-1:] = [a for a in ranked if a.is_cloud == is_cloud][:1] or kept[-1:]
    return sorted(kept, key=lambda a: a.id)


def _roomiest(p: Predictor, agents: Sequence[AgentView], limit: int) -> list[AgentView]:
    """The entry, then the agents with the most memory left."""
    return sorted(agents, key=lambda a: (a.id != p.entry, -p.room_bytes(a), a.id))[:limit]


def _least_bytes(p: Predictor) -> float:
    """What the smallest block of any model of the service takes when it runs."""
    sums = [p.costs.sums(m) for stage in p.view.spec.onnx_stages() for m in stage.variants]
    return min((float(np.diff(s.param_bytes).min()) + s.model.activation_bytes for s in sums), default=0.0)


def _yard(p: Predictor, agents: Sequence[AgentView], weights: Weights) -> Yard:
    steps = [stage for stage in p.view.spec.stages if isinstance(stage, PythonStage)]
    python_ms = sum(p.costs.python_ms(p.view, stage, p.entry) for stage in steps)
    busy = np.array([p.background[a.id].busy for a in agents])
    at_entry = p.rate_rps * python_ms / 1000.0
    busy += np.array([at_entry if a.id == p.entry else 0.0 for a in agents])
    least = 0.0 if p.entry is None else min(1.0, p.background[p.entry].busy + at_entry)
    free = np.array([float(p.room_bytes(a)) for a in agents])
    return Yard(
        p.view.contract, weights, p.rate_rps, np.minimum(busy, 0.98), free, least if steps else 0.0, python_ms,
        p.settings.sigma_unmeasured, p.settings.sigma_capacity,
    )  # fmt: skip


def _tables(p: Predictor, terrain: Terrain, yard: Yard, floor: float, rules: Sequence[Rule] = ()) -> list[Table]:
    """One table per ONNX stage, reduced to rows worth combining. Raises InfeasibleError."""
    stages = [bounded(stage, rules) for stage in p.view.spec.onnx_stages()]
    best = {stage.name: _best_accuracy(p, stage) for stage in stages}
    if math.prod(best.values()) < floor - 1e-9:
        raise InfeasibleError(
            f"The accuracy floor {floor:g} is above {math.prod(best.values()):.3g}, "
            f"what the most accurate variants of {p.view.spec.id} reach together."
        )
    tables = []
    for stage in stages:
        others = math.prod(accuracy for name, accuracy in best.items() if name != stage.name)
        enough = [m for m in stage.variants if stage.accuracy(p.costs.sums(m).model) * others >= floor - 1e-9]
        table = table_of(stage, [(m, p.costs.sums(m)) for m in enough], terrain, p.costs, p.view)
        reduced = None if table is None else prefilter(table, yard, floor, others, is_only=len(stages) == 1)
        if reduced is None or not len(reduced):
            raise InfeasibleError(_why_no_layout(p, stage, terrain.agents, reduced is None))
        tables.append(reduced)
    return tables


def _best_accuracy(p: Predictor, stage: OnnxStage) -> float:
    return max(stage.accuracy(p.costs.sums(m).model) for m in stage.variants)


def _why_no_layout(p: Predictor, stage: OnnxStage, agents: Sequence[AgentView], nobody_may: bool) -> str:
    contract = p.view.contract
    if nobody_may:
        return (
            f"Privacy {contract.privacy!r} binds: stage {stage.name} takes raw data, "
            f"and none of the {len(agents)} usable agents is at the edge."
        )
    smallest = min(int(p.costs.sums(m).param_bytes[-1]) for m in stage.variants)
    able = [a for a in agents if may_hold(a, contract, stage, p.costs.sums(stage.variants[0]).whole)]
    roomiest = max((p.room_bytes(a) for a in able), default=0)
    return (
        f"Memory binds: stage {stage.name} needs {smallest / 1e6:.3g} MB and its activations, and the roomiest agent "
        f"that may run it has {roomiest / 1e6:.3g} MB with {_headroom(p)} headroom."
    )


def _headroom(p: Predictor) -> str:
    return f"{100 * p.settings.memory_headroom:.0f} %"


@dataclass(frozen=True, slots=True)
class _Judge:
    """The full prediction of plans, where it is worth while."""

    p: Predictor
    weights: Weights
    spares: Spares

    def __call__(self, plans: Sequence[Plan], at_most: float = math.inf) -> list[Scored | None]:
        """The plans with fallbacks; None for one that would score more than `at_most` even if it were without risk."""
        p, found = self.p, dict[int, tuple[Plan, Walked]]()
        for at, plan in enumerate(in_files(p.costs, plan) for plan in plans):
            walked = p.walked(plan)
            if least_score(walked.saturation, walked.jitter_ms, p.view.contract, self.weights) <= at_most:
                found[at] = self.spares.complete(plan), walked
        known = dict(zip(found, _scored(p, list(found.values()), self.weights), strict=True))
        return [known.get(at) for at in range(len(plans))]


def _scored(p: Predictor, plans: Sequence[tuple[Plan, Walked]], weights: Weights) -> list[Scored]:
    return [
        Scored(
            plan=plan, prediction=prediction,
            score=score(prediction, p.view.contract, weights) + bias(plan, p.view.constraints, p.costs.agents),
        )
        for (plan, _), prediction in zip(plans, p.judged(plans), strict=True)
    ]  # fmt: skip


class _Loadable:
    """Whether plans can be loaded beside the running one: the old plan serves until the new one is ready."""

    def __init__(self, p: Predictor, agents: Sequence[AgentView]) -> None:
        self._p = p
        self._room = {a.id: usable_bytes(a, p.settings) for a in agents}

    def __call__(self, entry: Scored) -> bool:
        if self._p.view.running is None:
            return True
        wanted = self._p.moving_memory(entry.plan)
        return all(wanted[a] <= self._room[a] for a in entry.prediction.memory_bytes if a in self._room)

    def those_of(self, scored: list[Scored]) -> list[Scored]:
        """Those of the plans that can, if there are any."""
        return [entry for entry in scored if self(entry)] or scored


def _ranked(scored: list[Scored], tie: float, latency_p99_ms: float) -> list[Scored]:
    """Best first; where the score hardly differs from the best, the more accurate, then the quicker and simpler one."""
    best = min(entry.score for entry in scored)

    def key(entry: Scored) -> tuple[bool, float, float]:
        close = entry.score <= best + tie
        return not close, -entry.prediction.accuracy if close else 0.0, _plain(entry, latency_p99_ms)

    return sorted(scored, key=key)


def _plain(entry: Scored, latency_p99_ms: float) -> float:
    """The score, with a little more for a plan that is slower or has more shards."""
    late = entry.prediction.p99_ms / latency_p99_ms
    return entry.score + LATENCY_TIE * late / (late + 1.0) + HOP_TIE * len(entry.plan.shards())
