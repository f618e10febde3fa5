from __future__ import annotations

from collections.abc import Callable

import pytest

from policies.admit import admit
from policies.baselines import BASELINES
from policies.decide import Memory
from policies.fleet import AgentView
from policies.ids import ServiceId
from policies.plan import Plan, cover_faults
from policies.snapshot import Snapshot
from policies.solve import candidates

READER = ServiceId("document-reader")
Demo = Callable[..., Snapshot]


def choose(name: str, snapshot: Snapshot) -> Plan | None:
    proposal, _ = BASELINES[name](snapshot, READER, candidates(snapshot, READER), Memory())
    return None if proposal is None else proposal.plan


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_makes_a_legal_plan_that_the_solver_beats(demo: Demo, name: str) -> None:
    snapshot = demo()
    best = candidates(snapshot, READER)[0]
    proposal, _ = BASELINES[name](snapshot, READER, [best], Memory())
    assert proposal is not None
    assert cover_faults(proposal.plan, snapshot.services[READER].spec, snapshot.models) == []
    decision = admit(proposal, snapshot, READER, best=best, tolerance=1.0)
    assert decision.plan is not None
    assert decision.score is not None
    assert decision.score >= best.score - 0.01


def test_static_never_moves(demo: Demo) -> None:
    first = choose("static", demo())
    assert choose("static", demo(running=first)) is None


def test_edge_only_and_cloud_only_mean_it(demo: Demo) -> None:
    edge, cloud = choose("edge-only", demo()), choose("cloud-only", demo(contract={"privacy": "any"}))
    assert edge is not None
    assert cloud is not None
    assert edge.agents() == {"ascend"}
    assert cloud.agents() == {"cloud"}
    private = choose("cloud-only", demo())
    assert private is not None
    assert {s.agent for s in private.shards() if s.stage in ("detect", "recognise")} == {"ascend"}


def test_memory_proportional_follows_memory(demo: Demo) -> None:
    plan = choose("memory-proportional", demo(contract={"privacy": "any"}))
    assert plan is not None
    blocks = {s.agent: len(s.blocks) for s in plan.shards() if s.stage == "recognise"}
    assert blocks["cloud"] == max(blocks.values())


def test_latency_greedy_goes_where_the_next_request_is_quickest(demo: Demo, agent: Callable[..., AgentView]) -> None:
    near = choose(
        "latency-greedy", demo(contract={"privacy": "any"}, cloud={"rtt_ms": 2.0, "bandwidth_bytes_per_s": 1e9})
    )
    far = choose("latency-greedy", demo(contract={"privacy": "any"}, cloud={"rtt_ms": 900.0}))
    assert near is not None
    assert far is not None
    assert near.agents() == {"cloud"}
    assert "cloud" not in far.agents()
