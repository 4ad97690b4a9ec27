"""The live page's files, and /state. tests/clients has the page in a browser."""

import asyncio
import re
import threading
from contextlib import aclosing
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.server.http import live
from pagedattn_serve.server.http.live import CODES, FILES


def test_the_page_and_all_that_it_names(client: Any) -> None:
    page = client.http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
    scripts = [client.http.get(f"/page/{name}").text for name in FILES if name.endswith(".js")]
    named |= {f"page/{name}" for script in scripts for name in re.findall(r'from "\./([^"]+)"', script)}
    assert named == {f"page/{file.name}" for file in FILES.values()} - {"page/index.html"}
    for name in named:
        response = client.http.get(f"/{name}")
        assert response.status_code == 200
        assert response.headers["content-security-policy"].startswith("default-src 'self'")


@pytest.mark.parametrize("name", ["other.js", "..%2Flive.py", "%2Fetc%2Fpasswd"])
def test_no_other_file_is_served(client: Any, name: str) -> None:
    assert client.error_of(client.http.get(f"/page/{name}"))[0] == 404


def test_nothing_comes_from_elsewhere() -> None:
    for file in FILES.values():
        addresses = re.findall(r"https?://[^\s\"']+", file.read_text())
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}


def test_the_codes_are_those_of_the_map() -> None:
    named = re.findall(r"\b([A-Z]+) = (-\d)", FILES["map.js"].read_text())
    assert {name.lower(): int(code) for name, code in named} == CODES


def test_state_says_what_stats_and_the_cache_map_do(client: Any) -> None:
    client.answer("/v1/completions", prompt=[5] * 40, max_tokens=2)
    state = client.http.get("/state").json()
    stats = state["stats"]
    assert (state["model"], state["device"], state["requests"], state["replicas"]) == ("tiny", "cpu", [], [True])
    assert stats["num_running"] == stats["num_used_blocks"] == 0
    counts = {code: sum(count for what, count in state["blocks"] if what == code) for code in CODES.values()}
    assert sum(counts.values()) == stats["num_blocks"]
    assert counts[CODES["cached"]] == stats["num_cached_blocks"] > 0


def test_state_names_requests_by_what_does_not_tell_their_ids(demo: Any) -> None:
    async def state_while_one_runs() -> Any:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        async with aclosing(demo.engine.generate({"prompt_token_ids": [5] * 40}, params, "secret")) as outputs:
            await anext(outputs)
            async with AsyncClient(transport=ASGITransport(demo.http.app), base_url="http://test") as http:
                return await http.get("/state")

    response = demo.http.portal.call(state_while_one_runs)
    assert "secret" not in response.text
    state = response.json()
    [request] = state["requests"]
    assert (request["state"], request["num_prompt_tokens"]) == ("running", 40)
    assert re.fullmatch("[0-9a-f]{6}", request["name"])
    assert sum(count for what, count in state["blocks"] if what == 0) == state["stats"]["num_used_blocks"] >= 3


def test_state_of_a_server_whose_engine_has_stopped(serve: Any, demo_engine: LLMEngine) -> None:
    with serve(demo_engine, chat_template="{{ messages[0].content }}") as client:
        client.http.portal.call(client.engine.shutdown)
        status, _, message = client.error_of(client.http.get("/state"))
    assert (status, message) == (503, "the engine was shut down")


def test_the_state_does_not_wait_for_an_engine_that_stands(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STATE_SECONDS", 0.01)
    free = threading.Event()

    async def stand() -> asyncio.Task[bool]:
        return asyncio.create_task(demo.engine.call(lambda _: free.wait()))

    async def end(call: asyncio.Task[bool]) -> None:
        await call

    call = demo.http.portal.call(stand)
    status, _, message = demo.error_of(demo.http.get("/state"))
    free.set()
    demo.http.portal.call(end, call)
    assert (status, message) == (503, "a step takes more than 0.01 seconds")


def test_only_the_state_asks_for_a_key(serve: Any, demo_engine: LLMEngine) -> None:
    with serve(demo_engine, api_keys=("key",)) as client:
        assert client.http.get("/state").status_code == 401
        assert client.http.get("/state", headers={"Authorization": "Bearer key"}).status_code == 200
        assert client.http.get("/").status_code == client.http.get("/page/page.js").status_code == 200
