"""What this device is: facts that hold while the agent runs."""

from __future__ import annotations

import hashlib
import os
import platform as host
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import psutil

from agents.backends import onnx, rknn
from agents.messages import DeviceFacts
from policies.platforms import Platform

REFERENCE_GFLOPS = 63.0
"""What `measure_gflops` gives on one core of the machine that the profiles were made on (a 2-core x86_64 Linux machine)."""
_STABLE_IDS = (
    Path("/etc/machine-id"),
    Path("/proc/device-tree/serial-number"),
    Path("/sys/class/dmi/id/product_uuid"),
    Path("/sys/class/net/eth0/address"),
)
_PROCESSOR = re.compile(r"^(?:model name|Hardware|Model)\s*:(.*)$", re.MULTILINE)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def device_facts(
    platform: Platform,
    *,
    emulate: bool,
    zone: str,
    is_cloud: bool,
    claimed_host: str,
    peer_port: int,
    ingress_port: int,
    name: str = "",
    budget_bytes: int = 0,
    threads: int = 1,
) -> DeviceFacts:
    """The facts to enroll with. Without a `name`, emulated and cloud devices are called by their platform, others by the host.

    A real device is calibrated, which takes a moment; an emulated one has its platform's figure.
    """
    is_cloud = is_cloud or platform.is_cloud
    name = name or (platform.name if emulate or is_cloud else host.node())
    memory_bytes = int(psutil.virtual_memory().total)
    versions = _versions(platform, emulate)
    return DeviceFacts(
        platform=platform.name,
        evidence="emulated" if emulate else "measured",
        hostname=safe_name(name),
        zone=safe_name(zone),
        arch=host.machine()[:40],
        os=f"{host.system()} {host.release()}"[:120],
        fingerprint=fingerprint(),
        versions=versions,
        providers=("emulated",) if emulate else onnx.available_providers(),
        cores=1 if emulate else (os.cpu_count() or 1),
        memory_bytes=memory_bytes,
        memory_budget_bytes=budget_bytes or default_budget_bytes(platform, emulate, memory_bytes),
        slowdown=platform.emulated_slowdown if emulate else calibrated_slowdown(),
        claimed_host=claimed_host[:253],
        peer_port=peer_port,
        ingress_port=ingress_port,
        is_cloud=is_cloud,
        device_type=device_type(platform, emulate=emulate, threads=threads, versions=versions),
    )


def default_budget_bytes(platform: Platform, emulate: bool, memory_bytes: int) -> int:
    """What shards may use: the platform's figure when emulated, else half of the memory."""
    return platform.emulated_budget_bytes if emulate else memory_bytes // 2


def safe_name(name: str) -> str:
    """At most 63 letters, digits, dots, dashes and underscores, beginning with a letter or digit."""
    return _UNSAFE.sub("-", name).strip("-._")[:63].strip("-._") or "agent"


def fingerprint() -> str:
    """A hash of ids that stay with the hardware, not with the disk alone."""
    found = []
    for path in _STABLE_IDS:
        try:
            found.append(path.read_text(errors="replace").strip()[:200])
        except OSError:
            found.append("")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def device_type(platform: Platform, *, emulate: bool, threads: int, versions: Mapping[str, str]) -> str:
    """A name that is the same for devices that run shards alike, e.g. `rk3588-emulated-1f0c33ab`.

    Its digits are a hash of what makes a difference: processor, backend and provider, threads, versions of runtime and driver.
    """
    available = onnx.available_providers()
    provider = next((name for name in platform.providers if name in available or name == "rknn"), onnx.CPU)
    parts = [platform.name, host.machine(), _processor(), "emulated" if emulate else provider, str(threads)]
    parts += [str(platform.emulated_slowdown)] if emulate else []
    parts += [f"{name} {version}" for name, version in sorted(versions.items()) if name in ("onnxruntime", "rknn")]
    digits = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
    return f"{platform.name}-{'emulated-' if emulate else ''}{digits}"


def _processor() -> str:
    """The processor's model in the kernel's words; what Python knows of it where there is none."""
    try:
        found = _PROCESSOR.search(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:
        found = None
    return found.group(1).strip()[:200] if found else host.processor()[:200]


def calibrated_slowdown(measure: Callable[[], float] | None = None) -> float:
    """This device's time for a workload over the reference core's, bounded to [0.1, 50]."""
    gflops = (measure or measure_gflops)()
    return min(50.0, max(0.1, REFERENCE_GFLOPS / max(gflops, 0.01)))


def measure_gflops(*, rounds: int = 100) -> float:
    """Float32 GFLOPS of one core on small matrix products, the best of some rounds.

    CPU time of this thread, so that a busy machine does not look slow; small matrices, so that the library starts no threads.
    """
    size, count = 48, 200
    a = np.full((count, size, size), 0.5, np.float32)
    b = np.full((count, size, size), 0.25, np.float32)
    out = np.empty_like(a)
    best_s = float("inf")
    for _ in range(rounds):
        began_s = time.thread_time()
        np.matmul(a, b, out=out)
        best_s = min(best_s, time.thread_time() - began_s)
    return 2 * count * size**3 / max(best_s, 1e-6) / 1e9


def _versions(platform: Platform, emulate: bool) -> dict[str, str]:
    versions = {"onnxruntime": onnx.runtime_version(), "python": host.python_version(), "numpy": np.__version__}
    if "rknn" in platform.providers and not emulate:
        versions |= rknn.versions()
    return versions
