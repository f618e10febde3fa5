"""Small fleets of emulated devices as real processes, each with its own controller, on which given plans serve given loads."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.live_arrivals import arrivals_s
from benchmarks.live_plans import plans
from benchmarks.live_records import Load, Trial
from controller.cli import cache_dir
from controller.local.load import Load as Source
from controller.local.load import Outcome
from controller.local.stack import LocalStack, StackSettings
from controller.present import shards_out
from controller.replay import Logged, log_from
from controller.snapshots import snapshot_from
from policies.ids import AgentId, ServiceId
from policies.plan import Plan
from policies.predict import Predictor
from policies.snapshot import Snapshot
from sla.errors import InfeasibleError

SERVICE: Final = ServiceId("document-reader")
LOADS: Final = (0.2, 0.4, 0.6)
"""Shares of a plan's predicted capacity that are offered."""
LEAST_RPS, MOST_RPS = 2.0, 9.0
"""Plans that carry less take too long to measure; more than this is not offered, since the machine itself must stay idle enough."""
FIRST_WARM_UPS: Final = 4
"""Before the first plan of a fleet, under the plan that its controller chose: no fleet is asked what a plan would do before it ever served. A minute, so
that what is measured by then (half a minute) and most of what was learned are runs of devices that remember.
"""
PROFILES_WITHIN_S: Final = 400.0
LEAST_REQUESTS: Final = 20
WARM_UP: Final = 30
"""Requests that are not measured: devices that remember runs compute here, and every document comes three times."""
CONTRACT: Final = {
    "service_id": SERVICE, "latency_p99_ms": 10_000, "throughput_rps": 0.5, "availability_sla": "90%",
    "privacy": "any",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One emulated device."""

    name: str
    slowdown: float
    platform: str = "rk3588"
    is_cloud: bool = False
    options: tuple[str, ...] = ()
    """More of the agent's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A fleet: the gateway takes the requests and runs nothing else."""

    name: str
    devices: tuple[Device, ...]
    uplink: tuple[float, float, float] = (0.0, 0.0, 1e6)
    """Delay (ms, one way), jitter (ms) and Mbit/s of each direction to and from the cloud."""


def fleet(name: str, slowdowns: tuple[float, ...], cloud: float, uplink: tuple[float, float, float]) -> FleetPlan:
    """A gateway, devices of these slowdowns, and one cloud-like device."""
    devices = tuple(Device(name=f"{name}-d{at}", slowdown=s) for at, s in enumerate(slowdowns, 1))
    gateway = Device(name=f"{name}-gateway", slowdown=8.0)
    far = Device(name=f"{name}-cloud", slowdown=cloud, platform="ascend310p", is_cloud=True)
    return FleetPlan(name=name, devices=(gateway, *devices, far), uplink=uplink)


FLEETS: Final = (
    fleet("a", (1.5, 1.5, 2.2), 1.2, (4.0, 0.5, 200.0)),
    fleet("b", (1.2, 2.0, 3.5), 1.3, (15.0, 2.0, 100.0)),
    fleet("c", (1.8, 1.8, 1.8), 1.1, (8.0, 1.0, 60.0)),
    fleet("d", (1.3, 1.3, 4.0), 1.6, (25.0, 4.0, 150.0)),
)
"""Slowdowns are small so that many requests are measured; their devices remember their runs, so that this machine stays idle."""


class LiveFleet:
    """The processes of one fleet. Use as a context manager."""

    def __init__(
        self, wanted: FleetPlan, directory: Path, say: Callable[[str], None], warming: threading.Lock,
        contract: Mapping[str, object] = CONTRACT,
    ) -> None:  # fmt: skip
        """`warming` is held by the fleet that warms up."""
        settings = StackSettings(
            directory=directory / wanted.name, cache=Path(cache_dir()), api_port=_free_port(), agent_port=_free_port(),
            ray="none", platforms=(),
        )  # fmt: skip
        self.wanted, self._contract = wanted, contract
        self._say = say
        self._warming = warming
        self.stack = LocalStack(settings, lambda text: None)
        self.ids: dict[str, AgentId] = {}

    def __enter__(self) -> LiveFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.stop()

    @property
    def models(self) -> Path:
        """Where the controller keeps its models: another fleet may start from a copy."""
        return self.stack.directory / "controller" / "models"

    def start(self, models: Path | None = None) -> None:
        """Controller, agents, service and contract, until the first plan is active. Raises TidegateError."""
        if models is not None:
            shutil.copytree(models, self.models)
        stack = self.stack
        stack.start_controller()
        for device in self.wanted.devices:
            options = [
                "--slowdown",
                str(device.slowdown),
                "--remember",
                *(["--cloud"] if device.is_cloud else []),
                *device.options,
            ]
            stack.join_agent(device.name, device.platform, *options)
        stack.add_service()
        names = [device.name for device in self.wanted.devices]
        stack.wait_until(lambda: len(stack.live_agents()) == len(names), 90.0, "Not all agents came to life")
        live = [agent["id"] for agent in stack.live_agents()]
        self.ids = {name: AgentId(next(a for a in live if a.startswith(f"{name}-"))) for name in names}
        self._shape()
        stack.api.post("/v1/slas", json=self._contract, timeout_s=60)
        stack.wait_until(lambda: bool(self._running()), 120.0, "No first plan became active")
        time.sleep(8.0)  # Links are probed twice a second, their bandwidth every few seconds.
        self._say(f"fleet {self.wanted.name}: {len(names)} agents live")

    def wait_for_profiles(self) -> None:
        """Until every model was timed on every type of device that plans may use, as in the idle hours of a real fleet. Raises TidegateError."""
        names = {device.name for device in self.wanted.devices[1:]}
        kinds = {a["device_type"] for a in self.stack.live_agents() if a["id"] in {self.ids[name] for name in names}}

        def is_done() -> bool:
            models = self.stack.api.get("/v1/models")
            return all(kinds <= {device["device_type"] for device in model["devices"]} for model in models)

        self.stack.wait_until(is_done, PROFILES_WITHIN_S, "Not all models were timed on all types of devices")
        self._say(f"fleet {self.wanted.name}: all models timed on {len(kinds)} types of devices")

    def trials(self, wanted: int, seconds: float, seed: int, keep: Callable[[Trial], None]) -> None:
        """Plans one after the other, each under all loads for that many seconds in sum; `keep` is given each. Raises TidegateError."""
        devices = tuple(self.ids[device.name] for device in self.wanted.devices[1:])
        seen, done = self._seen(), 0
        last: tuple[Plan, bytes, tuple[Load, ...]] | None = None
        self._warm_up(seed, times=FIRST_WARM_UPS)

        def finish(after: bytes) -> None:
            if last is not None:
                plan, before, loads = last
                keep(Trial(fleet=self.wanted.name, service=SERVICE, plan=plan, before=before, after=after, loads=loads))

        for plan in plans(seen, SERVICE, devices, 50 * wanted, seed):
            if done == wanted:
                break
            if _capacity_rps(seen, plan) < LEAST_RPS:
                continue
            try:
                before = self._run(plan)
            except InfeasibleError as error:
                self._say(f"fleet {self.wanted.name}: {error}")
                continue
            finish(before)
            capacity = _capacity_rps(snapshot_from(before), plan)
            self._warm_up(seed + done)
            # Each fleet begins elsewhere, so that the machine is about as busy all the time.
            order = [(at + seed + done) % len(LOADS) for at in range(len(LOADS))]
            loads = [self._load(LOADS[at], min(capacity, MOST_RPS), seconds, seed + 100 * done + at) for at in order]
            last, seen, done = (plan, before, tuple(loads)), snapshot_from(before), done + 1
            self._say(
                f"fleet {self.wanted.name}: plan {done} of {wanted}, {sum(len(x.latency_ms) for x in loads)} requests, "
                f"{sum(x.failed for x in loads)} failed"
            )
        if last is not None:
            finish(self._run(last[0]))

    def _run(self, plan: Plan) -> bytes:
        """Make a plan run; the snapshot that the controller had before. Raises InfeasibleError when the gate refuses it."""
        api, models = self.stack.api, self._seen().models
        shards = [json.loads(shard.model_dump_json()) for shard in shards_out(plan, models)]
        answer = api.post(f"/v1/plans/{SERVICE}:preview", json={"shards": shards}, timeout_s=60)
        if not answer["admissible"]:
            raise InfeasibleError(answer["text"])
        api.post(f"/v1/plans/{SERVICE}:run", json={"shards": shards}, timeout_s=180)
        return self._last_seen()

    def _load(self, share: float, capacity_rps: float, seconds: float, seed: int) -> Load:
        """As long for each load: light ones need time for requests, heavy ones until their queues are as they stay."""
        mine = seconds / len(LOADS)
        rate = share * capacity_rps
        due_s = tuple(arrivals_s(max(LEAST_REQUESTS, round(rate * mine)), mine, seed).tolist())
        began_s = time.time()
        outcomes = self.send(rate, mine, seed, due_s)
        ok = sorted((o for o in outcomes if o.ok and not o.fell_back), key=lambda o: o.due_s)
        return Load(
            share=share, seconds=mine, due_ms=tuple(1000.0 * (o.due_s - began_s) for o in ok),
            latency_ms=tuple(o.latency_ms for o in ok), failed=len(outcomes) - len(ok),
        )  # fmt: skip

    def _warm_up(self, seed: int, times: int = 1) -> None:
        """One fleet at a time: devices compute here, and several fleets at once would teach their controllers how long they wait for a processor."""
        due_s = tuple(0.5 * at for at in range(WARM_UP))
        with self._warming:
            for at in range(times):
                self.send(2.0, WARM_UP / 2.0, seed + at, due_s)

    def send(self, rate_rps: float, seconds: float, seed: int, due_s: tuple[float, ...] | None = None) -> list[Outcome]:
        """What becomes of requests at the gateway, by default of a Poisson process; blocks until they are answered."""
        source = Source(ingresses=[self._ingress()], rate_rps=rate_rps, seed=seed, due_s=due_s)
        asyncio.run(source.run(seconds))
        return source.outcomes

    def _ingress(self) -> str:
        gateway = self.ids[self.wanted.devices[0].name]
        return next(str(a["ingress_url"]) for a in self.stack.live_agents() if a["id"] == gateway)

    def _running(self) -> list[dict[str, Any]]:
        return [p for p in self.stack.api.get("/v1/plans", service_id=SERVICE) if p["running"] and p["active_at_s"]]

    def serving(self) -> Snapshot:
        """The snapshot before the plan that runs now was decided, with that plan as the running one."""
        entry = self._last_move()
        snapshot = snapshot_from(entry.seen or b"")
        view = msgspec.structs.replace(snapshot.services[SERVICE], running=entry.record.decision.plan)
        return msgspec.structs.replace(snapshot, services={SERVICE: view})

    def _seen(self) -> Snapshot:
        return snapshot_from(self._last_seen())

    def _last_seen(self) -> bytes:
        """The snapshot beside the newest decision that moved something."""
        return self._last_move().seen or b""

    def _last_move(self) -> Logged:
        log = log_from(self.stack.api.get_bytes(f"/v1/decisions/{SERVICE}:log", limit=20))
        return next(e for e in reversed(log.entries) if e.seen is not None and e.record.decision.plan is not None)

    def _shape(self) -> None:
        delay_ms, jitter_ms, mbps = self.wanted.uplink
        for far in (d for d in self.wanted.devices if d.is_cloud):
            for near in (d for d in self.wanted.devices if not d.is_cloud):
                for src, dst in ((near, far), (far, near)):
                    self.stack.shape(self.ids[src.name], self.ids[dst.name], delay_ms, jitter_ms, mbps)


def _capacity_rps(snapshot: Snapshot, plan: Plan) -> float:
    return Predictor(snapshot, SERVICE).predict(plan).throughput_rps


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
