"""What there is, and whether it works: /v1/models, /health, /version."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

import pagedattn_ext
from pagedattn_serve.server.errors import ApiError, JSONResponse
from pagedattn_serve.server.responses import HealthResponse, Model, ModelList, VersionResponse
from pagedattn_serve.server.service import Service, service_of

router = APIRouter()


@router.get("/v1/models", response_model=ModelList)
async def list_models(service: Annotated[Service, Depends(service_of)]) -> Response:
    """The one model."""
    response: ModelList = {"object": "list", "data": [_model(service)]}
    return JSONResponse(response)


@router.get("/v1/models/{name:path}", response_model=Model)
async def get_model(name: str, service: Annotated[Service, Depends(service_of)]) -> Response:
    """A model by its name."""
    service.check_model(name)
    return JSONResponse(_model(service))


@router.get("/health", response_model=HealthResponse)
async def health(service: Annotated[Service, Depends(service_of)]) -> Response:
    """Whether the engine runs: status 503 if not."""
    if not service.engine.is_running:
        raise ApiError(503, service.engine.error or "the engine does not run", code="engine_dead")
    response: HealthResponse = {"status": "ok"}
    return JSONResponse(response)


@router.get("/version", response_model=VersionResponse)
async def version() -> Response:
    """The version of this package."""
    response: VersionResponse = {"version": pagedattn_ext.__version__}
    return JSONResponse(response)


def _model(service: Service) -> Model:
    return {
        "id": service.config.served_model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "pagedattn_serve",
        "max_model_len": service.max_model_len,
    }
