"""A server without sockets: its app in an event loop of its own, for as long as a test module."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient
from tool_models import TOOL_TEMPLATE, make_tool_model

from pagedattn_serve.async_engine import AsyncLLMEngine
from pagedattn_serve.config import DEMO_MODEL
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.openai.app import make_app

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Client:
    """What the tests say to a server. model: its name, which every body has unless it brings another."""

    def __init__(self, http: TestClient, engine: AsyncLLMEngine) -> None:
        self.http = http
        self.engine = engine

    def post(self, path: str, **body: Any) -> Any:
        """The response to a JSON body, whatever its status."""
        content = json.dumps({"model": "tiny", **body})  # lone surrogates too, as their escapes
        return self.http.post(path, content=content, headers={"Content-Type": "application/json"})

    def answer(self, path: str, **body: Any) -> dict[str, Any]:
        """The JSON of a response with status 200."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, without the [DONE] that ends it."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in response.headers
        *lines, last, nothing = response.text.split("\n\n")
        assert (last, nothing) == ("data: [DONE]", "")
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def watch_tokenizer(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The texts that the server tokenizes from now on."""
        texts = self.engine.texts
        tokenize, tokenized = texts.tokenize, []

        def watched(text: str, *options: Any) -> Any:
            tokenized.append(text)
            return tokenize(text, *options)

        monkeypatch.setattr(texts, "tokenize", watched)
        return tokenized

    def error(self, path: str, **body: Any) -> tuple[int, str | None, str]:
        """Status, param and message of a response that is an error in OpenAI's shape."""
        return self.error_of(self.post(path, **body))

    @staticmethod
    def error_of(response: Any) -> tuple[int, str | None, str]:
        """Status, param and message of a response, which has to be an error in OpenAI's shape."""
        body = response.json()
        assert set(body) == {"error"}, body
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        types = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        assert error["type"] == types.get(response.status_code, "invalid_request_error")
        return response.status_code, error["param"], error["message"]


@contextmanager
def serving(engine: LLMEngine, max_waiting: int = 1024, **config: Any) -> Iterator[Client]:
    """A client of the engine, whose requests all run in one event loop; the engine is idle again after it."""
    async_engine = AsyncLLMEngine(engine, max_waiting)
    app = make_app(async_engine, ServerConfig(**{"served_model_name": "tiny", **config}))
    with TestClient(app, raise_server_exceptions=False) as http:
        assert http.portal is not None
        http.portal.call(async_engine.start)
        try:
            yield Client(http, async_engine)
        finally:
            http.portal.call(async_engine.shutdown)
    assert engine.get_num_unfinished_requests() == 0
    assert engine.stats().num_used_blocks == 0


@pytest.fixture(scope="session")
def serve() -> Callable[..., AbstractContextManager[Client]]:
    return serving


@pytest.fixture(scope="module")
def client(speaker_path: str) -> Iterator[Client]:
    """A client of a model that says SPEECH after BEGINNING, and then ends. A chat is the text of its messages."""
    with serving(LLMEngine(speaker_path, max_num_seqs=8), chat_template=TEMPLATE) as client:
        yield client


@pytest.fixture(scope="session")
def demo_engine() -> LLMEngine:
    return LLMEngine(DEMO_MODEL, dtype="float32", num_blocks=256)


@pytest.fixture(scope="module")
def demo(demo_engine: LLMEngine) -> Iterator[Client]:
    """A client of the demo model."""
    with serving(demo_engine, chat_template=TEMPLATE) as client:
        yield client


@pytest.fixture(scope="session")
def tool_engine(tmp_path_factory: pytest.TempPathFactory) -> LLMEngine:
    directory = tmp_path_factory.mktemp("tools")
    make_tool_model(directory, TOOL_TEMPLATE)
    return LLMEngine(str(directory), num_blocks=512)


@pytest.fixture(scope="module")
def tools(tool_engine: LLMEngine) -> Iterator[Client]:
    """A client of a model whose calls are Hermes' and whose thoughts are Qwen's: the template says so. Its weights are
    random; a grammar makes it write calls."""
    pytest.importorskip("llguidance")
    with serving(tool_engine) as client:
        yield client
