"""What the demo does to the fleet while requests run, and what the loop makes of it. All through the public API and signals."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

from controller.local.report import Trouble
from controller.local.stack import LocalStack, Progress
from sla.errors import RetryableError

SERVICE = "document-reader"
DEGRADE_AT = 0.4
"""Share of the load's time after which one link is degraded."""
KILL_AT = 0.65
DEGRADED_DELAY_MS = 100.0
DEGRADED_JITTER_MS = 100.0
DEGRADED_MBPS = 20.0


def make_trouble(stack: LocalStack, began: float, seconds: float, progress: Progress) -> Trouble:
    """Degrade a link that the running plan uses, later kill an agent that holds a shard; returns what became of it."""
    _sleep_until(began + DEGRADE_AT * seconds)
    plan = running_plan(stack)
    src, dst = link_in_use(plan, stack)
    degraded_at_s = time.time()
    stack.shape(src, dst, DEGRADED_DELAY_MS, DEGRADED_JITTER_MS, DEGRADED_MBPS)
    progress(
        f"trouble: link {src} -> {dst} degraded to {DEGRADED_MBPS:g} Mbit/s, +{DEGRADED_DELAY_MS:g} ms, jitter {DEGRADED_JITTER_MS:g} ms"
    )
    announced = _announce_until(stack, began + KILL_AT * seconds, plan["epoch"], progress)
    victim = victim_of(running_plan(stack), stack)
    killed_at_s = stack.kill_agent(victim)
    progress(f"trouble: killed {victim} (SIGKILL) while it held a shard")
    replanned_at_s = _replanned(stack, announced, victim, killed_at_s, progress)
    _announce_until(stack, began + seconds, running_plan(stack)["epoch"], progress)
    return Trouble(
        degraded_link=f"{src} -> {dst}",
        degraded_at_s=degraded_at_s,
        left_link_at_s=_left_link_at_s(stack, (src, dst), degraded_at_s),
        killed_agent=victim,
        killed_at_s=killed_at_s,
        detected_at_s=_lost_at_s(stack, victim, killed_at_s),
        replanned_at_s=replanned_at_s,
    )


def _replanned(
    stack: LocalStack, after_epoch: int, victim: str, killed_at_s: float, progress: Progress
) -> float | None:
    try:
        plan = wait_for_plan(stack, after_epoch=after_epoch, timeout_s=30.0, without=victim)
    except RetryableError as error:
        progress(str(error))
        return None
    at_s = float(plan["active_at_s"])
    progress(f"plan {plan['epoch']} took over {(at_s - killed_at_s) * 1000:.0f} ms after the kill: {plan['sentence']}")
    return at_s


def _lost_at_s(stack: LocalStack, agent: str, since_s: float) -> float | None:
    """When the controller noticed."""
    events = stack.api.get("/v1/events", limit=1000)
    lost = [e["at_s"] for e in events if e["kind"] == "agent-lost" and e["agent"] == agent and e["at_s"] >= since_s]
    return lost[0] if lost else None


def _left_link_at_s(stack: LocalStack, link: tuple[str, str], since_s: float, patience_s: float = 20.0) -> float | None:
    """When a plan that does not send tensors over the link became active; a short demo may end before it does."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        for plan in stack.api.get("/v1/plans", service_id=SERVICE):
            if plan["active_at_s"] is not None and plan["active_at_s"] > since_s and link not in links_of(plan):
                return float(plan["active_at_s"])
        time.sleep(0.5)
    return None


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


def links_of(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """The links between two agents over which a lane hands its tensors on."""
    serving = [shard for shard in plan["shards"] if shard["role"] == "serving"]
    return [
        (before["agent"], after["agent"])
        for before, after in pairwise(serving)
        if all(before[key] == after[key] for key in ("stage", "patch", "token"))
        and before["blocks"][1] == after["blocks"][0]
        and before["agent"] != after["agent"]
    ]


def link_in_use(plan: dict[str, Any], stack: LocalStack) -> tuple[str, str]:
    """A link that the plan uses and that can be degraded: within a lane if there is one, else from the ingress."""
    emulated = {agent["id"] for agent in stack.live_agents() if agent["evidence"] == "emulated"}
    within = [link for link in links_of(plan) if link[0] in emulated]
    if within:
        return within[0]
    gateway = ingress_agents(stack)[0]
    return gateway, next(s["agent"] for s in plan["shards"] if s["role"] == "serving" and s["agent"] != gateway)


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
