"""Contracts as OpenSLO v1 objects (github.com/OpenSLO/OpenSLO) and back. Pure: plain values in, plain values out.

A contract becomes one Service, and per promise one SLI and one SLO, with an AlertPolicy per burn rule. What OpenSLO has no field
for travels in annotations of the Service (`tidegate.dev/FIELD`), so that our own export comes back whole; other tools keep
annotations but do not act on them. `UNSAID_THERE` and `UNSAID_HERE` list what one side cannot say to the other.
"""

from __future__ import annotations

import json
import re
from typing import Any

from sla.burn import RULES, BurnRule, duration
from sla.contract import SHARE_OF, Contract
from sla.window import SERVED_SHARE, SLICE_S

API_VERSION = "openslo/v1"
ANNOTATION = "tidegate.dev/"

ANNOTATED = (
    "model", "modality", "priority", "accuracy_floor", "energy_j_per_request", "cost_per_1k_requests", "privacy", "zones", "intent",
)  # fmt: skip
"""Fields of a contract that OpenSLO has no place for."""

UNSAID_THERE: tuple[str, ...] = (
    "where requests may run and what may leave the edge (zones, privacy)",
    "which service is meant when it is not named like the contract (model), modality, priority and intent",
    "floors and limits that are not service levels over time: accuracy_floor, energy_j_per_request, cost_per_1k_requests",
    "that a burn alert needs a long and a short window at once: OpenSLO allows one condition per policy, so the short window is "
    "written as alertAfter",
    "that a minute counts against the throughput only when the load was offered and not served",
    "that silence neither ends an alert nor counts as good",
)
"""What a contract means and OpenSLO v1 cannot say; the fields among it travel in annotations."""
UNSAID_HERE: tuple[str, ...] = (
    "calendar-aligned time windows, and windows that are not 1 to 90 whole days",
    "where indicators are measured (DataSource, metricSource): Tidegate measures its own ingresses",
    "latency objectives other than 50, 95 and 99 %",
    "several availability targets for one service; the strictest is taken",
    "alert conditions other than Tidegate's four burn rules, and notification targets",
    "the budgeting method: requests are counted for availability and latency, minutes for throughput",
    "objectives over thresholds that are neither times (op lte, lt) nor rates (op gte, gt)",
)
"""What OpenSLO v1 says and a contract cannot."""

Document = dict[str, Any]


def to_openslo(contract: Contract) -> list[Document]:
    """The contract as OpenSLO v1 objects, in an order in which nothing is referred to before it stands there."""
    name = contract.service_id
    policies = [_policy(contract, rule) for rule in RULES]
    refs = [{"alertPolicyRef": policy["metadata"]["name"]} for policy in policies]
    window = [{"duration": f"{contract.window_days}d", "isRolling": True}]
    documents = [_service(contract), _target(name), *policies]

    def add(promise: str, indicator: Document, method: str, objective: Document) -> None:
        metadata = {"name": _object_name(name, promise)}
        documents.append(_object("SLI", metadata, indicator))
        spec = {
            "service": name, "indicatorRef": metadata["name"], "timeWindow": window, "budgetingMethod": method,
            "objectives": [objective], "alertPolicies": refs,
        }  # fmt: skip
        documents.append(_object("SLO", metadata, spec))

    answered, offered = _source(name, "requests answered"), _source(name, "requests")
    ratio = {"ratioMetric": {"counter": True, "good": answered, "total": offered}}
    add("availability", ratio, "Occurrences", {"displayName": "availability", "target": contract.availability_sla})
    for objective in contract.latency_objectives():
        add(
            objective.name,
            {"thresholdMetric": _source(name, f"{objective.metric} in milliseconds")},
            "Occurrences",
            {
                "displayName": objective.name, "op": "lte", "value": objective.at_most_ms,
                "target": SHARE_OF[objective.percentile],
            },
        )  # fmt: skip
    add(
        "throughput",
        {"thresholdMetric": _source(name, "requests answered per second, while as many are offered")},
        "Timeslices",
        {
            "displayName": "throughput", "op": "gte", "value": contract.throughput_rps, "target": contract.availability_sla,
            "timeSliceTarget": SERVED_SHARE, "timeSliceWindow": duration(SLICE_S),
        },
    )  # fmt: skip
    return documents


def _service(contract: Contract) -> Document:
    plain = contract.model_dump(mode="json", exclude_defaults=True)
    annotations = {ANNOTATION + field: json.dumps(plain[field]) for field in ANNOTATED if field in plain}
    metadata: Document = {"name": contract.service_id}
    if annotations:
        metadata["annotations"] = annotations
    return _object("Service", metadata, {"description": f"Served by Tidegate as {contract.service_name}."})


def _target(name: str) -> Document:
    spec = {"target": "tidegate", "description": "Whoever Tidegate notifies."}
    return _object("AlertNotificationTarget", {"name": _object_name(name, "operators")}, spec)


def _policy(contract: Contract, rule: BurnRule) -> Document:
    name = _object_name(contract.service_id, f"burn-{duration(rule.long_s)}")
    condition = {
        "kind": "AlertCondition",
        "metadata": {"name": name},
        "spec": {
            "severity": rule.severity,
            "condition": {
                "kind": "burnrate", "op": "gte", "threshold": round(rule.factor(contract.window_days), 6),
                "lookbackWindow": duration(rule.long_s), "alertAfter": duration(rule.short_s),
            },
        },
    }  # fmt: skip
    spec = {
        "description": f"{rule.budget_share:.0%} of the error budget within {duration(rule.long_s)}, and still so over {duration(rule.short_s)}.",
        "alertWhenBreaching": True, "alertWhenResolved": True, "alertWhenNoData": False, "conditions": [condition],
        "notificationTargets": [{"targetRef": _object_name(contract.service_id, "operators")}],
    }  # fmt: skip
    return _object("AlertPolicy", {"name": name}, spec)


def _object(kind: str, metadata: Document, spec: Document) -> Document:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": dict(metadata), "spec": spec}


def _object_name(service: str, what: str) -> str:
    """At most 63 of the characters that OpenSLO allows in names."""
    tail = "-" + what
    return re.sub(r"[^a-z0-9-]", "-", service)[: 63 - len(tail)].rstrip("-") + tail


def _source(service: str, measures: str) -> Document:
    return {"metricSource": {"type": "tidegate", "spec": {"service": service, "measures": measures}}}
