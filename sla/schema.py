"""The contract's JSON Schema (draft 2020-12). `python -m sla.schema` writes it to standard output; CI compares it with `sla/schema.json`."""

from __future__ import annotations

import json
import sys
from typing import Any

from sla.contract import Contract

EXAMPLES: tuple[dict[str, Any], ...] = (
    {"service_id": "api-payment-v2", "latency_p99_ms": 150, "throughput_rps": 8000, "availability_sla": "99.95%"},
    {
        "service_id": "document-reader", "latency_p99_ms": 8000, "throughput_rps": 0.6, "availability_sla": "99%",
        "accuracy_floor": 0.9, "privacy": "features-may-leave",
    },
    {
        "service_id": "voice-assistant", "model": "speech-to-answer", "modality": "speech", "priority": 8,
        "latency_p99_ms": 1200, "throughput_rps": 5, "availability_sla": 0.995, "window_days": 28, "zones": ["plant-1"],
        "privacy": "raw-stays-on-edge", "energy_j_per_request": 12, "intent": "Prefer the wired devices at night.",
        "objectives": [
            {"percentile": "p50", "at_most_ms": 400},
            {"percentile": "p95", "at_most_ms": 350, "metric": "time-to-first-token"},
            {"percentile": "p99", "at_most_ms": 120, "metric": "inter-token"},
        ],
    },
)  # fmt: skip
"""Contracts that are accepted; the same as the files in `sla/examples/`."""


def contract_schema() -> dict[str, Any]:
    """The schema that editors and other tools check contracts with. Keys that stand twice are beyond what a schema can see."""
    schema = Contract.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://tidegate.dev/schemas/sla.json",
        **schema,
        "title": "Tidegate SLA",
        "examples": list(EXAMPLES),
    }


def schema_text() -> str:
    """The schema as it is kept in the repository."""
    return json.dumps(contract_schema(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
