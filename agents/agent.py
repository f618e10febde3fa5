"""The agent process of one device: it joins its controller, runs shards, carries requests, and reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agents.backends import InferenceBackend, open_backend
from agents.backends.remembered import Memory
from agents.blobs import BlobCache
from agents.calibration import Calibrator
from agents.chain import ChainRunner
from agents.control import ControllerBlobs, ControlLink
from agents.driver import Driver, Result
from agents.engine import Engine
from agents.enroll import enroll
from agents.facts import default_budget_bytes, device_facts
from agents.identity import Identity
from agents.ingress import IngressServer, create_app
from agents.ledger import Ledger
from agents.messages import (
    MAX_THROTTLE,
    PROTOCOL_VERSION,
    Activate,
    Address,
    DeviceFacts,
    Done,
    Hello,
    Leave,
    Message,
    Prepare,
    Probe,
    ProfileBlocks,
    Release,
    Report,
    Route,
    RunChain,
    ShapeLink,
    ShardFile,
    ThrottleDevice,
    Tune,
)
from agents.peers import PeerPool
from agents.probes import DeviceProbe
from agents.profiling import Profiler
from agents.queue import AcceleratorQueue
from agents.routes import RouteTable, files_for, pinned_blobs
from agents.settings import AgentSettings, parse_arguments
from agents.wire import Connection, Tensors, WireServer, serve
from policies.ids import AgentId, BlobHash, ServiceId
from policies.roofline import DeviceCalibration
from policies.service import ServiceSpec
from sla.errors import InvalidInputError, RefusedError, RetryableError, SettingsError, TidegateError

log = logging.getLogger("tidegate.agent")
Answer = tuple[Message, Tensors] | None
_WILDCARDS = ("0.0.0.0", "::", "")
_ENROLL_RETRY_S = 2.0


class Agent:
    """One agent. `run` on any event loop, with no signal handlers; `stop` from the same loop."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cleanup = contextlib.AsyncExitStack()
        self._reported_cache: tuple[BlobHash, ...] | None = None
        self._reported_calibration: DeviceCalibration | None = None
        self._addresses: dict[AgentId, Address] = {}
        self._draining = False
        self._throttled = 1.0
        """Times as long as an emulated device's runs should take."""
        self._memory = Memory() if settings.device.remember else None
        self.agent_id = AgentId("")
        """The controller's name for this agent; empty until it is enrolled."""
        self.ready = asyncio.Event()
        """Set when the peer door and the ingress are open."""

    async def run(self) -> None:
        """Join, serve, and return after `stop`.

        Raises RefusedError or InvalidInputError if the controller does not take this device, SettingsError if a port cannot be
        used. A controller that is away is waited for.
        """
        try:
            async with self._cleanup:
                await self._start_or_stop()
                await self._stopping.wait()
        finally:
            self._stopped.set()
            log.info("agent %s ended", self.agent_id or "(never enrolled)")

    async def stop(self, grace_s: float | None = None) -> None:
        """Take nothing new, finish what runs (for at most `grace_s`), end. Returns when `run` has, which must have been called."""
        if not self._draining:
            self._draining = True
            await self._drain(self._settings.drain_grace_s if grace_s is None else grace_s)
        self._stopping.set()
        await self._stopped.wait()

    # What the ingress serves

    @property
    def is_ready(self) -> bool:
        """See `InferenceService`."""
        return self.ready.is_set() and not self._draining

    def models(self) -> Mapping[ServiceId, ServiceSpec]:
        """See `InferenceService`."""
        return {route.spec.id: route.spec for route in self._routes.all()}

    async def infer(
        self,
        service_id: ServiceId,
        tensors: Mapping[str, np.ndarray],
        deadline_ms: float,
        *,
        request_id: str | None = None,
    ) -> Result:
        """See `Driver.infer`."""
        return await self._driver.infer(service_id, tensors, deadline_ms, request_id=request_id)

    # Starting

    async def _start_or_stop(self) -> None:
        """Start, unless it is stopped before that is done. Raises what starting raises."""
        starting = asyncio.create_task(self._start())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
        finally:
            starting.cancel()
            stopping.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)

    async def _start(self) -> None:
        settings = self._settings
        settings.directory.mkdir(parents=True, exist_ok=True)
        identity = Identity(settings.directory / "identity")
        await self._enroll(identity)
        self._build(identity)
        await self._open_doors(identity)
        self._spawn(self._restore(), "restore")
        self._spawn(self._control.run(), "control")
        self._spawn(self._calibrator.run(), "calibration")
        self.ready.set()
        log.info(
            "agent %s is up: platform %s%s, peers at port %d, ingress at port %d", self.agent_id, settings.device.platform.name,
            " (emulated)" if settings.device.emulate else "", self._facts.peer_port, self._facts.ingress_port,
        )  # fmt: skip

    async def _enroll(self, identity: Identity) -> None:
        """A certificate for this device, for which it waits as long as the controller is away."""
        join = self._settings.join
        while identity.agent_id is None:
            if not join.token or not join.ca_fingerprint:
                raise SettingsError(
                    "This device is not enrolled yet: give it --token and --ca-fingerprint of the controller."
                )
            try:
                await enroll(
                    join.host, join.port, join.token, join.ca_fingerprint, identity, await self._device_facts(0, 0)
                )
                log.info("enrolled as %s", identity.agent_id)
            except RetryableError as error:
                log.info("enrollment waits: %s", error)
                await asyncio.sleep(_ENROLL_RETRY_S)
        if join.ca_fingerprint not in (None, identity.ca_fingerprint):
            raise SettingsError(
                f"{self._settings.directory} holds the identity of another cluster; choose another --dir to join this one."
            )
        self.agent_id = identity.agent_id

    def _build(self, identity: Identity) -> None:
        """All parts of the agent, none of them running yet."""
        settings, device = self._settings, self._settings.device
        self._identity = identity
        self._ledger = Ledger()
        self._queue = AcceleratorQueue(max_depth=settings.queue_depth)
        self._routes = RouteTable(settings.directory / "routes")
        self._blobs = BlobCache(settings.directory / "blobs", max_bytes=settings.cache_max_bytes, pinned=self._pinned)
        self._engine = Engine(
            blobs=self._blobs, open_backend=self._open_backend, queue=self._queue, ledger=self._ledger,
            budget_bytes=device.budget_bytes or default_budget_bytes(device.platform, device.emulate, _memory_bytes()),
        )  # fmt: skip
        self._cleanup.callback(self._engine.close)
        self._profiler = Profiler(
            blobs=self._blobs, engine=self._engine, queue=self._queue, open_backend=self._open_for_timing, threads=device.threads
        )  # fmt: skip
        context = identity.client_context()
        self._peers = PeerPool(self.agent_id, lambda: context, emulated=device.emulate, settings=settings.peers)
        self._cleanup.push_async_callback(self._peers.close)
        self._chain = ChainRunner(agent_id=self.agent_id, engine=self._engine, peers=self._peers)
        self._driver = Driver(
            routes=self._routes, chain=self._chain, ledger=self._ledger, asset_path=self._blobs.path,
            is_broken=self._peers.is_broken, settings=settings.driver,
        )  # fmt: skip
        self._cleanup.callback(self._driver.close)
        self._probe = DeviceProbe(
            emulated=device.emulate,
            busy_share=self._queue.busy_share,
            threads=device.threads,
            free_budget_bytes=lambda: self._engine.free_bytes,
        )
        join = settings.join
        self._bulk = ControllerBlobs(join.host, join.port, context)
        self._cleanup.push_async_callback(self._bulk.close)
        self._control = ControlLink(
            host=join.host,
            port=join.port,
            identity=identity,
            handler=self._on_control,
            hello=self._hello,
            report=self._report,
        )
        self._cleanup.push_async_callback(self._cancel_tasks)

    async def _open_doors(self, identity: Identity) -> None:
        doors = self._settings.doors
        tls = identity.server_context() if doors.ingress_tls else None
        ingress = IngressServer(create_app(self, self._settings.ingress), doors.ingress_host, doors.ingress_port, tls)
        self._cleanup.push_async_callback(ingress.close)
        server = await serve(
            self._on_peer, doors.host, doors.peer_port, identity.server_context(), on_connect=self._peers.adopt
        )
        self._cleanup.push_async_callback(_close_server, server)
        self._facts = await self._device_facts(server.port, ingress.port)
        self._calibrator = Calibrator(
            device_type=self._facts.device_type, file=self._settings.directory / "calibration.json", queue=self._queue,
            open_backend=self._open_workload, settings=self._settings.calibration, threads=self._settings.device.threads,
        )  # fmt: skip
        for route in self._routes.all():
            self._addresses |= route.addresses
        self._peers.watch(self._addresses)
        await ingress.start()

    async def _device_facts(self, peer_port: int, ingress_port: int) -> DeviceFacts:
        device, doors = self._settings.device, self._settings.doors
        return await asyncio.to_thread(
            device_facts, device.platform, emulate=device.emulate, zone=device.zone, is_cloud=device.is_cloud, name=device.name,
            claimed_host=doors.advertise_host or self._dialable_host(), peer_port=peer_port, ingress_port=ingress_port,
            budget_bytes=device.budget_bytes, threads=device.threads,
        )  # fmt: skip

    def _dialable_host(self) -> str:
        """The address of the peer door; for a wildcard, that of the network card that leads to the controller."""
        host, join = self._settings.doors.host, self._settings.join
        if host not in _WILDCARDS:
            return host
        try:
            family, kind, _, _, address = socket.getaddrinfo(join.host, join.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing; asks the routing table
                return str(probe.getsockname()[0])
        except OSError:
            return ""

    def _open_backend(self, path: Path, file: ShardFile) -> InferenceBackend:
        return self._open(path, file.inputs, file.outputs, memory=self._memory)

    def _open_for_timing(self, path: Path, file: ShardFile) -> InferenceBackend:
        """What was computed is computed again."""
        return self._open(path, file.inputs, file.outputs)

    def _open_workload(self, path: Path) -> InferenceBackend:
        return self._open(path, ("x",), ("y",))

    def _open(
        self, path: Path, inputs: Sequence[str], outputs: Sequence[str], *, memory: Memory | None = None
    ) -> InferenceBackend:
        device = self._settings.device
        return open_backend(
            device.platform, path, emulate=device.emulate, budget_bytes=device.budget_bytes, input_names=inputs,
            output_names=outputs, threads=device.threads, memory=memory, throttle=lambda: self._throttled,
        )  # fmt: skip

    def _pinned(self) -> frozenset[BlobHash]:
        return pinned_blobs(self._routes.all(), self.agent_id) | self._engine.loaded()

    async def _restore(self) -> None:
        """Load again what the last life served, so that peers need not wait for the controller's orders; it is in the cache."""
        for route in self._routes.all():
            files, assets = files_for(route, self.agent_id), tuple(route.spec.assets.values())
            try:
                message = Prepare(service_id=route.spec.id, epoch=route.plan.epoch, files=files, assets=assets)
                await self._engine.prepare(message, self._bulk)
                log.info("serving %s again under epoch %d with %d shards", route.spec.id, route.plan.epoch, len(files))
            except TidegateError as error:
                log.warning("%s could not be restored: %s", route.spec.id, error)

    # Messages

    async def _on_control(self, connection: Connection, message: Message, tensors: Tensors) -> Answer:
        match message:
            case Prepare():
                log.info(
                    "preparing %d shards of %s for epoch %d", len(message.files), message.service_id, message.epoch
                )
                return await self._engine.prepare(message, self._bulk), {}
            case Activate(route=route):
                self._activate(route)
            case Release(service_id=service_id, below_epoch=below_epoch, abandoned=abandoned):
                gone = self._engine.release(service_id, below_epoch, abandoned)
                self._routes.drop(service_id, below_epoch)
                log.info("released %d shards of %s below epoch %d", len(gone), service_id, below_epoch)
            case ProfileBlocks(files=files):
                log.info("profiling %d blocks of %s", len(files), files[0].model if files else "nothing")
                return await self._profiler.profile(message, self._bulk), {}
            case Tune():
                if self._routes.tune(message.service_id, message.epoch, message.version, message.knobs):
                    log.info("knobs of %s: %s", message.service_id, message.knobs)
            case ShapeLink():
                self._peers.shape(message)
                log.info("link to %s is shaped: %s", message.peer or "all", message)
            case ThrottleDevice(factor=factor):
                self._throttle(factor)
            case Leave(grace_s=grace_s):
                log.info("the controller asks this agent to leave")
                self._leaving = asyncio.create_task(self._leave(min(max(grace_s, 0.0), 3600.0)))
            case _:
                raise InvalidInputError(f"An agent does not take {type(message).__name__} from its controller.")
        return Done(), {}

    async def _on_peer(self, connection: Connection, message: Message, tensors: Tensors) -> Answer:
        match message:
            case RunChain():
                return await self._chain.serve(message, tensors)
            case Probe():
                return Done(), {}
        raise InvalidInputError(f"The peer door does not take {type(message).__name__}.")

    def _throttle(self, factor: float) -> None:
        """Raises RefusedError if this device is real."""
        if not self._settings.device.emulate:
            raise RefusedError("Only emulated devices can be throttled; this device is real.")
        if not 1.0 <= factor <= MAX_THROTTLE:
            raise InvalidInputError(
                "A device can be throttled by a factor.", found=f"{factor:g}", accepted=f"1 to {MAX_THROTTLE:g}"
            )
        self._throttled = factor
        log.info("runs take %g times as long from now on", factor)

    def _activate(self, route: Route) -> None:
        self._routes.activate(route)
        known = {agent for each in self._routes.all() for agent in each.addresses}
        self._addresses = {a: at for a, at in (self._addresses | route.addresses).items() if a in known}
        self._peers.watch(self._addresses)
        log.info("serving %s by epoch %d", route.spec.id, route.plan.epoch)

    # Telemetry

    def _hello(self) -> Hello:
        self._reported_cache = self._blobs.held()
        self._reported_calibration = self._calibrator.calibration
        facts = msgspec.structs.replace(self._facts, calibration=self._reported_calibration)
        return Hello(protocol=PROTOCOL_VERSION, facts=facts, epochs=self._routes.epochs(), cached=self._reported_cache)

    def _report(self, sequence: int) -> Report:
        readings = self._probe.read()
        services, faults = self._ledger.take()
        cached = self._blobs.held()
        has_changed = cached != self._reported_cache
        self._reported_cache = cached
        calibration = self._calibrator.calibration
        is_new = calibration != self._reported_calibration
        self._reported_calibration = calibration
        return Report(
            sequence=sequence, cpu_saturation=readings.cpu_saturation, foreign_saturation=readings.foreign_saturation, memory_free_bytes=readings.memory_free_bytes,
            queue_depth=self._engine.queue_depth, loaded_bytes=self._engine.loaded_bytes, npu_load=readings.npu_load,
            temperature_c=readings.temperature_c, peers=self._peers.reports(), services=services,
            cached=cached if has_changed else None, faults=faults,
            memory_bandwidth_use=self._engine.bandwidth.use(calibration.copy_bytes_per_s if calibration else None),
            calibration=calibration if is_new else None,
        )  # fmt: skip

    # Ending

    async def _leave(self, grace_s: float) -> None:
        await asyncio.sleep(0.05)  # the answer to the order goes first
        await self.stop(grace_s)

    async def _drain(self, grace_s: float) -> None:
        if not self.ready.is_set():
            return
        log.info("draining for at most %.0f s", grace_s)
        self._driver.drain()
        self._chain.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._driver.in_flight or self._chain.in_flight:  # noqa: ASYNC110 (two counters, once in a life)
                    await asyncio.sleep(0.02)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended by itself", task.get_name(), exc_info=error)

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent that a command line describes; the exit status. Errors are one sentence on stderr."""
    return run_until_it_leaves(lambda: parse_arguments(argv))


def run_until_it_leaves(read_settings: Callable[[], AgentSettings]) -> int:
    """Run an agent until it leaves; the exit status. Errors are one sentence on stderr."""
    try:
        settings = read_settings()
        if not settings.embedded:
            _log_to_stderr()
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_main(settings))
    except KeyboardInterrupt:
        return 130
    except TidegateError as error:
        print(f"tidegate agent: {error}", file=sys.stderr)
        return 2
    return 0


async def _main(settings: AgentSettings) -> None:
    agent = Agent(settings)
    stopping: set[asyncio.Task[None]] = set()
    if not settings.embedded:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: stopping.add(asyncio.create_task(agent.stop())))
    await agent.run()


async def _close_server(server: WireServer) -> None:
    server.close()
    await server.wait_closed()


def _log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: half the time per hop; asyncio's own loop elsewhere."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]


def _memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)
