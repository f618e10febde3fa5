"""Models and their services at run time: registering, variants, formats of activations, removing.

What is registered is examined in a thread; only then the service changes, under a lock and durably. A service that runs is never left with a
plan that names what is gone: such a change is refused, and says what to do.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path

from controller.desired import Desired
from controller.device_profiles import DeviceProfiles
from controller.events import EventLog
from controller.loop import ControlLoop
from controller.model_views import DeletedOut, ModelIn
from controller.models.folders import Folders
from controller.models.registry import ModelRegistry
from controller.models.sample_files import read_samples
from controller.models.sessions import Arrays
from controller.models.uploads import Uploads
from controller.present import model_out, service_out
from controller.service_edits import is_same, stages_of, with_kept_variants, without_variant
from controller.services.catalog import builtin_services
from controller.services.single import Given, single_stage_service
from controller.views import ModelOut, ServiceOut
from policies.ids import ModelName, ServiceId
from policies.plan import cover_faults
from policies.service import ModelProfile, OnnxStage, ServiceSpec
from sla.errors import ConflictError, InvalidInputError, ModelError, NotFoundError

log = logging.getLogger(__name__)

_MODEL_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_MAX_LISTED = 5

Registered = tuple[ServiceSpec, ModelProfile, dict[ModelName, ModelProfile]]
"""A service, the model that was asked for, and all models of the service."""
Say = Callable[[str], None]


class ModelService:
    """Every operation on models that the API offers. Owned by the event loop."""

    def __init__(
        self, *, registry: ModelRegistry, directory: Path, cache: Path, desired: Desired, loop: ControlLoop, events: EventLog,
        profiles: DeviceProfiles,
    ) -> None:  # fmt: skip
        self.registry = registry
        self.uploads = Uploads(directory / "uploads")
        self.desired = desired
        self.changing = asyncio.Lock()
        """Services are read, changed and stored by one caller at a time."""
        self._folders = Folders(directory / "folders", registry.weight_directories)
        self._cache = cache
        self._loop = loop
        self._events = events
        self._profiles = profiles

    # --- registering

    async def add_bytes(self, name: str, data: bytes) -> ModelOut:
        """Register an ONNX file and serve it as a service of the same name. Raises ModelError; stores nothing then."""
        return await self._add(name, lambda say: single_stage_service(self.registry, ModelName(name), data, say))

    async def add(self, name: str, wanted: ModelIn) -> ModelOut:
        """The same of uploaded files, with what is said of the model. Raises NotFoundError for a file that was not uploaded."""
        if wanted.graph not in wanted.files:
            raise ModelError(
                f"The graph {wanted.graph!r} is none of the files.", pointer="/graph", found=wanted.graph,
                accepted=", ".join(list(wanted.files)[:_MAX_LISTED]),
            )  # fmt: skip

        def register(say: Say) -> Registered:
            given = Given(self._sample(wanted.sample), wanted.axis, wanted.accuracy)
            files = {member: self.uploads.path(sha256) for member, sha256 in wanted.files.items()}
            with self._folders.laid_out(files, wanted.files) as place:
                return single_stage_service(self.registry, ModelName(name), place / wanted.graph, say, given)

        return await self._add(name, register)

    async def add_builtin(self, name: str) -> ServiceOut:
        """Register a service that comes with Tidegate. Raises NotFoundError, or what fetching its weights raises."""
        register = builtin_services().get(name)
        if register is None:
            raise NotFoundError(f"There is no built-in service {name!r}; there are: {', '.join(builtin_services())}.")
        spec = await asyncio.to_thread(register, self.registry, self._cache, log.info)
        names = {model for stage in spec.onnx_stages() for model in stage.variants}
        async with self.changing:
            spec = await self._replace(spec, {name: self.registry.profile(name) for name in names})
        return service_out(spec)

    async def _add(
        self,
        name: str,
        register: Callable[[Say], Registered],
    ) -> ModelOut:
        if not _MODEL_NAME.fullmatch(name):
            raise InvalidInputError(
                f"{name!r} is not a model name; accepted are lower-case letters, digits, dots and dashes.",
                found=name,
                accepted="a name such as my-model",
            )
        if ModelName(name) in self.desired.models and ServiceId(name) not in self.desired.specs:
            raise ConflictError(f"{name} is a variant or a part of another model; choose another name.")
        return await self.serve(name, register)

    async def serve(self, name: str, register: Callable[[Say], Registered]) -> ModelOut:
        """Register a model in a thread, then serve it. Raises what `register` raises; nothing has changed then."""
        spec, profile, models = await asyncio.to_thread(register, self.progress_of(name))
        async with self.changing:
            await self._replace(spec, models)
        await self._profiles.profile_now(name, models.keys())
        return model_out(profile, self._profiles.of(profile.name))

    def progress_of(self, name: str) -> Say:
        """Tells of a model from any thread, as events."""
        loop = asyncio.get_running_loop()

        def progress(sentence: str) -> None:
            loop.call_soon_threadsafe(self.tell, name, sentence)

        return progress

    def tell(self, name: str, sentence: str) -> None:
        """Something happened to a model."""
        log.info(sentence)
        self._events.add("model", sentence, service=name)

    def _sample(self, sha256: str | None) -> Arrays | None:
        if sha256 is None:
            return None
        samples = read_samples(self.uploads.path(sha256))
        if len(samples) > 1:
            raise ModelError(
                f"A model is examined on one sample with a few items, not on {len(samples)} samples.", pointer="/sample"
            )
        return samples[0]

    # --- changing services

    async def _replace(self, spec: ServiceSpec, models: dict[ModelName, ModelProfile]) -> ServiceSpec:
        """Put a service in place of what had its id, with the variants of models that are still the same. Holds `changing`."""
        before = self.desired.specs.get(spec.id)
        if before is not None:
            same = {name for name, profile in models.items() if is_same(profile, self.desired.models.get(name))}
            spec = with_kept_variants(spec, before, same)
        changed = [name for name in models if not is_same(models[name], self.desired.models.get(name))]
        await self.desired.put_service(spec, models)
        self._events.add("service", f"Service {spec.id} is registered.", service=spec.id)
        self._profiles.changed()
        contract = self.contract_of(spec.id)
        if contract is not None:
            self.renew(spec, f"{', '.join(changed[:_MAX_LISTED])} changed", needed=bool(before and changed))
            self._loop.poke("contract", contract)
        return spec

    def renew(self, spec: ServiceSpec, why: str, *, needed: bool) -> None:
        """Roll the running plan out again if what it runs has changed and it still fits; if not, the loop finds another."""
        contract = self.contract_of(spec.id)
        running = None if contract is None else self.desired.book(contract).running
        if contract is None or running is None or not needed:
            return
        if not cover_faults(running, spec, self.desired.models):
            self._loop.renew(contract, why)

    def contract_of(self, service: ServiceId) -> ServiceId | None:
        """The contract that promises a service."""
        return next(
            (c for c, stored in self.desired.contracts.items() if stored.contract.service_name == service), None
        )

    # --- removing

    async def delete(self, name: str) -> DeletedOut:
        """Forget a model, its service and its variants there. Raises NotFoundError, or ConflictError while something needs it."""
        model = ModelName(name)
        async with self.changing:
            if model not in self.desired.models:
                raise NotFoundError(f"There is no model {name!r}; list them with: tidegate model list")
            own = self.desired.specs.get(ServiceId(name))
            doomed = self._doomed(model, own)
            users = [(spec, stage) for one in sorted(doomed) for spec, stage in stages_of(self.desired.specs, one)]
            others = [(spec, stage) for spec, stage in users if spec.id != name]
            if own is not None:
                self._refuse_promised(own)
            for spec, stage in others:
                self._refuse_needed(spec, stage, model)
            for spec, stage in others:
                await self.desired.put_service(without_variant(self.desired.specs[spec.id], stage, model), {})
            if own is not None:
                await self.desired.remove_service(own.id)
            for one in doomed:
                await self.desired.remove_model(one)
                await asyncio.to_thread(self.registry.remove, one)
            await asyncio.to_thread(self._folders.tidy)
        self.tell(name, f"Model {name} is removed.")
        return DeletedOut(
            model=name, services=[own.id] if own else [], stages=[f"{spec.id}/{stage.name}" for spec, stage in others]
        )

    def _doomed(self, model: ModelName, own: ServiceSpec | None) -> set[ModelName]:
        """The model; and with its own service the parts and variants that no other service runs."""
        if own is None:
            return {model}
        below = {
            one
            for one in self.desired.models
            if one.startswith(f"{model}.") and ServiceId(one) not in self.desired.specs
        }
        needed = {one for one in below for spec, _ in stages_of(self.desired.specs, one) if spec.id != own.id}
        return {model} | (below - needed)

    def _refuse_promised(self, spec: ServiceSpec) -> None:
        contract = self.contract_of(spec.id)
        if contract is not None:
            raise ConflictError(
                f"The service {spec.id} is promised by the SLA {contract}; withdraw it first: tidegate sla delete {contract}"
            )

    def _refuse_needed(self, spec: ServiceSpec, stage: OnnxStage, model: ModelName) -> None:
        if model not in stage.variants:
            raise ConflictError(f"A variant or part of {model} is used by stage {stage.name} of {spec.id}.")
        rest = [variant for variant in stage.variants if variant != model]
        if not rest or not model.startswith(tuple(f"{other}." for other in rest)):
            raise ConflictError(f"Stage {stage.name} of the service {spec.id} needs {model}.")
        contract = self.contract_of(spec.id)
        if contract is None:
            return
        running = self.desired.book(contract).running
        runs = running is not None and any(planned.model == model for planned in running.stages)
        if runs or self._loop.is_moving(contract):
            raise ConflictError(
                f"The running plan of {spec.id} uses {model}; move it away first: "
                f"tidegate intent add {contract} --only {stage.name}={rest[0]} --yes"
            )
