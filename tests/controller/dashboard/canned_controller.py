"""A process that serves the real API and the real dashboard over canned answers.

Run as a script: SCENE_FILE [KEY]. It prints its port and then serves. The scene file holds the name of what to answer now
(`calm`, `moved`, `empty`, `down`), so that a test changes the world without a restart.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn

from controller.api import create_api
from controller.auth import keys_with_admin
from controller.dashboard import mount_dashboard
from controller.llm_views import AdviceOut, ComparisonOut, IntentOut, LlmReport, SideOut, TimedOut
from controller.views import (
    Admission,
    AgentOut,
    Applied,
    DecisionOut,
    EventOut,
    LinkOut,
    PlanOut,
    ReasonOut,
    ShardOut,
    SlaOut,
    StatusOut,
    TokenIn,
    TokenOut,
)
from sla.contract import parse_contract
from sla.errors import NotFoundError, RetryableError

_WHOLE = (0, 1000)
_AGENTS = (
    ("rk3588-0f3a91", "rk3588", False),
    ("rk3588-77c2de", "rk3588", False),
    ("ascend310p-4be012", "ascend310p", False),
    ("imx93-<b>evil</b>", "imx93", False),
    ("ray-cloud-a81c", "ray", True),
)


def _agent(at: int, state: str = "live") -> AgentOut:
    name, platform, is_cloud = _AGENTS[at]
    lost = state == "lost"
    return AgentOut(
        id=name, platform=platform, evidence="measured" if is_cloud else "emulated", state=state, zone="hall-2",
        is_cloud=is_cloud, age_ms=42_000.0 if lost else 120.0 + 90 * at, cpu_saturation=None if lost else 0.18 + 0.19 * at,
        memory_budget_bytes=512 << 20, loaded_bytes=(60 + 70 * at) * 1e6, queue_depth=float(at), temperature_c=None,
        slowdown=3.0, peer_address="127.0.0.1:40001", seen_host="127.0.0.1", claimed_host="127.0.0.1",
        ingress_url=f"http://127.0.0.1:4100{at}", enrolled_at_s=1_790_000_000.0 + at, enrolled_in_ms=230.0,
        versions={"onnxruntime": "1.32"}, providers=["CPUExecutionProvider"],
        links=[LinkOut(peer=_AGENTS[(at + 1) % 5][0], rtt_ms=0.6 + at, jitter_ms=0.2, bandwidth_mbps=940, age_ms=400)],
        faults=["CANN was asked for, the CPU runs it"] if at == 2 else [],
    )  # fmt: skip


def _shard(stage: str, model: str, at: int, blocks: tuple[int, int], count: int, **axes: Any) -> ShardOut:
    return ShardOut(
        stage=stage, model=model, agent=_AGENTS[at][0], blocks=blocks, block_count=count,
        patch=axes.get("patch", _WHOLE), token=axes.get("token", _WHOLE), role=axes.get("role", "serving"),
    )  # fmt: skip


def _shards(scene: str) -> list[ShardOut]:
    third = 0 if scene == "calm" else 1
    return [
        _shard("orientation", "orientation", 1, (0, 6), 6),
        _shard("detect", "det-base", third, (0, 4), 9),
        _shard("detect", "det-base", 2, (4, 9), 9),
        _shard("recognise", "rec-base", 2, (0, 12), 12, patch=(0, 640)),
        _shard("recognise", "rec-base", 4, (0, 12), 12, patch=(640, 1000)),
        _shard("embed", "minilm-int8", 4, (0, 1), 1),
        _shard("orientation", "orientation", 4, (0, 6), 6, role="fallback"),
        _shard("detect", "det-base", 4, (0, 9), 9, role="fallback"),
        _shard("recognise", "rec-base", 1, (0, 12), 12, role="fallback"),
        _shard("recognise", "rec-base", 3, (0, 12), 12, role="fallback"),
        _shard("embed", "minilm-int8", 2, (0, 1), 1, role="fallback"),
    ]


def _sla(scene: str, pinned: bool) -> SlaOut:
    violated = scene == "moved"
    return SlaOut(
        service_id="document-reader", version=2,
        contract={"service_id": "document-reader", "latency_p99_ms": 4000.0, "throughput_rps": 0.8, "availability_sla": 0.99},
        state="violated" if violated else "met",
        text="p99 is 4612 ms; promised are 4000 ms." if violated else "p99 2310 of 4000 ms, 1284 requests, 2 failed.",
        requests=1284, failed=2, availability=0.9984, p50_ms=1400.0, p95_ms=2100.0, p99_ms=4612.0 if violated else 2310.0,
        offered_rps=0.7, latency_met=not violated, availability_met=True, budget_left=0.84, fell_back=3,
        running_epoch=8 if violated else 7, predicted_p99_ms=2600.0, pinned=pinned,
    )  # fmt: skip


_UNBOUND = SlaOut(
    service_id="api-payment-v2", version=1,
    contract={"service_id": "api-payment-v2", "latency_p99_ms": 150.0, "throughput_rps": 8000.0, "availability_sla": 0.9995},
    state="unbound", text="There is no service 'api-payment-v2' yet; add a model of that name, or name one in `model`.",
    requests=0, failed=0, availability=None, p50_ms=None, p95_ms=None, p99_ms=None, offered_rps=0.0, latency_met=None,
    availability_met=None, budget_left=None, fell_back=0, running_epoch=None, predicted_p99_ms=None,
)  # fmt: skip


class CannedLlm:
    """A model in the shadow, and an intent that waits for a person."""

    def report(self, service: str | None = None) -> LlmReport:
        side = SideOut(what="C2", predicted_p99_ms=2600.0, score=0.21)
        comparison = ComparisonOut(
            at_s=1_790_000_120.0, service_id="document-reader", epoch=7, mode="shadow", verdict="refused", reason="score-worse",
            solver=side, llm=side, behind=0.1, regret=0.0, acted=False, rationale="<script>alert(2)</script>", measured_p99_ms=None,
            prompt_tokens=900, output_tokens=60, cost=0.0, seconds=2.5,
        )  # fmt: skip
        return LlmReport(
            mode="shadow", model="m", policy="solver, with llm m in its shadow", response_format="plain", asked=1, won=0, agreed=0,
            refused={"score-worse": 1}, fallback={}, acted=0, win_rate=0.0, mean_behind=0.1, mean_regret=0.0, worst_regret=0.0,
            prompt_tokens=900, output_tokens=60, cost=0.0, tokens_this_hour=960, tokens_per_hour=200_000, mean_seconds=2.5,
            comparisons=[comparison],
        )  # fmt: skip

    def advices(self) -> list[AdviceOut]:
        return []

    def list_intents(self, service: str | None) -> list[IntentOut]:
        rule = TimedOut(text="run nothing on imx93-<b>evil</b>, until 18:00", from_s=1.0, until_s=2.0)
        return [
            IntentOut(
                id="ab12",
                service_id="document-reader",
                state="proposed",
                by="llm",
                said="",
                created_s=1.0,
                rules=[rule],
            )
        ]


class CannedController:
    """What the API's routes need of a controller."""

    version = "0.1.0"

    def __init__(self, scene_file: Path) -> None:
        self._file = scene_file
        self.llm = CannedLlm()
        self._pinned = False
        self._posted: list[str] = []

    @property
    def scene(self) -> str:
        scene = self._file.read_text().strip()
        if scene == "down":
            raise RetryableError("The store does not answer.")
        return scene

    async def ready(self) -> bool:
        return True

    async def status(self) -> StatusOut:
        live = 0 if self.scene == "empty" else sum(agent.state == "live" for agent in self.agents())
        return StatusOut(
            version=self.version, ready=True, leader=True, policy="solver (no LLM is configured)", cloud="local Ray, 1 agent",
            store="embedded Valkey", agents_live=live, services=1,
        )  # fmt: skip

    def agents(self) -> list[AgentOut]:
        if self.scene == "empty":
            return []
        return [_agent(at, "lost" if at == 0 and self.scene == "moved" else "live") for at in range(5)]

    def slas(self) -> list[SlaOut]:
        return [] if self.scene == "empty" else [_sla(self.scene, self._pinned), _UNBOUND]

    async def plans(self, service_id: str | None, limit: int) -> list[PlanOut]:
        if self.scene == "empty":
            return []
        moved = self.scene == "moved"
        return [
            PlanOut(
                service_id="document-reader", epoch=8 if moved else 7, running=True, trigger="agent-lost" if moved else "contract-changed",
                proposer="solver", score=0.21, predicted_p99_ms=2600.0, measured_p99_ms=2310.0, requests=400,
                decided_at_s=1_790_000_100.0, active_at_s=1_790_000_103.0, sentence="", shards=_shards(self.scene),
            )
        ]  # fmt: skip

    async def decisions(self, service_id: str | None, limit: int) -> list[DecisionOut]:
        if self.scene == "empty":
            return []
        return [
            DecisionOut(
                at_s=1_790_000_100.0, service_id="document-reader", trigger="contract-changed", proposer="solver", epoch=7,
                score=0.21, risk=0.04, sentence="Plan 7 was admitted: predicted p99 2600 ms of 4000 ms. Outcome: running.",
                reasons=[ReasonOut(code="best-score", text="the best score of 41 admissible plans (0.21)"),
                         ReasonOut(code="headroom", text="every agent keeps at least 15 % of its memory free")],
                rationale="",
            ),
            DecisionOut(
                at_s=1_790_000_131.0, service_id="document-reader", trigger="better-plan", proposer="llm", epoch=None,
                score=0.20, risk=0.04, sentence="The running plan is kept.",
                reasons=[ReasonOut(code="gain-too-small", text="a gain of 0.01 does not pay for moving 42 MB")],
                rationale="The link of A3 was jittery a minute ago <script>alert(1)</script>; I would wait.",
            ),
        ]  # fmt: skip

    def recent_events(self, limit: int) -> list[EventOut]:
        if self.scene == "empty":
            return []
        moments = (("agent-joined", "rk3588-0f3a91 enrolled in 230 ms"), ("plan-active", "plan 7 of document-reader took effect"),
                   ("link-degraded", "rk3588-0f3a91 to ascend310p-4be012: 80 ms, jitter 25 ms"))  # fmt: skip
        return [
            EventOut(at_s=1_790_000_090.0 + 7 * at, kind=kind, text=text, agent=None, service=None, epoch=None)
            for at, (kind, text) in enumerate(moments)
        ]

    async def apply_contract(self, document: bytes, version: int | None) -> Applied:
        contract = parse_contract(document)
        return Applied(service_id=contract.service_id, version=3, created=False, admission=await self.preview(document))

    async def preview(self, document: bytes) -> Admission:
        parse_contract(document)
        return Admission(
            verdict="admissible", text="admissible: predicted p99 2600 ms on 4 agents", shards=_shards("calm")
        )

    async def pin(self, service_id: str, pinned: bool) -> None:
        if service_id != "document-reader":
            raise NotFoundError(f"There is no SLA {service_id!r}.")
        self._pinned = pinned

    async def create_token(self, wanted: TokenIn) -> TokenOut:
        command = "tidegate agent join tidegate://127.0.0.1:7443 --token tgj_abc --ca-fingerprint " + "ab" * 32
        return TokenOut(
            token="tgj_abc", ca_fingerprint="ab" * 32, controller="tidegate://127.0.0.1:7443", command=command,
            expires_at_s=time.time() + wanted.ttl_s, uses=wanted.uses,
        )  # fmt: skip


def main() -> None:
    key = sys.argv[2] if len(sys.argv) > 2 else None
    listener = socket.create_server(("127.0.0.1", 0))  # Listens already: whoever comes early waits and is not refused.
    port = listener.getsockname()[1]
    app = create_api(CannedController(Path(sys.argv[1])), keys_with_admin(key) if key else None)  # type: ignore[arg-type]
    mount_dashboard(app, api_url=f"http://127.0.0.1:{port}", key=key, ca_pem="")
    print(json.dumps({"port": port}), flush=True)
    asyncio.run(
        uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)).serve(sockets=[listener])
    )


if __name__ == "__main__":
    main()
