"""The live page at /, and what it shows: /state."""

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, Response

from pagedattn_serve.async_engine import AsyncLLMEngine, EngineDeadError
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.server.http.errors import ApiError, JSONResponse

FILES = {file.name: file for file in (Path(__file__).parent / "page").iterdir()}
# The page takes nothing from elsewhere, and no other page frames it.
HEADERS = {"Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'", "Cache-Control": "no-cache"}
STATE_SECONDS = 5.0  # for the step that runs to end; by then it is known what hangs
CODES = {"free": -1, "cached": -2, "shared": -3}  # map.js reads these; any other code is the owner's index

router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    """The page."""
    return FileResponse(FILES["index.html"], headers=HEADERS)


@router.get("/page/{name}")
async def page_file(name: str) -> Response:
    """What the page is made of."""
    if name not in FILES:
        raise ApiError(404, f"page: expected one of {', '.join(sorted(FILES))}, got {name}")
    return FileResponse(FILES[name], headers=HEADERS)


@router.get("/state")
async def state(request: Request, replica: int = 0) -> Response:
    """What a replica of the engine is doing between two steps: its statistics, its requests, and what each block holds.

    replicas: which ones run.
    blocks, host_blocks: runs [what, how many]; `what` is the index of the request that has the blocks alone, or one of
    CODES. The name of a request is made from its id, and does not reveal the id.
    """
    engine: AsyncLLMEngine = request.app.state.engine
    try:
        async with asyncio.timeout(STATE_SECONDS):
            stats, cache = await engine.cache_map(replica)
    except ArgumentError as error:
        raise ApiError(400, str(error), param="replica") from None
    except EngineDeadError as error:
        raise ApiError(503, str(error), code="engine_dead") from None
    except TimeoutError:
        hang = engine.replicas()[replica].hang
        text = hang or f"a step takes more than {STATE_SECONDS:g} seconds"
        raise ApiError(503, text, code="engine_hangs" if hang else "engine_busy") from None
    requests = [
        {
            "name": hashlib.sha256(each.request_id.encode()).hexdigest()[:6],
            "state": each.state,
            "num_prompt_tokens": each.num_prompt_tokens,
            "num_output_tokens": each.num_output_tokens,
        }
        for each in cache.requests
    ]
    return JSONResponse(
        {
            "model": request.app.state.config.model_names[0],
            "device": engine.facts.device,
            "block_size": engine.facts.block_size,
            "replicas": [each.is_well for each in engine.replicas()],
            "time": time.monotonic(),
            "stats": dataclasses.asdict(stats),
            "requests": requests,
            "blocks": _runs(cache.blocks, cache.owners),
            "host_blocks": _runs(cache.host_blocks, cache.host_owners),
        }
    )


def _runs(states: Iterable[str], owners: Iterable[int]) -> list[tuple[int, int]]:
    """What each block is, as in `state`: neighbours that are alike make one run."""
    codes = (CODES.get(state, owner) for state, owner in zip(states, owners, strict=True))
    return [(code, sum(1 for _ in alike)) for code, alike in groupby(codes)]
