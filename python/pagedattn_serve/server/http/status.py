"""Whether the server works, and which version it is: /health, /version."""

from importlib import metadata
from typing import Literal, NotRequired

from fastapi import APIRouter, Request
from starlette.responses import Response
from typing_extensions import TypedDict  # which pydantic wants before Python 3.12

from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.server.http.errors import ApiError, JSONResponse

router = APIRouter()


class ReplicaHealth(TypedDict):
    """is_running: and does not hang (`ReplicaStatus.is_well`)."""

    replica: int
    is_running: bool
    error: str | None
    num_restarts: int


class HealthResponse(TypedDict):
    """replicas: only where there are several."""

    status: Literal["ok"]
    replicas: NotRequired[list[ReplicaHealth]]


class VersionResponse(TypedDict):
    version: str


@router.get("/health", response_model=HealthResponse)
async def health(request: Request) -> Response:
    """Whether the engine runs, and does not hang: status 503 if not. Of several replicas one that does is enough."""
    engine: AsyncLLMEngine = request.app.state.engine
    replicas = engine.replicas()
    if not engine.is_running or not any(each.is_well for each in replicas):
        errors = "; ".join(error for each in replicas if (error := each.error or each.hang) is not None)
        code = "engine_hangs" if engine.is_running else "engine_dead"
        raise ApiError(503, errors or "the engine does not run", code=code)
    response: HealthResponse = {"status": "ok"}
    if len(replicas) > 1:
        response["replicas"] = [
            {
                "replica": i,
                "is_running": each.is_well,
                "error": each.error or each.hang,
                "num_restarts": each.num_restarts,
            }
            for i, each in enumerate(replicas)
        ]
    return JSONResponse(response)


@router.get("/version", response_model=VersionResponse)
async def version() -> Response:
    """The version of this package."""
    response: VersionResponse = {"version": metadata.version("pagedattn-ext")}
    return JSONResponse(response)
