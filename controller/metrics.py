"""Prometheus metrics, rendered from the controller's state when asked (nothing is counted twice)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

if TYPE_CHECKING:
    from controller.core import Controller

_STATES = ("live", "suspect", "lost", "draining")


async def render_metrics(controller: Controller) -> str:
    """All metrics in the Prometheus text format."""
    registry = CollectorRegistry()
    agents = Gauge("tidegate_agents", "Enrolled agents by state.", ["state"], registry=registry)
    age = Gauge("tidegate_agent_report_age_seconds", "Age of the last report.", ["agent"], registry=registry)
    busy = Gauge("tidegate_agent_cpu_saturation", "Busy share of the device.", ["agent"], registry=registry)
    p99 = Gauge(
        "tidegate_sla_latency_p99_milliseconds", "p99 over the contract's window.", ["service"], registry=registry
    )
    availability = Gauge(
        "tidegate_sla_availability", "Share of requests answered in the window.", ["service"], registry=registry
    )
    budget = Gauge("tidegate_sla_error_budget_left", "Share of the error budget left.", ["service"], registry=registry)
    requests = Gauge("tidegate_sla_requests", "Requests in the window.", ["service"], registry=registry)
    failed = Gauge("tidegate_sla_requests_failed", "Failed requests in the window.", ["service"], registry=registry)
    met = Gauge("tidegate_sla_met", "1 if the contract is met.", ["service"], registry=registry)
    attained = Gauge(
        "tidegate_sla_promise_attained",
        "Share that was good in the contract's window.",
        ["service", "promise"],
        registry=registry,
    )
    promised = Gauge(
        "tidegate_sla_promise_share", "Share that must be good.", ["service", "promise"], registry=registry
    )
    left = Gauge(
        "tidegate_sla_promise_budget_left",
        "Share of this promise's error budget left.",
        ["service", "promise"],
        registry=registry,
    )
    burn = Gauge(
        "tidegate_sla_burn_rate",
        "How many times faster than allowed the budget is spent.",
        ["service", "promise", "window"],
        registry=registry,
    )
    alert = Gauge(
        "tidegate_sla_burn_alert",
        "1 while the multi-window burn-rate rule fires.",
        ["service", "promise", "rule", "severity"],
        registry=registry,
    )
    no_data = Gauge(
        "tidegate_sla_burn_alert_no_data",
        "1 while too little is heard of the service to judge the rule.",
        ["service", "promise", "rule"],
        registry=registry,
    )
    risk = Gauge(
        "tidegate_sla_violation_risk",
        "Probability that the contract is violated in ten minutes.",
        ["service"],
        registry=registry,
    )
    coverage = Gauge(
        "tidegate_sla_coverage",
        "Share of the window's minutes in which the ingresses were heard of.",
        ["service"],
        registry=registry,
    )
    fell_back = Gauge(
        "tidegate_requests_fell_back", "Requests of which a part ran on a fallback.", ["service"], registry=registry
    )
    copies = Gauge(
        "tidegate_lane_copies",
        "Second copies of lanes that ingresses sent to keep a promise.",
        ["service"],
        registry=registry,
    )
    epoch = Gauge("tidegate_plan_epoch", "Epoch of the running plan.", ["service"], registry=registry)
    known = controller.agents()
    for state in _STATES:
        agents.labels(state).set(sum(agent.state == state for agent in known))
    for agent in known:
        if agent.age_ms is not None:
            age.labels(agent.id).set(agent.age_ms / 1000)
        if agent.cpu_saturation is not None:
            busy.labels(agent.id).set(agent.cpu_saturation)
    for name in sorted(controller.desired.contracts):
        sla = controller.sla_status(name)
        for gauge, value in (
            (p99, sla.p99_ms),
            (availability, sla.availability),
            (budget, sla.budget_left),
            (epoch, sla.running_epoch),
        ):
            if value is not None:
                gauge.labels(sla.service_id).set(value)
        requests.labels(sla.service_id).set(sla.requests)
        failed.labels(sla.service_id).set(sla.failed)
        fell_back.labels(sla.service_id).set(sla.fell_back)
        copies.labels(sla.service_id).set(controller.telemetry.copies(name))
        met.labels(sla.service_id).set(sla.state in ("met", "no-traffic"))
        risk.labels(sla.service_id).set(sla.risk.contract)
        coverage.labels(sla.service_id).set(sla.coverage)
        for promise in sla.promises:
            promised.labels(sla.service_id, promise.name).set(promise.share)
            if promise.attained is not None and promise.left is not None:
                attained.labels(sla.service_id, promise.name).set(promise.attained)
                left.labels(sla.service_id, promise.name).set(promise.left)
        for promise_name, rates in sla.burns.items():
            for window, rate in rates.items():
                if rate is not None:
                    burn.labels(sla.service_id, promise_name, window).set(rate)
        for each in sla.alerts:
            alert.labels(sla.service_id, each.promise, each.rule, each.severity).set(each.state == "firing")
            no_data.labels(sla.service_id, each.promise, each.rule).set(each.state == "no-data")
    _llm_metrics(controller, registry)
    return generate_latest(registry).decode()


def _llm_metrics(controller: Controller, registry: CollectorRegistry) -> None:
    ledger = controller.llm.advisor.ledger
    came_to = Counter(
        "tidegate_llm_decisions",
        "Questions to the LLM by what they came to, with the reason of refusals and fallbacks.",
        ["verdict", "reason"],
        registry=registry,
    )
    for (verdict, reason), count in sorted(ledger.verdicts.items()):
        came_to.labels(verdict, reason).inc(count)
    tokens = Counter("tidegate_llm_tokens", "Tokens of the LLM.", ["direction"], registry=registry)
    tokens.labels("prompt").inc(ledger.prompt_tokens)
    tokens.labels("output").inc(ledger.output_tokens)
    seconds = Counter("tidegate_llm_seconds", "Time that questions to the LLM took.", registry=registry)
    seconds.inc(ledger.seconds)
