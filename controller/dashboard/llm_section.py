"""The LLM beside the solver, what it advises, and what operators want for a while. Shown only where there is something to show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from controller.dashboard.api import Api
from controller.dashboard.dialogs import confirm, perform
from controller.dashboard.elements import LiveHtml, box, button, show_if
from controller.dashboard.fragments import clock
from controller.llm_views import AdviceOut, ComparisonOut, IntentOut, LlmReport, SideOut

COMPARISONS = 6
INTENTS = 8


class LlmSection:
    """One card; its buttons act through the public API."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._asking: dict[str, Any] = {}
        self.element = box("section")
        with self.element:
            with box("div", "tg-section-head"):
                LiveHtml("h1", text="LLM and intents")
            with box("div", "tg-card"):
                self._counts = LiveHtml("div")
                self._waiting = box("div", "tg-stack")
                self._table = LiveHtml("div", "tg-scroll")
        self.element.set_visibility(False)

    def show(self, report: LlmReport | None, advices: Sequence[AdviceOut], intents: Sequence[IntentOut]) -> None:
        """Show the newest state."""
        alive = [intent for intent in intents if intent.state in ("proposed", "active", "scheduled")][-INTENTS:]
        show_if(self.element, report is not None and (report.mode != "off" or bool(alive)))
        if report is None:
            return
        self._counts.show(llm_counts(report))
        self._table.show(llm_comparisons(report.comparisons[-COMPARISONS:][::-1]))
        wanted: dict[str, Callable[[], Any]] = {}
        for advice in advices:
            wanted[f"advice {advice.id}"] = functools.partial(self._advice, advice)
        for intent in alive:
            wanted[f"{intent.state} {intent.id}"] = functools.partial(self._intent, intent)
        for name in self._asking.keys() - wanted.keys():
            self._asking.pop(name).delete()
        with self._waiting:
            for name, build in wanted.items():
                if name not in self._asking:
                    self._asking[name] = build()

    def _advice(self, advice: AdviceOut) -> Any:
        row = box("div", "tg-row")
        with row:
            LiveHtml(
                "span",
                text=f"<b>Advice</b> for {escape(advice.service_id)}: {escape(advice.text)}. {escape(advice.rationale)}",
            )
            path = f"/v1/llm/advice/{advice.id}"
            button(
                "Accept",
                lambda: self._act(f"{path}:accept", "Follow this advice?", "The gate judges it once more."),
                "tg-quiet",
            )
            button("Dismiss", lambda: perform(lambda: self._api.post(f"{path}:dismiss"), "Dismissed."), "tg-quiet")
        return row

    def _intent(self, intent: IntentOut) -> Any:
        row = box("div", "tg-row")
        words = "; ".join(rule.text for rule in intent.rules)
        with row:
            by = " (wished by the LLM)" if intent.by == "llm" else ""
            by = " (by the LLM alone)" if intent.confirmed_by == "gate" else by
            LiveHtml("span", text=f"<b>{escape(intent.state)}</b>{by} for {escape(intent.service_id)}: {escape(words)}")
            path = f"/v1/intents/{intent.id}"
            if intent.state == "proposed":
                button("Confirm", lambda: self._act(f"{path}:confirm", "Put this in force?", words), "tg-quiet")
            button("Revoke", lambda: perform(lambda: self._api.post(f"{path}:revoke"), "It is revoked."), "tg-quiet")
        return row

    async def _act(self, path: str, question: str, sentence: str) -> None:
        if await confirm(question, sentence, "Yes"):
            await perform(lambda: self._api.post(path), "Done.")


def llm_counts(report: LlmReport) -> str:
    """Who decides and how it went, in one line."""
    refused, fallback = sum(report.refused.values()), sum(report.fallback.values())
    share = "-" if report.win_rate is None else f"{report.win_rate:.0%}"
    return (
        f"<p>{escape(report.policy)}. Asked {report.asked}: own choice admitted {report.won} ({share}), same as the solver "
        f"{report.agreed}, refused {refused}, no usable answer {fallback}. {report.tokens_this_hour} of {report.tokens_per_hour} "
        "tokens this hour.</p>"
    )


def llm_comparisons(comparisons: Sequence[ComparisonOut]) -> str:
    """The newest questions, solver and LLM side by side."""
    if not comparisons:
        return ""
    rows = "".join(
        f"<tr><td>{clock(each.at_s)}</td><td>{escape(each.service_id)}</td>"
        f"<td>{escape(each.solver.what)} ({_ms(each.solver.predicted_p99_ms)})</td>"
        f"<td>{escape(each.llm.what) if each.llm else '-'} ({_ms(each.llm.predicted_p99_ms if each.llm else None)})</td>"
        f"<td>{escape(each.verdict)}{f' ({escape(each.reason)})' if each.reason else ''}{', acted' if each.acted else ''}</td>"
        f"<td>{_effect(each.solver)}</td><td>{_effect(each.llm)}</td><td>{each.seconds:.1f} s</td><td>{escape(each.rationale)}</td></tr>"
        for each in comparisons
    )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("at", "service", "solver", "LLM", "came to", "solver's effect", "LLM's effect", "took", "why")
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _effect(side: SideOut | None) -> str:
    """What a choice turned out to bring, and how that is known."""
    return "-" if side is None or side.effect_how is None else f"{_ms(side.effect_p99_ms)} ({side.effect_how})"
