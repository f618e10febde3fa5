"""From a snapshot to a decision: the rules of one look, most urgent first.

1. Nothing runs yet, an agent of the running plan is gone, or the contract changed: the solver's plan goes now. The loss of a
   device waits for nobody; a changed contract moves only if that helps.
2. An operator pinned the plan, or the numbers of its agents are stale: hold.
3. A fallback is gone: choose fallbacks anew, the lanes stay.
4. Otherwise a better plan must win several looks in a row, by more than its price, within dwell and flap budget; fewer looks
   and less gain suffice when the running plan is at risk.

Every plan passes `policies.admit`. Moves and holds both carry typed reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from policies.admit import SCORE_TOLERANCE, admit, plan_faults, summary
from policies.advised import Heeded, heed, with_rules
from policies.beliefs import CautionSettings, cautious, learned, measured_by
from policies.constraints import KeepPlan, bias, shifted
from policies.costs import PredictSettings
from policies.decision import Decision, Proposal, Reason, ReasonCode, Trigger
from policies.fallbacks import with_fallbacks
from policies.ids import AgentId, ServiceId
from policies.limits import is_fresh
from policies.plan import Plan
from policies.predict import Predictor
from policies.score import Scored, Weights, normalised_jitter, score
from policies.snapshot import Snapshot
from policies.solve import SolverSettings, candidates, usable_agents
from policies.stability import (
    Memory,
    Solved,
    StabilitySettings,
    agreed,
    budget_price,
    calm_dwell_ms,
    disagreed,
    moved,
    nothing_changed,
    recent_moves,
    saw_risk,
)
from sla.errors import InfeasibleError, SettingsError

__all__ = ["DecideSettings", "Keep", "Memory", "Policy", "StabilitySettings", "decide", "propose", "solver_policy"]


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Advice to leave the running plan alone for a while; it holds back plans that are merely better."""

    proposer: str = "llm"
    rationale: str = ""


class DecideSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a decision, one group per concern."""

    predict: PredictSettings = PredictSettings()
    weights: Weights = Weights()
    solver: SolverSettings = SolverSettings()
    stability: StabilitySettings = StabilitySettings()
    caution: CautionSettings = CautionSettings()
    candidates: int = 8
    score_tolerance: float = SCORE_TOLERANCE

    def __post_init__(self) -> None:
        seen_ms, dwell_ms = self.predict.stale_after_ms, self.stability.risky_dwell_ms
        if seen_ms > dwell_ms:
            raise SettingsError(
                f"stale_after_ms={seen_ms:g} must not be above risky_dwell_ms={dwell_ms:g}: a new plan would be judged by what was "
                "measured under the one before, and the two would replace each other."
            )


Policy = Callable[[Snapshot, ServiceId, Sequence[Scored], Memory], tuple[Proposal | None, Memory]]
"""Chooses among candidates (best first) or makes a plan of its own; None means keep what runs."""


def solver_policy(
    snapshot: Snapshot, service_id: ServiceId, scored: Sequence[Scored], memory: Memory
) -> tuple[Proposal | None, Memory]:
    """The best candidate."""
    if not scored:
        return None, memory
    rationale = f"the solver's best, score {scored[0].score:.3f}"
    return Proposal(plan=scored[0].plan, proposer="solver", trigger="better-plan", rationale=rationale), memory


def propose(
    snapshot: Snapshot, service_id: ServiceId, trigger: Trigger = "contract", settings: DecideSettings | None = None
) -> Proposal:
    """The solver's plan, whatever runs now. Raises NotFoundError, and InfeasibleError naming the binding limit."""
    s = settings or DecideSettings()
    scored = candidates(
        snapshot, service_id, 1, weights=s.weights, predict_settings=s.predict, settings=s.solver
    )  # fmt: skip
    return Proposal(plan=scored[0].plan, proposer="solver", trigger=trigger, rationale=f"score {scored[0].score:.3f}")


def decide(
    snapshot: Snapshot,
    service_id: ServiceId,
    memory: Memory,
    *,
    trigger: Trigger | None = None,
    suggestion: Proposal | Keep | None = None,
    scored: Sequence[Scored] | None = None,
    policy: Policy = solver_policy,
    settings: DecideSettings | None = None,
    next_epoch: int | None = None,
) -> tuple[Decision, Memory]:
    """What one service should do now, and what to remember for its next look.

    `trigger` is why the caller looks (a label, except that `operator` asks to move for any gain), `suggestion` what a slower
    policy (the LLM) came up with meanwhile, `scored` candidates that are known already. The decided plan has the epoch
    `next_epoch`, by default the running one's plus one. Raises NotFoundError for an unknown service.
    """
    s = settings or DecideSettings()

    def under(heeded: Heeded) -> tuple[Decision, Memory]:
        wanted = None if _plan_of(suggestion) in heeded.too_dear else suggestion
        before = disagreed(memory) if memory.favourite in heeded.too_dear else memory
        world = with_rules(snapshot, service_id, heeded.rules)
        decision, after = _decided(world, service_id, before, trigger, wanted, scored, policy, s, next_epoch)
        notes = heeded.notes(moved=decision.plan is not None)
        decision = msgspec.structs.replace(decision, reasons=(*decision.reasons, *notes))
        return decision, msgspec.structs.replace(after, heeded=heeded if heeded.wished else None)

    def heeded_now() -> Heeded:
        plans = [plan for plan in (_plan_of(suggestion), memory.favourite) if plan is not None]
        return heed(
            snapshot, service_id, plans, weights=s.weights, tolerance=s.score_tolerance, limit=s.candidates,
            predict_settings=s.predict, solver=s.solver,
        )  # fmt: skip

    known = memory.heeded if trigger is None and suggestion is None and scored is None else None
    if known is None or not known.holds(snapshot, service_id):
        return under(heeded_now())
    decision, after = under(known)
    # What was found a moment ago is good enough to stay where it is; a move is judged by what is now.
    return (decision, after) if decision.plan is None else under(heeded_now())


def _decided(
    snapshot: Snapshot, service_id: ServiceId, memory: Memory, trigger: Trigger | None, suggestion: Proposal | Keep | None,
    scored: Sequence[Scored] | None, policy: Policy, s: DecideSettings, next_epoch: int | None,
) -> tuple[Decision, Memory]:  # fmt: skip
    """`decide`, once it is settled which wishes count."""
    predictor = Predictor(snapshot, service_id, s.predict)
    measured = measured_by(predictor.costs, predictor.view)
    memory = msgspec.structs.replace(memory, beliefs=learned(memory.beliefs, snapshot, service_id, measured, s.caution))
    careful = cautious(snapshot, service_id, memory.beliefs, measured, s.caution)
    wary = predictor if careful is snapshot else Predictor(careful, service_id, s.predict)
    look = _Look(snapshot, service_id, memory, predictor, wary, s, policy, scored, trigger)
    decision, after = look.urgent() or look.hold_still() or look.repair_fallbacks() or look.compare(suggestion)
    if decision.plan is None:
        return decision, after
    running = look.predictor.view.running
    epoch = next_epoch if next_epoch is not None else (running.epoch + 1 if running is not None else 1)
    return msgspec.structs.replace(decision, plan=msgspec.structs.replace(decision.plan, epoch=epoch)), after


def _plan_of(suggestion: Proposal | Keep | None) -> Plan | None:
    return suggestion.plan if isinstance(suggestion, Proposal) else None


@dataclass(slots=True)
class _Look:
    """One look at one service; each rule answers or returns None."""

    snapshot: Snapshot
    service_id: ServiceId
    memory: Memory
    predictor: Predictor
    """Of what is now: what a plan may do, and what is promised when it is decided."""
    wary: Predictor
    """Of the worst of the last minutes: what plans are compared by."""
    settings: DecideSettings
    policy: Policy
    scored: Sequence[Scored] | None
    trigger: Trigger | None

    # --- rules

    def urgent(self) -> tuple[Decision, Memory] | None:
        view = self.predictor.view
        if view.running is None:
            first: Trigger = "contract" if self.trigger == "contract" or self.memory.contract is None else "start"
            return self._solve_now(first, Reason(code="first-plan", text="nothing runs yet"), counts=False)
        if gone := self._gone(view.running.agents()):
            states = {a: self._state(a) for a in gone}
            by_operator = all(state == "draining" for state in states.values())
            text = ", ".join(f"{agent} is {state}" for agent, state in states.items())
            why = Reason(code="operator" if by_operator else "agent-lost", text=text, agent=gone[0])
            return self._solve_now("operator" if by_operator else "agent-lost", why, counts=False)
        if view.pinned:
            return None
        lasting = {"cover", "shard-size", "privacy", "zone", "accuracy"}
        broken = [r for r in plan_faults(view.running, self.predictor, "start") if r.code in lasting]
        if broken:
            return self._solve_now("contract", broken[0], counts=False)
        return None

    def hold_still(self) -> tuple[Decision, Memory] | None:
        view = self.predictor.view
        assert view.running is not None
        if view.pinned:
            return self._hold("pinned", "an operator pinned the running plan"), disagreed(self.memory)
        if any(isinstance(rule, KeepPlan) for rule in view.constraints):
            return self._hold("pinned", "a wish that is in force keeps the running plan for now"), disagreed(
                self.memory
            )
        for name in sorted(view.running.agents()):
            agent = self.predictor.costs.agents[name]
            if agent.state != "live" or agent.age_ms > self.settings.predict.stale_after_ms:
                text = (
                    f"{name} is {agent.state} and last reported {agent.age_ms / 1000:.1f} s ago: no move on old numbers"
                )
                return self._hold("stale", text, name), self.memory
        return None

    def repair_fallbacks(self) -> tuple[Decision, Memory] | None:
        """When a stage has lost all its fallbacks and could have others, only they change."""
        running = self.predictor.view.running
        assert running is not None
        bare = [s.stage for s in running.stages if s.fallback and len(self._gone(s.fallback)) == len(s.fallback)]
        if not bare or self._budget_spent() or self._dwells(self.settings.stability.risky_dwell_ms):
            return None
        try:
            repaired = with_fallbacks(self.predictor, running, usable_agents(self.predictor))
        except InfeasibleError:
            return None
        if not any(stage.fallback for stage in repaired.stages if stage.stage in bare):
            return None
        why = Reason(code="agent-lost", text=f"the fallbacks of {', '.join(bare)} are gone")
        proposal = Proposal(
            plan=repaired, proposer="solver", trigger="agent-lost", rationale="new fallbacks, same lanes"
        )
        own = self._scored(repaired)
        decision = self._admit(proposal, own, (why,))
        if decision.plan is None:
            return None
        return decision, self._moved(counts=True)

    def compare(self, suggestion: Proposal | Keep | None) -> tuple[Decision, Memory]:
        view, limits = self.predictor.view, self.settings.stability
        assert view.running is not None
        running = self._scored(view.running)
        contract_changed = self.memory.contract is not None and self.memory.contract != view.contract
        memory = saw_risk(self.memory, running.prediction.risk, running.score, limits)
        asked = contract_changed or suggestion is not None or self.trigger is not None or self.scored is not None
        if not asked and nothing_changed(memory, self.snapshot.now_ms, running.score, self._live(), limits):
            return self._kept(running, "nothing changed since the solver last found nothing better", ()), memory
        if not asked and (wait := self._may_not_move(memory)):
            return self._kept(running, wait.text, (), wait.code), disagreed(memory)
        try:
            scored = self._known(memory) if not asked else ()
            scored = scored or self._best(running, memory, asked=asked)
        except InfeasibleError as error:
            return self._hold("no-candidate", str(error)), disagreed(memory)
        if not scored:
            text = f"no other plan would gain the {self._least_gain(running, memory):.3f} that a move must bring"
            return self._kept(running, text, ()), self._settled(memory, running)
        notes: tuple[Reason, ...] = ()
        wanted: Proposal | None = None
        if isinstance(suggestion, Keep):
            memory = msgspec.structs.replace(memory, keep_until_ms=self.snapshot.now_ms + limits.keep_ms)
        elif suggestion is not None:
            verdict = self._admit(suggestion, scored[0], ())
            notes = () if verdict.plan is not None else verdict.reasons
            wanted = suggestion if verdict.plan is not None else None
        wanted = wanted or self._standing(memory, scored[0])
        if wanted is None:
            wanted, memory = self.policy(self.snapshot, self.service_id, scored, memory)
        if wanted is None or wanted.plan.layout() == view.running.layout():
            return self._kept(running, "the running plan is the best one known", notes), self._settled(memory, running)
        target = self._scored(wanted.plan)
        gain = running.score - target.score
        urgent = contract_changed or self.trigger == "operator"
        needed = self._least_gain(running, memory, urgent=urgent) + target.prediction.move_ms / limits.pay_back_ms
        if gain < needed:
            text = f"the best other plan would gain {gain:.3f}, less than the {needed:.3f} that a move must bring"
            return self._kept(running, text, notes, "gain-too-small"), self._settled(memory, running)
        memory = agreed(memory, wanted.plan, wanted.proposer, wanted.rationale)
        if not urgent and (wait := self._must_wait(memory)):
            return self._kept(running, wait.text, notes, wait.code), memory
        label = "contract" if contract_changed else self._label(running, target, memory)
        why = Reason(
            code=_CODE_OF[label], text=f"gains {gain:.3f} over the running plan: {self._words(running, target)}"
        )
        chosen = msgspec.structs.replace(
            wanted, trigger=label, proposer=memory.favourite_of, rationale=memory.rationale
        )
        decision = self._admit(chosen, scored[0], (why, *notes))
        if decision.plan is None:
            return decision, disagreed(memory)
        self.memory = memory
        return decision, self._moved(counts=True)

    # --- parts

    def _known(self, memory: Memory) -> Sequence[Scored]:
        """While a favourite has not yet won its looks, it alone is judged again: the solver has the last word before a move."""
        limits = self.settings.stability
        if memory.favourite is None or memory.looks + 1 >= (limits.risky_looks if memory.is_risky else limits.looks):
            return ()
        if plan_faults(memory.favourite, self.wary):
            return ()
        return (self._scored(memory.favourite),)

    def _best(self, running: Scored, memory: Memory, *, asked: bool) -> Sequence[Scored]:
        """The candidates that may replace the running plan; none where the best of them would not gain what a move must bring at the least.

        Without another proposer or a favourite of the looks before, only the best one counts. Raises InfeasibleError.
        """
        if self.policy is not solver_policy:
            return self._candidates(self.settings.candidates)
        if asked or memory.favourite is not None:
            return self._candidates(1)
        worth = running.score - self._least_gain(running, memory) + 1e-9
        scored = self._candidates(1, worth)
        return scored if scored[0].score <= worth else ()

    def _least_gain(self, running: Scored, memory: Memory, *, urgent: bool = False) -> float:
        """What a move must bring even if it took no time."""
        limits = self.settings.stability
        in_danger = memory.is_risky and running.prediction.risk >= limits.risk_leave
        calm_gain = max(limits.min_gain, limits.min_gain_share * running.score)
        enough = limits.risky_min_gain if in_danger or urgent else calm_gain
        return enough + budget_price(memory, self.snapshot.now_ms, limits)

    def _solve_now(self, trigger: Trigger, why: Reason, *, counts: bool) -> tuple[Decision, Memory]:
        """The solver's plan without waiting for agreement."""
        try:
            scored = self._candidates(self.settings.candidates)
        except InfeasibleError as error:
            reasons = (why, Reason(code="no-candidate", text=str(error)))
            none = Decision(
                service_id=self.service_id, trigger=trigger, proposer="solver", plan=None, reasons=reasons
            )  # fmt: skip
            return none, self.memory
        wanted = self._cheapest_of_the_best(scored)
        proposal = Proposal(plan=wanted.plan, proposer="solver", trigger=trigger, rationale=f"score {wanted.score:.3f}")
        view = self.predictor.view
        why = msgspec.structs.replace(why, text=f"{why.text}; {summary(wanted.prediction, view.contract)}")
        decision = self._admit(proposal, scored[0], (why,))
        if decision.plan is None:
            return decision, self.memory
        return decision, self._moved(counts=counts)

    def _cheapest_of_the_best(self, scored: Sequence[Scored]) -> Scored:
        """In a hurry: of the plans that tie with the best, the one that is ready first."""
        close = [
            s for s in scored
            if s.score <= scored[0].score + self.settings.stability.tie
            and s.prediction.accuracy >= scored[0].prediction.accuracy
        ]  # fmt: skip
        return min(close, key=lambda s: s.prediction.move_ms)

    def _standing(self, memory: Memory, best: Scored) -> Proposal | None:
        """The favourite of the last looks while it is still admissible and about as good as the best."""
        if memory.favourite is None:
            return None
        again = Proposal(
            plan=memory.favourite, proposer=memory.favourite_of, trigger="better-plan", rationale=memory.rationale
        )  # fmt: skip
        is_solver = memory.favourite_of == "solver"
        tolerance = self.settings.stability.tie if is_solver else self.settings.score_tolerance
        verdict = self._admit(again, best, (), tolerance)
        return again if verdict.plan is not None else None

    def _must_wait(self, memory: Memory) -> Reason | None:
        limits = self.settings.stability
        looks = limits.risky_looks if memory.is_risky else limits.looks
        if memory.looks < looks:
            return Reason(
                code="not-agreed", text=f"a better plan won {memory.looks} of the {looks} looks that it takes"
            )
        return self._may_not_move(memory)

    def _may_not_move(self, memory: Memory) -> Reason | None:
        """Why no plan could replace the running one now, however much better it is."""
        limits, now = self.settings.stability, self.snapshot.now_ms
        if not memory.is_risky and memory.keep_until_ms is not None and now < memory.keep_until_ms:
            return Reason(code="dwell", text="the advice to keep the running plan still holds")
        if self._dwells(limits.risky_dwell_ms if memory.is_risky else calm_dwell_ms(memory, now, limits)):
            return Reason(code="dwell", text="the running plan has not run long enough to be judged")
        allowed = limits.moves_per_hour if memory.is_risky else limits.calm_moves
        if len(recent_moves(memory, now)) >= allowed:
            text = f"{allowed} moves within the last hour are all that is allowed"
            return Reason(
                code="flap-budget", text=text + ("" if memory.is_risky else " to plans that are merely better")
            )
        return None

    def _dwells(self, dwell_ms: float) -> bool:
        last = self.memory.last_move_ms
        return last is not None and self.snapshot.now_ms - last < dwell_ms

    def _budget_spent(self) -> bool:
        return len(recent_moves(self.memory, self.snapshot.now_ms)) >= self.settings.stability.moves_per_hour

    def _label(self, running: Scored, target: Scored, memory: Memory) -> Trigger:
        if self.trigger == "operator":
            return "operator"
        w, contract = self.settings.weights, self.predictor.view.contract
        calmer = normalised_jitter(running.prediction.jitter_ms, contract, w) - normalised_jitter(
            target.prediction.jitter_ms, contract, w
        )
        if running.prediction.bottleneck.startswith("link ") or w.jitter * calmer > 0.5 * (
            running.score - target.score
        ):
            return "link"
        if memory.is_risky and running.prediction.risk >= self.settings.stability.risk_leave:
            return "risk"
        if self.trigger == "agent-joined":
            return "agent-joined"
        return "better-plan"

    def _words(self, running: Scored, target: Scored) -> str:
        a, b = running.prediction, target.prediction
        return (
            f"risk {100 * a.risk:.1f} to {100 * b.risk:.1f} %, saturation {100 * a.saturation:.0f} to "
            f"{100 * b.saturation:.0f} %, jitter {a.jitter_ms:.1f} to {b.jitter_ms:.1f} ms"
        )

    def _candidates(self, limit: int, worth: float = math.inf) -> Sequence[Scored]:
        """So many of the best `DecideSettings.candidates` plans, best first. Raises InfeasibleError."""
        s, p = self.settings, self.wary
        if self.scored is None:
            self.scored = candidates(
                p.costs.snapshot, self.service_id, limit, among=s.candidates, worth=worth, predictor=p, weights=s.weights,
                settings=s.solver,
            )  # fmt: skip
        elif p is not self.predictor:
            self.scored = sorted((self._scored(entry.plan) for entry in self.scored), key=lambda entry: entry.score)
        if not self.scored:
            raise InfeasibleError("There is no candidate plan.")
        return self.scored

    def _scored(self, plan: Plan, predictor: Predictor | None = None) -> Scored:
        p = predictor or self.wary
        prediction, rules = p.predict(plan), p.view.constraints
        value = score(prediction, p.view.contract, shifted(self.settings.weights, rules))
        return Scored(plan=plan, prediction=prediction, score=value + bias(plan, rules, p.costs.agents))

    def _admit(
        self, proposal: Proposal, best: Scored, why: tuple[Reason, ...], tolerance: float | None = None
    ) -> Decision:
        s, p = self.settings, self.wary
        decision = admit(
            proposal, p.costs.snapshot, self.service_id, best=best, predictor=p, weights=s.weights, why=why,
            tolerance=s.score_tolerance if tolerance is None else tolerance,
        )  # fmt: skip
        if decision.plan is None or p is self.predictor:
            return decision
        now = self._scored(decision.plan, self.predictor)
        return msgspec.structs.replace(decision, prediction=now.prediction, score=now.score)

    def _gone(self, agents: Sequence[AgentId] | frozenset[AgentId]) -> list[AgentId]:
        return sorted(agent for agent in agents if self._state(agent) in ("lost", "draining"))

    def _state(self, agent: AgentId) -> str:
        view = self.predictor.costs.agents.get(agent)
        return "lost" if view is None else view.state

    def _hold(self, code: ReasonCode, text: str, agent: AgentId | None = None) -> Decision:
        return Decision(
            service_id=self.service_id, trigger=self.trigger or "better-plan", proposer="solver", plan=None,
            reasons=(Reason(code=code, text=text, agent=agent),),
        )  # fmt: skip

    def _kept(
        self, running: Scored, text: str, notes: tuple[Reason, ...], code: ReasonCode = "gain-too-small"
    ) -> Decision:
        held = self._hold(code, text)
        return msgspec.structs.replace(
            held, reasons=(*held.reasons, *notes), prediction=running.prediction, score=running.score
        )  # fmt: skip

    def _live(self) -> frozenset[AgentId]:
        """Agents that the solver may use."""
        return frozenset(a.id for a in self.predictor.costs.agents.values() if is_fresh(a, self.settings.predict))

    def _settled(self, memory: Memory, running: Scored) -> Memory:
        solved = Solved(at_ms=self.snapshot.now_ms, score=running.score, live=self._live())
        return msgspec.structs.replace(disagreed(memory), contract=self.predictor.view.contract, solved=solved)

    def _moved(self, *, counts: bool) -> Memory:
        return moved(self.memory, self.snapshot.now_ms, self.predictor.view.contract, counts=counts)


_CODE_OF: dict[Trigger, ReasonCode] = {
    "contract": "better", "agent-lost": "agent-lost", "agent-joined": "better", "risk": "risk", "better-plan": "better",
    "operator": "operator", "link": "risk", "start": "first-plan",
}  # fmt: skip
