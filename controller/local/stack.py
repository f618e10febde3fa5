"""A controller and emulated agents as processes of this machine. Everything goes through the public API."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.client import ApiClient
from controller.local.llm_server import MODEL_NAME, READY
from sla.errors import RetryableError, SettingsError

Progress = Callable[[str], None]

UPLINK_DELAY_MS = 4.0
UPLINK_JITTER_MS = 0.5
UPLINK_MBPS = 200.0
"""The emulated way from a device to the cloud; the way between devices is this machine's loopback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """What `tidegate up` and `tidegate demo` can be told."""

    directory: Path | None
    cache: Path
    api_port: int = 8080
    agent_port: int = 7443
    ray: str = "local"
    llm_base_url: str | None = None
    llm_model: str = "default"
    llm_local: bool = False
    """Start a small model on this machine and ask that one."""
    llm_options: tuple[str, ...] = ()
    """More options of the controller."""
    platforms: tuple[str, ...] = ("rk3588", "rk3588", "ascend310p", "imx93")
    cloud_agents: int = 1


@dataclass(slots=True)
class _Process:
    name: str
    command: list[str]
    popen: subprocess.Popen[bytes]


@dataclass(slots=True)
class LocalStack:
    """Starts and stops the processes; use as a context manager so that nothing is left behind."""

    settings: StackSettings
    progress: Progress
    directory: Path = field(init=False)
    api: ApiClient = field(init=False)
    agent_ids: dict[str, str] = field(default_factory=dict)
    """Process name (e.g. `rk3588-1`) -> agent id."""
    _processes: list[_Process] = field(default_factory=list)
    _killed: list[_Process] = field(default_factory=list)
    """What was killed on purpose; its children may still run."""

    def __post_init__(self) -> None:
        self.directory = self.settings.directory or Path(tempfile.mkdtemp(prefix="tidegate-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "logs").mkdir(exist_ok=True)
        self.api = ApiClient(f"http://127.0.0.1:{self.settings.api_port}", timeout_s=60)

    def __enter__(self) -> LocalStack:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def dashboard_url(self) -> str:
        """Where a browser finds the dashboard."""
        return f"{self.api.url}/"

    def start(self) -> None:
        """Controller, service and agents, ready for requests. Raises TidegateError with one sentence."""
        for port in (self.settings.api_port, self.settings.agent_port):
            require_free_port(port)
        self.start_controller()
        self.join_agents()
        self.add_service()
        self.wait_for_agents()

    def start_controller(self) -> None:
        """Spawn the controller and wait until it is ready."""
        s = self.settings
        model, base_url = s.llm_model, s.llm_base_url
        local = ("--llm-candidates=3", "--llm-deadline=30") if s.llm_local else ()
        if s.llm_local:
            model, base_url = MODEL_NAME, self._start_local_llm()
        command = [
            "controller", "--port", str(s.api_port), "--agent-port", str(s.agent_port), "--dir", str(self.directory / "controller"),
            "--cache", str(s.cache), "--ray", s.ray, "--llm-model", model, *s.llm_options, *local,
        ]  # fmt: skip
        if base_url:
            command += ["--llm-base-url", base_url]
        began = time.monotonic()
        self._spawn("controller", [sys.executable, "-m", "controller.cli", *command])
        self.wait_until(lambda: self._is_ready(), 60.0, "The controller did not become ready")
        self.progress(f"controller ready in {time.monotonic() - began:.1f} s (API, dashboard, embedded store)")
        self.progress(f"dashboard: {self.dashboard_url}   who decides: {self.api.get('/v1/status')['policy']}")

    def _start_local_llm(self) -> str:
        """Its base URL. Raises SettingsError with the process's last line when it cannot start."""
        began = time.monotonic()
        log = self.directory / "logs" / "llm.log"
        self._spawn("llm", [sys.executable, "-m", "controller.local.llm_server", "--cache", str(self.settings.cache)])
        found: list[str] = []

        def is_ready() -> bool:
            lines = log.read_text(errors="replace").splitlines()
            found[:] = [line.removeprefix(READY) for line in lines if line.startswith(READY)]
            return bool(found)

        self.wait_until(is_ready, 900.0, "The local model did not become ready")
        self.progress(f"local model {MODEL_NAME} ready in {time.monotonic() - began:.1f} s")
        return found[-1]

    def join_agents(self) -> None:
        """Spawn one process per emulated device, each enrolled with a one-time token of its own."""
        for index, platform in enumerate(self.settings.platforms):
            number = self.settings.platforms[: index + 1].count(platform)
            self.join_agent(f"{platform}-{number}", platform)
        names = ", ".join(self.settings.platforms)
        self.progress(
            f"{len(self.settings.platforms)} agent processes started, each with a one-time join token: {names} (emulated)"
        )

    def join_agent(self, name: str, platform: str, *options: str) -> None:
        """Spawn the process of one emulated device; `options` are more of the agent's own."""
        offer = self.api.post("/v1/tokens", json={"uses": 1, "note": name})
        self._spawn(
            name,
            [
                sys.executable, "-m", "agents", "--controller", offer["controller"], "--token", offer["token"],
                "--ca-fingerprint", offer["ca_fingerprint"], "--platform", platform, "--emulate",
                "--dir", str(self.directory / name), "--host", "127.0.0.1", "--name", name, *options,
            ],
        )  # fmt: skip

    def add_service(self) -> None:
        """Register `document-reader`: fetch weights, cut, prove, profile (cached by content)."""
        began = time.monotonic()
        service = self.api.post("/v1/services", json={"builtin": "document-reader"}, timeout_s=600)
        stages = sum(stage["type"] == "onnx" for stage in service["stages"])
        self.progress(
            f"service document-reader registered in {time.monotonic() - began:.1f} s: {stages} ONNX stages cut, proven and profiled"
        )

    def wait_for_agents(self, timeout_s: float = 90.0) -> None:
        """Wait until all agents are live, the cloud's too, then give the devices their emulated uplink."""
        wanted = len(self.settings.platforms) + (self.settings.cloud_agents if self.settings.ray != "none" else 0)
        self.wait_until(
            lambda: len(self.live_agents()) >= wanted, timeout_s, f"Not all of {wanted} agents came to life"
        )
        for agent in self.live_agents():
            self.progress(
                f"agent {agent['id']}: {agent['platform']}, {agent['evidence']}, ingress {agent['ingress_url'] or '-'}"
            )
        for device in self.live_agents():
            for cloud in self.live_agents():
                if cloud["is_cloud"] and device["evidence"] == "emulated":
                    self.shape(device["id"], cloud["id"], UPLINK_DELAY_MS, UPLINK_JITTER_MS, UPLINK_MBPS)

    def shape(self, src: str, dst: str, delay_ms: float, jitter_ms: float, mbps: float) -> None:
        """Set the emulated link from a device to a peer."""
        body = {"src": src, "dst": dst, "delay_ms": delay_ms, "jitter_ms": jitter_ms, "bandwidth_mbps": mbps}
        self.api.post("/v1/links:shape", json=body)

    def throttle(self, agent_id: str, factor: float) -> None:
        """Let an emulated device's runs take so many times as long; 1 ends it."""
        self.api.post(f"/v1/agents/{agent_id}:throttle", json={"factor": factor})

    def live_agents(self) -> list[dict[str, Any]]:
        """Agents that are live now, as the API tells them."""
        return [agent for agent in self.api.get("/v1/agents") if agent["state"] == "live"]

    def kill_agent(self, agent_id: str) -> float:
        """SIGKILL the process of an agent; the wall-clock seconds at which it was sent."""
        process = next(process for process in self._processes if agent_id.startswith(f"{process.name}-"))
        at_s = time.time()
        self._kill(process)
        return at_s

    def freeze_agent(self, agent_id: str, frozen: bool) -> None:
        """SIGSTOP or SIGCONT: a process that hangs keeps its connections open and answers nothing."""
        process = next(process for process in self._processes if agent_id.startswith(f"{process.name}-"))
        process.popen.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def restart_agent(self, agent_id: str) -> None:
        """Start a killed agent's process again (nothing if it runs); it is the same device, so it needs no new token."""
        for process in [process for process in self._killed if agent_id.startswith(f"{process.name}-")]:
            self._killed.remove(process)
            self._spawn(process.name, process.command)

    def kill_controller(self) -> None:
        """SIGKILL the controller's process (its store, and Ray's processes, are on their own then)."""
        self._kill(next(process for process in self._processes if process.name == "controller"))

    def stop(self) -> None:
        """Stop every process; the controller is told first, so that it does not plan around agents that leave on purpose."""
        self.api.close()
        processes = sorted([*self._processes, *self._killed], key=lambda process: process.name != "controller")
        for process in processes:
            if process.popen.poll() is None:
                process.popen.terminate()
        for process in processes:
            _end(process.popen)
        self._processes.clear()
        self._killed.clear()

    def pid(self, name: str) -> int:
        """The process id of `controller` or of an agent by its process name."""
        return next(process.popen.pid for process in reversed(self._processes) if process.name == name)

    def alive(self) -> list[str]:
        """Names of the processes that run."""
        return [process.name for process in self._processes if process.popen.poll() is None]

    def _kill(self, process: _Process) -> None:
        process.popen.kill()
        process.popen.wait()
        self._processes.remove(process)
        self._killed.append(process)

    def _spawn(self, name: str, command: list[str]) -> None:
        log = (self.directory / "logs" / f"{name}.log").open("ab")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        popen = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        log.close()
        self._processes.append(_Process(name, command, popen))

    def _is_ready(self) -> bool:
        try:
            return bool(self.api.get("/readyz")["ready"])
        except RetryableError:
            return False

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, complaint: str) -> None:
        """Returns as soon as the condition holds. Raises RetryableError, or SettingsError when a process ended meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            dead = [p for p in self._processes if p.popen.poll() is not None]
            if dead:
                raise SettingsError(f"{dead[0].name} ended while starting: {self._last_line(dead[0].name)}")
            if time.monotonic() > deadline:
                raise RetryableError(
                    f"{complaint} within {timeout_s:.0f} s; see the logs in {self.directory / 'logs'}."
                )
            time.sleep(0.1)

    def _last_line(self, name: str) -> str:
        lines = (self.directory / "logs" / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def require_free_port(port: int) -> None:
    """Raises SettingsError when something listens on the port already (0 is always free)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise SettingsError(
                f"Port {port} is in use; stop what listens there or choose another with --port and --agent-port."
            ) from None


def _end(popen: subprocess.Popen[bytes], grace_s: float = 20.0) -> None:
    """Wait for a process that was told to end, then SIGKILL it and what it started."""
    try:
        popen.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(popen.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    popen.wait()
