"""The HTTP API about plans that an operator wrote."""

from __future__ import annotations

from fastapi import APIRouter

from controller.core import Controller
from controller.plan_documents import PlanAnswer, PlanIn, PlanQuestion, PlanStarted


def plan_routes(router: APIRouter, controller: Controller) -> None:
    """Add the routes."""

    @router.post("/v1/plans/{service_id}:preview", tags=["plans"])
    async def preview(service_id: str, body: PlanQuestion) -> PlanAnswer:
        """What would this plan do, and may it run? Changes nothing."""
        return await controller.operator_plans.preview(service_id, body)

    @router.post("/v1/plans/{service_id}:run", tags=["plans"])
    async def run(service_id: str, body: PlanIn) -> PlanStarted:
        """Make this plan run, if the gate admits it: rolled out with the same proofs as any other, then pinned."""
        return await controller.operator_plans.run(service_id, body)
