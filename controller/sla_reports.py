"""The monthly report of one contract: objective, attained, budget spent, worst hours, and what Tidegate did about them.

One HTML file without anything from elsewhere, fit to be sent to a customer, and the same as JSON. Months are UTC.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import NamedTuple

from controller.records import DecisionRecord, StoredContract
from controller.sla_present import promise_out
from controller.sla_views import DayOut, HourOut, PromiseOut, SlaReport
from sla.assess import coverage_of
from sla.budget import Budget
from sla.contract import percent
from sla.errors import InvalidInputError
from sla.hours import HOUR_S, Hour
from sla.promises import promises_of, tally
from sla.window import ServiceWindow

WORST_HOURS = 10
ACTIONS = 50
BEFORE_S, AFTER_S = 600.0, 1800.0
"""A decision belongs to an hour when it was made so shortly before, in, or after it."""
DAY_S = 86_400.0


class Month(NamedTuple):
    """A month of UTC, [start, end) in seconds since 1970."""

    name: str
    start_s: float
    end_s: float


def month_of(at_s: float) -> str:
    """`YYYY-MM`."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m")


def month_bounds(name: str) -> Month:
    """Raises InvalidInputError unless `name` is `YYYY-MM`."""
    match = re.fullmatch(r"(20\d\d)-(0[1-9]|1[0-2])", name, re.ASCII)
    if match is None:
        raise InvalidInputError(
            f"{name[:20]!r} is not a month; accepted is YYYY-MM such as 2026-11.", pointer="/month", found=name[:20],
            accepted="YYYY-MM",
        )  # fmt: skip
    year, month = int(match.group(1)), int(match.group(2))
    start = datetime(year, month, 1, tzinfo=UTC)
    end = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    return Month(name, start.timestamp(), end.timestamp())


def build_report(
    stored: StoredContract, window: ServiceWindow, month: Month, decisions: Sequence[DecisionRecord], now_s: float
) -> SlaReport:
    """The report as it stands now. Pure."""
    sums = window.between(month.start_s, month.end_s)
    until_s = min(month.end_s, max(now_s, month.start_s))
    budgets = [Budget(promise=promise, tally=tally(promise, sums)) for promise in promises_of(stored.contract)]
    hours = window.hours.within(month.start_s, month.end_s)
    allowed = _allowed(budgets)
    moves = [d for d in decisions if d.decision.plan is not None and month.start_s <= d.at_s < month.end_s]
    worst = sorted((h for h in hours if _spent(h, allowed) > 0), key=lambda h: (-_spent(h, allowed), h.start_s))
    state = "no-traffic" if not sums.requests else "violated" if any(b.met is False for b in budgets) else "met"
    return SlaReport.model_validate(
        {
            "service_id": stored.contract.service_id,
            "month": month.name,
            "contract": stored.contract.model_dump(mode="json"),
            "version": stored.version,
            "from_s": month.start_s,
            "until_s": until_s,
            "made_at_s": now_s,
            "complete": now_s >= month.end_s,
            "state": state,
            "requests": sums.requests,
            "failed": sums.failed,
            "p50_ms": sums.latency.quantile(0.5),
            "p95_ms": sums.latency.quantile(0.95),
            "p99_ms": sums.latency.quantile(0.99),
            "coverage": coverage_of(window, sums, until_s, until_s - month.start_s) if until_s > month.start_s else 0.0,
            "promises": [promise_out(budget) for budget in budgets],
            "days": _days(hours, month, until_s, allowed),
            "worst_hours": [_hour(hour, allowed, moves) for hour in worst[:WORST_HOURS]],
            "moves": len(moves),
            "actions": [_action(record) for record in moves[-ACTIONS:]],
        }
    )


class _Allowed(NamedTuple):
    """How many may be bad in the month: requests, late answers, minutes."""

    failed: float
    slow: float
    minutes: float


def _allowed(budgets: Sequence[Budget]) -> _Allowed:
    by_name = {budget.promise.name: budget.allowed for budget in budgets}
    return _Allowed(by_name["availability"], by_name["latency-p99"], by_name["throughput"])


def _spent(hour: Hour, allowed: _Allowed) -> float:
    """Share of the month's tightest budget that an hour spent."""
    pairs = ((hour.failed, allowed.failed), (hour.slow, allowed.slow), (hour.bad_slices, allowed.minutes))
    return max((bad / may for bad, may in pairs if may > 0), default=0.0)


def _days(hours: Sequence[Hour], month: Month, until_s: float, allowed: _Allowed) -> list[DayOut]:
    days = []
    for number in range(int((until_s - month.start_s + DAY_S - 1) // DAY_S)):
        start_s = month.start_s + number * DAY_S
        inside = [hour for hour in hours if start_s <= hour.start_s < start_s + DAY_S]
        whole = Hour(
            start_s=start_s, ok=sum(h.ok for h in inside), failed=sum(h.failed for h in inside),
            slow=sum(h.slow for h in inside), p99_ms=None, slices=sum(h.slices for h in inside),
            bad_slices=sum(h.bad_slices for h in inside), observed=sum(h.observed for h in inside),
        )  # fmt: skip
        days.append(
            DayOut(
                day=number + 1, requests=whole.requests, failed=whole.failed, slow=whole.slow,
                bad_minutes=whole.bad_slices, budget_spent=_spent(whole, allowed),
            )
        )  # fmt: skip
    return days


def _hour(hour: Hour, allowed: _Allowed, moves: Sequence[DecisionRecord]) -> HourOut:
    start_s, end_s = hour.start_s - BEFORE_S, hour.start_s + HOUR_S + AFTER_S
    return HourOut(
        start_s=hour.start_s, requests=hour.requests, failed=hour.failed, slow=hour.slow, p99_ms=hour.p99_ms,
        bad_minutes=hour.bad_slices, budget_spent=_spent(hour, allowed),
        actions=[_action(record) for record in moves if start_s <= record.at_s < end_s],
    )  # fmt: skip


def _action(record: DecisionRecord) -> str:
    outcome = f" Outcome: {record.outcome}." if record.outcome else ""
    return f"{_clock(record.at_s)} {record.decision.sentence()}{outcome}"


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")


# The page


def report_html(report: SlaReport) -> str:
    """The report as one HTML page. Everything that came from outside is escaped."""
    verdict = {
        "met": ("ok", "All promises were kept."),
        "violated": ("bad", "Not all promises were kept."),
        "no-traffic": ("muted", "There were no requests to judge."),
    }[report.state]
    period = f"{_clock(report.from_s)} to {_clock(report.until_s)} UTC"
    running = "" if report.complete else " The month is still running."
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(report.service_id)}: service levels {escape(report.month)}</title><style>{_CSS}</style></head><body><main>
<header><p class="kind">Service level report</p><h1>{escape(report.service_id)}</h1><p>{escape(report.month)} &middot; {period}.{running}</p></header>
<p class="verdict {verdict[0]}">{verdict[1]}</p>
<section><h2>Promises</h2>{_promises(report)}</section>
<section><h2>Day by day</h2>{_bars(report)}</section>
<section><h2>Worst hours</h2>{_worst(report)}</section>
<section><h2>What Tidegate did</h2>{_actions(report)}</section>
<section class="small"><h2>How this is counted</h2>{_notes(report)}</section>
</main></body></html>
"""


def _promises(report: SlaReport) -> str:
    rows = "".join(
        f'<tr><td>{_promise_words(p)}</td><td class="n">{_share(p.attained)}</td><td class="n">{p.bad:,} of {p.total:,}</td>'
        f'<td class="n">{"&ndash;" if p.left is None else f"{1 - p.left:.1%}"}</td><td>{_met(p.met)}</td></tr>'
        for p in report.promises
    )
    head = "<tr><th>Promise</th><th>Attained</th><th>Bad</th><th>Budget spent</th><th></th></tr>"
    times = (report.p50_ms, report.p95_ms, report.p99_ms)
    seen = "" if None in times else (
        f"<p>{report.requests:,} requests, {report.failed:,} of them failed. Half of the answers took at most "
        f"{report.p50_ms:.0f} ms, 95 % at most {report.p95_ms:.0f} ms, 99 % at most {report.p99_ms:.0f} ms.</p>"
    )  # fmt: skip
    return f"<table>{head}{rows}</table>{seen}"


def _promise_words(p: PromiseOut) -> str:
    share = percent(p.share)
    match p.counts:
        case "requests":
            return f"{share} of requests are answered"
        case "minutes":
            return f"{p.limit:g} requests/s are served when offered, in {share} of minutes"
        case "answers":
            metric = p.name.rpartition("-")[0].replace("-", " ")
            return f"{share} of answers within {p.limit:g} ms ({escape(metric)})"
        case "nothing":
            return f"{escape(p.name)}: not judged, the service does not stream"


def _met(met: bool | None) -> str:
    if met is None:
        return '<span class="muted">nothing to judge</span>'
    return '<span class="ok">kept</span>' if met else '<span class="bad">broken</span>'


def _bars(report: SlaReport) -> str:
    """One bar per day: the share of the month's tightest budget that was spent on it."""
    if not report.days:
        return "<p>The month has not begun.</p>"
    top = max(0.05, *(day.budget_spent for day in report.days))
    width, height, gap = 20, 90, 4
    bars = []
    for at, day in enumerate(report.days):
        size = max(1.0, height * day.budget_spent / top)
        tone = "idle" if not day.requests else "over" if day.budget_spent > 1 / 15 else "fine"
        words = f"day {day.day}: {day.requests:,} requests, {day.failed:,} failed, {day.slow:,} late, {day.budget_spent:.1%} of the budget"
        bars.append(
            f'<rect class="{tone}" x="{at * (width + gap)}" y="{height - size:.1f}" width="{width}" height="{size:.1f}"><title>{words}</title></rect>'
            f'<text x="{at * (width + gap) + width / 2:g}" y="{height + 14}">{day.day}</text>'
        )
    whole = len(report.days) * (width + gap)
    return (
        f'<svg viewBox="0 0 {max(whole, 240)} {height + 20}" role="img" aria-label="budget spent per day">{"".join(bars)}</svg>'
        f'<p class="small">Share of the month\'s tightest error budget spent on each day; the whole height is {top:.1%}.</p>'
    )


def _worst(report: SlaReport) -> str:
    if not report.worst_hours:
        return "<p>No hour spent any of the error budget.</p>"
    rows = "".join(
        f'<tr><td>{_clock(h.start_s)}</td><td class="n">{h.requests:,}</td><td class="n">{h.failed:,}</td><td class="n">{h.slow:,}</td>'
        f'<td class="n">{"&ndash;" if h.p99_ms is None else f"{h.p99_ms:.0f} ms"}</td><td class="n">{h.bad_minutes}</td><td class="n">{h.budget_spent:.1%}</td>'
        f"<td>{'<br>'.join(escape(action) for action in h.actions) or 'nothing had to be moved'}</td></tr>"
        for h in report.worst_hours
    )
    head = "<tr><th>Hour (UTC)</th><th>Requests</th><th>Failed</th><th>Late</th><th>p99</th><th>Minutes short</th><th>Budget spent</th><th>What was done</th></tr>"
    return f"<table>{head}{rows}</table>"


def _actions(report: SlaReport) -> str:
    if not report.actions:
        return "<p>No work had to be moved.</p>"
    more = report.moves - len(report.actions)
    items = "".join(f"<li>{escape(action)}</li>" for action in report.actions)
    older = f"<p class='small'>{more} earlier moves are not listed.</p>" if more > 0 else ""
    return f"<p>The work was moved {report.moves} time{'' if report.moves == 1 else 's'}.</p><ul>{items}</ul>{older}"


def _notes(report: SlaReport) -> str:
    return (
        "<p>A request counts in the minute in which its report reached the controller. Latency is judged among answered requests and known within 1 %. "
        f"A minute is short when less than 95 % of what was offered was served, up to what is promised. In {report.coverage:.1%} of the minutes "
        f"the service's ingresses were heard of; what was not heard of is neither good nor bad.</p><p>Contract version {report.version}; made {_clock(report.made_at_s)} UTC by Tidegate.</p>"
    )


def _share(value: float | None) -> str:
    return "&ndash;" if value is None else f"{value:.4%}"


_CSS = """
:root{--ink:#15202b;--muted:#5d6b78;--line:#dde3e8;--ok:#0a7d4f;--bad:#b42318;--bar:#2f6fa8}
body{margin:0;background:#f5f7f9;color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:920px;margin:0 auto;padding:40px 32px;background:#fff}
h1{margin:0;font-size:30px}h2{font-size:18px;margin:32px 0 8px}.kind{margin:0;color:var(--muted);text-transform:uppercase;letter-spacing:.08em;font-size:12px}
table{width:100%;border-collapse:collapse}th,td{text-align:left;padding:7px 10px 7px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-size:12px;color:var(--muted);font-weight:600}.n{font-variant-numeric:tabular-nums;white-space:nowrap}
.verdict{font-size:17px;font-weight:600;padding:12px 16px;border-left:4px solid currentColor;background:#f8fafb}
.ok{color:var(--ok)}.bad{color:var(--bad)}.muted,.small{color:var(--muted)}.small{font-size:13px}
svg{width:100%;max-height:160px}svg text{font-size:9px;text-anchor:middle;fill:var(--muted)}rect.fine{fill:var(--bar)}rect.over{fill:var(--bad)}rect.idle{fill:var(--line)}
@media print{body{background:#fff}main{padding:0}}
""".strip()
