"""What the HTTP API answers. These models are the public interface: fields are added, never renamed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from agents.messages import MAX_THROTTLE

SlaState = Literal["unbound", "infeasible", "starting", "no-traffic", "met", "violated"]


class ShardOut(BaseModel):
    """A box in one model's index space, on one agent. Patch and token ranges are thousandths of the items of a request."""

    stage: str
    model: str
    agent: str
    patch: tuple[int, int]
    token: tuple[int, int]
    blocks: tuple[int, int]
    block_count: int
    role: Literal["serving", "fallback"] = "serving"


class PredictionOut(BaseModel):
    p50_ms: float
    p95_ms: float
    p99_ms: float
    throughput_rps: float
    saturation: float
    jitter_ms: float
    risk: float
    availability: float
    accuracy: float
    energy_j: float
    bottleneck: str


class BindingOut(BaseModel):
    """In what a contract asks for more than the fleet can give, and which stage, link or device is to blame."""

    dimension: str
    text: str
    asked: float | None = None
    """As a number: milliseconds, requests/s, joules; for the availability the share that may fail."""
    reached: float | None = None
    stage: str | None = None
    device: str | None = None
    link: str | None = None


class NearestOut(BaseModel):
    """The nearest contract that could be kept if only this dimension gave way."""

    dimension: str
    possible: bool
    changes: dict[str, Any]
    """Fields of the contract with the values that would do (a JSON merge patch)."""
    text: str


class Admission(BaseModel):
    """The answer to a contract before anything moves."""

    verdict: Literal["admissible", "infeasible", "unbound"]
    text: str
    score: float | None = None
    prediction: PredictionOut | None = None
    shards: list[ShardOut] = []
    p99_low_ms: float | None = None
    p99_high_ms: float | None = None
    """Four of five plans that were predicted so end up between these two."""
    cost_per_1k_requests: float | None = None
    agents: list[str] = []
    binding: list[BindingOut] = []
    """Of an infeasible contract: what binds, the worst first."""
    nearest: list[NearestOut] = []
    together: NearestOut | None = None
    """Where no dimension alone would do: several of them."""


class Applied(BaseModel):
    service_id: str
    version: int
    created: bool
    admission: Admission


class SlaOut(BaseModel):
    service_id: str
    version: int
    contract: dict[str, Any]
    state: SlaState
    text: str
    """One sentence: why it is in this state."""
    requests: int
    failed: int
    availability: float | None
    """Share of requests in the window that were answered; None without requests."""
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    offered_rps: float
    latency_met: bool | None
    availability_met: bool | None
    budget_left: float | None
    """Share of the window's error budget that is left, of the promise that has least; negative when overspent."""
    fell_back: int
    running_epoch: int | None
    predicted_p99_ms: float | None
    pinned: bool = False
    firing: list[str] = []
    """Burn-rate alerts that fire, the most urgent first."""


class LinkOut(BaseModel):
    peer: str
    rtt_ms: float
    jitter_ms: float
    bandwidth_mbps: float
    age_ms: float


class CalibrationOut(BaseModel):
    """What a device does, measured by its agent through its own backend."""

    matmul_gflops: float
    conv_gflops: float
    copy_gb_per_s: float
    launch_ms: float
    spread: float
    """How far the estimates lie above the quickest runs, relative."""
    provider: str


class AgentOut(BaseModel):
    id: str
    platform: str
    evidence: str
    """`emulated`: this machine's CPU plays the device."""
    state: str
    zone: str
    is_cloud: bool
    age_ms: float | None
    """Age of the last report; None before the first."""
    cpu_saturation: float | None
    memory_budget_bytes: int
    loaded_bytes: float | None
    queue_depth: float | None
    temperature_c: float | None
    slowdown: float
    device_type: str = ""
    """The same for devices that run shards alike; profiles of models are kept by it."""
    calibration: CalibrationOut | None = None
    """None until it was measured."""
    peer_address: str
    seen_host: str
    claimed_host: str
    ingress_url: str | None
    enrolled_at_s: float
    enrolled_in_ms: float | None
    versions: dict[str, str]
    providers: list[str]
    links: list[LinkOut]
    faults: list[str]


class PlanOut(BaseModel):
    service_id: str
    epoch: int
    running: bool
    trigger: str
    proposer: str
    score: float | None
    predicted_p99_ms: float | None
    measured_p99_ms: float | None
    requests: int
    decided_at_s: float
    active_at_s: float | None
    """When the ingresses had it; None while or if it did not get there."""
    sentence: str
    shards: list[ShardOut]


class ReasonOut(BaseModel):
    code: str
    text: str


class DecisionOut(BaseModel):
    at_s: float
    service_id: str
    trigger: str
    proposer: str
    epoch: int | None
    """The plan that was decided; None when the running one was held."""
    score: float | None
    risk: float | None
    sentence: str
    reasons: list[ReasonOut]
    rationale: str


class EventOut(BaseModel):
    at_s: float
    kind: str
    text: str
    agent: str | None
    service: str | None
    epoch: int | None


class TokenIn(BaseModel):
    model_config = {"extra": "forbid"}

    uses: int = 1
    ttl_s: float = 3600.0
    note: str = ""


class TokenOut(BaseModel):
    token: str
    ca_fingerprint: str
    controller: str
    command: str
    """What to run on the device."""
    expires_at_s: float
    uses: int


class KeyIn(BaseModel):
    model_config = {"extra": "forbid"}

    role: Literal["viewer", "operator", "admin"] = "viewer"
    note: Annotated[str, Field(max_length=200)] = ""


class KeyOut(BaseModel):
    id: str
    role: str
    note: str
    created_at_s: float


class NewKeyOut(KeyOut):
    key: str
    """Shown once."""


class BlockOut(BaseModel):
    name: str
    fixed_ms: float
    per_item_ms: float
    param_bytes: int
    cut_bytes_per_item: int
    file_bytes: int = 0


class BlockTimeOut(BaseModel):
    fixed_ms: float
    per_item_ms: float


class DeviceProfileOut(BaseModel):
    """What the blocks of a model take on one type of device."""

    device_type: str
    blocks: list[BlockTimeOut]
    provider: str
    agent: str
    """On which it was timed."""
    measured_at_s: float
    runs: int
    spread: float
    """How far the times lie above the quickest runs, relative."""
    peak_bytes: int
    """Largest growth of the agent's memory while one block was loaded and ran."""


class ModelOut(BaseModel):
    name: str
    sha256: str
    blocks: list[BlockOut]
    split_axis: str | None
    split_until: int | None = None
    """The first block that mixes items, where that was looked for."""
    accuracy: float
    atomic_reason: str
    devices: list[DeviceProfileOut] = []
    """Types of devices on which it was timed."""


class KnobOut(BaseModel):
    """Something that is turned while requests run."""

    key: str
    """STAGE.KNOB"""
    value: float
    """What ingresses feed now."""
    auto: bool
    """It follows the use of the memory bandwidth."""
    default: float
    low: float
    high: float
    better: str
    """The end (`high` or `low`) at which the model is most accurate."""
    limit: float
    """How far from that end the contract's accuracy floor allows."""
    bandwidth_use: float | None
    """Of the busiest agent that runs the stage, [0, 1], estimated; None while nobody reported it."""


class ServiceOut(BaseModel):
    id: str
    stages: list[dict[str, Any]]
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    knobs: list[KnobOut] = []


class LinkShapeIn(BaseModel):
    """Slow one direction of an emulated device's link."""

    model_config = {"extra": "forbid"}

    src: str
    dst: str | None = None
    delay_ms: float = Field(default=0.0, ge=0, le=60_000)
    jitter_ms: float = Field(default=0.0, ge=0, le=60_000)
    bandwidth_mbps: float | None = Field(default=None, gt=0, le=1e6)


class ThrottleIn(BaseModel):
    """Slow an emulated device."""

    model_config = {"extra": "forbid"}

    factor: float = Field(ge=1, le=MAX_THROTTLE)
    """Times as long as its runs take otherwise."""


class StatusOut(BaseModel):
    """The controller itself."""

    version: str
    ready: bool
    leader: bool
    policy: str
    """`llm` or `solver`; says why when it is the solver."""
    cloud: str
    store: str
    agents_live: int
    services: int
