"""The HTTP API about models, their variants, and the services that run them."""

from __future__ import annotations

import asyncio
import json

from fastapi import APIRouter, Query, Request

from controller.core import Controller
from controller.model_views import (
    ActivationsIn,
    ActivationsOut,
    DeletedOut,
    ModelIn,
    UploadOut,
    VariantIn,
    VariantOut,
)
from controller.models.uploads import MAX_FILE_BYTES, MAX_PIECE_BYTES, Upload
from controller.request_bodies import read_body
from controller.views import ModelOut, ServiceOut
from sla.errors import InvalidInputError

MAX_MODEL_BYTES = 2 << 30
_MAX_WISH_BYTES = 64 * 1024


def model_routes(router: APIRouter, controller: Controller) -> None:
    """Add the routes."""
    _uploads(router, controller)
    _models(router, controller)
    _services(router, controller)


def _uploads(router: APIRouter, controller: Controller) -> None:
    @router.get("/v1/uploads/{sha256}", tags=["models"])
    async def upload_state(sha256: str) -> UploadOut:
        """How far a file is that is sent in pieces; nothing of it is no error."""
        return _upload_out(controller.model_service.uploads.state(sha256))

    @router.put("/v1/uploads/{sha256}", tags=["models"])
    async def upload(
        sha256: str,
        request: Request,
        offset: int = Query(ge=0, le=MAX_FILE_BYTES),
        size: int = Query(ge=1, le=MAX_FILE_BYTES),
    ) -> UploadOut:
        """Send the bytes from `offset` on (the body) of a file of `size` bytes with this hash. Kept for a day."""
        piece = await read_body(request, MAX_PIECE_BYTES)
        uploads = controller.model_service.uploads
        return _upload_out(await asyncio.to_thread(uploads.append, sha256, offset, size, piece))


def _upload_out(upload: Upload) -> UploadOut:
    return UploadOut(
        sha256=upload.sha256, held_bytes=upload.held_bytes, is_whole=upload.is_whole, max_piece_bytes=MAX_PIECE_BYTES
    )


def _models(router: APIRouter, controller: Controller) -> None:
    @router.get("/v1/models", tags=["models"])
    async def models() -> list[ModelOut]:
        return controller.models()

    @router.put("/v1/models/{name}", tags=["models"], status_code=201)
    async def add_model(name: str, request: Request) -> ModelOut:
        """Register an ONNX file (the body): cut, prove, profile, and serve it as a service of the same name."""
        return await controller.model_service.add_bytes(name, await read_body(request, MAX_MODEL_BYTES))

    @router.post("/v1/models/{name}", tags=["models"], status_code=201)
    async def add_uploaded_model(name: str, body: ModelIn) -> ModelOut:
        """The same of uploaded files: a graph with weights in other files, a sample, an axis, an accuracy."""
        return await controller.model_service.add(name, body)

    @router.delete("/v1/models/{name}", tags=["models"])
    async def delete_model(name: str) -> DeletedOut:
        """Forget a model with its own service and variants; refused while a contract or another service needs it."""
        return await controller.model_service.delete(name)

    @router.post("/v1/models/{name}/variants", tags=["models"], status_code=201)
    async def add_variant(name: str, body: VariantIn) -> VariantOut:
        """Register NAME.SUFFIX with its measured accuracy, and let every stage that runs NAME run it as well."""
        return await controller.variant_service.add(name, body)

    @router.put("/v1/models/{name}/activations", tags=["models"])
    async def set_activations(name: str, body: ActivationsIn) -> list[ActivationsOut]:
        """How values travel between the shards of every stage that runs NAME, with the error measured at all its cuts."""
        return await controller.variant_service.set_activations(name, body)


def _services(router: APIRouter, controller: Controller) -> None:
    @router.get("/v1/services", tags=["models"])
    async def services() -> list[ServiceOut]:
        return controller.service_list()

    @router.post("/v1/services", tags=["models"], status_code=201)
    async def add_service(request: Request) -> ServiceOut:
        """Register a service that comes with Tidegate: {"builtin": "document-reader"}."""
        body = await read_body(request, _MAX_WISH_BYTES)
        try:
            wanted = json.loads(body)
            name = wanted["builtin"]
        except (ValueError, KeyError, TypeError):
            raise InvalidInputError('Send {"builtin": NAME}.', accepted='{"builtin": "document-reader"}') from None
        return await controller.model_service.add_builtin(str(name))
