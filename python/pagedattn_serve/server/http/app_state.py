"""What an app carries for the routes of this room. Its functions are async, or FastAPI would call them in threads."""

from fastapi import FastAPI, Request

from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.server.http.config import ServerConfig


def set_app_state(app: FastAPI, engine: AsyncLLMEngine, config: ServerConfig) -> None:
    app.state.engine = engine
    app.state.config = config


async def engine_of(request: Request) -> AsyncLLMEngine:
    engine: AsyncLLMEngine = request.app.state.engine
    return engine


async def config_of(request: Request) -> ServerConfig:
    config: ServerConfig = request.app.state.config
    return config
