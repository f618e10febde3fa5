"""The simulator: the same seed gives the same day, and it knows what a queue and a loss are."""

from __future__ import annotations

from typing import Any

import pytest

from policies.scenario import Scenario, scenario_from, world_of
from policies.simulate import SimulationSettings
from policies.simulate_choosers import CHOOSERS, simulate_policy
from policies.simulate_results import Result
from sla.errors import InvalidInputError

DOCUMENT: dict[str, Any] = {
    "name": "small",
    "seconds": 120,
    "devices": [{"name": "edge", "platform": "x86"}, {"name": "cloud", "platform": "ray"}],
    "stages": [{"name": "s", "ms_per_item": 40.0, "input_kb": 20.0, "cut_kb": 20.0}],
    "contract": {"latency_p99_ms": 300, "throughput_rps": 2.0, "availability_sla": "99%"},
    "load": {"rps": 2.0},
    "lan": {"rtt_ms": 1.0, "jitter_ms": 0.1, "mbit_per_s": 800},
    "uplink": {"rtt_ms": 20.0, "jitter_ms": 2.0, "mbit_per_s": 50},
}


def scenario(**changes: Any) -> Scenario:
    return scenario_from({**DOCUMENT, **changes})


def played(name: str, seed: int = 1, **changes: Any) -> Result:
    return simulate_policy(name, world_of(scenario(**changes), seed), seed, SimulationSettings(look_every_s=5.0))


def test_the_same_seed_gives_the_same_result() -> None:
    assert played("solver") == played("solver")
    assert played("static", 1) != played("static", 2)


def test_an_idle_site_keeps_its_promise() -> None:
    result = played("solver")
    assert result.violation_minutes == 0
    assert result.failed == 0
    assert result.requests == pytest.approx(240, rel=0.3)
    assert 30 < result.p50_ms < 80


@pytest.mark.parametrize("name", list(CHOOSERS))
def test_every_policy_plays(name: str) -> None:
    result = played(name, seconds=40)
    assert result.requests > 0
    assert result.plans


def test_a_queue_grows_beyond_what_is_carried() -> None:
    """40 ms each at 40 requests/s on a policy that uses one device only."""
    late = played("edge-only", load={"rps": 40.0}, seconds=60)
    assert late.p99_ms > 1000
    assert late.violation_minutes == 1


def test_the_loss_of_a_device_is_survived() -> None:
    loss = [
        {"at_s": 30, "for_s": 90, "agent": "cloud", "kind": "lost"},
        {"at_s": 10, "for_s": 15, "agent": "edge", "kind": "slow"},
    ]
    result = played("solver", troubles=loss)
    assert "cloud" not in result.plans[-1].agents()
    assert result.failed <= 5


def test_an_outage_of_the_uplink_is_not_a_lost_device() -> None:
    result = played(
        "cloud-only", uplink={"rtt_ms": 20.0, "jitter_ms": 2.0, "mbit_per_s": 50, "outages_per_hour": 120.0}
    )
    assert result.p99_ms > 300
    assert result.violation_minutes > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seconds": 1}, "seconds must be"),
        ({"devices": [{"name": "a", "platform": "abacus"}]}, "abacus"),
        ({"troubles": [{"at_s": 1, "for_s": 1, "agent": "nobody", "kind": "lost"}]}, "nobody"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_scenario_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        scenario(**changes)


def test_an_ingress_that_hedges_keeps_the_promise_while_a_device_throttles() -> None:
    """The plan that never moves, with and without: the device becomes six times slower for half a minute."""
    trouble = {"at_s": 60, "for_s": 30, "agent": "edge", "kind": "slow", "factor": 6.0}
    planned, hedged = (played(name, seconds=150, troubles=[trouble]) for name in ("static", "static-hedged"))
    late = [sum(minute.late + minute.failed for minute in result.minutes) for result in (planned, hedged)]
    assert late[0] > 20
    assert late[1] <= 1
    assert planned.requests == hedged.requests


def test_hedging_costs_nothing_where_nothing_is_late() -> None:
    planned, hedged = played("static"), played("static-hedged")
    assert hedged.p99_ms <= planned.p99_ms * 1.01
    assert hedged.energy_j <= planned.energy_j * 1.05


def test_an_overload_is_not_answered_with_more_work() -> None:
    """Two and a half times what both devices carry: copies stay within their budget."""
    planned, hedged = (played(name, load={"rps": 60.0}, seconds=40) for name in ("static", "static-hedged"))
    assert hedged.energy_j * hedged.requests <= 1.6 * planned.energy_j * planned.requests
    assert hedged.failed <= planned.failed
