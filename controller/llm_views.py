"""What the HTTP API answers about the LLM and about intents. Fields are added, never renamed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_Factor = Annotated[float, Field(ge=0.5, le=1.5, allow_inf_nan=False)]


class SideOut(BaseModel):
    """What the solver or the LLM would run, and what is expected of it."""

    what: str
    predicted_p99_ms: float | None
    score: float | None
    effect_p99_ms: float | None = None
    """What it turned out to bring; None before the running plan had served for a while."""
    effect_how: Literal["measured", "estimated"] | None = None
    """`measured` where this plan ran; `estimated` from what was measured of the shards that it shares with the one that ran."""


class ComparisonOut(BaseModel):
    """One question to the LLM beside the solver's plan."""

    at_s: float
    service_id: str
    epoch: int
    mode: str
    verdict: Literal["won", "agreed", "refused", "fallback"]
    reason: str
    solver: SideOut
    llm: SideOut | None
    behind: float | None
    """Score of the LLM's choice minus the solver's, before the gate."""
    regret: float
    """The same after the gate."""
    acted: bool
    rationale: str
    measured_p99_ms: float | None
    """Of the plan that ran when it was asked."""
    effect_behind_ms: float | None = None
    """p99 of the LLM's choice minus the solver's, by effect; below zero the LLM's is the quicker one."""
    prompt_tokens: int
    output_tokens: int
    cost: float
    seconds: float


class LlmReport(BaseModel):
    """The LLM beside the solver. Counts begin with this controller's process; comparisons are the newest ones kept."""

    mode: str
    model: str
    policy: str
    """Who decides, in words."""
    response_format: str
    asked: int
    won: int
    agreed: int
    refused: dict[str, int]
    """By the gate's reason."""
    fallback: dict[str, int]
    """By why there was no usable answer."""
    acted: int
    win_rate: float | None
    """Share of readable answers whose own choice the gate let through; None before the first."""
    mean_behind: float | None
    """Before the gate, over the comparisons that have one."""
    mean_regret: float | None
    worst_regret: float | None
    settled: int = 0
    """Comparisons of which it is known what the two choices brought, measured or estimated."""
    mean_effect_behind_ms: float | None = None
    """Over these: p99 of the LLM's choice minus the solver's."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Of the prompt's, those that the endpoint had in its prompt cache, where it says so."""
    output_tokens: int
    cost: float
    tokens_this_hour: int
    tokens_per_hour: int
    mean_seconds: float | None
    comparisons: list[ComparisonOut]
    """Newest last."""


class AdviceOut(BaseModel):
    """What the LLM advises; it waits for a person."""

    id: str
    at_s: float
    service_id: str
    text: str
    rationale: str
    predicted_p99_ms: float | None
    solver_p99_ms: float | None


class RuleIn(BaseModel):
    """One wish: about an agent or a zone (`avoid`, `prefer`), a stage's models or a knob (`bound`), weights or everything."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["avoid", "prefer", "bound", "shift", "keep"]
    agent: Annotated[str, Field(max_length=128)] | None = None
    zone: Annotated[str, Field(max_length=63)] | None = None
    stage: Annotated[str, Field(max_length=128)] | None = None
    models: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=32)] = []
    knob: Annotated[str, Field(max_length=256)] | None = None
    """STAGE.KNOB; with `low` and `high`."""
    low: Annotated[float, Field(allow_inf_nan=False)] | None = None
    high: Annotated[float, Field(allow_inf_nan=False)] | None = None
    saturation: _Factor = 1.0
    jitter: _Factor = 1.0
    risk: _Factor = 1.0


class IntentIn(BaseModel):
    """A sentence for the LLM to read, or the rules themselves."""

    model_config = ConfigDict(extra="forbid")

    service_id: Annotated[str, Field(max_length=63)]
    text: Annotated[str, Field(max_length=500)] = ""
    rules: Annotated[list[RuleIn], Field(max_length=8)] = []
    starts_in_s: Annotated[float, Field(ge=0, lt=86_400, allow_inf_nan=False)] = 0.0
    lasts_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 3600.0
    """Both for `rules`; a sentence brings its own times."""


class TimedOut(BaseModel):
    text: str
    """The rule in plain words."""
    from_s: float
    until_s: float


class IntentOut(BaseModel):
    id: str
    service_id: str
    state: Literal["proposed", "active", "scheduled", "revoked", "expired"]
    by: Literal["operator", "llm"]
    confirmed_by: Literal["person", "gate"] | None = None
    """Who put it in force: a person, or the gate alone (a wish of the LLM in mode `control`)."""
    said: str
    created_s: float
    rules: list[TimedOut]
