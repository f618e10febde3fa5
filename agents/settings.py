"""The agent's settings: read once, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agents.calibration import CalibrationSettings
from agents.driver import DriverSettings
from agents.enroll import parse_fingerprint, parse_url
from agents.ingress import IngressSettings
from agents.lanes import LaneSettings
from agents.options import add_options
from agents.peers import PeerSettings
from policies.platforms import Platform, platform
from sla.errors import SettingsError

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """How this agent finds and joins its controller."""

    host: str
    port: int
    token: str | None = None
    """Needed only until the device is enrolled."""
    ca_fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """What this device is."""

    platform: Platform
    emulate: bool = False
    remember: bool = False
    """An emulated device computes each input once."""
    zone: str = "default"
    name: str = ""
    """What the device calls itself; empty for the host's name."""
    is_cloud: bool = False
    budget_bytes: int = 0
    """Memory for shards; 0 for the platform's figure or half of the memory."""
    threads: int = 1
    """Threads of one shard's run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """Where this agent listens; 0 takes any free port."""

    host: str = "127.0.0.1"
    """Of the peer door, which is always under mutual TLS."""
    peer_port: int = 0
    advertise_host: str = ""
    """What peers should dial; empty for `host`, or for the address that reaches the controller when `host` is a wildcard."""
    ingress_host: str = "127.0.0.1"
    ingress_port: int = 0
    ingress_tls: bool = False
    """Mutual TLS at the ingress: clients need a certificate by the cluster's CA."""

    def __post_init__(self) -> None:
        if not self.ingress_tls and self.ingress_host not in _LOOPBACK:
            raise SettingsError(
                f"The ingress would listen on {self.ingress_host} without TLS; use a loopback address or --ingress-tls."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """All of it."""

    join: JoinSettings
    device: DeviceSettings
    doors: DoorSettings = field(default_factory=DoorSettings)
    directory: Path = Path("tidegate-agent")
    """Key, certificate, cached shards, routes."""
    cache_max_bytes: int = 4 << 30
    drain_grace_s: float = 30.0
    queue_depth: int = 64
    embedded: bool = False
    """The agent is not the process: it leaves signals alone."""
    driver: DriverSettings = field(default_factory=DriverSettings)
    peers: PeerSettings = field(default_factory=PeerSettings)
    ingress: IngressSettings = field(default_factory=IngressSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)


def parse_arguments(argv: Sequence[str] | None = None) -> AgentSettings:
    """The settings that a command line says. Raises SettingsError or InvalidInputError; exits for `--help` and unknown options."""
    parser = argparse.ArgumentParser(prog="tidegate-agent", description="Joins a Tidegate controller and runs shards.")
    add_options(parser)
    return settings_from(parser.parse_args(argv))


def settings_from(options: argparse.Namespace) -> AgentSettings:
    """The settings that parsed options say. Raises SettingsError or InvalidInputError."""
    host, port = parse_url(options.controller)
    return AgentSettings(
        join=JoinSettings(
            host=host,
            port=port,
            token=_token(options),
            ca_fingerprint=parse_fingerprint(options.ca_fingerprint) if options.ca_fingerprint else None,
        ),
        device=DeviceSettings(
            platform=_platform(options),
            emulate=options.emulate,
            remember=options.remember,
            zone=options.zone,
            name=options.name,
            is_cloud=options.cloud,
            budget_bytes=options.memory_mb << 20,
            threads=options.threads,
        ),
        doors=DoorSettings(
            host=options.host,
            peer_port=options.peer_port,
            advertise_host=options.advertise_host,
            ingress_host=options.ingress_host,
            ingress_port=options.ingress_port,
            ingress_tls=options.ingress_tls,
        ),
        directory=Path(options.dir),
        cache_max_bytes=options.cache_mb << 20,
        embedded=options.embedded,
        driver=DriverSettings(lanes=LaneSettings(hedge=None)) if options.no_hedge else DriverSettings(),
    )


def _platform(options: argparse.Namespace) -> Platform:
    chosen = platform(options.platform)
    if options.slowdown is None:
        return chosen
    if not options.emulate:
        raise SettingsError("--slowdown is for emulated devices (--emulate); a real one is measured.")
    return msgspec.structs.replace(chosen, emulated_slowdown=options.slowdown)


def _token(options: argparse.Namespace) -> str | None:
    if not options.token_file:
        return options.token or None
    try:
        return Path(options.token_file).read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"The join token in {options.token_file} cannot be read: {error}.") from error
