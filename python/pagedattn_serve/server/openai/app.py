"""The FastAPI app: routes, what wraps them, and how it describes itself."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.server.http import live, status
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.metrics import add_metrics_route
from pagedattn_serve.server.http.middleware import add_middleware
from pagedattn_serve.server.openai import chat, completions, embeddings, models, scores
from pagedattn_serve.server.openai.errors import ErrorResponse, add_error_handlers
from pagedattn_serve.server.openai.messages import routes as messages
from pagedattn_serve.server.openai.responses import routes as responses
from pagedattn_serve.server.openai.responses.store import ResponseStore
from pagedattn_serve.server.openai.service import Service

# How each route may fail; "default" keeps FastAPI from promising status 422.
STATUSES = {
    400: "the request is not valid",
    401: "no API key, or a wrong one",
    404: "no such model",
    413: "the body is too large",
    415: "the body is not announced as JSON, or compressed",
    429: "too many requests wait; Retry-After says for how many seconds to wait",
    500: "the request failed",
    503: "the engine does not run",
}


def make_app(engine: AsyncLLMEngine, config: ServerConfig) -> FastAPI:
    """OpenAI's API on an engine, which the caller starts and shuts down. Raises ValueError if the model has no
    tokenizer."""
    app = FastAPI(
        title="pagedattn serve",
        version=version("pagedattn-ext"),
        docs_url=None,  # pages that load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # redirects would leave out the path of a proxy
        responses=errors_as(ErrorResponse),
    )
    app.state.engine, app.state.config = engine, config
    app.state.service = service = Service(engine, config)
    app.state.responses = ResponseStore(config.response_store_size, config.response_ttl)
    for module in (completions, chat, responses, embeddings, scores, models, status, live):
        app.include_router(module.router)
    app.include_router(messages.router, responses=errors_as(messages.ErrorMessage))
    add_metrics_route(app, service.metrics)
    add_error_handlers(app)
    add_middleware(app, config)
    return app


def errors_as(model: Any) -> dict[int | str, dict[str, Any]]:
    """How the errors of routes are described. model: of their body."""
    answers: dict[int | str, dict[str, Any]] = {"default": {"model": model, "description": "any other error"}}
    return answers | {code: {"model": model, "description": text} for code, text in STATUSES.items()}
