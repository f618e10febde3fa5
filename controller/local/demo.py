"""`tidegate demo`: the main job on this machine, with trouble on the way, and a report of what held."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from controller.local.load import Load
from controller.local.report import build_report, promises
from controller.local.stack import LocalStack, Progress
from controller.local.trouble import SERVICE, ingress_urls, make_trouble, wait_for_plan
from controller.local.up import (
    console_of_stdout,
    example_sla,
    progress_to,
    settings_from,
    stop_like_ctrl_c,
    wait_for_signal,
)


def run_demo(arguments: argparse.Namespace) -> int:
    """The exit status: 0 if everything promised held, else 1."""
    stop_like_ctrl_c()
    console = console_of_stdout()
    progress = progress_to(console)
    with LocalStack(settings_from(arguments), progress) as stack:
        stack.start()
        applied = stack.api.post("/v1/slas", body=example_sla(), timeout_s=60)
        progress(f"SLA {SERVICE} version {applied['version']}: {applied['admission']['text']}")
        wait_for_plan(stack, after_epoch=0)
        report = _run(stack, arguments.seconds, applied, progress)
        held = promises(report)
        report["promises"] = dict(held)
        if arguments.report:
            Path(arguments.report).write_text(json.dumps(report, indent=2) + "\n")
        _print(console, report, held)
        console.print(
            f"Dashboard while it runs: {stack.dashboard_url}   logs: {stack.directory / 'logs'}", highlight=False
        )
        if arguments.keep:
            console.print("Everything is left running; stop with Ctrl-C.")
            wait_for_signal()
    return 0 if all(ok for _, ok in held) else 1


def _run(stack: LocalStack, seconds: float, applied: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Load for that long, trouble on the way, then the report."""
    rate_rps = stack.api.get(f"/v1/slas/{SERVICE}")["contract"]["throughput_rps"]
    ingresses = ingress_urls(stack)
    load = Load(ingresses=ingresses, rate_rps=rate_rps)
    progress(f"sending {rate_rps:g} requests/s for {seconds:g} s, open loop, to {ingresses[0]} (others if it is gone)")
    sender = threading.Thread(target=lambda: asyncio.run(load.run(seconds)), daemon=True)
    began = time.monotonic()
    sender.start()
    trouble = make_trouble(stack, began, seconds, progress)
    sender.join(timeout=seconds + 60)
    time.sleep(1.5)  # The ingresses report every half second; the last requests must be counted.
    return build_report(
        outcomes=list(load.outcomes),
        sent=load.sent,
        sla=stack.api.get(f"/v1/slas/{SERVICE}"),
        agents=stack.api.get("/v1/agents"),
        plans=stack.api.get("/v1/plans", service_id=SERVICE),
        trouble=trouble,
    )


def _print(console: Console, report: dict[str, Any], held: list[tuple[str, bool]]) -> None:
    requests, latency, recovery = report["requests"], report["latency_ms"], report["recovery"]
    console.print()
    table = Table(
        "plan",
        "trigger",
        "proposer",
        "score",
        "p99 predicted",
        "p99 measured",
        "requests",
        "shards",
        title="Plans",
        title_justify="left",
    )
    for plan in report["plans"]:
        where = {shard["stage"]: [] for shard in plan["shards"]}  # type: dict[str, list[str]]
        for shard in plan["shards"]:
            where[shard["stage"]].append(f"{shard['agent']}[{shard['blocks'][0]}:{shard['blocks'][1]}]")
        table.add_row(
            str(plan["epoch"]), plan["trigger"], plan["proposer"], _text(plan["score"], 3), _text(plan["predicted_p99_ms"]),
            _text(plan["measured_p99_ms"]), str(plan["requests"]), "\n".join(f"{stage}: {' '.join(at)}" for stage, at in where.items()),
        )  # fmt: skip
    console.print(table)
    console.print(
        f"\n{requests['sent']} requests: {requests['ok']} answered ({requests['correct']} right, {requests['fell_back']} by a fallback), "
        f"{requests['failed']} failed. Latency p50 {latency['p50']:.0f}, p95 {latency['p95']:.0f}, p99 {latency['p99']:.0f} ms.\n"
        f"Killed {recovery['killed_agent']}: noticed after {_text(recovery['detected_ms'])} ms, new plan after {_text(recovery['replanned_ms'])} ms, "
        f"{recovery['failed_requests']} requests failed. Devices are emulated on this machine's CPU; their order is real, their speed is not.\n",
        highlight=False,
    )
    for error in requests["errors"]:
        console.print(f"  error: {error}", highlight=False)
    for text, ok in held:
        console.print(f"  {'[green]held[/green]  ' if ok else '[red]BROKEN[/red]'} {text}", highlight=False)
    console.print()


def _text(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
