"""Generated decisions with a known best, in five kinds; where the best one stands in the prompt is balanced by the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from policies.fleet import AgentView, Fleet, LinkView, link_key
from policies.ids import AgentId, BlobHash, ModelName, ServiceId, StageName
from policies.llm import Question, ask, meets
from policies.llm_judge import Judged
from policies.service import BlockProfile, ModelProfile, OnnxStage, ServiceSpec
from policies.snapshot import ServiceView, Snapshot
from policies.solve import candidates
from sla.contract import contract_from
from sla.errors import InfeasibleError

Kind = Literal["obvious", "trade-off", "stale", "infeasible", "intent"]
KINDS: tuple[Kind, ...] = get_args(Kind)
POSITIONS = 4
SERVICE = ServiceId("scenario")
TOLERANCE = 0.02


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One decision."""

    kind: Kind
    snapshot: Snapshot
    service: ServiceId
    seed: int
    avoided: AgentId | None = None
    """What the operator's intent wants to avoid."""


def scenarios(count: int) -> Iterator[Scenario]:
    """`count` decisions, the kinds in turn; the same ones at every call."""
    made, number = 0, 0
    while made < count:
        number += 1
        scenario = _scenario(KINDS[made % len(KINDS)], random.Random(number))
        placed = None if scenario is None else _at(scenario, made // len(KINDS) % POSITIONS)
        if placed is not None:
            made += 1
            yield placed


def is_right(scenario: Scenario, question: Question, judged: Judged) -> bool:
    """Whether an answer is what a careful operator would have chosen."""
    if judged.plan is None or judged.score is None:
        return False
    if scenario.kind == "intent" and scenario.avoided is not None:
        return scenario.avoided not in judged.plan.agents() and judged.score <= question.best.score + 0.1
    if scenario.kind == "infeasible":
        return judged.score <= question.best.score + TOLERANCE
    assert judged.prediction is not None
    contract = scenario.snapshot.services[SERVICE].contract
    best_meets = meets(question.best.prediction, contract, contract.throughput_rps)
    return judged.score <= question.best.score + TOLERANCE and (
        not best_meets or meets(judged.prediction, contract, contract.throughput_rps)
    )


def _at(scenario: Scenario, position: int) -> Scenario | None:
    """The scenario with a seed under which the solver's plan stands at this position; None if there is nothing to choose."""
    for seed in range(64):
        question = ask(scenario.snapshot, SERVICE, seed=seed)
        if question is None or len(question.options) < 2:
            return None
        wanted = min(position, len(question.options) - 1)
        if list(question.options.values())[wanted].plan.layout() == question.best.plan.layout():
            return msgspec.structs.replace(scenario, seed=seed)
    return None


def _scenario(kind: Kind, chance: random.Random) -> Scenario | None:
    agents = {}
    for at in range(chance.randint(3, 5)):
        slow = chance.uniform(1.0, 4.0) * (3.0 if kind == "obvious" and at else 1.0)
        age_ms = 20_000.0 if kind == "stale" and at == 0 else chance.uniform(50.0, 900.0)
        name = AgentId(f"device-{at}")
        agents[name] = AgentView(
            id=name, platform="rk3588", evidence="emulated", slowdown=1.0 if kind == "stale" and at == 0 else slow, age_ms=age_ms,
            zone=f"site-{at % 2}", cpu_saturation=chance.uniform(0.0, 0.4),
        )  # fmt: skip
    links = {
        link_key(a, b): LinkView(src=a, dst=b, rtt_ms=chance.uniform(0.5, 12.0), jitter_ms=chance.uniform(0.05, 4.0))
        for a in agents for b in agents if a != b
    }  # fmt: skip
    stages = tuple(
        OnnxStage(name=StageName(f"stage-{at}"), variants=(ModelName(f"model-{at}"),), inputs={"x": f"x{at}"}, outputs={"y": f"y{at}"})
        for at in range(chance.randint(1, 3))
    )  # fmt: skip
    models = {stage.variants[0]: _model(stage.variants[0], chance) for stage in stages}
    work_ms = sum(block.fixed_ms for model in models.values() for block in model.blocks)
    generous = {"obvious": 12.0, "trade-off": 5.0, "stale": 10.0, "infeasible": 0.5, "intent": 25.0}[kind]
    contract = contract_from(
        {
            "service_id": SERVICE,
            "latency_p99_ms": round(work_ms * generous, 1),
            "throughput_rps": 2.0,
            "availability_sla": 0.99,
        }
    )
    spec = ServiceSpec(id=SERVICE, inputs=(), outputs=(), stages=stages)
    view = ServiceView(spec=spec, contract=contract, entry=AgentId("device-1"))
    snapshot = Snapshot(now_ms=0.0, fleet=Fleet(agents=agents, links=links), models=models, services={SERVICE: view})
    if kind != "intent":
        return Scenario(kind=kind, snapshot=snapshot, service=SERVICE, seed=0)
    try:
        best = candidates(snapshot, SERVICE, 1)[0]
    except InfeasibleError:
        return None
    avoided = sorted(best.plan.agents())[0]
    text = f"{avoided} is flaky today, run nothing on it; cost does not matter"
    view = msgspec.structs.replace(view, contract=contract.model_copy(update={"intent": text}))
    snapshot = msgspec.structs.replace(snapshot, services={SERVICE: view})
    return Scenario(kind=kind, snapshot=snapshot, service=SERVICE, seed=0, avoided=avoided)


def _model(name: ModelName, chance: random.Random) -> ModelProfile:
    blocks = tuple(
        BlockProfile(name=f"b{at}", fixed_ms=chance.uniform(2.0, 12.0), per_item_ms=0.0, param_bytes=2_000_000, cut_bytes_per_item=100_000)
        for at in range(4)
    )  # fmt: skip
    return ModelProfile(name=name, sha256=BlobHash("0" * 64), blocks=blocks, input_bytes_per_item=300_000)
