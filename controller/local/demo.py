"""`tidegate demo`: the main job on this machine, with trouble on the way, and a report of what held."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from controller.local.load import Load
from controller.local.report import Trouble, build_report, promises
from controller.local.stack import LocalStack, Progress
from controller.local.up import console_of_stdout, example_sla, progress_to, settings_from, wait_for_signal
from sla.errors import RetryableError

SERVICE = "document-reader"
DEGRADE_AT = 0.35
"""Share of the load's time after which one link is degraded."""
KILL_AT = 0.6
DEGRADED_DELAY_MS = 120.0
DEGRADED_JITTER_MS = 50.0
DEGRADED_MBPS = 20.0


def run_demo(arguments: argparse.Namespace) -> int:
    """The exit status: 0 if everything promised held, else 1."""
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


def make_trouble(stack: LocalStack, began: float, seconds: float, progress: Progress) -> Trouble:
    """Degrade a link that the running plan uses, later kill an agent that holds a shard; returns what became of it."""
    _sleep_until(began + DEGRADE_AT * seconds)
    plan = running_plan(stack)
    src, dst = link_in_use(plan, entry=ingress_agents(stack)[0])
    degraded_at_s = time.time()
    stack.shape(src, dst, DEGRADED_DELAY_MS, DEGRADED_JITTER_MS, DEGRADED_MBPS)
    progress(
        f"trouble: link {src} -> {dst} degraded to {DEGRADED_MBPS:g} Mbit/s, +{DEGRADED_DELAY_MS:g} ms, jitter {DEGRADED_JITTER_MS:g} ms"
    )
    announced = _announce_until(stack, began + KILL_AT * seconds, plan["epoch"], progress)
    victim = victim_of(running_plan(stack), stack)
    killed_at_s = stack.kill_agent(victim)
    progress(f"trouble: killed {victim} (SIGKILL) while it held a shard")
    try:
        replanned = wait_for_plan(stack, after_epoch=announced, timeout_s=30.0, without=victim)
        progress(
            f"plan {replanned['epoch']} took over {(replanned['active_at_s'] - killed_at_s) * 1000:.0f} ms after the kill"
        )
    except RetryableError as error:
        progress(str(error))
        replanned = {"active_at_s": None}
    lost = [
        e
        for e in stack.api.get("/v1/events", limit=1000)
        if e["kind"] == "agent-lost" and e["agent"] == victim and e["at_s"] >= killed_at_s
    ]
    _announce_until(stack, began + seconds, replanned.get("epoch", announced), progress)
    return Trouble(
        degraded_link=f"{src} -> {dst}",
        degraded_at_s=degraded_at_s,
        killed_agent=victim,
        killed_at_s=killed_at_s,
        detected_at_s=lost[0]["at_s"] if lost else None,
        replanned_at_s=replanned["active_at_s"],
    )


def ingress_agents(stack: LocalStack) -> list[str]:
    """Devices that take requests, the slowest first: it is the site's gateway, since it is of little use for shards."""
    devices = [agent for agent in stack.live_agents() if agent["ingress_url"] and not agent["is_cloud"]]
    return [agent["id"] for agent in sorted(devices, key=lambda agent: -agent["slowdown"])]


def ingress_urls(stack: LocalStack) -> list[str]:
    """Their addresses, in the same order."""
    urls = {agent["id"]: agent["ingress_url"] for agent in stack.live_agents()}
    return [urls[agent] for agent in ingress_agents(stack)]


def running_plan(stack: LocalStack) -> dict[str, Any]:
    """The plan that serves now."""
    plan: dict[str, Any] = next(
        plan for plan in reversed(stack.api.get("/v1/plans", service_id=SERVICE)) if plan["running"]
    )
    return plan


def wait_for_plan(
    stack: LocalStack, *, after_epoch: int, timeout_s: float = 120.0, without: str | None = None
) -> dict[str, Any]:
    """The first plan after `after_epoch` that reached the ingresses and does not use the agent `without`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        plans = stack.api.get("/v1/plans", service_id=SERVICE)
        for plan in plans:
            used = {shard["agent"] for shard in plan["shards"] if shard["role"] == "serving"}
            if plan["epoch"] > after_epoch and plan["active_at_s"] is not None and without not in used:
                found: dict[str, Any] = plan
                return found
        time.sleep(0.1)
    raise RetryableError(f"No new plan became active within {timeout_s:.0f} s; see: tidegate explain {SERVICE}")


def link_in_use(plan: dict[str, Any], entry: str) -> tuple[str, str]:
    """A link that the plan sends tensors over: between two shards of one lane if there is one, else from the ingress."""
    serving = [shard for shard in plan["shards"] if shard["role"] == "serving"]
    for before, after in pairwise(serving):
        if (
            before["stage"] == after["stage"]
            and before["blocks"][1] == after["blocks"][0]
            and before["agent"] != after["agent"]
        ):
            return before["agent"], after["agent"]
    return entry, next(shard["agent"] for shard in serving if shard["agent"] != entry)


def victim_of(plan: dict[str, Any], stack: LocalStack) -> str:
    """An edge agent that holds a serving shard and is not the ingress that clients use first."""
    gateway = ingress_agents(stack)[0]
    edge: set[str] = {agent["id"] for agent in stack.live_agents() if not agent["is_cloud"]} - {gateway}
    serving: list[str] = [
        shard["agent"] for shard in plan["shards"] if shard["role"] == "serving" and shard["agent"] in edge
    ]
    return max(sorted(set(serving)), key=serving.count)


def _announce_until(stack: LocalStack, until: float, epoch: int, progress: Progress) -> int:
    """Say when a new plan becomes active; the newest epoch that was said."""
    while time.monotonic() < until:
        plan = running_plan(stack)
        if plan["epoch"] > epoch and plan["active_at_s"] is not None:
            progress(f"plan {plan['epoch']} ({plan['trigger']}) is active: {plan['sentence']}")
            epoch = plan["epoch"]
        time.sleep(min(0.5, max(0.0, until - time.monotonic())))
    return epoch


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))


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
