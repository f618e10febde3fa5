"""What a route says about times is what the prediction of its plan is made of."""

from __future__ import annotations

import msgspec
import pytest

from policies.expected_times import expected_times
from policies.ids import AgentId, ModelName, StageName
from policies.plan import Plan, Span, StagePlan, make_lane
from policies.predict import Predictor
from policies.route_times import RouteTimes
from sla.errors import NotFoundError
from tests.policies.conftest import READER, make_snapshot

RK1, RK2, ASCEND, CLOUD = (AgentId(name) for name in ("rk-1", "rk-2", "ascend", "cloud"))


def plan_of(recognise: tuple[tuple[Span, AgentId], ...], fallback: tuple[AgentId, ...] = ()) -> Plan:
    def on(stage: str, model: str, agent: AgentId, blocks: int) -> StagePlan:
        lane = make_lane(StageName(stage), ModelName(model), None, Span(0, 1000), ((agent, Span(0, blocks)),))
        return StagePlan(stage=StageName(stage), model=ModelName(model), axis=None, lanes=(lane,), fallback=fallback)

    stage, model = StageName("recognise"), ModelName("rec-base")
    lanes = tuple(make_lane(stage, model, "patch", share, ((agent, Span(0, 8)),)) for share, agent in recognise)
    return Plan(
        service_id=READER, epoch=1,
        stages=(
            on("orientation", "orientation", RK1, 4), on("detect", "det-base", RK1, 8),
            StagePlan(stage=stage, model=model, axis="patch", lanes=lanes, fallback=fallback),
            on("embed", "minilm-int8", RK2, 6),
        ),
    )  # fmt: skip


def test_ways_stages_and_the_rest_add_up_to_the_prediction_of_an_idle_fleet() -> None:
    snapshot = make_snapshot(offered_rps=0.001)
    plan = plan_of(((Span(0, 500), RK2), (Span(500, 1000), ASCEND)), fallback=(ASCEND, CLOUD))
    predictor = Predictor(snapshot, READER, rate_rps=0.0001)
    times = expected_times(predictor, plan)
    first = times.stages[StageName("orientation")]
    assert times.promise_ms == 4000
    (lane,) = first.lanes
    own_ms = lane.travel_ms(1.0) + sum(shard.run_ms(1.0) for shard in lane.shards)
    prepare_ms = 15.0
    assert prepare_ms + own_ms + first.rest_ms == pytest.approx(predictor.predict(plan).mean_ms, rel=0.05)
    assert times.stages[StageName("embed")].rest_ms == pytest.approx(1.0)


def test_a_lane_of_a_split_stage_counts_its_items_and_a_whole_stage_counts_one() -> None:
    snapshot = make_snapshot()
    predictor = Predictor(snapshot, READER)
    times = expected_times(predictor, plan_of(((Span(0, 500), RK2), (Span(500, 1000), ASCEND)), fallback=(CLOUD,)))
    recognise, detect = times.stages[StageName("recognise")], times.stages[StageName("detect")]
    for items in (1.0, 3.5, 7.0):
        asked_ms = predictor.costs.run_ms(StageName("recognise"), ModelName("rec-base"), RK2, Span(0, 8), items)
        assert recognise.lanes[0].shards[0].run_ms(items) == pytest.approx(asked_ms)
    whole_ms = predictor.costs.run_ms(StageName("detect"), ModelName("det-base"), CLOUD, Span(0, 8), 1.0)
    assert detect.fallbacks[CLOUD].shards[0].run_ms(1.0) == pytest.approx(whole_ms)
    assert detect.fallbacks[CLOUD].travel_ms(1.0) > 8.0


def test_times_travel_with_a_route() -> None:
    times = expected_times(Predictor(make_snapshot(), READER), plan_of(((Span(0, 1000), RK2),), fallback=(CLOUD,)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(times), type=RouteTimes) == times


def test_a_plan_on_an_agent_that_is_gone_has_no_times() -> None:
    predictor = Predictor(make_snapshot(), READER)
    with pytest.raises(NotFoundError):
        expected_times(predictor, plan_of(((Span(0, 1000), AgentId("gone")),)))
