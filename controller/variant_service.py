"""Variants of models and formats of activations, measured and put to work in the services that run the model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

import msgspec
import numpy as np

from controller.desired import Desired
from controller.model_recipes import recipe_of
from controller.model_service import ModelService, Say
from controller.model_views import (
    ActivationsIn,
    ActivationsOut,
    FileIn,
    PrecisionIn,
    PruneCacheIn,
    PruneTokensIn,
    VariantIn,
    VariantOut,
)
from controller.models.cache_variants import pruned_cache
from controller.models.sample_files import read_labels, read_samples
from controller.models.sessions import Arrays
from controller.models.variants import ActivationCost, Variant, activation_cost, add_variant
from controller.service_edits import stages_of, step_before, with_stage, with_variant
from controller.services.single import Given, single_stage_service
from policies.ids import ModelName, ServiceId
from policies.service import ActivationFormat, OnnxStage, ServiceSpec
from sla.errors import ConflictError, InvalidInputError, NotFoundError

_PLAIN = ActivationCost(cosine=1.0, difference=0.0, bytes_ratio=1.0, fidelity=1.0)

Users = list[tuple[ServiceSpec, OnnxStage]]


class VariantService:
    """See the module. Owned by the event loop; what takes time runs in threads."""

    def __init__(self, models: ModelService) -> None:
        self._models = models
        self._desired: Desired = models.desired
        self._registry = models.registry

    async def add(self, base: str, wanted: VariantIn) -> VariantOut:
        """Register BASE.SUFFIX with what was measured, and let every stage that runs the base run it.

        Raises NotFoundError, ModelError (nothing is added then), and ConflictError if a service runs BASE.SUFFIX as something else.
        """
        name = ModelName(f"{base}.{wanted.suffix}")
        users = self._users(base)
        if ServiceId(name) in self._desired.specs and not isinstance(wanted.how, PruneCacheIn):
            raise ConflictError(f"There is a service {name} already; choose another suffix.")
        if isinstance(wanted.how, PruneCacheIn):
            return await self._add_cache(base, name, wanted, wanted.how)
        made = await asyncio.to_thread(self._make, base, wanted, wanted.how, users, self._models.progress_of(base))
        kept = await asyncio.to_thread(self._kept, name, wanted, users)
        async with self._models.changing:
            served = []
            # The services are read again: they may have changed while the variant was made.
            for spec, stage in self._users(base):
                changed = with_variant(spec, stage, ModelName(base), name, kept.get(stage.activations, 1.0))
                await self._desired.put_service(changed, {name: made.profile})
                served.append(spec.id)
        self._models.tell(base, f"{name} is a variant of {base} with accuracy {made.profile.accuracy:.4f}")
        return _variant_out(made, self._desired.models[ModelName(base)].accuracy, wanted, served)

    def _make(
        self, base: str, wanted: VariantIn, how: PrecisionIn | PruneTokensIn | FileIn, users: Users, progress: Say
    ) -> Variant:  # fmt: skip
        upload = self._models.uploads.path
        samples = read_samples(upload(wanted.samples))
        labels = None if wanted.labels is None else read_labels(upload(wanted.labels))
        steps = {step_before(spec, stage) for spec, stage in users}
        recipe = recipe_of(how, base, steps.pop() if len(steps) == 1 else "", upload)
        axis = self._registry.profile(base).split_axis
        return add_variant(
            self._registry,
            base,
            wanted.suffix,
            recipe,
            samples,
            axis=axis,
            class_scores=wanted.classes,
            labels=labels,
            progress=progress,
        )

    def _kept(self, name: ModelName, wanted: VariantIn, users: Users) -> dict[ActivationFormat, float]:
        """What the formats that the stages use leave of the variant's accuracy."""
        formats: set[ActivationFormat] = {stage.activations for _, stage in users} - {"fp32"}
        samples = read_samples(self._models.uploads.path(wanted.samples)) if formats else []
        return {how: self._cost(name, how, samples, wanted.classes).fidelity for how in formats}

    async def _add_cache(self, base: str, name: ModelName, wanted: VariantIn, how: PruneCacheIn) -> VariantOut:
        samples = read_samples(self._models.uploads.path(wanted.samples))
        pruned = await asyncio.to_thread(
            pruned_cache, self._registry, base, samples, keep=how.keep, protect=how.protect
        )
        accuracy = self._registry.profile(base).accuracy * pruned.fidelity
        given = Given(pruned.sample, None, accuracy, pruned.knobs)
        await self._models.serve(
            name, lambda say: single_stage_service(self._registry, name, pruned.content, say, given)
        )
        return VariantOut(
            name=name, accuracy=accuracy, measured_by="nothing", fidelity=pruned.fidelity, cosine=pruned.cosine,
            difference=_finite(pruned.difference), time_ratio=1.0, size_ratio=pruned.size_ratio,
            base_accuracy=self._registry.profile(base).accuracy, cache_ratio=pruned.cache_ratio, services=[name],
        )  # fmt: skip

    async def set_activations(self, name: str, wanted: ActivationsIn) -> list[ActivationsOut]:
        """Let values travel in a format between the shards of every stage that runs the model, with the error measured at all its cuts.

        Raises NotFoundError, ModelError, and ConflictError if a contract's accuracy floor could not be kept then; nothing changes then.
        """
        users = self._users(name)
        if wanted.format != "fp32" and wanted.samples is None:
            raise InvalidInputError(
                f"Give samples: what {wanted.format} costs is measured on them.",
                pointer="/samples",
                accepted="an uploaded .npz",
            )
        variants = sorted({variant for _, stage in users for variant in stage.variants})
        costs = await asyncio.to_thread(self._costs, variants, wanted)
        async with self._models.changing:
            users = self._users(name)
            changed = [(spec, stage, _with_format(stage, wanted.format, costs)) for spec, stage in users]
            for spec, _, after in changed:
                self._refuse_below_floor(with_stage(spec, after))
            for spec, before, after in changed:
                spec = with_stage(self._desired.specs[spec.id], after)
                await self._desired.put_service(spec, {})
                self._models.renew(spec, f"activations travel as {wanted.format}", needed=before != after)
        return [
            ActivationsOut(
                service=spec.id, stage=stage.name, model=variant, format=wanted.format,
                kept_accuracy=costs[variant].fidelity, cosine=costs[variant].cosine,
                difference=costs[variant].difference, bytes_ratio=costs[variant].bytes_ratio,
            )
            for spec, _, stage in changed
            for variant in stage.variants
        ]  # fmt: skip

    def _costs(self, variants: list[ModelName], wanted: ActivationsIn) -> dict[ModelName, ActivationCost]:
        samples = [] if wanted.samples is None else read_samples(self._models.uploads.path(wanted.samples))
        return {variant: self._cost(variant, wanted.format, samples, wanted.classes) for variant in variants}

    def _cost(
        self, name: ModelName, how: ActivationFormat, samples: list[Arrays], classes: bool
    ) -> ActivationCost:  # fmt: skip
        """At every cut that the model has, so that no plan loses more."""
        cuts = range(1, len(self._registry.profile(name).blocks))
        if how == "fp32" or not len(cuts):
            return _PLAIN
        return activation_cost(self._registry, name, cuts, how, samples, class_scores=classes)

    def _refuse_below_floor(self, spec: ServiceSpec) -> None:
        contract = self._models.contract_of(spec.id)
        floor = None if contract is None else self._desired.contracts[contract].contract.accuracy_floor
        models = self._desired.models
        best = math.prod(max(stage.accuracy(models[v]) for v in stage.variants) for stage in spec.onnx_stages())
        if floor is not None and best < floor - 1e-9:
            raise ConflictError(
                f"{spec.id} would reach an accuracy of at most {best:.4f}, below the floor {floor:g} of its contract {contract}."
            )

    def _users(self, base: str) -> Users:
        """The stages that run a model. Raises NotFoundError that says which parts a model is served in."""
        users = stages_of(self._desired.specs, base)
        if users:
            return users
        spec = self._desired.specs.get(ServiceId(base))
        if spec is not None:
            parts = ", ".join(stage.variants[0] for stage in spec.onnx_stages())
            raise NotFoundError(f"{base} is served in parts: {parts}; name one of them.")
        known = ", ".join(sorted(self._desired.models)) or "none yet"
        raise NotFoundError(f"No service runs a model named {base!r}; there are: {known[:300]}.")


def _with_format(
    stage: OnnxStage, how: ActivationFormat, costs: Mapping[ModelName, ActivationCost]
) -> OnnxStage:  # fmt: skip
    kept = {} if how == "fp32" else {variant: costs[variant].fidelity for variant in stage.variants if variant in costs}
    return msgspec.structs.replace(stage, activations=how, kept_accuracy=kept)


def _variant_out(made: Variant, base_accuracy: float, wanted: VariantIn, served: list[ServiceId]) -> VariantOut:
    return VariantOut(
        name=made.profile.name, accuracy=made.profile.accuracy,
        measured_by="labels" if wanted.labels else "classes" if wanted.classes else "cosine",
        fidelity=made.fidelity, cosine=made.cosine, difference=_finite(made.difference), time_ratio=made.time_ratio,
        size_ratio=made.size_ratio, right=made.right, base_right=made.base_right, base_accuracy=base_accuracy,
        services=list(served),
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
