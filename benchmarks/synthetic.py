"""Made-up fleets and services of any size, the same for the same numbers."""

from __future__ import annotations

import numpy as np

from policies.fleet import AgentView, Fleet, LinkView, link_key
from policies.ids import AgentId, BlobHash, ModelName, ServiceId, StageName
from policies.service import BlockProfile, ModelProfile, OnnxStage, ServiceSpec
from policies.snapshot import ServiceView, Snapshot
from sla.contract import contract_from

_LINKED = 24
"""Links are measured only between the first so many agents; the others are priced by the cautious guess."""


def fleet_snapshot(*, devices: int, blocks: int, services: int, seed: int = 1) -> Snapshot:
    """Devices of mixed speed with one cloud agent among eight, and services of one model each."""
    rng = np.random.default_rng(seed)
    agents = {a.id: a for a in (_agent(at, rng) for at in range(devices))}
    names = list(agents)[:_LINKED]
    links = {
        link_key(a, b): LinkView(
            src=a, dst=b, rtt_ms=float(rng.uniform(0.5, 3.0)), bandwidth_bytes_per_s=float(rng.uniform(20e6, 120e6))
        )
        for a in names for b in names if a != b
    }  # fmt: skip
    edge = [a.id for a in agents.values() if not a.is_cloud]
    models, views = {}, {}
    for number in range(services):
        model = _model(f"m{number}", blocks, rng)
        models[model.name] = model
        service = ServiceId(f"s{number}")
        stage = OnnxStage(name=StageName("s"), variants=(model.name,), inputs={"x": "in"}, outputs={"y": "out"})
        contract = {"service_id": service, "latency_p99_ms": 800, "throughput_rps": 2.0, "availability_sla": "99%"}
        spec = ServiceSpec(id=service, inputs=(), outputs=(), stages=(stage,))
        views[service] = ServiceView(
            spec=spec, contract=contract_from(contract), entry=edge[number * len(edge) // services]
        )
    return Snapshot(now_ms=0.0, fleet=Fleet(agents=agents, links=links), models=models, services=views)


def _agent(at: int, rng: np.random.Generator) -> AgentView:
    cloud = at % 8 == 7
    return AgentView(
        id=AgentId(f"a{at:05d}"), platform="ray" if cloud else "rk3588", evidence="emulated", is_cloud=cloud,
        slowdown=1.0 if cloud else float(rng.uniform(1.5, 5.0)), memory_budget_bytes=512 << 20,
        cpu_saturation=float(rng.uniform(0.0, 0.2)), zone=f"z{at // 50}",
    )  # fmt: skip


def _model(name: str, blocks: int, rng: np.random.Generator) -> ModelProfile:
    return ModelProfile(
        name=ModelName(name), sha256=BlobHash("0" * 64), input_bytes_per_item=300_000,
        blocks=tuple(
            BlockProfile(
                name=f"b{at}", fixed_ms=float(rng.uniform(0.5, 3.0)) * 24 / blocks, per_item_ms=0.0,
                param_bytes=int(rng.uniform(0.5e6, 2e6)), cut_bytes_per_item=int(rng.uniform(2e4, 4e5)),
            )
            for at in range(blocks)
        ),
    )  # fmt: skip
