"""A vision-language model over three devices on all three axes: tiles, questions and cross-attention blocks, equal to the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.messages import Prepare, Route, ShardFile, file_key
from agents.routes import files_for
from benchmarks.vlm import VOCABULARY, VlmModels, build_vlm
from controller.models.registry import ModelRegistry
from controller.models.sessions import open_session, run
from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.plan import Plan, Span, StagePlan, cover_faults, items_of, make_lane
from policies.service import Axis, OnnxStage, ServiceSpec, TensorSpec

SERVICE = ServiceId("vlm")
NAMES = ("one", "two", "three")
TILES, QUESTIONS = 7, 4


class RegistrySource:
    """Blobs straight from the registry's disk."""

    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry

    async def fetch(self, sha256: str, offset: int, length: int) -> tuple[bytes, int]:
        path = self._registry.blob_path(sha256)
        assert path is not None
        data = path.read_bytes()
        return data[offset : offset + length], len(data)


@pytest.fixture(scope="module")
def vlm() -> VlmModels:
    return build_vlm()


@pytest.fixture(scope="module")
def registry(vlm: VlmModels, tmp_path_factory: pytest.TempPathFactory) -> ModelRegistry:
    registry = ModelRegistry(tmp_path_factory.mktemp("vlm"))
    rng = np.random.default_rng(1)
    features = {name: rng.standard_normal((2, 16, 64)).astype(np.float32) for name in ("tokens", "patches")}
    registry.add("vision", vlm.vision.SerializeToString(), axis="patch")
    registry.add("text", vlm.text.SerializeToString(), axis="token")
    registry.add("fusion", vlm.fusion.SerializeToString(), samples=features)
    return registry


def test_every_axis_is_found_where_it_holds(registry: ModelRegistry) -> None:
    assert registry.profile("vision").split_axis == "patch"
    assert registry.profile("text").split_axis == "token"
    assert registry.profile("fusion").split_axis is None
    assert [block.name for block in registry.profile("fusion").blocks] == [f"cross_attention.{n}" for n in range(6)]
    assert "vision.layer.2" in [block.name for block in registry.profile("vision").blocks]


def test_in_one_graph_cross_attention_does_not_act_item_by_item(vlm: VlmModels, tmp_path: Path) -> None:
    registry = ModelRegistry(tmp_path)
    rng = np.random.default_rng(2)
    sample = {
        "tiles": rng.standard_normal((3, 3, 32, 32)).astype(np.float32),
        "input_ids": rng.integers(0, VOCABULARY, (3, 5)),
    }
    profile = registry.add("whole", vlm.whole.SerializeToString(), axis="patch", samples=sample)
    assert profile.split_axis is None
    names = [block.name for block in profile.blocks]
    assert "cross_attention.5" in names
    assert profile.split_until == names.index("cross_attention.0")
    assert registry.proof("whole").chain_error == 0.0


def _stage(name: str, inputs: tuple[str, ...], output: str, axis: Axis | None) -> OnnxStage:
    return OnnxStage(
        name=StageName(name), variants=(ModelName(name),), inputs={key: key for key in inputs},
        outputs={output: output}, axis=axis,
    )  # fmt: skip


SPEC = ServiceSpec(
    id=SERVICE,
    inputs=(
        TensorSpec(name="tiles", datatype="FP32", shape=(-1, 3, 32, 32)),
        TensorSpec(name="input_ids", datatype="INT64", shape=(-1, -1)),
    ),
    outputs=(TensorSpec(name="answer", datatype="FP32", shape=(-1, -1, 64)),),
    stages=(
        _stage("vision", ("tiles",), "patches", "patch"),
        _stage("text", ("input_ids",), "tokens", "token"),
        _stage("fusion", ("tokens", "patches"), "answer", None),
    ),
)


def _plan(registry: ModelRegistry) -> Plan:
    """Tiles in unequal shares over three devices, questions over two (one of them cut in blocks), cross attention over three in series."""
    one, two, three = (AgentId(name) for name in NAMES)

    def stage(name: str, axis: Axis | None, lanes: list[tuple[Span, tuple[tuple[AgentId, Span], ...]]]) -> StagePlan:
        made = tuple(make_lane(StageName(name), ModelName(name), axis, share, hops) for share, hops in lanes)
        return StagePlan(stage=StageName(name), model=ModelName(name), axis=axis, lanes=made)

    vision, text = (len(registry.profile(name).blocks) for name in ("vision", "text"))
    return Plan(
        service_id=SERVICE,
        epoch=1,
        stages=(
            stage("vision", "patch", [
                (Span(0, 500), ((one, Span(0, vision)),)),
                (Span(500, 800), ((two, Span(0, 2)), (three, Span(2, vision)))),
                (Span(800, 1000), ((three, Span(0, vision)),)),
            ]),
            stage("text", "token", [
                (Span(0, 700), ((two, Span(0, 1)), (one, Span(1, text)))),
                (Span(700, 1000), ((three, Span(0, text)),)),
            ]),
            stage("fusion", None, [(Span(0, 1000), ((one, Span(0, 2)), (two, Span(2, 4)), (three, Span(4, 6))))]),
        ),
    )  # fmt: skip


@pytest.fixture
async def route(fleet: Any, registry: ModelRegistry) -> Route:
    plan = _plan(registry)
    assert cover_faults(plan, SPEC, registry.profiles()) == []
    files: dict[str, ShardFile] = {
        file_key(shard.model, shard.blocks): registry.shard_file(shard.model, shard.blocks) for shard in plan.shards()
    }
    devices = [await fleet.start(name) for name in NAMES]
    route = Route(spec=SPEC, plan=plan, addresses={d.id: d.address for d in devices}, files=files)
    for device in devices:
        prepare = Prepare(service_id=SERVICE, epoch=1, files=files_for(route, device.id))
        ready = await device.engine.prepare(prepare, RegistrySource(registry))
        assert all(shard.golden_error == 0 for shard in ready.shards)
        device.routes.activate(route)
    return route


async def test_three_devices_on_three_axes_answer_what_the_whole_model_answers(
    fleet: Any, vlm: VlmModels, route: Route
) -> None:
    rng = np.random.default_rng(3)
    tiles = rng.standard_normal((TILES, 3, 32, 32)).astype(np.float32)
    ids = rng.integers(0, VOCABULARY, (QUESTIONS, 6))
    expected = run(
        open_session(vlm.whole.SerializeToString(), "whole"), {"tiles": tiles, "input_ids": ids}, ["answer"], "whole"
    )
    result = await fleet.devices[AgentId("one")].driver.infer(SERVICE, {"tiles": tiles, "input_ids": ids}, 20_000.0)
    assert [len(items_of(lane.share, TILES)) for lane in route.plan.stages[0].lanes] == [3, 2, 2]
    assert not result.fell_back
    np.testing.assert_allclose(result.tensors["answer"], expected["answer"], rtol=0, atol=1e-5)
    assert all(device.engine.loaded() for device in fleet.devices.values())
