"""Open-loop load: rendered documents with known answers, sent on a schedule through the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

from controller.local.oip_client import bytes_output, encode_request
from controller.services.document_reader import correct
from controller.services.documents import Document, render

DOCUMENTS = 10
REQUEST_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. `latency_ms` counts from the moment it was due, so that a late client hides nothing."""

    due_s: float
    """Wall-clock seconds."""
    latency_ms: float
    ok: bool
    correct: bool
    epoch: int | None
    fell_back: bool
    error: str = ""


@dataclass(slots=True)
class Load:
    """One open-loop source. It knows several ingresses and, like any careful client, tries the next one when one is gone."""

    ingresses: list[str]
    rate_rps: float
    seed: int = 7
    due_s: tuple[float, ...] | None = None
    """When to send, in seconds from the start; None: a Poisson process of the given rate."""
    outcomes: list[Outcome] = field(default_factory=list)
    sent: int = 0

    async def run(self, seconds: float) -> None:
        """Send for that long, then wait for the stragglers. The gaps are exponential: arrivals are a Poisson process."""
        documents = await asyncio.to_thread(
            lambda: [render(seed, upside_down=seed % 3 == 2) for seed in range(DOCUMENTS)]
        )
        rng = random.Random(self.seed)
        limits = httpx.Limits(max_connections=64)
        async with (
            httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as http,
            asyncio.TaskGroup() as tasks,
        ):
            started = time.monotonic()
            for due in self._due(seconds, rng):
                await asyncio.sleep(max(0.0, started + due - time.monotonic()))
                document = documents[self.sent % len(documents)]
                question, answer = document.questions[rng.randrange(len(document.questions))]
                self.sent += 1
                tasks.create_task(self._ask(http, document, question, answer, started + due))

    def _due(self, seconds: float, rng: random.Random) -> Iterator[float]:
        if self.due_s is not None:
            yield from self.due_s
            return
        due = rng.expovariate(self.rate_rps)
        while due < seconds:
            yield due
            due += rng.expovariate(self.rate_rps)

    async def _ask(
        self, http: httpx.AsyncClient, document: Document, question: str, answer: str, due_monotonic_s: float
    ) -> None:
        due_wall_s = time.time() - (time.monotonic() - due_monotonic_s)
        outcome = Outcome(due_wall_s, 0.0, False, False, None, False, "no ingress answered")
        for ingress in self.ingresses:
            try:
                response = await self._send(http, ingress, document, question)
            except httpx.TransportError as error:
                outcome = Outcome(due_wall_s, 0.0, False, False, None, False, f"{ingress}: {type(error).__name__}")
                continue
            latency_ms = (time.monotonic() - due_monotonic_s) * 1000
            epoch = response.headers.get("x-tidegate-epoch")
            fell_back = response.headers.get("x-tidegate-fallback") == "true"
            if response.status_code != 200:
                outcome = Outcome(
                    due_wall_s,
                    latency_ms,
                    False,
                    False,
                    None,
                    fell_back,
                    f"{response.status_code}: {response.text[:300]}",
                )
                break
            said = bytes_output(response, "answer")[0].decode()
            outcome = Outcome(
                due_wall_s, latency_ms, True, correct(said, answer), int(epoch) if epoch else None, fell_back
            )
            break
        self.outcomes.append(outcome)

    async def _send(self, http: httpx.AsyncClient, ingress: str, document: Document, question: str) -> httpx.Response:
        body, headers = encode_request({"image": [document.png_bytes], "question": [question.encode()]})
        return await http.post(f"{ingress}/v2/models/document-reader/infer", content=body, headers=headers)
