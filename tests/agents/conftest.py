"""Tiny real models, real certificates, and whole devices in this process that talk over real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from agents.backends import InferenceBackend
from agents.backends.onnx import OnnxBackend
from agents.blobs import BlobCache
from agents.chain import ChainRunner
from agents.driver import Driver, DriverSettings
from agents.engine import Engine
from agents.frames import encode_tensors
from agents.identity import Identity
from agents.ledger import Ledger
from agents.messages import Address, Done, Message, Prepare, Probe, Route, RunChain, ShardFile, file_key
from agents.peers import PeerPool, PeerSettings
from agents.queue import AcceleratorQueue
from agents.routes import RouteTable, files_for
from agents.wire import Connection, WireServer, serve
from controller.pki import CertificateAuthority
from policies.ids import AgentId, BlobHash, ModelName, ServiceId, StageName
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.service import OnnxStage, ServiceSpec, TensorSpec
from sla.errors import NotFoundError

MODEL = ModelName("tiny")
STAGE = StageName("model")
SERVICE = ServiceId("tiny-service")
WIDTH = 4


def sha256(data: bytes) -> BlobHash:
    return BlobHash(hashlib.sha256(data).hexdigest())


@dataclass
class MemorySource:
    """A `BlobSource` over a dictionary; it can be told to fail, and counts what it was asked."""

    blobs: dict[BlobHash, bytes] = field(default_factory=dict)
    fail_next: list[Exception] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)

    def add(self, data: bytes) -> BlobHash:
        self.blobs[sha256(data)] = data
        return sha256(data)

    async def fetch(self, sha256: BlobHash, offset: int, length: int) -> tuple[bytes, int]:
        self.offsets.append(offset)
        if self.fail_next:
            raise self.fail_next.pop(0)
        if sha256 not in self.blobs:
            raise NotFoundError(f"There is no {sha256}.")
        data = self.blobs[sha256]
        return data[offset : offset + length], len(data)


@dataclass(frozen=True)
class TinyModel:
    """y = relu(x @ a) @ b + x @ c, whole and cut in two; x crosses the cut beside the hidden tensor."""

    source: MemorySource
    files: dict[str, ShardFile]

    def file(self, start: int, stop: int) -> ShardFile:
        return self.files[file_key(MODEL, Span(start, stop))]

    def expected(self, x: np.ndarray) -> np.ndarray:
        a, b, c = _weights()
        return np.asarray(np.maximum(x @ a, 0) @ b + x @ c, dtype=np.float32)


def _weights() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((WIDTH, 8), (8, 3), (WIDTH, 3)))
    return a, b, c


def onnx_bytes(nodes: list[onnx.NodeProto], inputs: dict[str, int], outputs: dict[str, int]) -> bytes:
    """A model of float tensors [N, width]; the weights a, b and c that its nodes name are put in."""
    weights = dict(zip("abc", _weights(), strict=True))
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name, width in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name, width in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in weights.items() if name in used],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())


_FIRST = [helper.make_node("MatMul", ["x", "a"], ["h0"]), helper.make_node("Relu", ["h0"], ["h"])]
_SECOND = [
    helper.make_node("MatMul", ["h", "b"], ["y0"]),
    helper.make_node("MatMul", ["x", "c"], ["y1"]),
    helper.make_node("Add", ["y0", "y1"], ["y"]),
]


@pytest.fixture(scope="session")
def tiny() -> TinyModel:
    source = MemorySource()
    a, _, _ = _weights()
    x = np.linspace(-1, 1, 3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)
    h = np.maximum(x @ a, 0)
    y = TinyModel(source, {}).expected(x)
    pieces: list[tuple[Span, bytes, dict[str, np.ndarray], dict[str, np.ndarray]]] = [
        (Span(0, 2), onnx_bytes(_FIRST + _SECOND, {"x": WIDTH}, {"y": 3}), {"x": x}, {"y": y}),
        (Span(0, 1), onnx_bytes(_FIRST, {"x": WIDTH}, {"h": 8}), {"x": x}, {"h": h}),
        (Span(1, 2), onnx_bytes(_SECOND, {"h": 8, "x": WIDTH}, {"y": 3}), {"h": h, "x": x}, {"y": y}),
    ]
    files = {}
    for blocks, data, inputs, outputs in pieces:
        golden = {f"in:{k}": v for k, v in inputs.items()} | {f"out:{k}": v for k, v in outputs.items()}
        files[file_key(MODEL, blocks)] = ShardFile(
            model=MODEL, blocks=blocks, sha256=source.add(data), size_bytes=len(data), inputs=tuple(inputs), outputs=tuple(outputs),
            golden_sha256=source.add(encode_tensors(golden)), memory_bytes=1 << 20,
        )  # fmt: skip
    return TinyModel(source, files)


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


SPEC = ServiceSpec(
    id=SERVICE,
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, WIDTH)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 3)),),
    stages=(OnnxStage(name=STAGE, variants=(MODEL,), inputs={"x": "x"}, outputs={"y": "y"}, axis="patch"),),
)


@dataclass
class Device:
    """An agent without its controller: engine, peers, driver and a peer door on a real socket."""

    id: AgentId
    server: WireServer
    engine: Engine
    peers: PeerPool
    chain: ChainRunner
    routes: RouteTable
    driver: Driver
    ledger: Ledger
    queue: AcceleratorQueue

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.server.port)


class Fleet:
    """Devices in this process, and the routes over them."""

    def __init__(self, tiny: TinyModel, ca: CertificateAuthority, directory: Path) -> None:
        self.tiny = tiny
        self.devices: dict[AgentId, Device] = {}
        self._ca = ca
        self._directory = directory
        self._stack = AsyncExitStack()

    async def start(
        self,
        name: str,
        *,
        emulated: bool = False,
        open_backend: Callable[[Path], InferenceBackend] = OnnxBackend,
        settings: DriverSettings | None = None,
    ) -> Device:
        identity = Identity(self._directory / name)
        agent = AgentId(name)
        identity.save_certificate(self._ca.sign_agent(identity.csr_pem(), agent, now_s=time.time()), self._ca.ca_pem)
        context: ssl.SSLContext = identity.client_context()
        ledger, queue = Ledger(), AcceleratorQueue()
        blobs = BlobCache(self._directory / name / "blobs", max_bytes=1 << 24)
        engine = Engine(
            blobs=blobs, open_backend=lambda path, file: open_backend(path), queue=queue, ledger=ledger,
            budget_bytes=8 << 20,
        )  # fmt: skip
        peers = PeerPool(agent, lambda: context, emulated=emulated, settings=PeerSettings(probe_every_s=0.05), seed=1)
        chain = ChainRunner(agent_id=agent, engine=engine, peers=peers)
        routes = RouteTable(self._directory / name / "routes")
        driver = Driver(
            routes=routes,
            chain=chain,
            ledger=ledger,
            asset_path=blobs.path,
            is_broken=peers.is_broken,
            settings=settings,
        )

        async def on_peer(
            connection: Connection, message: Message, tensors: Mapping[str, np.ndarray]
        ) -> tuple[Message, Mapping[str, np.ndarray]]:
            if isinstance(message, RunChain):
                return await chain.serve(message, tensors)
            assert isinstance(message, Probe)
            return Done(), {}

        server = await serve(on_peer, "127.0.0.1", 0, identity.server_context(), on_connect=peers.adopt)
        device = Device(agent, server, engine, peers, chain, routes, driver, ledger, queue)
        self.devices[agent] = device
        self._stack.callback(driver.close)
        self._stack.callback(engine.close)
        self._stack.push_async_callback(self.kill, device)
        return device

    async def kill(self, device: Device) -> None:
        """Close its sockets, as a dying process would."""
        await device.peers.close()
        device.server.close()
        await device.server.wait_closed()

    def route(
        self,
        *lanes: list[tuple[str, int, int]],
        shares: list[tuple[int, int]] | None = None,
        fallback: tuple[str, ...] = (),
        epoch: int = 1,
    ) -> Route:
        """Each lane is a chain of (agent, first block, end block)."""
        spans = [Span(*share) for share in shares] if shares else [WHOLE_AXIS]
        made = tuple(
            make_lane(STAGE, MODEL, "patch", span, tuple((AgentId(a), Span(i, j)) for a, i, j in lane))
            for lane, span in zip(lanes, spans, strict=True)
        )
        stage = StagePlan(
            stage=STAGE, model=MODEL, axis="patch", lanes=made, fallback=tuple(AgentId(name) for name in fallback)
        )
        plan = Plan(service_id=SERVICE, epoch=epoch, stages=(stage,))
        addresses = {agent: device.address for agent, device in self.devices.items()}
        return Route(spec=SPEC, plan=plan, addresses=addresses, files=self.tiny.files)

    async def activate(self, route: Route) -> None:
        """Prepare everywhere, then switch everywhere."""
        for agent, device in self.devices.items():
            files = files_for(route, agent)
            await device.engine.prepare(
                Prepare(service_id=SERVICE, epoch=route.plan.epoch, files=files), self.tiny.source
            )
        for device in self.devices.values():
            device.routes.activate(route)

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def fleet(tiny: TinyModel, ca: CertificateAuthority, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tiny, ca, tmp_path)
    yield fleet
    await fleet.close()


@dataclass
class FakeClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def items() -> Callable[[int], np.ndarray]:
    """`items(n)`: n different rows that the tiny model takes."""
    return lambda n: np.random.default_rng(n).standard_normal((n, WIDTH)).astype(np.float32)


async def eventually(condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
    """Returns as soon as the condition holds; fails loudly if it never does."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (any condition, no event)
            await asyncio.sleep(0.01)


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    return eventually


@pytest.fixture
def memory_source() -> type[MemorySource]:
    """The class: `memory_source()` makes an empty one."""
    return MemorySource


class GatedBackend(OnnxBackend):
    """Computes only while its gate is open; otherwise it hangs, as a stopped device does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate, self.entered, self.runs = threading.Event(), threading.Event(), 0
        self.gate.set()
        self.fail_with: Exception | None = None

    def run(self, inputs, outputs):
        self.runs += 1
        self.entered.set()
        self.gate.wait(30)
        if self.fail_with is not None:
            raise self.fail_with
        return super().run(inputs, outputs)


class Gates(list):
    """Opens gated backends and remembers them."""

    def __call__(self, path: Path) -> GatedBackend:
        backend = GatedBackend(path)
        self.append(backend)
        return backend


@pytest.fixture
def gates():
    gates = Gates()
    yield gates
    for backend in gates:
        backend.gate.set()
