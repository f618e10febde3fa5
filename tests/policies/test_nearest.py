from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from policies.fleet import AgentView
from policies.ids import AgentId, ServiceId
from policies.nearest import MAX_SOLVES, Answer, Nearest, examine
from policies.snapshot import Snapshot
from sla.contract import contract_from
from sla.errors import NotFoundError

READER = ServiceId("document-reader")
Demo = Callable[..., Snapshot]
MakeAgent = Callable[..., AgentView]


def with_changes(snapshot: Snapshot, nearest: Nearest) -> Snapshot:
    """The same world under the contract that was offered."""
    view = snapshot.services[READER]
    document: dict[str, Any] = {**view.contract.model_dump(), **nearest.changes}
    document["objectives"] = [
        o if isinstance(o, dict) else o.model_dump() for o in nearest.changes.get("objectives", document["objectives"])
    ]
    view = msgspec.structs.replace(view, contract=contract_from(document))
    return msgspec.structs.replace(snapshot, services={READER: view})


def possible(answer: Answer) -> dict[str, dict[str, Any]]:
    return {nearest.dimension: nearest.changes for nearest in answer.nearest if nearest.possible}


def test_a_contract_that_can_be_kept_is_answered_with_its_plan_and_uncertainty(demo: Demo) -> None:
    answer = examine(demo(), READER)
    assert answer.feasible
    assert answer.best is not None
    assert answer.nearest == ()
    assert answer.p99_low_ms is not None
    assert answer.p99_high_ms is not None
    assert answer.p99_low_ms < answer.best.prediction.p99_ms < answer.p99_high_ms
    assert answer.cost_per_1k is not None
    assert answer.cost_per_1k > 0


@pytest.mark.parametrize(
    ("contract", "binds", "offered"),
    [
        ({"latency_p99_ms": 300}, "latency", "latency_p99_ms"),
        ({"objectives": [{"percentile": "p50", "at_most_ms": 200}]}, "latency", "objectives"),
        ({"throughput_rps": 20}, "throughput", "throughput_rps"),
        ({"availability_sla": 0.999999}, "availability", "availability_sla"),
        ({"zones": ["nowhere"]}, "zones", "zones"),
        ({"energy_j_per_request": 0.5}, "energy", "energy_j_per_request"),
        ({"cost_per_1k_requests": 1e-5}, "cost", "cost_per_1k_requests"),
    ],
)
def test_what_is_offered_instead_would_really_be_kept(
    demo: Demo, contract: dict[str, Any], binds: str, offered: str
) -> None:
    snapshot = demo(contract=contract)
    answer = examine(snapshot, READER)
    assert binds in {binding.dimension for binding in answer.bindings}
    assert binds in possible(answer)
    assert set(possible(answer)[binds]) == {offered}
    for nearest in answer.nearest:
        if nearest.possible:
            assert examine(with_changes(snapshot, nearest), READER).feasible, nearest


def test_one_flaky_board_is_refused_for_its_availability(demo: Demo, agent: MakeAgent) -> None:
    easy = {"throughput_rps": 0.2, "latency_p99_ms": 20_000, "availability_sla": "99.95%"}
    board = agent("rk-1", "rk3588", availability=0.97)
    answer = examine(demo(agents=(board,), contract=easy), READER)
    (binding,) = answer.bindings
    assert (binding.dimension, binding.device) == ("availability", AgentId("rk-1"))
    assert "nothing else can take over" in binding.text
    assert possible(answer) == {"availability": {"availability_sla": "96%"}}
    spare = tuple(agent(f"rk-{n}", "rk3588", availability=0.99) for n in (1, 2, 3))
    assert examine(demo(agents=spare, contract=easy), READER).feasible


def test_the_bottleneck_is_named(demo: Demo) -> None:
    answer = examine(demo(contract={"throughput_rps": 20}), READER)
    binding = next(b for b in answer.bindings if b.dimension == "throughput")
    assert binding.stage
    assert binding.device in demo().fleet.agents
    assert binding.asked == 20
    slow = examine(demo(contract={"latency_p99_ms": 300}), READER).bindings[0]
    assert slow.stage or slow.link
    assert slow.text.startswith("the quickest kept plan has a p99 of")


def test_a_slow_link_is_named(demo: Demo, agent: MakeAgent) -> None:
    agents = (agent("imx", "imx93"), agent("cloud", "ray"))
    snapshot = demo(
        agents=agents, contract={"latency_p99_ms": 500, "privacy": "any", "throughput_rps": 0.01},
        cloud={"rtt_ms": 900.0}, entry=AgentId("imx"),
    )  # fmt: skip
    binding = examine(snapshot, READER).bindings[0]
    assert binding.dimension == "latency"
    assert binding.link == "imx to cloud" or binding.device == "imx"


def test_hard_limits_say_which_one(demo: Demo, agent: MakeAgent) -> None:
    def binds(answer: Answer) -> tuple[str, str | None]:
        assert answer.best is None
        return answer.bindings[0].dimension, answer.bindings[0].stage

    assert binds(examine(demo(agents=()), READER)) == ("fleet", None)
    assert binds(examine(demo(agents=(agent("cloud", "ray"),)), READER)) == ("privacy", "detect")
    tiny = agent("imx", "imx93", memory_budget_bytes=20 << 20)
    assert binds(examine(demo(agents=(tiny,)), READER)) == ("memory", "embed")
    cloud = demo(agents=(agent("cloud", "ray"),), contract={"privacy": "raw-stays-on-edge"})
    assert binds(examine(cloud, READER)) == ("privacy", None)
    assert possible(examine(cloud, READER))["privacy"] == {"privacy": "any"}


def test_the_nearest_accuracy_is_the_highest_that_helps(demo: Demo, model: Callable[..., Any]) -> None:
    snapshot = demo()
    models = {n: msgspec.structs.replace(m, accuracy=min(m.accuracy, 0.98)) for n, m in snapshot.models.items()}
    asked = demo(models=models, contract={"accuracy_floor": 0.999})
    answer = examine(asked, READER)
    assert answer.bindings[0].dimension == "accuracy"
    assert answer.bindings[0].stage is not None
    assert possible(answer)["accuracy"] == {"accuracy_floor": pytest.approx(0.98**4, abs=1e-4)}


def test_where_one_dimension_is_not_enough_several_are_offered_together(demo: Demo) -> None:
    snapshot = demo(contract={"throughput_rps": 20, "latency_p99_ms": 300})
    answer = examine(snapshot, READER)
    assert possible(answer) == {}
    assert answer.together is not None
    assert set(answer.together.changes) == {"throughput_rps", "latency_p99_ms"}
    assert examine(with_changes(snapshot, answer.together), READER).feasible


def test_the_number_of_solver_runs_is_bounded(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    import policies.nearest as nearest

    runs = 0
    real = nearest.candidates

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal runs
        runs += 1
        return real(*args, **named)

    monkeypatch.setattr(nearest, "candidates", counted)
    everything = {
        "latency_p99_ms": 100, "throughput_rps": 50, "availability_sla": 0.999999, "accuracy_floor": 1.0, "zones": ["default"],
        "privacy": "raw-stays-on-edge", "energy_j_per_request": 0.1, "cost_per_1k_requests": 1e-6,
    }  # fmt: skip
    examine(demo(contract=everything), READER)
    assert 0 < runs <= MAX_SOLVES


def test_an_unknown_service_is_not_found(demo: Demo) -> None:
    with pytest.raises(NotFoundError):
        examine(demo(), ServiceId("nobody"))


def test_risk_counts_the_tightest_promise_about_times(demo: Demo) -> None:
    def risk(**contract: Any) -> float:
        best = examine(demo(contract=contract), READER).best
        assert best is not None
        return best.prediction.risk

    loose, tight = risk(), risk(objectives=[{"percentile": "p50", "at_most_ms": 700}])
    assert tight > loose


def test_a_flaky_link_is_named(demo: Demo, agent: MakeAgent) -> None:
    agents = (
        agent("imx", "imx93", availability=0.99999, memory_budget_bytes=26 << 20),
        agent("cloud", "ray", availability=0.99999),
    )
    snapshot = demo(
        agents=agents, cloud={"availability": 0.9}, entry=AgentId("imx"),
        contract={"privacy": "any", "throughput_rps": 0.2, "latency_p99_ms": 5_000, "availability_sla": "99.9%"},
    )  # fmt: skip
    answer = examine(snapshot, READER)
    binding = next(b for b in answer.bindings if b.dimension == "availability")
    assert binding.link == "cloud to imx"
    assert "works 90 % of the time" in binding.text
