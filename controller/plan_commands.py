"""What the commands about an operator's own plans print."""

from __future__ import annotations

import argparse
import json
from typing import Any

from controller.commands import api_of, read_file
from sla.errors import InvalidInputError

ROLLOUT_TIMEOUT_S = 180.0


def plan_apply(arguments: argparse.Namespace) -> int:
    """The plan of a file runs and is pinned; with `--preview` only what it would do is said."""
    service, shards = plan_of(read_file(arguments.file), arguments.file, arguments.service)
    if arguments.preview:
        return _preview(arguments, service, shards)
    started = api_of(arguments).post(f"/v1/plans/{service}:run", json={"shards": shards}, timeout_s=ROLLOUT_TIMEOUT_S)
    if arguments.json:
        print(json.dumps(started, indent=2))
        return 0
    print(f"{service} runs this plan as plan {started['epoch']}; {started['text']}")
    print(f"It is pinned; let the loop decide again with: tidegate plan unpin {service}")
    return 0


def _preview(arguments: argparse.Namespace, service: str, shards: list[Any]) -> int:
    """Exit status 1 when the plan is refused."""
    question: dict[str, Any] = {"shards": shards}
    if arguments.rps is not None:
        question["rps"] = arguments.rps
    answer = api_of(arguments).post(f"/v1/plans/{service}:preview", json=question, timeout_s=60)
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        print("\n".join(preview_lines(answer)))
    return 0 if answer["admissible"] else 1


def preview_lines(answer: dict[str, Any]) -> list[str]:
    """What a plan would do, for people."""
    lines = [answer["text"]]
    if (p := answer["prediction"]) is not None:
        lines.append(
            f"latency p50 {p['p50_ms']:.0f}, p95 {p['p95_ms']:.0f}, p99 {p['p99_ms']:.0f} ms; carries {p['throughput_rps']:.3g} "
            f"requests/s; busiest device {p['saturation']:.0%}; accuracy {p['accuracy']:.2f}; {p['energy_j']:.2g} J per request"
        )
        lines.append(
            f"going there: {answer['move_bytes'] / 1e6:.1f} MB to push, about {answer['move_ms'] / 1000:.1f} s"
        )
    return lines


def plan_of(content: bytes, name: str, service: str | None) -> tuple[str, list[Any]]:
    """Service and shards of a file as `tidegate plan show --json` prints it: a plan, or a list with one. Raises InvalidInputError."""
    try:
        document = json.loads(content)
    except ValueError as error:
        raise InvalidInputError(f"{name} is not JSON: {error}.") from None
    plans = document if isinstance(document, list) else [document]
    plans = [plan for plan in plans if isinstance(plan, dict) and isinstance(plan.get("shards"), list)]
    if service is not None:
        plans = [plan for plan in plans if plan.get("service_id", service) == service]
    if len(plans) != 1:
        raise InvalidInputError(
            f"{name} must hold one plan{f' of {service}' if service else ''} with its shards, but it holds {len(plans)}; "
            "start from: tidegate plan show SERVICE --json",
            found=f"{len(plans)} plans", accepted="one plan",
        )  # fmt: skip
    of = service or plans[0].get("service_id")
    if not isinstance(of, str) or not of:
        raise InvalidInputError(f"{name} does not say which service the plan is for; add service_id, or --service.")
    return of, plans[0]["shards"]
