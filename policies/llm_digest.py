"""The words of a prompt: contract, fleet, plans and past outcomes, as short as they can be said.

Verdicts that code can compute stand there as words, since arithmetic is not what a small model is good at; what is alike for all
agents or all plans is said once. Every number has its unit, every report its age.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from policies.admit import SCORE_TOLERANCE
from policies.constraints import in_words
from policies.decision import Prediction
from policies.fleet import AgentView
from policies.ids import AgentId
from policies.knobs import knobs_of
from policies.llm_names import Aliases
from policies.plan import GRAIN, Lane, Plan
from policies.platforms import PLATFORMS
from policies.score import Scored
from policies.service import ServiceSpec
from policies.snapshot import ServiceView, Snapshot
from sla.contract import Contract

MAX_OUTCOMES = 5
FRESH_MS = 5_000.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an earlier decision."""

    seconds_ago: float
    proposer: str
    """`llm`, `solver` or a baseline; anything else is shown as `other`."""
    predicted_p99_ms: float
    measured_p99_ms: float | None = None


def meets(prediction: Prediction, contract: Contract, needed_rps: float) -> bool:
    """Whether a plan is predicted to keep every promise, with risk below one half."""
    return (
        prediction.p99_ms <= contract.latency_p99_ms
        and prediction.throughput_rps >= needed_rps
        and prediction.availability >= contract.availability_sla
        and prediction.accuracy >= (contract.accuracy_floor or 0.0) - 1e-9
        and prediction.risk < 0.5
    )


def contract_text(view: ServiceView) -> str:
    """What is promised, and how it goes now."""
    contract = view.contract
    floor = f", accuracy at least {contract.accuracy_floor:g}" if contract.accuracy_floor is not None else ""
    now = f"Load now {view.offered_rps:.2f} requests/s" if view.offered_rps >= 0.005 else "No requests now"
    measured = f", measured p99 {view.measured_p99_ms:.0f} ms" if view.measured_p99_ms is not None else ""
    return (
        f"SLA: p99 at most {contract.latency_p99_ms:.4g} ms, {contract.throughput_rps:g} requests/s, availability "
        f"{round(100 * contract.availability_sla, 4):g}%{floor}, privacy {contract.privacy}.\n{now}{measured}."
    )


def agents_text(snapshot: Snapshot, aliases: Aliases, shown: Sequence[AgentId]) -> str:
    """One line for each agent that is shown."""
    agents = snapshot.fleet.agents
    facts = [_facts(agents[name], aliases) for name in shown]
    common = [values[0] for values in zip(*facts, strict=True) if len(facts) > 1 and len(set(values)) == 1]
    lines = [
        f"{aliases.agents[name]}: {', '.join([*(fact for fact in own if fact not in common), _load(agents[name])])}"
        for name, own in zip(shown, facts, strict=True)
    ]
    hidden = len(agents) - len(shown)
    more = f"\nand {hidden} more agents that no candidate uses." if hidden else ""
    head = f"Agents (all {', '.join(common)})" if common else "Agents"
    return f"{head}; times slower than the reference, busy with other work:\n" + "\n".join(lines) + more


def wishes_text(view: ServiceView, aliases: Aliases) -> str:
    """What is in force; the candidates keep to what persons confirmed already."""
    said = {"In force": view.constraints, "In force by your own wish": view.advised}
    return "\n".join(
        f"{head}: {'; '.join(_plain_words(aliases.hide(in_words(rule))) for rule in rules)}."
        for head, rules in said.items()
        if rules
    )


def knobs_text(spec: ServiceSpec, aliases: Aliases) -> str:
    """What can be turned while requests run; empty where there is nothing."""
    said = [
        f"{aliases.knobs[key]} of {aliases.stages[stage.name]}, {knob.low:g} to {knob.high:g}, most accurate at its {knob.better} end"
        for key, stage, knob in knobs_of(spec)
    ]
    return f"Knobs: {'; '.join(said)}." if said else ""


def plans_text(
    options: dict[str, Scored], running: Scored | None, best: Scored, contract: Contract, aliases: Aliases
) -> str:
    """The running plan and the candidates, one line each; what is alike for all of them stands in the head."""
    shown = [*options.values(), *([running] if running is not None else [])]
    marks, columns = _marks(shown), _columns(shown, aliases)
    common = [values[0] for values in columns if len(set(values)) == 1]
    own = [values for values in columns if len(set(values)) > 1]

    def line(at: int, entry: Scored) -> str:
        verdict = "YES" if meets(entry.prediction, contract, contract.throughput_rps) else "NO"
        best_in = [mark for mark, owner in marks.items() if owner is entry]
        return ", ".join([f"meets SLA: {verdict}", _rank(entry, best), *best_in, *(values[at] for values in own)])

    lines = [
        f"Plans ({', '.join(['p99', 'load of the busiest agent', 'bytes to move', 'agents by stage'])}):",
        *([f"all: {', '.join(common)}"] if common else []),
        *(f"{name}: {line(at, entry)}" for at, (name, entry) in enumerate(options.items())),
        f"Running plan: {line(len(options), running)}" if running is not None else "Nothing runs yet.",
    ]
    return "\n".join(lines)


def outcomes_text(outcomes: Sequence[Outcome]) -> str:
    """How earlier decisions went; empty if there were none."""
    lines = []
    for outcome in list(outcomes)[-MAX_OUTCOMES:]:
        who = outcome.proposer if outcome.proposer in ("llm", "solver", "operator") else "other"
        came = (
            f"measured {outcome.measured_p99_ms:.0f} ms" if outcome.measured_p99_ms is not None else "not measured yet"
        )
        lines.append(
            f"- {outcome.seconds_ago:.0f} s ago, by {who}: predicted p99 {outcome.predicted_p99_ms:.0f} ms, {came}"
        )
    return "Last decisions:\n" + "\n".join(lines) if lines else ""


# --- agents


def _facts(agent: AgentView, aliases: Aliases) -> list[str]:
    return [
        agent.platform if agent.platform in PLATFORMS else "other",
        "cloud" if agent.is_cloud else "edge",
        aliases.zones[agent.zone],
        agent.state,
        f"reported within {FRESH_MS / 1000:.0f} s"
        if agent.age_ms <= FRESH_MS
        else f"STALE, {agent.age_ms / 1000:.0f} s old",
    ]


def _load(agent: AgentView) -> str:
    return f"{agent.slowdown:.1f}x, {100 * agent.cpu_saturation:.0f}%"


# --- plans


def _columns(shown: Sequence[Scored], aliases: Aliases) -> list[list[str]]:
    """What is said of each plan, one list for each thing that is said."""
    predictions = [entry.prediction for entry in shown]
    return [
        [_models_text(entry.plan, aliases) for entry in shown],
        [f"accuracy {p.accuracy:.2f}" for p in predictions],
        [f"risk {_level(p.risk)}" for p in predictions],
        [f"{p.p99_ms:.0f} ms" for p in predictions],
        [f"{100 * p.saturation:.0f}%" for p in predictions],
        [f"{p.move_bytes / 1e6:.0f} MB" for p in predictions],
        [_layout_text(entry.plan, aliases) for entry in shown],
    ]


def _rank(entry: Scored, best: Scored) -> str:
    """The comparison of scores in words."""
    behind = entry.score - best.score
    if behind <= 1e-9:
        return "score best"
    return "score near best" if behind <= SCORE_TOLERANCE else "score worse" if behind <= 0.1 else "score much worse"


def _level(risk: float) -> str:
    return "low" if risk < 0.05 else "medium" if risk < 0.3 else "HIGH"


_FIGURES: tuple[tuple[str, Callable[[Prediction], float]], ...] = (
    ("least jitter", lambda p: p.jitter_ms),
    ("least energy", lambda p: p.energy_j),
    ("quickest move", lambda p: p.move_ms),
    ("most accurate", lambda p: -p.accuracy),
)


def _marks(shown: Sequence[Scored]) -> dict[str, Scored]:
    """Which plan is best in what its line gives no figure of; a tie marks nobody."""
    marks = {}
    for name, figure in _FIGURES:
        ranked = sorted(shown, key=lambda entry: figure(entry.prediction))
        if len(ranked) > 1 and figure(ranked[1].prediction) - figure(ranked[0].prediction) > 1e-6:
            marks[name] = ranked[0]
    return marks


def _models_text(plan: Plan, aliases: Aliases) -> str:
    return " ".join(f"{_stage(aliases, stage.stage)}={_model(aliases, stage.model)}" for stage in plan.stages)


def _layout_text(plan: Plan, aliases: Aliases) -> str:
    """Where its stages run, in their order; where one chain runs all of them, only that."""
    places = [" | ".join(_lane_text(lane, aliases) for lane in stage.lanes) for stage in plan.stages]
    return f"all {places[0]}" if len(places) > 1 and len(set(places)) == 1 else " / ".join(places)


def _lane_text(lane: Lane, aliases: Aliases) -> str:
    share = "" if len(lane.share) == GRAIN else f"{len(lane.share) / 10:.0f}% "
    return share + ">".join(aliases.agents.get(shard.agent, "A?") for shard in lane.shards)


def _stage(aliases: Aliases, name: str) -> str:
    return {str(stage): alias for stage, alias in aliases.stages.items()}.get(name, "S?")


def _model(aliases: Aliases, name: str) -> str:
    return {str(model): alias for model, alias in aliases.models.items()}.get(name, "M?")


def _plain_words(text: str) -> str:
    """Our own words around names that were hidden: letters, digits and little else."""
    return "".join(c if c.isascii() and (c.isalnum() or c in " .,%-") else " " for c in text)[:200]


def candidates_text(names: Iterable[str]) -> str:
    """Which names an answer may choose; they are numbered without a gap."""
    found = list(names)
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
