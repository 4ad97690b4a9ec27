"""A server without sockets: its app in an event loop of its own, for as long as a test module."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.server.app import make_app
from pagedattn_serve.server.config import ServerConfig


@contextmanager
def serve(engine: LLMEngine, **config: Any) -> Iterator[TestClient]:
    """A client of the engine, whose requests run in one event loop."""
    async_engine = AsyncLLMEngine(engine)
    app = make_app(async_engine, ServerConfig(**{"served_model_name": "tiny", **config}))
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.portal is not None
        client.portal.call(async_engine.start)
        try:
            yield client
        finally:
            client.portal.call(async_engine.shutdown)


@pytest.fixture(scope="module")
def client(speaker_path: str) -> Iterator[TestClient]:
    """Of a model that says SPEECH after BEGINNING, and then ends."""
    with serve(LLMEngine(speaker_path, max_num_seqs=8)) as client:
        yield client


@pytest.fixture(scope="module")
def demo_engine() -> LLMEngine:
    return LLMEngine(DEMO_MODEL, dtype="float32", num_blocks=256)


@pytest.fixture(scope="module")
def demo(demo_engine: LLMEngine) -> Iterator[TestClient]:
    with serve(demo_engine) as client:
        yield client
