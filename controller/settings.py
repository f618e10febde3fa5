"""Settings of the centre: small frozen groups, read once by the command line."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sla.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """Where the centre listens."""

    host: str = "127.0.0.1"
    api_port: int = 8080
    """Dashboard, HTTP API and Open Inference Protocol; HTTPS and keys unless the host is loopback."""
    agent_port: int = 7443
    """Agents dial this; always mutual TLS after enrollment."""
    advertise: str | None = None
    """Name or address that agents should dial; default: the host."""

    def __post_init__(self) -> None:
        for name in ("api_port", "agent_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise SettingsError(f"{name}={getattr(self, name)} is not a port; accepted is 0 to 65535.")

    @property
    def is_loopback(self) -> bool:
        """True if nobody but this machine can reach the doors."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionSettings:
    """When a silent agent is suspected, and when it is given up (see `controller.suspicion`)."""

    suspect_phi: float = 3.0
    """Suspicion at which an agent gets no new work; the chance of a mistake is 10**-phi."""
    lost_phi: float = 12.0
    """Suspicion at which its shards are placed elsewhere."""
    lost_silence_ms: float = 3_000.0
    """A connected agent is never given up for a shorter silence, however steady it was before: networks and busy machines pause."""
    reconnect_grace_ms: float = 1_000.0
    """An agent whose control connection broke has this long to come back before it is lost."""
    restart_grace_ms: float = 20_000.0
    """After a restart of the controller its agents have this long to come back (they redial at least every 10 s)."""

    def __post_init__(self) -> None:
        if not 0 < self.suspect_phi < self.lost_phi:
            raise SettingsError("suspect_phi must lie between 0 and lost_phi.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    """What keeps a look short when there are thousands of agents and services."""

    whole_up_to: int = 48
    """With at most so many agents and contracts every decision sees the whole world; beyond, its neighbourhood."""
    near: int = 16
    """Agents of the entry's zone that a decision looks at, besides those that the service has ..."""
    clouds: int = 4
    """... and cloud agents."""
    choose_again_ms: float = 30_000.0
    """A neighbourhood is chosen anew after this time, or when one of its agents is gone."""
    quiet_every_ms: float = 5_000.0
    """A service with nothing to report (no reason to look, no risk, no better plan in sight) is decided about this often."""
    look_apart_ms: float = 250.0
    """Looks at a large fleet are at least so far apart, however many agents join or are lost at once."""
    decide_at_once: int = 8
    """Decisions that are made side by side; the others wait their turn, those with a reason first."""
    move_at_once: int = 32
    """Plans that are rolled out side by side."""
    plan_together: int = 16
    """So many services without a plan are planned together, by zone; fewer one by one."""
    parts: int = 8
    """Into how many parts the zones are bundled then, each planned by itself."""

    def __post_init__(self) -> None:
        for name in ("whole_up_to", "near", "clouds", "decide_at_once", "move_at_once", "plan_together", "parts"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}={getattr(self, name)} must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How often the loop looks, and how a plan is rolled out."""

    look_every_ms: float = 1_000.0
    prepare_timeout_s: float = 90.0
    """Fetch, load, warm up and golden comparison of all shards of a plan."""
    canary_deadline_ms: float = 15_000.0
    release_after_s: float = 10.0
    """Shards of the previous plan stay loaded this long, for requests that are still on their way."""
    save_windows_every_s: float = 5.0
    """SLI counters are written to the store this often; what is newer is lost with the controller."""
    scale: ScaleSettings = ScaleSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """How models are timed on the types of devices (see `controller.device_profiles`)."""

    budget_s: float = 5.0
    """Runs of one model on one type; loading and fetching are not counted."""
    timeout_s: float = 120.0
    at_once_s: float = 30.0
    """`model add` waits for the timing of its model at most this long; the rest is done in the background."""
    look_every_s: float = 5.0
    settle_s: float = 20.0
    """The background begins this long after the last agent or model came."""
    retry_s: float = 60.0
    """After a failure; it doubles with each."""

    def __post_init__(self) -> None:
        if min(self.budget_s, self.timeout_s, self.at_once_s, self.look_every_s, self.retry_s) <= 0:
            raise SettingsError("The times of device profiles must be above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudSettings:
    """The Ray side."""

    ray: str = "local"
    """`local` starts a small Ray here, `none` does without a cloud, anything else is the address of a cluster."""
    num_cpus: float = 1.0
    agents: int = 1


LlmMode = Literal["off", "shadow", "advise", "control"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmSettings:
    """The model in the control loop; without `base_url` the solver decides alone."""

    mode: LlmMode = "shadow"
    """`shadow`: asked and recorded, never acts; `advise`: a person confirms; `control`: the gate is enough; `off`: not asked."""

    base_url: str | None = None
    model: str = "default"
    api_key: str | None = None
    deadline_s: float = 10.0
    """For one question, its repair round included; the loop never waits for it."""
    max_output_tokens: int = 400
    tokens_per_hour: int = 200_000
    """Prompt and output together; beyond it nothing is asked until an hour has passed."""
    price_per_million_tokens: float = 0.0
    """What a million tokens cost, in any currency; for the report."""
    min_interval_s: float = 20.0
    """At most one question per service in this time."""
    candidates: int = 8
    """Plans that it is shown, at most 8; fewer for a small model."""

    def __post_init__(self) -> None:
        if min(self.deadline_s, self.min_interval_s, self.price_per_million_tokens) < 0 or self.deadline_s == 0:
            raise SettingsError("The LLM's deadline must be above 0, its interval and its price not below.")
        if not 1 <= self.candidates <= 8:
            raise SettingsError(f"candidates={self.candidates} must be 1 to 8.")
        if self.max_output_tokens < 300:
            raise SettingsError(
                f"max_output_tokens={self.max_output_tokens} cuts answers off; accepted is 300 or more."
            )
        if self.tokens_per_hour < 0:
            raise SettingsError("tokens_per_hour must not be negative.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Everything that `tidegate controller` can be told."""

    directory: Path
    """State that must survive: certificate authority, embedded store, shard files."""
    cache: Path
    """Downloaded packages; may be deleted at any time."""
    store_url: str | None = None
    """redis:// or unix:// address of the operator's store; None starts an embedded one."""
    admin_key: str | None = None
    """Key of the first operator; None makes one and keeps it in `directory/admin.key`."""
    door: DoorSettings = field(default_factory=DoorSettings)
    suspicion: SuspicionSettings = field(default_factory=SuspicionSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    profiles: ProfileSettings = field(default_factory=ProfileSettings)
    cloud: CloudSettings = field(default_factory=CloudSettings)
    llm: LlmSettings = field(default_factory=LlmSettings)
