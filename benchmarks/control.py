"""The control loop with thousands of agents and services: what one look costs, beside looking at everything for every service.

The fleet is made up and nobody is connected: reports are folded, snapshots made, decisions taken and noted as in production (a real
store), but no plan is carried out. Times are of the processor, of this process.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from agents.messages import AnyMessage, DeviceFacts, PeerReport, Report, ServiceReport, ShardFile, ShardReport
from benchmarks.common import Row, at_most
from benchmarks.synthetic import fleet_snapshot
from controller.desired import Desired
from controller.embedded_store import EmbeddedStore
from controller.events import EventLog
from controller.fleet import FleetRegistry
from controller.llm import LlmAdvisor
from controller.loop import ControlLoop
from controller.part_runners import in_processes
from controller.records import AgentRecord, PlanBook, PlanRecord, StoredContract
from controller.replay import Look, look_bytes
from controller.rollout import Rollout
from controller.settings import LlmSettings, LoopSettings, SuspicionSettings
from controller.slis import Slis
from controller.state import State
from controller.telemetry import Telemetry
from controller.thinking import think
from controller.together import Together
from policies.decide import Memory, decide
from policies.ids import ModelName, ServiceId
from policies.plan import Span
from policies.snapshot import Snapshot
from sla.errors import NotFoundError

LOOKS = 6
"""As many as lie between two at which a service asks the solver (30 s at one look in 5 s), so that their mean is what a round costs."""
WHOLE_LOOKS = 4
"""Services that are decided about with the whole world in view, for comparison."""


def run(quick: bool) -> list[Row]:
    """Rows for one size of fleet."""
    services, devices = (200, 2_000) if quick else (1_000, 10_000)
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as directory:
        return asyncio.run(_measured(services, devices, Path(directory)))


class _Clock:
    """Time that is advanced."""

    def __init__(self) -> None:
        self.ms = 1e9

    def now_ms(self) -> float:
        return self.ms

    def wall_s(self) -> float:
        return 1.8e9 + self.ms / 1000


class _Nothing:
    """Neither shard files nor a canary: nothing is carried out."""

    def shard_file(self, name: ModelName, blocks: Span) -> ShardFile:
        raise NotFoundError(f"{name} {blocks}: no plan is carried out here.")

    async def check(self, route: object, deadline_ms: float) -> None:
        raise NotFoundError("No plan is carried out here.")


class _Centre:
    """A controller's inside over a made-up world."""

    def __init__(self, world: Snapshot, state: State) -> None:
        self.clock = _Clock()
        self.telemetry, self.desired = Telemetry(), Desired(state)
        events = EventLog(self.clock)
        self.fleet = FleetRegistry(self.telemetry, self.clock, events, SuspicionSettings())
        nothing, settings = _Nothing(), LoopSettings()
        self.slis = Slis(state, self.clock)
        self.loop = ControlLoop(
            desired=self.desired, fleet=self.fleet, telemetry=self.telemetry, slis=self.slis,
            rollout=Rollout(self.fleet, nothing, nothing, settings), state=state,
            advisor=LlmAdvisor(LlmSettings(mode="off"), events, self.clock), events=events, clock=self.clock,
            settings=settings, on_route=lambda route: None,
        )  # fmt: skip
        for agent in world.fleet.agents.values():
            facts = DeviceFacts(
                platform=agent.platform, evidence=agent.evidence, hostname=agent.id, zone=agent.zone, fingerprint=agent.id,
                slowdown=agent.slowdown, memory_budget_bytes=agent.memory_budget_bytes, is_cloud=agent.is_cloud,
            )  # fmt: skip
            record = AgentRecord(id=agent.id, facts=facts, public_key_fingerprint=agent.id, enrolled_at_s=0.0)
            self.fleet.admit(record).state = "live"
        self.report(world)
        self.desired.models = dict(world.models)
        for service, view in world.services.items():
            self.desired.specs[view.spec.id] = view.spec
            self.desired.contracts[service] = StoredContract(contract=view.contract, version=1)

    def report(self, world: Snapshot) -> float:
        """Everybody reports; seconds per report."""
        began_s = time.process_time()
        now_ms = self.clock.now_ms()
        for agent in world.fleet.agents.values():
            plain = Report(
                sequence=1, cpu_saturation=agent.cpu_saturation, foreign_saturation=agent.cpu_saturation,
                memory_free_bytes=1 << 28, queue_depth=0, loaded_bytes=0,
            )  # fmt: skip
            self.telemetry.fold(agent.id, plain, now_ms)
        return (time.process_time() - began_s) / len(world.fleet.agents)

    async def look(self, world: Snapshot) -> tuple[float, float]:
        """One look to the end of its steps: seconds that it holds the event loop for, and of all."""
        self.clock.ms += LoopSettings().scale.quiet_every_ms
        self.report(world)
        began_s = time.process_time()
        self.loop.look()
        held_s = time.process_time() - began_s
        await self.loop.idle()
        return held_s, time.process_time() - began_s


async def _measured(services: int, devices: int, directory: Path) -> list[Row]:
    world = fleet_snapshot(devices=devices, blocks=12, services=services)
    async with EmbeddedStore(directory) as server:
        store = await server.open("bench")
        centre = _Centre(world, State(store))
        size = f"{services} services on {devices} agents"
        rows = await _first_plans(centre, size)
        rows += await _looks(centre, world, size)
        rows += [*_one_by_one(centre, size), _reports(centre, world)]
        await centre.loop.close()
        await store.close()
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [*rows, at_most(f"{size}, memory of the process", memory_mb, "MB", 1024.0, runs=1)]


def _reports(centre: _Centre, world: Snapshot) -> Row:
    """Reports of agents that serve: decoded, folded into the columns and into the windows of the SLA."""
    agents, services = list(world.fleet.agents), list(world.services)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(AnyMessage)
    frames = []
    for number in range(2_000):
        at, service = number % len(agents), services[number % len(services)]
        peers = tuple(
            PeerReport(peer=agents[at - back], rtt_ms=2.1, jitter_ms=0.3, bandwidth_bytes_per_s=6e7) for back in (1, 2)
        )
        shard = ShardReport(
            stage="s", blocks=Span(0, 12), count=2, sum_ms=80.0, sum_sq_ms=3300.0, items=2, provider="CPUExecutionProvider"
        )  # fmt: skip
        served = ServiceReport(
            service_id=service, epoch=1, ok=2, failed=0, fell_back=0, latency_buckets={210: 1, 214: 1}, shards=(shard,)
        )  # fmt: skip
        frames.append((agents[at], encoder.encode(Report(
            sequence=number, cpu_saturation=0.3, memory_free_bytes=1 << 28, queue_depth=1, loaded_bytes=1 << 20,
            peers=peers, services=(served,),
        ))))  # fmt: skip
    began_s = time.process_time()
    for agent, frame in frames:
        report = decoder.decode(frame)
        assert isinstance(report, Report)
        centre.slis.fold(centre.telemetry.fold(agent, report, centre.clock.now_ms()), agent)
    micros = 1e6 * (time.process_time() - began_s) / len(frames)
    note = f"two peers, one service; {len(frames[0][1])} bytes; without TLS and frames"
    return Row(name="decoding and folding a report", value=micros, unit="us", runs=len(frames), note=note)


async def _first_plans(centre: _Centre, size: str) -> list[Row]:
    """All services have no plan: they are planned together, by zone, in processes; the plans then run."""
    sent: list[int] = []

    async def in_pool(parts: Sequence[bytes]) -> list[bytes]:
        sent.append(sum(map(len, parts)))
        return await asyncio.to_thread(in_processes, parts)

    together = Together(in_pool, LoopSettings().scale)
    centre.loop.world.look()
    began_s, own_s = time.perf_counter(), time.process_time()
    names = list(centre.desired.contracts)
    takes = await together.plan(centre.loop.world, names)
    wall_s, own_s = time.perf_counter() - began_s, time.process_time() - own_s
    for service in takes:
        plan = together.take(service)
        assert plan is not None
        record = PlanRecord(plan=plan, at_s=0.0)
        centre.desired.books[service] = PlanBook(history=(record,), running_epoch=plan.epoch)
    note = f"{len(names) - len(takes)} without a plan; {own_s:.2f} s of them in this process; {sum(sent) / 1e6:.1f} MB sent"
    return [Row(name=f"{size}, first plans of all, by zone in processes", value=wall_s, unit="s", note=note)]


async def _looks(centre: _Centre, world: Snapshot, size: str) -> list[Row]:
    first = await centre.look(world)
    later = [await centre.look(world) for _ in range(LOOKS)]
    held_ms = [1000.0 * held for held, _ in later]
    all_ms = [1000.0 * whole for _, whole in later]
    note = (
        f"mean; dearest {max(all_ms):.0f} ms, cheapest {min(all_ms):.0f} ms; the first one, with nothing remembered and every hold noted "
        f"in the store: {1000 * first[1]:.0f} ms"
    )
    return [
        Row(name=f"{size}, a look holds the event loop for", value=float(np.mean(held_ms)), unit="ms", runs=LOOKS),
        Row(
            name=f"{size}, deciding about every service once, which happens every 5 s",
            value=float(np.mean(all_ms)),
            unit="ms",
            runs=LOOKS,
            note=note,
        ),
    ]


def _one_by_one(centre: _Centre, size: str) -> list[Row]:
    """A decision seen near, and with the whole world in view."""
    world, names = centre.loop.world, list(centre.desired.contracts)
    near_ms, near_bytes = _timed(names[:200], lambda s: world.near(s), in_whole=False)
    whole_ms, whole_bytes = _timed(names[:WHOLE_LOOKS], lambda _: world.snapshot(), in_whole=True)
    note = f"{near_bytes / 1e3:.0f} kB kept beside it"
    beside = f"{whole_bytes / 1e6:.1f} MB kept beside it; {whole_ms / near_ms:.0f} times a near one"
    return [
        Row(name=f"{size}, a decision in its neighbourhood", value=near_ms, unit="ms", runs=200, note=note),
        Row(name=f"{size}, a decision on the whole", value=whole_ms, unit="ms", runs=WHOLE_LOOKS, note=beside),
    ]


def _timed(names: list[ServiceId], see: Callable[[ServiceId], Snapshot], *, in_whole: bool) -> tuple[float, int]:
    """Median milliseconds and bytes of a decision with its snapshot."""
    times, sizes = [], []
    for service in names:
        began_s = time.process_time()
        snapshot = see(service)
        if in_whole:
            decide(snapshot, service, Memory())
        else:
            think(snapshot, service, Look(), with_takes=True)
        times.append(1000.0 * (time.process_time() - began_s))
        sizes.append(len(look_bytes(snapshot, Look())))
    return float(np.median(times)), int(np.median(sizes))
