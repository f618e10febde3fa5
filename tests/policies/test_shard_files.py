"""A model that is larger than one file may be is never planned as one shard, nor given a fallback that must hold all of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.admit import admit
from policies.baselines import BASELINES
from policies.costs import ProfileSums
from policies.decide import Memory
from policies.decision import Proposal
from policies.fallbacks import in_files
from policies.ids import AgentId, ModelName, ServiceId
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.predict import Predictor
from policies.service import ModelProfile, OnnxStage, ServiceSpec
from policies.snapshot import Snapshot
from policies.solve import candidates

READER = ServiceId("document-reader")
BLOCK_BYTES = 10 << 20


@pytest.fixture
def large(
    demo: Callable[..., Snapshot], model: Callable[..., ModelProfile], stage: Callable[..., OnnxStage]
) -> Snapshot:
    """A service of one model with eight blocks, of which a file holds three."""
    profile = msgspec.structs.replace(
        model("large", 80.0, 8 * BLOCK_BYTES, 10_000, 10_000), shard_limit_bytes=3 * BLOCK_BYTES
    )
    spec = ServiceSpec(id=READER, inputs=(), outputs=(), stages=(stage("model", "large"),))
    return demo(models={profile.name: profile}, spec=spec)


def spans_of(plan: Plan) -> list[Span]:
    return [shard.blocks for shard in plan.shards()]


def test_the_solver_cuts_it_and_gives_it_no_fallback(large: Snapshot) -> None:
    found = candidates(large, READER)
    for entry in found:
        assert all(len(span) <= 3 for span in spans_of(entry.plan))
        assert all(stage.fallback == () for stage in entry.plan.stages)
        assert admit(Proposal(plan=entry.plan, proposer="solver", trigger="start"), large, best=entry).plan is not None
    # Several shards one after the other on one device are a legal answer, and are loaded together.
    assert any(len(entry.plan.agents()) == 1 for entry in found)


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "static"])
def test_so_do_the_baselines(large: Snapshot, name: str) -> None:
    proposal, _ = BASELINES[name](large, READER, [], Memory())
    assert proposal is not None
    assert all(len(span) <= 3 for span in spans_of(proposal.plan))


def placed(*hops: tuple[str, int, int], fallback: tuple[str, ...] = ()) -> Plan:
    lane = make_lane("model", "large", None, WHOLE_AXIS, tuple((AgentId(a), Span(lo, hi)) for a, lo, hi in hops))  # type: ignore[arg-type]
    stage = StagePlan(
        stage=lane.shards[0].stage, model=ModelName("large"), axis=None, lanes=(lane,),
        fallback=tuple(AgentId(a) for a in fallback),
    )  # fmt: skip
    return Plan(service_id=READER, epoch=0, stages=(stage,))


@pytest.mark.parametrize(
    ("plan", "agent"),
    [
        (placed(("cloud", 0, 8)), "cloud"),
        (placed(("ascend", 0, 3), ("cloud", 3, 8)), "cloud"),
        (placed(("ascend", 0, 3), ("ascend", 3, 6), ("cloud", 6, 8), fallback=("rk-1",)), "rk-1"),
    ],
)
def test_the_gate_refuses_a_shard_or_a_fallback_that_no_file_holds(large: Snapshot, plan: Plan, agent: str) -> None:
    decision = admit(Proposal(plan=plan, proposer="llm", trigger="better-plan"), large)
    assert decision.plan is None
    assert [(reason.code, reason.agent) for reason in decision.reasons] == [("shard-size", agent)]
    assert "one shard may have 31.46" in decision.reasons[0].text


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=12), limit=st.integers(0, 250), cut=st.integers(0, 11))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_runs_of_blocks_cover_a_span_and_fit(
    model: Callable[..., ModelProfile], sizes: list[int], limit: int, cut: int
) -> None:  # fmt: skip
    base = model("any", 1.0, 8, 8, 8, blocks=len(sizes))
    blocks = tuple(msgspec.structs.replace(b, file_bytes=s) for b, s in zip(base.blocks, sizes, strict=True))
    sums = ProfileSums.of(msgspec.structs.replace(base, blocks=blocks, shard_limit_bytes=limit))
    span = Span(min(cut, len(sizes) - 1), len(sizes))
    runs = sums.files(span)
    assert (runs[0].start, runs[-1].stop) == (span.start, span.stop)
    assert all(a.stop == b.start for a, b in itertools.pairwise(runs))
    assert all(len(run) == 1 or sums.fits_one_file(run) for run in runs)
    if limit == 0:
        assert runs == (span,)


def test_a_plan_of_models_that_fit_stays_as_it_is(demo: Callable[..., Snapshot]) -> None:
    snapshot = demo()
    plan = candidates(snapshot, READER)[0].plan
    assert in_files(Predictor(snapshot, READER).costs, plan) == plan
