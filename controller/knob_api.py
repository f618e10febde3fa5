"""The HTTP API about knobs."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import RootModel

from controller.core import Controller
from controller.views import KnobOut
from sla.errors import InvalidInputError

MAX_KNOBS = 64


class KnobsIn(RootModel[dict[str, float | str]]):
    """STAGE.KNOB -> a number, or `auto`."""


def knob_routes(router: APIRouter, controller: Controller) -> None:
    """Add the routes."""

    @router.post("/v1/services/{service_id}:tune", tags=["services"])
    async def tune(service_id: str, body: KnobsIn) -> list[KnobOut]:
        """Turn knobs of a running service, e.g. {"decode.keep": 0.6} or {"decode.keep": "auto"}. Nothing is loaded again."""
        if not 0 < len(body.root) <= MAX_KNOBS:
            raise InvalidInputError(
                f"Turn 1 to {MAX_KNOBS} knobs at once.", found=str(len(body.root)), accepted=f"1 to {MAX_KNOBS}"
            )
        return await controller.tune(service_id, body.root)

    @router.get("/v1/services/{service_id}/knobs", tags=["services"])
    async def knobs(service_id: str) -> list[KnobOut]:
        """Where a service's knobs stand, and how far the contract's accuracy floor lets them go."""
        return controller.service_knobs(service_id)
