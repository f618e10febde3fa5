"""Changes to what a service is: which models a stage may run, and how values travel between their shards. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from policies.ids import BlobHash, ModelName, ServiceId
from policies.service import ModelProfile, OnnxStage, PythonStage, ServiceSpec, Stage


def step_before(spec: ServiceSpec, stage: OnnxStage) -> str:
    """The step that makes the inputs of a stage; empty if they come from outside or from another model."""
    at = spec.stages.index(stage)
    before = spec.stages[at - 1] if at > 0 else None
    return before.step if isinstance(before, PythonStage) else ""


def stages_of(specs: Mapping[ServiceId, ServiceSpec], model: str) -> list[tuple[ServiceSpec, OnnxStage]]:
    """Every stage that may run a model."""
    name = ModelName(model)
    return [(spec, stage) for spec in specs.values() for stage in spec.onnx_stages() if name in stage.variants]


def with_stage(spec: ServiceSpec, stage: OnnxStage) -> ServiceSpec:
    """`spec` with `stage` in place of the one of its name."""
    stages: Iterable[Stage] = (stage if old.name == stage.name else old for old in spec.stages)
    return msgspec.structs.replace(spec, stages=tuple(stages))


def with_variant(spec: ServiceSpec, stage: OnnxStage, base: ModelName, variant: ModelName, kept: float) -> ServiceSpec:
    """`spec` in which a stage may run `variant` as well; what the steps need for `base` they get for it."""
    variants = (*(v for v in stage.variants if v != variant), variant)
    accuracy = {**stage.kept_accuracy, variant: kept} if stage.activations != "fp32" else {}
    changed = with_stage(spec, msgspec.structs.replace(stage, variants=variants, kept_accuracy=accuracy))
    return msgspec.structs.replace(changed, assets=_shared_assets(spec, base, variant))


def _shared_assets(spec: ServiceSpec, base: ModelName, variant: ModelName) -> dict[str, BlobHash]:
    """Assets are named KIND/MODEL where they belong to one model."""
    own = {key: blob for key, blob in spec.assets.items() if key.endswith(f"/{base}")}
    return {**spec.assets, **{key.removesuffix(base) + variant: blob for key, blob in own.items()}}


def without_variant(spec: ServiceSpec, stage: OnnxStage, model: ModelName) -> ServiceSpec:
    """`spec` in which a stage may no longer run `model`."""
    variants = tuple(variant for variant in stage.variants if variant != model)
    accuracy = {key: value for key, value in stage.kept_accuracy.items() if key != model}
    changed = with_stage(spec, msgspec.structs.replace(stage, variants=variants, kept_accuracy=accuracy))
    assets = {key: blob for key, blob in spec.assets.items() if not key.endswith(f"/{model}")}
    return msgspec.structs.replace(changed, assets=assets)


def is_same(new: ModelProfile, old: ModelProfile | None) -> bool:
    """Whether a model is the one that had its name before; unknown, hence no, where weights lie in other files."""
    return old is not None and old.sha256 == new.sha256 and old.shard_limit_bytes == new.shard_limit_bytes == 0


def with_kept_variants(spec: ServiceSpec, before: ServiceSpec, same: set[ModelName]) -> ServiceSpec:
    """`spec` with the variants and the format of activations that were added to its stages, as far as their bases are the same."""
    earlier = {stage.name: stage for stage in before.onnx_stages()}
    for stage in spec.onnx_stages():
        old = earlier.get(stage.name)
        if old is None or not set(stage.variants) <= same:
            continue
        kept = {name: value for name, value in old.kept_accuracy.items() if name in {*stage.variants, *old.variants}}
        spec = with_stage(spec, msgspec.structs.replace(stage, activations=old.activations, kept_accuracy=kept))
        for variant in old.variants:
            base = next((name for name in stage.variants if variant.startswith(f"{name}.")), None)
            if base is not None and variant not in stage.variants:
                current = next(s for s in spec.onnx_stages() if s.name == stage.name)
                spec = with_variant(spec, current, base, variant, kept.get(variant, 1.0))
    return spec
