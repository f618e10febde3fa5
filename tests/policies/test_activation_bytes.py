"""What shards send each other in fewer bits: everybody who prices a cut counts those bytes, and the time to convert."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from policies.binding import where_time_goes
from policies.costs import ProfileSums
from policies.ids import AgentId, ModelName, StageName
from policies.layouts import Terrain, chains_of
from policies.objectives import work_of
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.predict import Predictor
from policies.service import ActivationFormat, ModelProfile, OnnxStage
from policies.snapshot import Snapshot
from tests.policies.conftest import READER, SPEC, make_model, make_snapshot, onnx_stage

PLAIN_BYTES, HALF_BYTES, QUARTER_BYTES = 400_000, 200_000, 104_000
FIRST, SECOND = AgentId("rk-1"), AgentId("cloud")


def _model() -> ModelProfile:
    model = make_model("vit", 40.0, 1_000_000, PLAIN_BYTES, 600_000, blocks=4)
    packed = {"cut_bytes_as": {"fp16": HALF_BYTES, "int8": QUARTER_BYTES}}
    return msgspec.structs.replace(model, blocks=tuple(msgspec.structs.replace(b, **packed) for b in model.blocks))


def _stage(how: ActivationFormat) -> OnnxStage:
    return msgspec.structs.replace(onnx_stage("see", "vit"), activations=how)


def _snapshot(how: ActivationFormat) -> Snapshot:
    model = _model()
    spec = msgspec.structs.replace(SPEC, stages=(_stage(how),))
    return make_snapshot(spec=spec, models={model.name: model}, entry=FIRST)


def _plan() -> Plan:
    hops = ((FIRST, Span(0, 2)), (SECOND, Span(2, 4)))
    lane = make_lane(StageName("see"), ModelName("vit"), None, WHOLE_AXIS, hops)
    stage = StagePlan(stage=StageName("see"), model=ModelName("vit"), axis=None, lanes=(lane,))
    return Plan(service_id=READER, epoch=1, stages=(stage,))


def test_only_cuts_inside_a_model_shrink():
    sums = ProfileSums.of(_model())
    assert [sums.bytes_before(2, how) for how in ("fp32", "fp16", "int8")] == [PLAIN_BYTES, HALF_BYTES, QUARTER_BYTES]
    for end in (0, 4):
        assert sums.bytes_before(end, "int8") == sums.bytes_before(end)
        assert sums.convert_ms(end, "int8") == 0.0
    assert sums.convert_ms(2, "fp32") == 0.0
    assert sums.convert_ms(2, "fp16") > sums.convert_ms(2, "int8") > 0.0


def test_a_profile_that_notes_nothing_is_not_believed_to_shrink():
    sums = ProfileSums.of(make_model("old", 40.0, 1_000_000, PLAIN_BYTES, 600_000))
    assert sums.bytes_before(2, "int8") == PLAIN_BYTES


@pytest.mark.parametrize(("how", "size"), [("fp16", HALF_BYTES), ("int8", QUARTER_BYTES)])
def test_prediction_solver_and_explanation_count_the_bytes_that_travel(how: ActivationFormat, size: int):
    plain, packed = (Predictor(_snapshot(each), READER) for each in ("fp32", how))
    link = plain.costs.link(FIRST, SECOND)
    sums = plain.costs.sums(ModelName("vit"))
    saved_ms = 1000.0 * (PLAIN_BYTES - size) / link.bandwidth_bytes_per_s - sums.convert_ms(2, how)
    assert saved_ms > 5.0
    # The prediction; the rest of the difference is less waiting for the link.
    gained_ms = plain.predict(_plan()).mean_ms - packed.predict(_plan()).mean_ms
    assert saved_ms - 0.5 <= gained_ms <= saved_ms * 1.5
    # The explanation of it.
    parts = [sum(part.ms for part in where_time_goes(p, _plan())) for p in (plain, packed)]
    assert parts[0] - parts[1] == pytest.approx(saved_ms, abs=0.5)
    # The solver's layouts of two agents, and its chains of many.
    agents = [plain.costs.agents[name] for name in (FIRST, SECOND)]
    terrain = Terrain.of(plain.costs, agents, FIRST)
    tables = [chains_of(_stage(each), sums, terrain, plain.view, 1.0) for each in ("fp32", how)]
    assert tables[0] is not None
    assert tables[1] is not None
    row = int(np.flatnonzero((tables[0].head == 0) & (tables[0].tail == 1) & (tables[0].cut == 2))[0])
    assert tables[0].delay_item[row] - tables[1].delay_item[row] == pytest.approx(saved_ms)
    works = [work_of(p, _stage(each), ModelName("vit"), terrain) for p, each in ((plain, "fp32"), (packed, how))]
    assert works[0].hop[0, 1, 2] - works[1].hop[0, 1, 2] == pytest.approx(saved_ms)
    assert works[0].enter[0] == works[1].enter[0]
