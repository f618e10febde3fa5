"""What is learned over minutes and hours: how far each model's profile is off on every agent, and how much runs vary.

A snapshot's measures say how the shards of the running plans are *now*, which is what a throttled device needs. They say nothing of
models and agents that do not run now, and one measured shard cannot tell whether its model's profile or its agent is off. Over
time a model runs on several agents and an agent runs several models, and the two can be told apart: `ratio = model + agent`.

Pure arithmetic with a memory; the caller says how much time passed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from policies.costs import CostModel, Ran
from policies.ids import AgentId, ModelName
from policies.snapshot import Learned, Snapshot

TIME_CONSTANT_S = 600.0
"""What was seen longer ago than this fades."""
LEAST_COUNT = 5.0
"""Measures of fewer runs say too little: the first run of a shard is no typical one."""
PRIOR_S = 10.0
"""Profiles are taken as right as if they had been seen so for that long."""
MAX_PAIRS = 10_000
BACKFITTINGS = 8
MAX_RATIO = 1.5
Key = TypeVar("Key", bound=Hashable)


class Learner:
    """Time-averaged log-ratios per model and agent. Owned by the control loop."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[ModelName, AgentId], tuple[float, float]] = {}
        """(log-ratio over the profile, seconds seen)."""
        self._profiled_ms: dict[tuple[ModelName, AgentId], float] = {}
        """What one item took by the profile over which that ratio is."""
        self._variation = (0.0, 0.0)
        self._learned = Learned()

    def learned(self) -> Learned:
        """What a snapshot should carry now."""
        return self._learned

    def see(self, snapshot: Snapshot, passed_s: float) -> None:
        """Learn from what runs now; `passed_s` since the last call."""
        costs = CostModel(snapshot)
        before = snapshot.learned.models
        runs = [
            run for view in snapshot.services.values() for run in costs.measured_of(view) if run.weight >= LEAST_COUNT
        ]
        if not runs:
            return
        self._rebase(costs, before)
        for run in runs:
            pair = (run.model, run.agent)
            old = self._pairs.pop(pair, (0.0, 0.0))
            self._pairs[pair] = _averaged(old, run.log_ratio + before.get(run.model, 0.0), passed_s)
            self._profiled_ms[pair] = _profiled_ms(costs, run.model, run.agent, before)
        while len(self._pairs) > MAX_PAIRS:
            oldest = next(iter(self._pairs))  # The one that ran longest ago.
            del self._pairs[oldest]
            self._profiled_ms.pop(oldest, None)
        self._variation = _averaged(self._variation, _mean_variation(runs), passed_s)
        self._learned = Learned(
            models=self._models(), run_variation=_settled(self._variation, costs.settings.run_variation)
        )

    def _rebase(self, costs: CostModel, before: Mapping[ModelName, float]) -> None:
        """Keep what runs were seen to take where a better profile came: it is another ratio now."""
        for (model, agent), (ratio, seconds) in self._pairs.items():
            if model in costs.snapshot.models and agent in costs.agents:
                now_ms = _profiled_ms(costs, model, agent, before)
                was_ms = self._profiled_ms[model, agent]
                if now_ms > 0.0 and was_ms > 0.0 and now_ms != was_ms:
                    self._pairs[model, agent] = (ratio + math.log(was_ms / now_ms), seconds)
                    self._profiled_ms[model, agent] = now_ms

    def _models(self) -> dict[ModelName, float]:
        """The models' part of all ratios, by alternating means that are drawn toward nothing."""
        models: dict[ModelName, float] = {}
        agents: dict[AgentId, float] = {}
        for _ in range(BACKFITTINGS):
            models = _parts((m, ratio - agents.get(a, 0.0), s) for (m, a), (ratio, s) in self._pairs.items())
            agents = _parts((a, ratio - models[m], s) for (m, a), (ratio, s) in self._pairs.items())
        return {model: min(max(ratio, -MAX_RATIO), MAX_RATIO) for model, ratio in models.items()}


def _profiled_ms(costs: CostModel, model: ModelName, agent: AgentId, learned: Mapping[ModelName, float]) -> float:
    """One item of a whole model on an agent, without what was learned of it."""
    return costs.modelled_ms(model, agent, costs.sums(model).whole, 1.0) * math.exp(-learned.get(model, 0.0))


def _averaged(old: tuple[float, float], value: float, passed_s: float) -> tuple[float, float]:
    """A mean over all time at first, over `TIME_CONSTANT_S` later."""
    mean, seconds = old
    seconds = min(seconds + passed_s, TIME_CONSTANT_S)
    return mean + min(1.0, passed_s / max(seconds, 1e-9)) * (value - mean), seconds


def _parts(of: Iterable[tuple[Key, float, float]]) -> dict[Key, float]:
    totals: dict[Key, tuple[float, float]] = {}
    for key, ratio, seconds in of:
        total, weight = totals.get(key, (0.0, 0.0))
        totals[key] = total + ratio * seconds, weight + seconds
    return {key: total / (weight + PRIOR_S) for key, (total, weight) in totals.items()}


def _mean_variation(runs: list[Ran]) -> float:
    return sum(run.variation * run.weight for run in runs) / sum(run.weight for run in runs)


def _settled(variation: tuple[float, float], prior: float) -> float:
    mean, seconds = variation
    return (mean * seconds + prior * PRIOR_S) / (seconds + PRIOR_S)
