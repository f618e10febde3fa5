"""The HTTP API about the LLM and about intents."""

from __future__ import annotations

from fastapi import APIRouter

from controller.core import Controller
from controller.llm_views import AdviceOut, IntentIn, IntentOut, LlmReport


def llm_routes(router: APIRouter, controller: Controller) -> None:
    """Add the routes."""

    @router.get("/v1/llm/report", tags=["llm"])
    async def llm_report(service_id: str | None = None) -> LlmReport:
        """The LLM beside the solver: choices, effects, win rate, regret, refusals, tokens, seconds."""
        return controller.llm.report(service_id)

    @router.get("/v1/llm/advice", tags=["llm"])
    async def llm_advice() -> list[AdviceOut]:
        """What the LLM advises; it waits for a person."""
        return controller.llm.advices()

    @router.post("/v1/llm/advice/{advice_id}:accept", tags=["llm"])
    async def accept(advice_id: str) -> dict[str, str]:
        """Follow an advice; the gate judges it once more."""
        controller.llm.accept(advice_id)
        return {"id": advice_id, "state": "accepted"}

    @router.post("/v1/llm/advice/{advice_id}:dismiss", tags=["llm"])
    async def dismiss(advice_id: str) -> dict[str, str]:
        controller.llm.dismiss(advice_id)
        return {"id": advice_id, "state": "dismissed"}

    @router.post("/v1/intents", tags=["llm"], status_code=201)
    async def propose(body: IntentIn) -> IntentOut:
        """A sentence or rules as a proposal, shown back in plain words; it acts once confirmed."""
        return await controller.llm.propose(body)

    @router.get("/v1/intents", tags=["llm"])
    async def intents(service_id: str | None = None) -> list[IntentOut]:
        """Newest last."""
        return controller.llm.list_intents(service_id)

    @router.post("/v1/intents/{intent_id}:confirm", tags=["llm"])
    async def confirm(intent_id: str) -> IntentOut:
        """Put a proposal in force."""
        return await controller.llm.confirm(intent_id)

    @router.post("/v1/intents/{intent_id}:revoke", tags=["llm"])
    async def revoke(intent_id: str) -> IntentOut:
        """Take an intent back."""
        return await controller.llm.revoke(intent_id)
