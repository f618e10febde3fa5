"""The command line options of an agent; nothing heavy is imported, since every `tidegate` command builds its parser."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from policies.platforms import PLATFORMS


def add_options(parser: argparse.ArgumentParser, *, positional: bool = False) -> None:
    """Everything that an agent can be told. `positional`: the controller's address comes first, without a flag."""
    if positional:
        parser.add_argument(
            "controller", metavar="URL", help="the controller's agent door, e.g. tidegate://controller:7443"
        )
    else:
        parser.add_argument("--controller", required=True, help="HOST:PORT of the controller's agent door")
    token = parser.add_mutually_exclusive_group()
    token.add_argument("--token", default="", help="join token (tidegate token create); not needed once enrolled")
    token.add_argument("--token-file", default="", help="a file that holds the join token")
    parser.add_argument(
        "--ca-fingerprint", default="", help="sha256 of the controller's CA certificate; comes with the token"
    )
    parser.add_argument("--platform", default="x86", help=f"one of {', '.join(PLATFORMS)}")
    parser.add_argument(
        "--emulate", action="store_true", help="play the platform on this machine's CPU; labelled as emulated"
    )
    parser.add_argument(
        "--slowdown", type=positive_number, metavar="X",
        help="with --emulate: runs take X times as long as on one core of this machine (default: the platform's)",
    )  # fmt: skip
    parser.add_argument(
        "--remember", action="store_true",
        help="with --emulate: compute each input once, later only spend its time (for many devices on one machine)",
    )  # fmt: skip
    parser.add_argument(
        "--dir", default=default_directory(), help="the agent's key, certificate, shard cache and routes"
    )
    parser.add_argument("--zone", default="default")
    parser.add_argument("--name", default="", help="what the device calls itself (default: the host's name)")
    parser.add_argument("--cloud", action="store_true", help="this agent runs in the cloud")
    parser.add_argument("--host", default="127.0.0.1", help="address of the peer door (always mutual TLS)")
    parser.add_argument("--advertise-host", default="", help="address that peers should dial, if it is another one")
    parser.add_argument("--peer-port", type=whole_number(0, 65535), default=0)
    parser.add_argument(
        "--ingress-host", default="127.0.0.1", help="address of the ingress; beyond loopback with --ingress-tls only"
    )
    parser.add_argument("--ingress-port", type=whole_number(0, 65535), default=0)
    parser.add_argument(
        "--ingress-tls", action="store_true", help="mutual TLS at the ingress: clients need a certificate of this CA"
    )
    parser.add_argument(
        "--memory-mb", type=whole_number(0, 1 << 24), default=0, help="memory for shards (default: the platform's)"
    )
    parser.add_argument("--cache-mb", type=whole_number(0, 1 << 24), default=4096, help="disk for cached shards")
    parser.add_argument("--threads", type=whole_number(0, 1024), default=1, help="threads of one shard's run")
    parser.add_argument(
        "--no-hedge", action="store_true",
        help="send requests where the plan says as long as that works, even when a fallback would be in time and it would not",
    )  # fmt: skip
    parser.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)


def default_directory() -> str:
    """Where an agent keeps its state unless it is told."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(os.environ.get("TIDEGATE_DIR") or os.path.join(base, "tidegate"), "agent")


def positive_number(text: str) -> float:
    """A parser of positive numbers for options, up to 1000."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.01 <= value <= 1000.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0.01 to 1000")
    return value


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers for options: from `low` on, up to `high` if there is one."""

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if value < low or (high is not None and value > high):
            wanted = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return value

    return parse
