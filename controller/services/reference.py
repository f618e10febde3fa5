"""A service in one process, stage after stage: the referee of the distributed runtime, and the tool that measures accuracy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from agents.steps import StepContext, run_step
from policies.ids import StageName
from policies.service import OnnxStage, ServiceSpec
from sla.errors import ModelError


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """All tensors of one request, and how long each stage took."""

    tensors: dict[str, np.ndarray]
    stage_ms: dict[str, float]


class ReferencePipeline:
    """Runs the stages of a service with whole models on one core."""

    def __init__(self, spec: ServiceSpec, models: Mapping[str, Path | bytes], assets: Mapping[str, Path]) -> None:
        """`models` holds the ONNX file of every variant that will be asked for; sessions are made when first needed."""
        self._spec = spec
        self._models = models
        self._assets = assets
        self._sessions: dict[str, ort.InferenceSession] = {}

    def run(
        self, tensors: Mapping[str, np.ndarray], variants: Mapping[str, str] | None = None, *, start: str | None = None
    ) -> ReferenceRun:
        """Serve one request. `variants` maps stage name -> model; the first variant of a stage is the default.

        With `start`, the stages before it are left out: `tensors` already holds what they gave.

        Raises what the steps raise, and ModelError for a variant that the stage or this pipeline does not have.
        """
        chosen = {stage.name: stage.variants[0] for stage in self._spec.onnx_stages()} | dict(variants or {})
        context = StepContext(assets=self._assets, models=chosen)
        known = dict(tensors)
        stage_ms: dict[str, float] = {}
        names = [stage.name for stage in self._spec.stages]
        for stage in self._spec.stages[names.index(StageName(start)) if start else 0 :]:
            started = time.perf_counter()
            if isinstance(stage, OnnxStage):
                known |= self._run_model(stage, chosen[stage.name], known)
            else:
                known |= run_step(stage.step, known, context)
            stage_ms[stage.name] = (time.perf_counter() - started) * 1e3
        return ReferenceRun(known, stage_ms)

    def _run_model(self, stage: OnnxStage, model: str, known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if model not in stage.variants:
            raise ModelError(
                f"Stage {stage.name} has no variant {model!r}.", found=model, accepted=", ".join(stage.variants)
            )
        feeds = {graph_name: known[name] for graph_name, name in stage.inputs.items()}
        outputs = self._session(model).run(list(stage.outputs), feeds)
        return dict(zip(stage.outputs.values(), outputs, strict=True))

    def _session(self, model: str) -> ort.InferenceSession:
        if model not in self._sessions:
            source = self._models.get(model)
            if source is None:
                raise ModelError(f"There is no file of model {model!r}.", found=model, accepted=", ".join(self._models))
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            options.inter_op_num_threads = 1
            options.log_severity_level = 3
            self._sessions[model] = ort.InferenceSession(
                source if isinstance(source, bytes) else str(source), options, providers=["CPUExecutionProvider"]
            )
        return self._sessions[model]
