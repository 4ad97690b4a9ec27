"""Whether the server works, and which version it is: /health, /version."""

from importlib import metadata
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.server.http.errors import ApiError, JSONResponse

router = APIRouter()


class HealthResponse(TypedDict):
    status: Literal["ok"]


class VersionResponse(TypedDict):
    version: str


@router.get("/health", response_model=HealthResponse)
async def health(request: Request) -> Response:
    """Whether the engine runs: status 503 if not."""
    engine: AsyncLLMEngine = request.app.state.engine
    if not engine.is_running:
        raise ApiError(503, engine.error or "the engine does not run", code="engine_dead")
    response: HealthResponse = {"status": "ok"}
    return JSONResponse(response)


@router.get("/version", response_model=VersionResponse)
async def version() -> Response:
    """The version of this package."""
    response: VersionResponse = {"version": metadata.version("pagedattn-ext")}
    return JSONResponse(response)
