"""Random worlds that the solver may meet: any mix of devices, links, pipelines and promises, the same for the same seed."""

from __future__ import annotations

import numpy as np

from policies.fleet import AgentView, Fleet, LinkView, link_key
from policies.ids import AgentId, BlobHash, ModelName, ServiceId, StageName
from policies.plan import WHOLE_AXIS, Plan, Span, StagePlan, make_lane
from policies.service import BlockProfile, ModelProfile, OnnxStage, PythonStage, ServiceSpec, Stage
from policies.snapshot import ServiceView, Snapshot
from sla.contract import contract_from

SERVICE = ServiceId("asked")
OTHER = ServiceId("other")
_KINDS = (
    (("rk3588", False), 2.5),
    (("ascend310p", False), 1.5),
    (("imx93", False), 10.0),
    (("x86", False), 1.0),
    (("ray", True), 1.0),
)


def random_world(
    seed: int, *, devices: tuple[int, int] = (1, 12), stages: tuple[int, int] = (1, 4), blocks: tuple[int, int] = (1, 24),
    variants: int = 3, items: int = 12, runs: bool = True,
) -> Snapshot:  # fmt: skip
    """One service (`SERVICE`) to plan, sometimes with a plan that runs already (if it `runs`) and beside another service.

    Numbers of devices, ONNX stages and blocks per model are drawn from the given ranges, both ends included; `variants` and
    `items` are the most of them that a stage has.
    """
    rng = np.random.default_rng(seed)
    spec, models = _service(rng, SERVICE, stages, blocks, variants, items)
    whole_ms = sum(_run_ms(models[s.variants[-1]], s.items) for s in spec.onnx_stages())
    size = sum(_bytes(models[s.variants[-1]]) for s in spec.onnx_stages())
    agents = _agents(rng, int(rng.integers(devices[0], devices[1] + 1)), size)
    ids = list(agents)
    best = min(a.slowdown for a in agents.values())
    contract = {
        "service_id": SERVICE,
        "latency_p99_ms": max(5.0, best * whole_ms * float(rng.choice([0.7, 1.5, 3.0, 8.0, 30.0]))),
        "throughput_rps": float(rng.choice([0.02, 0.2, 0.5, 0.9, 1.5])) * 1000.0 / max(1.0, best * whole_ms),
        "availability_sla": str(rng.choice(["95%", "99%", "99.9%"])),
        "privacy": str(rng.choice(["any", "features-may-leave", "raw-stays-on-edge"], p=[0.6, 0.3, 0.1])),
    }
    if rng.random() < 0.3:
        contract["accuracy_floor"] = float(rng.choice([0.5, 0.8, 0.95]))
    running = _anywhere(rng, spec, models, ids) if rng.random() < 0.4 and runs else None
    entry = AgentId(str(rng.choice(ids))) if rng.random() < 0.7 else None
    views = {SERVICE: ServiceView(spec=spec, contract=contract_from(contract), running=running, entry=entry)}
    if rng.random() < 0.4:
        other, more = _service(rng, OTHER, (1, 2), (2, 6), 1, 12)
        models |= more
        promise = contract_from(
            {"service_id": OTHER, "latency_p99_ms": 1000, "throughput_rps": 0.2, "availability_sla": "95%"}
        )
        views[OTHER] = ServiceView(spec=other, contract=promise, running=_anywhere(rng, other, more, ids))
    return Snapshot(now_ms=0.0, fleet=Fleet(agents=agents, links=_links(rng, agents)), models=models, services=views)


def _agents(rng: np.random.Generator, count: int, size: float) -> dict[AgentId, AgentView]:
    roomy = float(rng.choice([0.4, 1.0, 3.0, 20.0]))
    agents = {}
    for at in range(count):
        (platform, is_cloud), slow = _KINDS[int(rng.choice(len(_KINDS), p=[0.35, 0.15, 0.15, 0.2, 0.15]))]
        name = AgentId(f"a{at:02d}")
        agents[name] = AgentView(
            id=name, platform=platform, evidence="emulated", is_cloud=is_cloud,
            slowdown=slow * float(rng.choice([1.0, rng.uniform(0.7, 1.6)])),
            memory_budget_bytes=int(1e6 + size * roomy * rng.uniform(0.1, 2.0)),
            cpu_saturation=float(rng.choice([0.0, rng.uniform(0.0, 0.8)])),
            availability=float(rng.choice([0.999, rng.uniform(0.95, 1.0)])),
            zone=str(rng.choice(["north", "south"])),
        )  # fmt: skip
    return agents


def _links(rng: np.random.Generator, agents: dict[AgentId, AgentView]) -> dict[str, LinkView]:
    far, links = float(rng.choice([5.0, 20.0, 100.0])), {}
    for a, one in agents.items():
        for b, two in agents.items():
            if a == b or rng.random() < 0.1:
                continue
            rtt = (far if one.is_cloud != two.is_cloud else 1.0) * float(rng.uniform(0.5, 2.0))
            links[link_key(a, b)] = LinkView(
                src=a, dst=b, rtt_ms=rtt, jitter_ms=rtt * float(rng.uniform(0.01, 0.4)),
                bandwidth_bytes_per_s=float(10 ** rng.uniform(5.5, 8.0)), availability=float(rng.choice([1.0, 0.99])),
            )  # fmt: skip
    return links


def _service(
    rng: np.random.Generator,
    name: ServiceId,
    stages: tuple[int, int],
    blocks: tuple[int, int],
    variants: int,
    items: int,
) -> tuple[ServiceSpec, dict[ModelName, ModelProfile]]:
    made: list[Stage] = []
    models: dict[ModelName, ModelProfile] = {}
    for at in range(int(rng.integers(stages[0], stages[1] + 1))):
        if rng.random() < 0.4:
            made.append(PythonStage(name=StageName(f"p{at}"), step="step", typical_ms=float(rng.uniform(0.5, 20.0))))
        axis = "patch" if rng.random() < 0.4 else None
        size, cost = float(10 ** rng.uniform(6.0, 8.0)), float(10 ** rng.uniform(0.3, 2.3))
        count = float(rng.integers(1, items + 1)) if axis else 1.0
        names = []
        for grade in range(min(variants, int(rng.choice([1, 1, 2, 3])))):
            model = _model(
                rng, f"{name}-{at}-{grade}", int(rng.integers(blocks[0], blocks[1] + 1)), size, cost / count, axis
            )
            accuracy = 1.0 - 0.15 * grade * float(rng.random())
            names.append(model.name)
            models[model.name] = _smaller(model, grade, accuracy)
        made.append(OnnxStage(
            name=StageName(f"s{at}"), variants=tuple(names), inputs={"x": "in"}, outputs={"y": "out"}, items=count,
            axis="patch" if axis else None, raw=bool(rng.random() < 0.4),
        ))  # fmt: skip
    return ServiceSpec(id=name, inputs=(), outputs=(), stages=tuple(made)), models


def _model(
    rng: np.random.Generator, name: str, blocks: int, size: float, cost_ms: float, axis: str | None
) -> ModelProfile:  # fmt: skip
    bytes_per_item = float(10 ** rng.uniform(3.0, 6.3))
    times, sizes = rng.dirichlet(np.full(blocks, 3.0)) * cost_ms, rng.dirichlet(np.full(blocks, 3.0)) * size
    fixed = float(rng.choice([0.0, 0.3]))
    return ModelProfile(
        name=ModelName(name), sha256=BlobHash("0" * 64), input_bytes_per_item=int(bytes_per_item),
        split_axis="patch" if axis else None, activation_bytes=int(size * rng.choice([0.0, 0.1])),
        blocks=tuple(
            BlockProfile(
                name=f"b{at}", fixed_ms=fixed * float(times[at]), per_item_ms=(1.0 - fixed) * float(times[at]),
                param_bytes=int(sizes[at]), cut_bytes_per_item=int(bytes_per_item * rng.uniform(0.02, 1.5)),
            )
            for at in range(blocks)
        ),
    )  # fmt: skip


def _smaller(model: ModelProfile, grade: int, accuracy: float) -> ModelProfile:
    """A variant of a model: each grade costs half."""
    part = 0.5**grade
    blocks = tuple(
        BlockProfile(
            name=b.name, fixed_ms=b.fixed_ms * part, per_item_ms=b.per_item_ms * part,
            param_bytes=int(b.param_bytes * part), cut_bytes_per_item=b.cut_bytes_per_item,
        )
        for b in model.blocks
    )  # fmt: skip
    return ModelProfile(
        name=model.name, sha256=model.sha256, input_bytes_per_item=model.input_bytes_per_item, blocks=blocks,
        split_axis=model.split_axis, activation_bytes=int(model.activation_bytes * part), accuracy=accuracy,
    )  # fmt: skip


def _anywhere(
    rng: np.random.Generator, spec: ServiceSpec, models: dict[ModelName, ModelProfile], ids: list[AgentId]
) -> Plan:
    """Each stage whole on any agent, whether that is wise or even allowed."""
    stages = []
    for stage in spec.onnx_stages():
        model = models[stage.variants[-1]]
        hops = ((AgentId(str(rng.choice(ids))), Span(0, len(model.blocks))),)
        lane = make_lane(stage.name, model.name, None, WHOLE_AXIS, hops)
        stages.append(StagePlan(stage=stage.name, model=model.name, axis=None, lanes=(lane,)))
    return Plan(service_id=spec.id, epoch=3, stages=tuple(stages))


def _run_ms(model: ModelProfile, items: float) -> float:
    return sum(b.fixed_ms + items * b.per_item_ms for b in model.blocks)


def _bytes(model: ModelProfile) -> float:
    return float(sum(b.param_bytes for b in model.blocks) + model.activation_bytes)
