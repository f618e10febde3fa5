"""Everything that the API offers about the LLM and intents, over the parts that do the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from controller.clock import Clock
from controller.events import EventLog
from controller.llm import LlmAdvisor
from controller.llm_intents import Intent, Intents
from controller.llm_records import Effects, Exchange, LlmLog, Side
from controller.llm_views import AdviceOut, ComparisonOut, IntentIn, IntentOut, LlmReport, RuleIn, SideOut, TimedOut
from controller.replay import LoggedExchange
from controller.settings import LlmSettings
from controller.state import State
from policies.constraints import Avoid, Bound, KeepPlan, KnobBound, Prefer, Rule, Shift
from policies.effects import Effect
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.llm_resolve import Wish
from policies.snapshot import Snapshot
from sla.errors import InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from controller.loop import ControlLoop

COMPARISONS = 50


class LlmService:
    """The advisor and the intents of one controller. `bind` before use: the loop needs the advisor, and this needs the loop."""

    def __init__(self, settings: LlmSettings, state: State, events: EventLog, clock: Clock) -> None:
        self.records = LlmLog(state)
        self.advisor = LlmAdvisor(settings, events, clock, records=self.records, wishes=self)
        self.intents = Intents(state, self.advisor.endpoint, settings, events, clock)
        self._settings = settings
        self._clock = clock
        self._loop: ControlLoop | None = None

    def bind(self, loop: ControlLoop) -> None:
        """From now on, what changes here wakes the loop."""
        self._loop = loop

    async def start(self) -> None:
        """Restore what was acknowledged."""
        await self.intents.load()
        await self.advisor.restore()

    async def close(self) -> None:
        """Ask nothing more."""
        await self.advisor.close()
        await self.intents.close()

    def offer(self, service: ServiceId, wishes: tuple[Wish, ...], rationale: str, *, admitted: bool) -> None:
        """The model would like these to last; the gate let the plan under them through, or not."""
        self.intents.offer(service, wishes, rationale, self._snapshot(service), admitted=admitted)

    # --- comparison

    def report(self, service: str | None = None) -> LlmReport:
        """The LLM beside the solver; the comparisons of one service or of all."""
        ledger, s = self.advisor.ledger, self._settings
        recent = [each for each in ledger.recent if service is None or each.service_id == service]
        behind = [each.behind for each in recent if each.behind is not None]
        answered = ledger.answered()
        effects = [gap for each in recent if (gap := _effect_behind_ms(each)) is not None]
        return LlmReport(
            mode=s.mode if s.base_url is not None else "off",
            model=s.model,
            policy=self.advisor.policy(),
            response_format=self.advisor.endpoint.response_format,
            asked=ledger.asked,
            won=ledger.count("won"),
            agreed=ledger.count("agreed"),
            refused=_by_reason(ledger.verdicts, "refused"),
            fallback=_by_reason(ledger.verdicts, "fallback"),
            acted=ledger.acted,
            win_rate=ledger.count("won") / answered if answered else None,
            mean_behind=sum(behind) / len(behind) if behind else None,
            mean_regret=sum(each.regret for each in recent) / len(recent) if recent else None,
            worst_regret=max((each.regret for each in recent), default=None),
            settled=len(effects),
            mean_effect_behind_ms=sum(effects) / len(effects) if effects else None,
            prompt_tokens=ledger.prompt_tokens,
            cached_tokens=ledger.cached_tokens,
            output_tokens=ledger.output_tokens,
            cost=ledger.cost,
            tokens_this_hour=self.advisor.endpoint.tokens_this_hour(),
            tokens_per_hour=s.tokens_per_hour,
            mean_seconds=ledger.seconds / ledger.asked if ledger.asked else None,
            comparisons=[_comparison(each) for each in recent[-COMPARISONS:]],
        )

    async def logged(self, service: str, limit: int) -> tuple[LoggedExchange, ...]:
        """The newest exchanges with what they were about, for `tidegate replay`; oldest of them first."""
        return tuple([
            LoggedExchange(exchange=exchange, seen=await self.records.snapshot_of(service, exchange.id))
            for exchange in await self.records.tail(service, limit)
        ])  # fmt: skip

    # --- advice

    def advices(self) -> list[AdviceOut]:
        """What waits for a person."""
        return [
            AdviceOut(
                id=each.id, at_s=each.at_s, service_id=each.service, text=each.text, rationale=each.rationale,
                predicted_p99_ms=each.exchange.llm.predicted_p99_ms if each.exchange.llm is not None else None,
                solver_p99_ms=each.exchange.solver.predicted_p99_ms,
            )
            for each in self.advisor.advices()
        ]  # fmt: skip

    def accept(self, advice_id: str) -> None:
        """Follow an advice; the gate judges it once more. Raises NotFoundError."""
        advice = self.advisor.accept(advice_id)
        self._poke(advice.service)

    def dismiss(self, advice_id: str) -> None:
        """Forget an advice. Raises NotFoundError."""
        self.advisor.dismiss(advice_id)

    # --- intents

    async def propose(self, wanted: IntentIn) -> IntentOut:
        """A sentence or rules as a proposal, in plain words; it acts once confirmed. Raises InvalidInputError, ConflictError, ..."""
        service = ServiceId(wanted.service_id)
        snapshot = self._snapshot(service, [AgentId(rule.agent) for rule in wanted.rules if rule.agent is not None])
        if service not in snapshot.services:
            raise NotFoundError(f"There is no SLA for {wanted.service_id!r}, or its service is not registered.")
        if bool(wanted.text.strip()) == bool(wanted.rules):
            raise InvalidInputError("Give either a sentence or rules.", pointer="/text", accepted="text, or rules")
        if not wanted.rules:
            return self._out(await self.intents.understand(service, wanted.text, snapshot))
        wishes = tuple(
            Wish(rule=_rule(rule), starts_in_s=wanted.starts_in_s, ends_in_s=wanted.starts_in_s + wanted.lasts_s)
            for rule in wanted.rules
        )
        return self._out(await self.intents.propose(service, wishes, "", "operator", snapshot))

    def list_intents(self, service: str | None) -> list[IntentOut]:
        """Newest last."""
        return [self._out(intent) for intent in self.intents.list(service)]

    async def confirm(self, intent_id: str) -> IntentOut:
        """Put a proposal in force. Raises NotFoundError, ConflictError."""
        intent = await self.intents.confirm(intent_id)
        self._poke(intent.service_id)
        return self._out(intent)

    async def revoke(self, intent_id: str) -> IntentOut:
        """Take an intent back. Raises NotFoundError."""
        intent = await self.intents.revoke(intent_id)
        self._poke(intent.service_id)
        return self._out(intent)

    def _out(self, intent: Intent) -> IntentOut:
        return IntentOut(
            id=intent.id, service_id=intent.service_id, state=intent.state(self._clock.wall_s()), by=intent.by, said=intent.said,
            created_s=intent.created_s, confirmed_by=_confirmed_by(intent),
            rules=[TimedOut(text=rule.text, from_s=rule.from_s, until_s=rule.until_s) for rule in intent.rules],
        )  # fmt: skip

    def _snapshot(self, service: ServiceId, keep: Sequence[AgentId] = ()) -> Snapshot:
        assert self._loop is not None
        return self._loop.world.near(service, keep)

    def _poke(self, service: ServiceId) -> None:
        assert self._loop is not None
        self._loop.poke("operator", service)


def _confirmed_by(intent: Intent) -> Literal["person", "gate"] | None:
    if intent.confirmed_s is not None:
        return "person"
    return None if intent.admitted_s is None else "gate"


def _by_reason(verdicts: dict[tuple[str, str], int], verdict: str) -> dict[str, int]:
    return {reason: count for (each, reason), count in sorted(verdicts.items()) if each == verdict}


def _effect_behind_ms(exchange: Exchange) -> float | None:
    found = exchange.effects
    return (
        None if found is None or found.llm is None or found.solver is None else found.llm.p99_ms - found.solver.p99_ms
    )


def _comparison(exchange: Exchange) -> ComparisonOut:
    effects = exchange.effects or Effects()
    return ComparisonOut(
        at_s=exchange.at_s, service_id=exchange.service_id, epoch=exchange.epoch, mode=exchange.mode, verdict=exchange.verdict,
        reason=exchange.reason, solver=_side(exchange.solver, effects.solver),
        llm=_side(exchange.llm, effects.llm) if exchange.llm is not None else None, effect_behind_ms=_effect_behind_ms(exchange),
        behind=exchange.behind, regret=exchange.regret, acted=exchange.acted,
        rationale=exchange.answer.rationale if exchange.answer is not None else "",
        measured_p99_ms=exchange.measured_p99_ms, prompt_tokens=exchange.prompt_tokens, output_tokens=exchange.output_tokens,
        cost=exchange.cost, seconds=exchange.seconds,
    )  # fmt: skip


def _side(side: Side, effect: Effect | None) -> SideOut:
    return SideOut(
        what=side.what, predicted_p99_ms=side.predicted_p99_ms, score=side.score,
        effect_p99_ms=effect.p99_ms if effect is not None else None, effect_how=effect.how if effect is not None else None,
    )  # fmt: skip


def _rule(said: RuleIn) -> Rule:
    agent = AgentId(said.agent) if said.agent is not None else None
    match said.kind:
        case "avoid":
            return Avoid(agent=agent, zone=said.zone)
        case "prefer":
            return Prefer(agent=agent, zone=said.zone)
        case "bound" if said.knob is not None:
            if said.low is None or said.high is None:
                raise InvalidInputError("A bound of a knob needs both ends.", pointer="/rules", accepted="low and high")
            return KnobBound(knob=said.knob, low=said.low, high=said.high)
        case "bound":
            return Bound(stage=StageName(said.stage or ""), variants=_models(said.models))
        case "shift":
            return Shift(saturation=said.saturation, jitter=said.jitter, risk=said.risk)
        case "keep":
            return KeepPlan()


def _models(names: Sequence[str]) -> tuple[ModelName, ...]:
    return tuple(ModelName(name) for name in names)
