"""The cells of an agent's row. Pure; everything that comes from the API is escaped."""

from __future__ import annotations

from html import escape

from controller.dashboard.fragments import number, pill, span_text
from controller.dashboard.plan_picture import short_name
from controller.views import AgentOut, LinkOut

COLUMNS = ("Agent", "State", "Last report", "CPU", "Memory", "Queue", "Ingress", "Worst link", "Faults")
_BUSY = 0.9
"""From this share on, a meter is drawn as a warning."""


def cells(agent: AgentOut, colour: str, late_s: float) -> tuple[str, ...]:
    """One cell per column of COLUMNS. `late_s`: how old the reading itself is."""
    return (
        _identity(agent, colour),
        pill(agent.state),
        _age(agent, late_s),
        _meter(agent.cpu_saturation, None if agent.cpu_saturation is None else f"{agent.cpu_saturation:.0%}"),
        _memory(agent),
        number(agent.queue_depth),
        _ingress(agent),
        _worst_link(agent.links),
        _faults(agent),
    )


def _identity(agent: AgentOut, colour: str) -> str:
    marks = "".join(f'<span class="tg-tag">{word}</span>' for word in _marks(agent))
    return (
        f'<div class="tg-agent"><i style="background:{colour}"></i><div><b title="{escape(agent.id)}">'
        f'{escape(short_name(agent.id, 26))}</b><div class="tg-muted"{_calibrated(agent)}>{escape(agent.platform)} · {escape(agent.zone)}{marks}</div></div></div>'
    )


def _calibrated(agent: AgentOut) -> str:
    """What the device was measured to do, as a tooltip; nothing until it was."""
    found = agent.calibration
    if found is None:
        return ""
    text = (
        f"matrix products {found.matmul_gflops:.1f} GFLOP/s, convolutions {found.conv_gflops:.1f} GFLOP/s, "
        f"memory {found.copy_gb_per_s:.1f} GB/s, launch {found.launch_ms:.2f} ms (measured through {found.provider})"
    )
    return f' title="{escape(text)}"'


def _marks(agent: AgentOut) -> list[str]:
    marks = [escape(agent.evidence)] if agent.evidence == "emulated" else []
    return [*marks, "cloud"] if agent.is_cloud else marks


def _age(agent: AgentOut, late_s: float) -> str:
    if agent.age_ms is None:
        return '<span class="tg-muted">none yet</span>'
    age_s = agent.age_ms / 1000 + late_s
    tone = "tg-text-bad" if age_s > 5 else ""
    return f'<span class="{tone}">{span_text(age_s)} ago</span>'


def _meter(share: float | None, text: str | None) -> str:
    if share is None or text is None:
        return '<span class="tg-muted">–</span>'
    tone = "warn" if share >= _BUSY else "calm"
    width = f"{100 * min(1.0, max(0.0, share)):.0f}%"
    return f'<div class="tg-meter"><span>{text}</span><i><b class="tg-fill-{tone}" style="width:{width}"></b></i></div>'


def _memory(agent: AgentOut) -> str:
    budget = agent.memory_budget_bytes
    if agent.loaded_bytes is None or budget <= 0:
        return f'<span class="tg-muted">{budget / 1e6:,.0f} MB</span>'
    return _meter(agent.loaded_bytes / budget, f"{agent.loaded_bytes / 1e6:,.0f} of {budget / 1e6:,.0f} MB")


def _ingress(agent: AgentOut) -> str:
    if agent.ingress_url is None:
        return '<span class="tg-muted">none</span>'
    return f'<code title="{escape(agent.ingress_url)}">{escape(agent.ingress_url.split("://")[-1])}</code>'


def _worst_link(links: list[LinkOut]) -> str:
    if not links:
        return '<span class="tg-muted">–</span>'
    worst = max(links, key=lambda link: link.rtt_ms + link.jitter_ms)
    return (
        f'<span title="to {escape(worst.peer)}, {worst.bandwidth_mbps:,.0f} Mbit/s">{worst.rtt_ms:.1f} ms '
        f'<span class="tg-muted">± {worst.jitter_ms:.1f}</span></span>'
    )


def _faults(agent: AgentOut) -> str:
    notes = [f'<span class="tg-text-bad">{escape(fault)}</span>' for fault in agent.faults[:3]]
    return "<br>".join(notes) or '<span class="tg-muted">none</span>'
