"""The demo fleet and service, as values that tests change with `msgspec.structs.replace`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from policies.fleet import AgentView, Fleet, LinkView, link_key
from policies.ids import AgentId, BlobHash, ModelName, ServiceId, StageName
from policies.plan import Plan
from policies.platforms import platform
from policies.service import BlockProfile, ModelProfile, OnnxStage, PythonStage, ServiceSpec
from policies.snapshot import ServiceView, Snapshot
from sla.contract import contract_from

READER = ServiceId("document-reader")
SnapshotMaker = Callable[..., Snapshot]


DEVICES = {"rk3588": (3.0, 512), "ascend310p": (2.0, 1024), "imx93": (12.0, 96), "ray": (1.0, 4096), "x86": (1.0, 2048)}
"""Slowdown and memory in MB, fixed here so that tests do not follow the platform table."""


def make_agent(name: str, kind: str, **changes: object) -> AgentView:
    """An emulated device of a platform, as it is after enrollment."""
    p = platform(kind)
    slowdown, memory_mb = DEVICES[kind]
    values: dict[str, object] = {
        "id": AgentId(name), "platform": kind, "evidence": "emulated", "is_cloud": p.is_cloud, "power_w": p.power_w,
        "slowdown": slowdown, "memory_budget_bytes": memory_mb << 20, "age_ms": 200.0,
    }  # fmt: skip
    return AgentView(**{**values, **changes})  # type: ignore[arg-type]


def make_links(agents: Mapping[AgentId, AgentView], **cloud: float) -> dict[str, LinkView]:
    """LAN between devices (1 ms, 100 MB/s); the way to the cloud is slower (8 ms, 12 MB/s) unless `cloud` says otherwise."""
    far = {"rtt_ms": 8.0, "jitter_ms": 1.0, "bandwidth_bytes_per_s": 12e6, "age_ms": 300.0, **cloud}
    near = {"rtt_ms": 1.0, "jitter_ms": 0.1, "bandwidth_bytes_per_s": 100e6, "age_ms": 300.0}
    return {
        link_key(a, b): LinkView(src=a, dst=b, **(far if agents[a].is_cloud != agents[b].is_cloud else near))
        for a in agents for b in agents if a != b
    }  # fmt: skip


def make_model(
    name: str, per_item_ms: float, size: int, cut_bytes: int, input_bytes: int, *, blocks: int = 8, accuracy: float = 1.0,
    axis: str | None = None, fixed_ms: float = 0.0, activation_bytes: int = 0,
) -> ModelProfile:  # fmt: skip
    """A model whose blocks cost alike."""
    return ModelProfile(
        name=ModelName(name), sha256=BlobHash("0" * 64), input_bytes_per_item=input_bytes, split_axis=axis,  # type: ignore[arg-type]
        accuracy=accuracy, activation_bytes=activation_bytes,
        blocks=tuple(
            BlockProfile(name=f"b{i}", fixed_ms=fixed_ms / blocks, per_item_ms=per_item_ms / blocks,
                         param_bytes=size // blocks, cut_bytes_per_item=cut_bytes)
            for i in range(blocks)
        ),
    )  # fmt: skip


MODELS = {
    m.name: m
    for m in (
        make_model("orientation", 7.0, 6_783_084, 300_000, 602_112, blocks=4),
        make_model("det-tiny", 36.0, 1_829_618, 600_000, 2_027_520, accuracy=0.8),
        make_model("det-base", 47.0, 4_745_517, 600_000, 2_027_520, accuracy=0.95),
        make_model("det-small", 80.0, 9_929_594, 600_000, 2_027_520, activation_bytes=20_000_000),
        make_model("rec-tiny", 48 / 7, 1_269_595, 120_000, 184_320, accuracy=0.8, axis="patch"),
        make_model("rec-base", 236 / 7, 10_857_958, 150_000, 184_320, accuracy=0.95, axis="patch"),
        make_model("rec-small", 242 / 7, 21_234_383, 150_000, 184_320, axis="patch", activation_bytes=2_000_000),
        make_model("minilm-int8", 46 / 8, 22_928_619, 25_000, 400, blocks=6, axis="token"),
    )
}


def onnx_stage(name: str, *variants: str, items: float = 1.0, axis: str | None = None, raw: bool = False) -> OnnxStage:
    return OnnxStage(
        name=StageName(name), variants=tuple(ModelName(v) for v in variants), inputs={"x": f"{name}_in"},
        outputs={"y": f"{name}_out"}, items=items, axis=axis, raw=raw,  # type: ignore[arg-type]
    )  # fmt: skip


SPEC = ServiceSpec(
    id=READER, inputs=(), outputs=(),
    stages=(
        PythonStage(name=StageName("prepare"), step="document.prepare", typical_ms=15.0),
        onnx_stage("orientation", "orientation"),
        PythonStage(name=StageName("upright"), step="document.upright", typical_ms=5.0),
        onnx_stage("detect", "det-tiny", "det-base", "det-small", raw=True),
        PythonStage(name=StageName("crops"), step="document.crops", typical_ms=8.0),
        onnx_stage("recognise", "rec-tiny", "rec-base", "rec-small", items=7.0, axis="patch", raw=True),
        PythonStage(name=StageName("decode"), step="document.decode", typical_ms=5.0),
        onnx_stage("embed", "minilm-int8", items=8.0, axis="token"),
        PythonStage(name=StageName("answer"), step="document.answer", typical_ms=1.0),
    ),
)  # fmt: skip

CONTRACT = {
    "service_id": "document-reader", "latency_p99_ms": 4000, "throughput_rps": 0.8, "availability_sla": "99%",
    "accuracy_floor": 0.9, "privacy": "features-may-leave",
}  # fmt: skip


def make_snapshot(
    *,
    agents: tuple[AgentView, ...] | None = None,
    contract: Mapping[str, object] | None = None,
    cloud: Mapping[str, float] | None = None,
    running: Plan | None = None,
    models: Mapping[ModelName, ModelProfile] | None = None,
    spec: ServiceSpec = SPEC,
    now_ms: float = 0.0,
    **view: object,
) -> Snapshot:
    """The demo as a snapshot; `contract` and `cloud` (links) are changes, `view` are fields of ServiceView."""
    if agents is None:
        agents = (
            make_agent("rk-1", "rk3588"), make_agent("rk-2", "rk3588"), make_agent("ascend", "ascend310p"),
            make_agent("imx", "imx93"), make_agent("cloud", "ray"),
        )  # fmt: skip
    by_id = {agent.id: agent for agent in agents}
    service = ServiceView(
        spec=spec, contract=contract_from({**CONTRACT, **(contract or {})}), running=running, **view,  # type: ignore[arg-type]
    )  # fmt: skip
    fleet = Fleet(agents=by_id, links=make_links(by_id, **(cloud or {})))
    return Snapshot(now_ms=now_ms, fleet=fleet, models=dict(models or MODELS), services={READER: service})


@pytest.fixture(scope="session")
def demo() -> SnapshotMaker:
    return make_snapshot


@pytest.fixture
def agent() -> Callable[..., AgentView]:
    return make_agent


@pytest.fixture
def model() -> Callable[..., ModelProfile]:
    return make_model


@pytest.fixture
def stage() -> Callable[..., OnnxStage]:
    return onnx_stage
