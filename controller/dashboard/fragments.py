"""Parts of the page as HTML. Pure; everything that comes from the API is escaped here, once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from controller.views import AgentOut, DecisionOut, EventOut, PlanOut, SlaOut, StatusOut

_TONES = {
    "met": "ok", "live": "ok",
    "starting": "info", "no-traffic": "info",
    "unbound": "warn", "suspect": "warn", "draining": "warn",
    "infeasible": "bad", "violated": "bad", "lost": "bad",
}  # fmt: skip
"""What a state's colour says; the word always stands next to it."""

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="8" fill="#2563eb"/>'
    '<g stroke="#fff" stroke-width="2.6" stroke-linecap="round" fill="none"><path d="M9 8v16M16 8v16M23 8v16"/>'
    '<path d="M5 21c3-3 5-3 7.3 0s4.3 3 7.3 0 4.500-3 7.400 0" stroke="#93c5fd"/></g></svg>'
)


def pill(word: str) -> str:
    """A state as colour and word."""
    return f'<span class="tg-pill tg-{_TONES.get(word, "info")}">{escape(word)}</span>'


def clock(at_s: float) -> str:
    """The time of day of a Unix time, UTC, with the date on hover."""
    at = datetime.fromtimestamp(at_s, UTC)
    return f'<time title="{at:%Y-%m-%d %H:%M:%S} UTC" datetime="{at.isoformat()}">{at:%H:%M:%S}</time>'


def span_text(seconds: float) -> str:
    """A duration, as coarse as a person reads it: `0.4 s`, `12 s`, `3 min`, `2 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def number(value: float | None, unit: str = "", digits: int = 0) -> str:
    """A measured value; a dash where nothing was measured."""
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def milliseconds(value: float | None) -> str:
    """A latency; the API writes an endless one as a huge number."""
    return "endless" if value is not None and value >= 1e9 else number(value, " ms")


def status_line(status: StatusOut, agents: Sequence[AgentOut]) -> str:
    """Who decides, the cloud, the agents, and what is unusual about the controller."""
    facts = [
        _fact("Decides", status.policy),
        _fact("Cloud", status.cloud),
        _fact("Agents", f"{status.agents_live} live of {len(agents)}"),
    ]
    if not status.ready:
        facts.append('<span class="tg-pill tg-warn">not ready</span>')
    if not status.leader:
        facts.append('<span class="tg-pill tg-info">standby</span>')
    return "".join(facts)


def _fact(label: str, value: str) -> str:
    return f'<span class="tg-fact"><span class="tg-label">{label}</span> {escape(value)}</span>'


def freshness(error: str | None, age_s: float, *, known: bool) -> str:
    """The mark that says whether what is shown is now."""
    if error is None:
        return '<span class="tg-pill tg-ok">up to date</span>'
    seen = f"last seen {span_text(age_s)} ago" if known else "not seen yet"
    return f'<span class="tg-pill tg-bad" role="alert" title="{escape(error)}">unreachable · {seen}</span>'


def sla_head(sla: SlaOut) -> str:
    """Name, version, state."""
    pinned = '<span class="tg-pill tg-info" title="only the loss of a device moves the plan">pinned</span>'
    return (
        f'<span class="tg-name">{escape(sla.service_id)}</span><span class="tg-label">v{sla.version}</span>'
        f"{pill(sla.state)}{pinned if sla.pinned else ''}"
    )


def sla_body(sla: SlaOut) -> str:
    """The sentence, the alerts that fire, the latency bar and the figures."""
    alerts = "".join(f'<p class="tg-why tg-text-bad">{escape(alert)}</p>' for alert in sla.firing[:4])
    return f'<p class="tg-why">{escape(sla.text)}</p>{alerts}{latency_bar(sla)}{_figures(sla)}'


def latency_bar(sla: SlaOut) -> str:
    """p99 against its target, with the prediction as a thin mark."""
    target = _contract_number(sla, "latency_p99_ms")
    if target is None:
        return ""
    predicted = sla.predicted_p99_ms if sla.predicted_p99_ms is not None and sla.predicted_p99_ms < 1e9 else None
    top = max(target * 1.25, (sla.p99_ms or 0) * 1.08, min(predicted or 0, target * 4) * 1.08)
    tone = "bad" if sla.latency_met is False else "ok"
    marks = f'<i class="tg-target" style="left:{_percent(target, top)}" title="target"></i>'
    if predicted is not None:
        marks += f'<i class="tg-predicted" style="left:{_percent(predicted, top)}" title="predicted"></i>'
    p99 = "no p99 yet" if sla.p99_ms is None else f"p99 <b>{milliseconds(sla.p99_ms)}</b>"
    expected = "" if predicted is None else f" · predicted {milliseconds(predicted)}"
    return (
        f'<div class="tg-bar-text"><span>{p99}</span><span class="tg-muted">target {milliseconds(target)}{expected}</span></div>'
        f'<div class="tg-bar" role="img" aria-label="p99 against its target"><b class="tg-fill-{tone}" '
        f'style="width:{_percent(sla.p99_ms or 0, top)}"></b>{marks}</div>'
    )


def _percent(value: float, top: float) -> str:
    return f"{min(100.0, 100 * value / top):.1f}%"


def _figures(sla: SlaOut) -> str:
    promised = _contract_number(sla, "availability_sla")
    availability = "–" if sla.availability is None else f"{sla.availability:.2%}"
    if promised is not None:
        availability += f' <span class="tg-muted">target {100 * promised:.6g}%</span>'
    rate = f"{sla.offered_rps:.1f} rps"
    if (carried := _contract_number(sla, "throughput_rps")) is not None:
        rate += f' <span class="tg-muted">of {carried:,.4g}</span>'
    budget = "–" if sla.budget_left is None else f"{max(sla.budget_left, -9.99):.0%}"
    budget_tone = "tg-text-bad" if sla.budget_left is not None and sla.budget_left <= 0 else ""
    requests = f"{sla.requests:,}"
    extra = [f"{count:,} {word}" for count, word in ((sla.failed, "failed"), (sla.fell_back, "fell back")) if count]
    if extra:
        requests += f' <span class="tg-muted">{", ".join(extra)}</span>'
    cells = (
        ("Availability", availability, "tg-text-bad" if sla.availability_met is False else ""),
        ("Requests", requests, ""),
        ("Offered", rate, ""),
        ("Error budget left", budget, budget_tone),
        ("p50 / p95", f"{number(sla.p50_ms)} / {milliseconds(sla.p95_ms)}", ""),
    )
    return '<dl class="tg-figures">' + "".join(
        f'<div><dt>{label}</dt><dd class="{tone}">{value}</dd></div>' for label, value, tone in cells
    ) + "</dl>"  # fmt: skip


def _contract_number(sla: SlaOut, name: str) -> float | None:
    value = sla.contract.get(name)
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def plan_head(plan: PlanOut) -> str:
    """Which plan runs, since when, and who wanted it why."""
    since = f" · running since {clock(plan.active_at_s)} UTC" if plan.active_at_s is not None else ""
    measured = "" if plan.measured_p99_ms is None else f" · measured {milliseconds(plan.measured_p99_ms)}"
    predicted = "" if plan.predicted_p99_ms is None else f" · predicted p99 {milliseconds(plan.predicted_p99_ms)}"
    return (
        f"<b>Plan {plan.epoch}</b> "
        f'<span class="tg-muted">proposed by {escape(plan.proposer)} ({escape(plan.trigger)}){since}{predicted}{measured}</span>'
    )


def decision_list(decisions: Sequence[DecisionOut]) -> str:
    """Decisions, newest first, each with its reasons."""
    if not decisions:
        return '<p class="tg-empty">No decision was made yet; the first one follows the first SLA.</p>'
    return '<ol class="tg-log">' + "".join(map(_decision, decisions)) + "</ol>"


def _decision(decision: DecisionOut) -> str:
    what = f"plan {decision.epoch}" if decision.epoch is not None else "held"
    reasons = "".join(
        f'<li title="{escape(reason.code)}">{escape(reason.text)}</li>'
        for reason in decision.reasons[:8]
        if reason.text not in decision.sentence
    )
    rationale = f'<p class="tg-rationale">{escape(decision.rationale[:600])}</p>' if decision.rationale else ""
    risk = "" if decision.risk is None else f'<span class="tg-muted">risk {decision.risk:.2f}</span>'
    return (
        f'<li><div class="tg-log-head">{clock(decision.at_s)}<b>{escape(decision.service_id)}</b>'
        f'<span class="tg-tag">{what}</span><span class="tg-muted">{escape(decision.trigger)} · by '
        f"{escape(decision.proposer)}</span>{risk}</div><p>{escape(decision.sentence)}</p>{rationale}"
        f"{f'<ul>{reasons}</ul>' if reasons else ''}</li>"
    )


def event_list(events: Sequence[EventOut]) -> str:
    """Events, newest first."""
    if not events:
        return '<p class="tg-empty">Nothing happened yet.</p>'
    return '<ol class="tg-log tg-events">' + "".join(
        f'<li>{clock(event.at_s)}<span class="tg-tag">{escape(event.kind)}</span><span>{escape(event.text)}</span></li>'
        for event in events
    ) + "</ol>"  # fmt: skip
