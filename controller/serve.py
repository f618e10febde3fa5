"""The controller's process: settings from the command line, logging, one event loop, one HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI

from agents.ingress import EmbeddedServer, create_app
from controller.api import create_api
from controller.auth import load_or_create_admin_key
from controller.core import Controller
from controller.dashboard import mount_dashboard
from controller.settings import CloudSettings, ControllerSettings, DoorSettings, LlmSettings
from policies.ids import AgentId
from sla.errors import SettingsError

log = logging.getLogger("tidegate.controller")


def run_controller(arguments: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT; the exit status. Raises TidegateError when it cannot start."""
    logging.basicConfig(
        stream=sys.stderr, level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    settings = settings_from(arguments)
    settings.directory.mkdir(parents=True, exist_ok=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))
    return 0


def settings_from(arguments: argparse.Namespace) -> ControllerSettings:
    """The settings that a command line says; secrets come from the environment, where `ps` does not show them."""
    return ControllerSettings(
        directory=Path(arguments.dir),
        cache=Path(arguments.cache),
        store_url=arguments.store or os.environ.get("TIDEGATE_STORE_URL") or None,
        admin_key=os.environ.get("TIDEGATE_ADMIN_KEY") or None,
        door=DoorSettings(
            host=arguments.host, api_port=arguments.port, agent_port=arguments.agent_port, advertise=arguments.advertise
        ),
        cloud=CloudSettings(ray=arguments.ray),
        llm=LlmSettings(
            base_url=arguments.llm_base_url,
            model=arguments.llm_model,
            mode=arguments.llm_mode,
            tokens_per_hour=arguments.llm_tokens_per_hour,
            price_per_million_tokens=arguments.llm_price,
            deadline_s=arguments.llm_deadline,
            candidates=arguments.llm_candidates,
            api_key=os.environ.get("TIDEGATE_LLM_API_KEY") or None,
        ),
    )


async def _serve(settings: ControllerSettings) -> None:
    listener = _listen(settings.door.host, settings.door.api_port)
    controller = Controller(settings)
    await controller.start()
    try:
        key = _admin_key(settings)
        if key is not None:
            controller.api_keys.add_admin(key)
        keys = controller.api_keys.keys if key is not None else None
        app = create_api(controller, keys)
        app.mount("/v2", create_app(controller.gateway))
        mount_dashboard(app, api_url=_own_url(settings, listener), key=key, ca_pem=controller.ca.ca_pem)
        server = EmbeddedServer(_config(app, controller, settings))
        # Not uvicorn's own handling: it raises the signal again when it is done, which would skip our own goodbye.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: setattr(server, "should_exit", True))
        await server.serve(sockets=[listener])
    finally:
        await controller.stop()


def _config(app: FastAPI, controller: Controller, settings: ControllerSettings) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        lifespan="on",
        loop="none",
    )
    if not settings.door.is_loopback:
        names = (settings.door.advertise, socket.gethostname(), "localhost", "127.0.0.1", "::1")
        identity = controller.ca.identity_for(AgentId(_api_name(names)), also=tuple(name for name in names if name))
        context = identity.server_context("none")
        config.ssl_context_factory = lambda config, default: context
    return config


def _api_name(names: tuple[str | None, ...]) -> str:
    """Other host names, another certificate."""
    return f"api-{hashlib.sha256(repr(names).encode()).hexdigest()[:12]}"


def _admin_key(settings: ControllerSettings) -> str | None:
    """The first administrator's key; None on loopback, where nobody needs one unless one was given."""
    if settings.door.is_loopback and settings.admin_key is None:
        return None
    return settings.admin_key or load_or_create_admin_key(settings.directory / "admin.key")


def _own_url(settings: ControllerSettings, listener: socket.socket) -> str:
    scheme = "http" if settings.door.is_loopback else "https"
    return f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, before anything else is started. Raises SettingsError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"Cannot listen on {host} port {port}: {error.strerror}; choose another with --host and --port."
        ) from None
    listener.listen(256)
    return listener
