"""GET /v1/models: the one model that there is."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from pagedattn_serve.server.http.errors import JSONResponse
from pagedattn_serve.server.openai.response_bodies import Model, ModelList
from pagedattn_serve.server.openai.service import Service, service_of

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


def _model(service: Service) -> Model:
    return {
        "id": service.config.served_model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "pagedattn_serve",
        "max_model_len": service.max_model_len,
    }
