"""Variants of a model as a knob: taken when they are needed and allowed, refused below the accuracy floor, whoever proposes them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from policies.admit import admit
from policies.decision import Proposal
from policies.ids import AgentId, ModelName, ServiceId
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.service import ModelProfile, OnnxStage, ServiceSpec
from policies.snapshot import Snapshot
from policies.solve import candidates
from sla.errors import InfeasibleError

READER = ServiceId("document-reader")
Make = Callable[..., Snapshot]


@pytest.fixture
def make(demo: Make, model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage]) -> Make:
    """One model that takes 80 ms on the reference core, and its int8 variant that takes half of that with 0.97 of its accuracy."""
    base = model("net", 80.0, 40 << 20, 10_000, 10_000)
    int8 = model("net.int8", 40.0, 20 << 20, 10_000, 10_000, accuracy=0.97)
    models = {profile.name: profile for profile in (base, int8)}

    def made(floor: float, latency_p99_ms: float = 4000, **stage_changes: object) -> Snapshot:
        only = msgspec.structs.replace(stage("model", "net", "net.int8"), **stage_changes)
        spec = ServiceSpec(id=READER, inputs=(), outputs=(), stages=(only,))
        contract = {"accuracy_floor": floor, "latency_p99_ms": latency_p99_ms, "throughput_rps": 1.0}
        return demo(models=models, spec=spec, contract=contract)

    return made


def running(model: str) -> Plan:
    lane = make_lane("model", model, None, WHOLE_AXIS, ((AgentId("cloud"), Span(0, 8)),))  # type: ignore[arg-type]
    stage = StagePlan(stage=lane.shards[0].stage, model=ModelName(model), axis=None, lanes=(lane,))
    return Plan(service_id=READER, epoch=0, stages=(stage,))


def test_the_gate_refuses_a_variant_below_the_floor_whoever_proposes_it(make: Make) -> None:
    proposal = Proposal(plan=running("net.int8"), proposer="llm", trigger="better-plan")
    refused = admit(proposal, make(floor=0.98))
    assert refused.plan is None
    assert [reason.code for reason in refused.reasons] == ["accuracy"]
    assert "0.97, below the floor 0.98" in refused.reasons[0].text
    assert admit(proposal, make(floor=0.97)).plan is not None


def models_of(snapshot: Snapshot) -> list[str]:
    return [entry.plan.stages[0].model for entry in candidates(snapshot, READER)]


def test_the_solver_takes_the_variant_when_it_is_allowed_and_needed(make: Make) -> None:
    """The quickest way with the whole model takes about 110 ms at p99."""
    hurry = 80
    assert models_of(make(floor=0.9, latency_p99_ms=hurry))[0] == "net.int8"
    assert set(models_of(make(floor=0.98, latency_p99_ms=hurry))) == {"net"}
    assert models_of(make(floor=0.9, latency_p99_ms=60_000))[0] == "net"


def test_what_activations_cost_counts_against_the_floor(make: Make) -> None:
    coarse = {"activations": "int8", "kept_accuracy": {ModelName("net"): 0.99, ModelName("net.int8"): 0.99}}
    entry = candidates(make(floor=0.9, **coarse), READER)[0]
    assert entry.prediction.accuracy == pytest.approx(0.99)
    assert set(models_of(make(floor=0.97, **coarse))) == {"net"}
    proposal = Proposal(plan=running("net.int8"), proposer="llm", trigger="better-plan")
    assert admit(proposal, make(floor=0.97, **coarse)).plan is None
    with pytest.raises(InfeasibleError, match=r"0\.995 is above 0\.99"):
        candidates(make(floor=0.995, **coarse), READER)
