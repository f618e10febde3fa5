"""A real Valkey server for all tests of this package with a fresh namespace for each test; time that is advanced; small fakes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import pytest_asyncio

from agents.messages import DeviceFacts, Done, Message, Prepare, Prepared, ShardReady
from controller.core import Controller
from controller.embedded_store import EmbeddedStore
from controller.settings import CloudSettings, ControllerSettings, DoorSettings
from controller.store import Store, open_store
from policies.ids import AgentId, BlobHash, ModelName, ServiceId, StageName
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.service import BlockProfile, ModelProfile, OnnxStage, ServiceSpec, TensorSpec
from sla.errors import AgentLostError, TidegateError

_numbers = itertools.count(1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def valkey_socket(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    """The socket of a server that runs for the whole session."""
    async with EmbeddedStore(tmp_path_factory.mktemp("valkey")) as server:
        yield server.socket_path


@pytest_asyncio.fixture
async def valkey_store(valkey_socket: Path) -> AsyncIterator[Store]:
    """A store with a namespace of its own."""
    store = await open_store(valkey_socket, f"test-{next(_numbers)}")
    yield store
    await store.close()


class FakeClock:
    """Time that tests advance."""

    def __init__(self, now_ms: float = 1_000_000.0, wall_s: float = 1_800_000_000.0) -> None:
        self._now_ms = now_ms
        self._wall_s = wall_s

    def now_ms(self) -> float:
        return self._now_ms

    def wall_s(self) -> float:
        return self._wall_s

    def advance(self, ms: float) -> None:
        """Both clocks go on."""
        self._now_ms += ms
        self._wall_s += ms / 1000


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still until it is advanced."""
    return FakeClock()


Answer = Message | TidegateError
Script = Callable[[Message], Answer]


class FakeConnection:
    """A control connection whose other end is a function; what it was asked is kept in `calls`."""

    def __init__(self, script: Script, peer_host: str = "127.0.0.1") -> None:
        self.script = script
        self.peer_host = peer_host
        self.closed = False
        self.calls: list[Message] = []
        self._callbacks: list[Callable[[], object]] = []

    async def call(
        self, message: Message, tensors: object = None, *, timeout_s: float
    ) -> tuple[Message, dict[str, Any]]:
        if self.closed:
            raise AgentLostError("the connection is closed")
        self.calls.append(message)
        answer = self.script(message)
        if isinstance(answer, TidegateError):
            raise answer
        return answer, {}

    def asked(self, kind: type[Message]) -> list[Message]:
        """The messages of one kind that came in."""
        return [message for message in self.calls if isinstance(message, kind)]

    def on_close(self, callback: Callable[[], object]) -> None:
        self._callbacks.append(callback)

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            for callback in self._callbacks:
                callback()

    async def close(self) -> None:
        self.abort()


def good_agent(message: Message) -> Answer:
    """Does whatever it is asked, and proves it."""
    if isinstance(message, Prepare):
        ready = (
            ShardReady(sha256=file.sha256, provider="CPU", golden_error=0.0, load_ms=1.0, fetched_bytes=file.size_bytes)
            for file in message.files
        )
        return Prepared(shards=tuple(ready))
    return Done()


MakeConnection = Callable[..., FakeConnection]


@pytest.fixture
def make_connection() -> MakeConnection:
    """A control connection; by default the agent behind it is a good one."""
    return lambda script=good_agent, peer_host="127.0.0.1": FakeConnection(script, peer_host)


@pytest.fixture
def good_script() -> Script:
    """What a good agent answers; tests wrap it to make trouble."""
    return good_agent


MakeFacts = Callable[..., DeviceFacts]


@pytest.fixture
def make_facts() -> MakeFacts:
    """Facts of an emulated device; keywords replace single ones."""

    def make(**changed: Any) -> DeviceFacts:
        facts = DeviceFacts(
            platform="rk3588", evidence="emulated", hostname="board", fingerprint="hardware-1",
            memory_budget_bytes=512 << 20, slowdown=3.0, peer_port=0, ingress_port=8001,
        )  # fmt: skip
        return msgspec.structs.replace(facts, **changed)

    return make


SPEC = ServiceSpec(
    id=ServiceId("reader"),
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 4)),),
    stages=(
        OnnxStage(
            name=StageName("detect"),
            variants=(ModelName("det"),),
            inputs={"x": "x"},
            outputs={"y": "y"},
            axis="patch",
            items=4.0,
        ),
    ),
)


def _block(number: int) -> BlockProfile:
    return BlockProfile(name=f"b{number}", fixed_ms=1.0, per_item_ms=2.0, param_bytes=1 << 20, cut_bytes_per_item=4096)


@pytest.fixture
def spec() -> ServiceSpec:
    """A service of one stage whose items are independent."""
    return SPEC


@pytest.fixture
def models() -> dict[ModelName, ModelProfile]:
    """Its one model of three blocks."""
    det = ModelProfile(
        name=ModelName("det"), sha256=BlobHash("d" * 64), blocks=(_block(0), _block(1), _block(2)), input_bytes_per_item=4096,
        split_axis="patch", activation_bytes=1 << 16,
    )  # fmt: skip
    return {det.name: det}


MakePlan = Callable[..., Plan]


@pytest.fixture
def make_plan() -> MakePlan:
    """A plan of that service: one lane through the named agents, block by block."""

    def make(epoch: int, *agents: str, fallback: tuple[str, ...] = ()) -> Plan:
        bounds = [3 * at // len(agents) for at in range(len(agents) + 1)]
        hops = tuple((AgentId(a), Span(lo, hi)) for a, lo, hi in zip(agents, bounds, bounds[1:], strict=False))
        stage = StagePlan(
            stage=StageName("detect"), model=ModelName("det"), axis="patch",
            lanes=(make_lane(StageName("detect"), ModelName("det"), "patch", WHOLE_AXIS, hops),),
            fallback=tuple(AgentId(a) for a in fallback),
        )  # fmt: skip
        return Plan(service_id=SPEC.id, epoch=epoch, stages=(stage,))

    return make


def sla_document(service: str = "reader", **changed: Any) -> bytes:
    return json.dumps(
        {"service_id": service, "latency_p99_ms": 400, "throughput_rps": 5, "availability_sla": "99.5%"} | changed
    ).encode()


MakeSla = Callable[..., bytes]


@pytest.fixture
def make_sla() -> MakeSla:
    """An SLA document."""
    return sla_document


class _SharedStoreController(Controller):
    """A controller whose store is a namespace of the session's server: everything else is as in production."""

    def __init__(self, settings: ControllerSettings, socket: Path, namespace: str, clock: FakeClock) -> None:
        super().__init__(settings, clock)
        self._socket, self._namespace = socket, namespace

    async def _open_store(self) -> Store:
        return await open_store(self._socket, self._namespace)


MakeController = Callable[..., Controller]


@pytest_asyncio.fixture
async def make_controller(valkey_socket: Path, tmp_path: Path, clock: FakeClock) -> AsyncIterator[MakeController]:
    """Controllers over one store and one directory, stopped at the end; starting them is up to the test."""
    made: list[Controller] = []
    namespace = f"test-{next(_numbers)}"

    def make(**changed: Any) -> Controller:
        settings = ControllerSettings(
            directory=tmp_path / "state",
            cache=tmp_path / "cache",
            door=DoorSettings(agent_port=0),
            cloud=CloudSettings(ray="none"),
        )
        settings.directory.mkdir(exist_ok=True)
        controller = _SharedStoreController(dataclasses.replace(settings, **changed), valkey_socket, namespace, clock)
        made.append(controller)
        return controller

    yield make
    for controller in made:
        if await controller.ready():
            await controller.stop()


@pytest.fixture(scope="session")
def tiny_onnx() -> bytes:
    """A real model: three layers, each row on its own."""
    rng = np.random.default_rng(7)
    weights = [
        onnx.numpy_helper.from_array((rng.standard_normal((8, 8)) / 3).astype(np.float32), f"w{n}") for n in range(3)
    ]
    nodes = [
        onnx.helper.make_node("MatMul", [f"h{n}" if n else "x", f"w{n}"], [f"h{n + 1}" if n < 2 else "y"])
        for n in range(3)
    ]
    shape = ["rows", 8]
    graph = onnx.helper.make_graph(
        nodes, "tiny", [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)], weights,
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    return bytes(model.SerializeToString())
