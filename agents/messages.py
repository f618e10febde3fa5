"""The wire between agents and controller, and between agents: every message, in one place.

Each message is a small struct, encoded as MessagePack with its `type` as a tag; tensors never stand in a message but follow it
as raw buffers (see `agents.wire`). Requests are answered by the message that their docstring names, or by a `Fault`.

Doors:
- *enroll* (TLS, no client certificate yet): GetCa, Enroll
- *control* (mutual TLS, dialled by the agent): Hello, Report from the agent; Prepare, Activate, Tune, Release, ProfileBlocks, ShapeLink, ThrottleDevice, Leave to it
- *bulk* (mutual TLS, dialled by the agent, so that a shard push never delays a report): FetchBlob
- *peer* (mutual TLS, agent to agent): RunChain, Probe
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from policies.fleet import Evidence
from policies.ids import AgentId, BlobHash, ModelName, ServiceId
from policies.plan import Plan, Span
from policies.roofline import DeviceCalibration
from policies.route_times import RouteTimes
from policies.service import ActivationFormat, ServiceSpec

PROTOCOL_VERSION = 1
REPORT_EVERY_MS = 500


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of everything that crosses a wire."""


class Fault(Message, frozen=True, kw_only=True, tag="fault"):
    """The answer to a request that failed; `slug` names a class of `sla.errors`."""

    slug: str
    message: str
    retry_after_s: float = 1.0


class Done(Message, frozen=True, kw_only=True, tag="done"):
    """The answer to a request that has nothing to report."""


# --- enroll ------------------------------------------------------------------------------------------------------------


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a device says of itself; every string is bounded when it is received."""

    platform: str
    evidence: Evidence
    hostname: str
    zone: str = "default"
    arch: str = ""
    os: str = ""
    fingerprint: str = ""
    """Hash of stable hardware ids, to tell cloned disks apart."""
    versions: dict[str, str] = {}
    """Runtime and driver versions, e.g. {"onnxruntime": "1.32.0"}."""
    providers: tuple[str, ...] = ()
    cores: int = 1
    memory_bytes: int = 0
    memory_budget_bytes: int = 0
    """What shards may use."""
    slowdown: float = 1.0
    """Calibrated time of a reference workload, divided by its time on the profiling core."""
    claimed_host: str = ""
    """The address the agent believes peers can reach; the controller keeps the one it saw as well."""
    peer_port: int = 0
    ingress_port: int = 0
    is_cloud: bool = False
    device_type: str = ""
    """The same for devices that run shards alike: platform, processor, backend, provider, threads, versions."""
    calibration: DeviceCalibration | None = None
    """What it was measured to do; None while it was not."""


class GetCa(Message, frozen=True, kw_only=True, tag="get-ca"):
    """-> Ca. The caller checks the fingerprint that came with the join token."""


class Ca(Message, frozen=True, kw_only=True, tag="ca"):
    ca_pem: str


class Enroll(Message, frozen=True, kw_only=True, tag="enroll"):
    """-> Enrolled. Idempotent: the same public key may finish what it began, without spending the token twice."""

    token: str
    csr_pem: str
    facts: DeviceFacts


class Enrolled(Message, frozen=True, kw_only=True, tag="enrolled"):
    agent_id: AgentId
    certificate_pem: str
    ca_pem: str


class Renew(Message, frozen=True, kw_only=True, tag="renew"):
    """Over mutual TLS, before the certificate expires. -> Enrolled."""

    csr_pem: str


# --- control -----------------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message on a control connection. -> Welcome."""

    protocol: int
    facts: DeviceFacts
    epochs: dict[ServiceId, int] = {}
    """The newest plan epoch that the agent holds per service."""
    cached: tuple[BlobHash, ...] = ()


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    agent_id: AgentId
    report_every_ms: int = REPORT_EVERY_MS


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured towards one peer in this interval."""

    peer: AgentId
    rtt_ms: float
    jitter_ms: float
    bandwidth_bytes_per_s: float
    broken: bool = False
    """The connection was lost and could not be made again."""


class ShardReport(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one shard in this interval."""

    stage: str
    blocks: Span
    count: int
    sum_ms: float
    sum_sq_ms: float
    items: int
    provider: str
    """The execution provider that really ran."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one Python stage in this interval."""

    stage: str
    count: int
    sum_ms: float


class ServiceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that came in at this agent's ingress and ended in this interval."""

    service_id: ServiceId
    epoch: int
    ok: int
    failed: int
    fell_back: int
    latency_buckets: dict[int, int]
    """A latency sketch (`sla.sketch`) of the requests that were answered, milliseconds."""
    shards: tuple[ShardReport, ...] = ()
    """Runs of this service's shards on this agent."""
    steps: tuple[StepReport, ...] = ()
    copies: int = 0
    """Second copies of lanes that the ingress sent to keep a promise."""


class Report(Message, frozen=True, kw_only=True, tag="report"):
    """One-way, every `report_every_ms`."""

    sequence: int
    cpu_saturation: float
    """Busy share of the device, our own shards included."""
    memory_free_bytes: int
    queue_depth: int
    loaded_bytes: int
    foreign_saturation: float = 0.0
    """Share of the time in which work that is not ours keeps our shards from running, [0, 1]."""
    npu_load: tuple[float, ...] = ()
    """Per core, [0, 1]; empty where there is none."""
    temperature_c: float | None = None
    memory_bandwidth_use: float | None = None
    """Bytes that our shards move per second over what the device was measured to copy; estimated, see `agents.bandwidth`."""
    peers: tuple[PeerReport, ...] = ()
    services: tuple[ServiceReport, ...] = ()
    cached: tuple[BlobHash, ...] | None = None
    """Sent when it changed."""
    faults: tuple[str, ...] = ()
    """New faults in words (a probe out of bounds, a provider that fell back)."""
    calibration: DeviceCalibration | None = None
    """Sent when it changed."""


class ShardFile(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a model: a valid ONNX file that holds only its own weights."""

    model: ModelName
    blocks: Span
    sha256: BlobHash
    size_bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    golden_sha256: BlobHash | None = None
    """Sample inputs with the outputs that the whole model gave for them (a frame in `agents.wire` form)."""
    memory_bytes: int = 0
    """What the loaded shard is expected to use."""
    moved_bytes_per_item: int = 0
    """Activations that a run reads and writes for one item, counted from shapes; 0 if they were not."""


class Prepare(Message, frozen=True, kw_only=True, tag="prepare"):
    """Fetch, load, warm up and compare golden outputs. -> Prepared; changes nothing that serves."""

    service_id: ServiceId
    epoch: int
    files: tuple[ShardFile, ...]
    assets: tuple[BlobHash, ...] = ()
    """Files of the service's Python steps, for agents with an ingress."""


class ShardReady(msgspec.Struct, frozen=True, kw_only=True):
    sha256: BlobHash
    provider: str
    golden_error: float
    """Largest absolute difference from the golden outputs, relative to their largest magnitude; 0 when bit-identical."""
    load_ms: float
    fetched_bytes: int


class Prepared(Message, frozen=True, kw_only=True, tag="prepared"):
    shards: tuple[ShardReady, ...]


class ProfileBlocks(Message, frozen=True, kw_only=True, tag="profile-blocks"):
    """Time the blocks of a model one by one, while nothing else runs. -> BlocksProfiled; an OverloadedError means: not now."""

    files: tuple[ShardFile, ...]
    """One per block, in order."""
    sample_sha256: BlobHash
    """The model's inputs for one item (a frame in `agents.wire` form)."""
    items: int = 1
    """With more than one, the sample is also run repeated that often along its first axis."""
    budget_s: float = 5.0
    """Seconds of runs in all; each block runs at least twice."""
    tight: float = 0.03
    """Runs of a block end early when their quickest agree within this share."""


class BlockTiming(msgspec.Struct, frozen=True, kw_only=True):
    one_ms: float
    """A run with one item."""
    many_ms: float | None
    """A run with all items; None if only one was asked for."""
    runs: int
    spread: float


class BlocksProfiled(Message, frozen=True, kw_only=True, tag="blocks-profiled"):
    blocks: tuple[BlockTiming, ...]
    provider: str
    peak_bytes: int
    """Largest growth of the process while one block was loaded and ran."""


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """All that an ingress needs to serve a service without asking anybody."""

    spec: ServiceSpec
    plan: Plan
    addresses: dict[AgentId, Address]
    files: dict[str, ShardFile]
    """Keyed by `file_key`; holds every shard of the plan and the whole model of every fallback."""
    knobs: dict[str, float] = {}
    """Values of the service's knobs by `policies.knobs.knob_key`; what is missing has its default."""
    knobs_version: int = 0
    """Grows with every change of the knobs."""
    times: RouteTimes | None = None
    """What the plan was expected to take; without it an ingress does not hedge."""


def file_key(model: str, blocks: Span) -> str:
    """The key of a shard file in a route."""
    return f"{model}[{blocks.start}:{blocks.stop}]"


class Activate(Message, frozen=True, kw_only=True, tag="activate"):
    """Serve new requests by this route. -> Done; refused if the agent holds a newer epoch of the service."""

    route: Route


class Tune(Message, frozen=True, kw_only=True, tag="tune"):
    """Feed these values to requests that come in from now on. -> Done.

    Nothing happens if the agent holds another epoch of the service (its route brings its own values) or newer values.
    """

    service_id: ServiceId
    epoch: int
    version: int
    knobs: dict[str, float]


class Release(Message, frozen=True, kw_only=True, tag="release"):
    """Unload shards that only epochs of the service below `below_epoch` need. -> Done."""

    service_id: ServiceId
    below_epoch: int
    abandoned: int | None = None
    """An epoch that was prepared and will never serve: nobody needs its shards either."""


class ShapeLink(Message, frozen=True, kw_only=True, tag="shape-link"):
    """Emulated devices only: traffic that this agent sends to `peer` is slowed as given. -> Done.

    None for `peer` shapes all links. It is a fault for a device that is not emulated.
    """

    peer: AgentId | None
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    bandwidth_bytes_per_s: float | None = None


MAX_THROTTLE: Final = 100.0


class ThrottleDevice(Message, frozen=True, kw_only=True, tag="throttle-device"):
    """Emulated devices only: from now on runs take `factor` times as long as the device should. -> Done.

    It is a fault for a device that is not emulated.
    """

    factor: float = 1.0


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """Finish what runs, take nothing new, then exit. -> Done."""

    grace_s: float = 30.0


# --- bulk --------------------------------------------------------------------------------------------------------------


class FetchBlob(Message, frozen=True, kw_only=True, tag="fetch-blob"):
    """-> BlobChunk with one uint8 tensor `data`. Resumable: ask again from the offset that was reached."""

    sha256: BlobHash
    offset: int
    length: int


class BlobChunk(Message, frozen=True, kw_only=True, tag="blob-chunk"):
    total_bytes: int


# --- peer --------------------------------------------------------------------------------------------------------------


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of a chain: run it, then hand what is still needed to the next hop."""

    agent: AgentId
    address: Address
    stage: str
    blocks: Span
    sha256: BlobHash
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    activations: ActivationFormat = "fp32"
    """How it sends on what the next hops need."""


class RunChain(Message, frozen=True, kw_only=True, tag="run-chain"):
    """Run `hops[0]` here and send the rest on. -> ChainDone with the last hop's outputs.

    Tensors that a later hop needs travel along. The first failure anywhere comes back as a Fault, and the caller falls back.
    """

    service_id: ServiceId
    epoch: int
    request_id: str
    remaining_ms: float
    """What is left of the request's deadline when the message is sent."""
    hops: tuple[Hop, ...]
    modality: Literal["vision", "speech", "text"] = "vision"
    packed: tuple[str, ...] = ()
    """Tensors of this message that travel in fewer bits (see `agents.activations`)."""


class ChainDone(Message, frozen=True, kw_only=True, tag="chain-done"):
    run_ms: tuple[float, ...]
    """Compute time per hop."""


class Probe(Message, frozen=True, kw_only=True, tag="probe"):
    """-> Done. Sent with a small tensor for the round trip, with a larger one for the bandwidth."""


AnyMessage = (
    Fault | Done | GetCa | Ca | Enroll | Enrolled | Renew | Hello | Welcome | Report | Prepare | Prepared | Activate | Tune | Release
    | ProfileBlocks | BlocksProfiled | ShapeLink | ThrottleDevice | Leave | FetchBlob | BlobChunk | RunChain | ChainDone | Probe
)  # fmt: skip
