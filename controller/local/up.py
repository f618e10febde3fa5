"""`tidegate up`: the demo's stack, left running."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from importlib import resources
from pathlib import Path

from rich.console import Console

from controller.local.stack import LocalStack, Progress, StackSettings


def settings_from(arguments: argparse.Namespace) -> StackSettings:
    """Stack settings from the command line."""
    return StackSettings(
        directory=Path(arguments.dir) if arguments.dir else None,
        cache=Path(arguments.cache),
        api_port=arguments.port,
        agent_port=arguments.agent_port,
        ray=arguments.ray,
        llm_base_url=arguments.llm_base_url,
        llm_model=arguments.llm_model,
        llm_local=arguments.llm == "local",
        llm_options=tuple(
            f"--llm-{name}={getattr(arguments, f'llm_{name}'.replace('-', '_'))}"
            for name in ("mode", "tokens-per-hour", "deadline", "price", "candidates")
        ),
    )


def console_of_stdout() -> Console:
    """Where the stack tells what it does; a pipe has no width, so it gets room instead of folded lines."""
    return Console() if sys.stdout.isatty() else Console(width=180)


def progress_to(console: Console) -> Progress:
    """A progress line with the seconds since now in front of it."""
    began = time.monotonic()

    def line(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:6.1f} s[/dim]  {text}", highlight=False, soft_wrap=True)

    return line


def example_sla() -> bytes:
    """The demo's contract."""
    return resources.files("sla").joinpath("examples/document-reader.json").read_bytes()


def run_up(arguments: argparse.Namespace) -> int:
    """Start everything, submit the example contract, and wait for Ctrl-C."""
    stop_like_ctrl_c()
    console = console_of_stdout()
    progress = progress_to(console)
    with LocalStack(settings_from(arguments), progress) as stack:
        stack.start()
        applied = stack.api.post("/v1/slas", body=example_sla())
        progress(f"SLA document-reader: {applied['admission']['text']}")
        console.print(
            f"\nDashboard: {stack.dashboard_url}   state and logs: {stack.directory}\nStop with Ctrl-C.",
            highlight=False,
        )
        wait_for_signal()
    return 0


def stop_like_ctrl_c() -> None:
    """SIGTERM unwinds from now on, so that a stack which is still starting takes its processes along."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def wait_for_signal() -> None:
    """Returns at SIGINT or SIGTERM."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
