"""The prompts of a request through the engine: at once, and gone when one of them fails or nobody listens any more."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from async_runs import Runner, play, until

from pagedattn_serve.async_engine import AsyncLLMEngine, EngineBusyError, EngineDeadError
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.outputs import CompletionOutput, EngineStats, ReplicaStatus, RequestMetrics, RequestOutput
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.errors import ApiError
from pagedattn_serve.server.http.event_stream import EventStream, SendEvents
from pagedattn_serve.server.http.metrics import ServerMetrics
from pagedattn_serve.server.openai.answers import Answer, ChunkWriter, JobChunks
from pagedattn_serve.server.openai.app import make_app
from pagedattn_serve.server.openai.fields import StreamOptions
from pagedattn_serve.server.openai.jobs import Job, JobRunner, PromptTokens, RecentEnds

NO_STATS = EngineStats(**{name: 0 for name in EngineStats.__slots__} | {"num_blocks": 8})  # type: ignore[arg-type]
IDLE = ReplicaStatus(None, True, None, 0, NO_STATS)


def job(num_prompts: int) -> Job:
    return Job("id", 0, "tiny", "fp_none", [PromptTokens(None, [5])] * num_prompts, SamplingParams())


def output(num_tokens: int, finish_reason: str | None = None, error: str | None = None) -> RequestOutput:
    completion = CompletionOutput(0, "x" * num_tokens, [7] * num_tokens, 0.0, None, finish_reason)
    return RequestOutput("id", None, [5], [completion], finish_reason is not None, RequestMetrics(0.0), error)


class FakeEngine:
    """Prompts that get a token at each turn of the event loop, until `end` says how one ends.

    open: the places of those that the engine has. metrics: what they show. dies_at: after so many tokens the replica of
    each prompt dies, once. has_forgotten: whether the outputs of each prompt came again then, by place.
    """

    def __init__(self, end: Callable[[int, int], RequestOutput | Exception | None], dies_at: int | None = None) -> None:
        self.open: set[int] = set()
        self.metrics = ServerMetrics(lambda: [IDLE], "tiny")
        self.has_forgotten: dict[int, bool] = {}
        self._end = end
        self._dies_at = dies_at

    def jobs(self) -> JobRunner:
        return JobRunner(self, self.metrics, max_waiting=8)  # type: ignore[arg-type]

    async def generate(
        self,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        priority: int,
        cache_salt: str,
        forget: Callable[[], bool],
    ) -> AsyncGenerator[RequestOutput, None]:
        place = int(request_id.removeprefix("id-"))
        self.open.add(place)
        try:
            num_tokens = 0
            while True:
                await asyncio.sleep(0)
                if num_tokens == self._dies_at and place not in self.has_forgotten:
                    self.has_forgotten[place] = forget()
                    if not self.has_forgotten[place]:
                        raise EngineDeadError("replica 0 died")
                    num_tokens = 0
                num_tokens += 1
                end = self._end(place, num_tokens)
                if isinstance(end, Exception):
                    raise end
                made = end or output(1)
                yield made
                if made.finished:
                    return
        finally:
            self.open.remove(place)


def test_each_prompt_tells_all_it_has() -> None:
    """And in steps: that a reader who keeps up misses none is what makes it a stream."""
    engine = FakeEngine(lambda place, num_tokens: output(1, "stop") if num_tokens == 3 + place else None)

    async def main() -> None:
        told: dict[int, list[RequestOutput]] = {0: [], 1: [], 2: []}

        async def take(place: int, each: RequestOutput) -> None:
            told[place].append(each)

        await engine.jobs().run(job(3), take)
        assert told == {place: [output(1)] * (2 + place) + [output(1, "stop")] for place in range(3)}
        whole = await engine.jobs().outputs(job(3))
        assert whole == [output(num_tokens, "stop") for num_tokens in (3, 4, 5)]

    asyncio.run(main())
    assert not engine.open


def test_outputs_that_come_again_count_once() -> None:
    """In the answer and in the metrics: the client of a whole answer has seen none of the first ones."""
    engine = FakeEngine(lambda place, num_tokens: output(1, "stop") if num_tokens == 3 + place else None, dies_at=2)
    assert asyncio.run(engine.jobs().outputs(job(2))) == [output(3, "stop"), output(4, "stop")]
    assert engine.has_forgotten == {0: True, 1: True}
    page = engine.metrics.render().decode()
    assert 'request_generation_tokens_sum{model_name="tiny"} 7.0' in page
    assert 'request_success_total{finished_reason="stop",model_name="tiny"} 2.0' in page


@pytest.mark.parametrize("is_seen", [False, True])
def test_a_stream_begins_anew_if_its_client_has_seen_nothing(is_seen: bool) -> None:
    """What has brought no event may come again, from its opening on; what the client has may not."""

    def end(place: int, num_tokens: int) -> RequestOutput:
        made = output(1, "stop" if num_tokens == 3 else None)
        made.outputs[0].text = "x" * (is_seen or num_tokens == 3)  # else held back
        return made

    engine = FakeEngine(end, dies_at=2)
    openings: list[int] = []

    class Texts(Answer):
        chunk_kind = "text_completion"

        def opening(self, writer: ChunkWriter, place: int, output: RequestOutput) -> tuple[list[str], list[Any]]:
            openings.append(place)
            return [], [None]

        def render(self, text: str) -> str:
            return f'"text":"{text}"'

    async def main() -> list[bytes]:
        sent: list[bytes] = []

        async def send(events: bytes) -> None:
            sent.append(events)

        chunks = JobChunks(engine.jobs(), Texts(job(2)), StreamOptions(include_usage=True))
        if is_seen:
            with pytest.raises(ApiError, match="replica 0 died"):
                await chunks.send_all(send)
        else:
            await chunks.send_all(send)
        return sent

    sent = asyncio.run(main())
    assert set(engine.has_forgotten.values()) == {not is_seen}
    if not is_seen:
        assert sorted(openings) == [0, 0, 1, 1] and len(sent) == 3  # a chunk of each prompt, and the usage
        assert b'"completion_tokens":6' in sent[-1]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (EngineBusyError("full"), 429),
        (ValueError("n: expected less"), 400),
        (output(4, "error", "ValueError: nothing left"), 500),
        (output(4, "abort"), 503),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_when_one_fails_the_others_are_left(end: RequestOutput | Exception, status: int, num_prompts: int) -> None:
    last = num_prompts - 1
    engine = FakeEngine(lambda place, num_tokens: end if (place, num_tokens) == (last, 4) else None)
    with pytest.raises(ApiError) as caught:
        asyncio.run(engine.jobs().outputs(job(num_prompts)))
    assert caught.value.status == status
    assert not engine.open


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_reader_that_leaves_takes_all_of_them_along(num_prompts: int) -> None:
    engine = FakeEngine(lambda place, num_tokens: None)

    async def main() -> None:
        taken = asyncio.Event()

        async def take(place: int, each: RequestOutput) -> None:
            taken.set()

        reader = asyncio.create_task(engine.jobs().run(job(num_prompts), take))
        await taken.wait()
        assert len(engine.open) == num_prompts
        reader.cancel()
        await asyncio.wait([reader])
        assert reader.cancelled() and not engine.open

    asyncio.run(main())


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_a_bug_of_whoever_takes_an_output_is_no_error_of_the_request(num_prompts: int) -> None:
    """A ValueError of the engine is the client's fault; one that comes later is not."""
    engine = FakeEngine(lambda place, num_tokens: None)

    async def take(place: int, each: RequestOutput) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        asyncio.run(engine.jobs().run(job(num_prompts), take))
    assert not engine.open


class FakeConnection:
    """One HTTP request straight to an app. The client is gone once `leave` is set; `started` is, with the answer."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.leave, self.started = asyncio.Event(), asyncio.Event()
        self.status = 0
        self.sent = b""
        self._body: bytes | None = json.dumps(body).encode()

    async def run(self, app: Any, path: str) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self._body or b"")).encode())]
        scope = dict(type="http", method="POST", path=path, raw_path=path.encode(), query_string=b"", headers=headers)
        await app({**scope, "http_version": "1.1", "scheme": "http", "root_path": ""}, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.sent += message.get("body", b"")
        if self.sent:
            self.started.set()


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["A class", ["A class", "Lists", "Sets"]], ids=["one", "three"])
def test_a_client_that_disconnects(
    demo_engine: LLMEngine, stream: bool, prompt: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests are gone from the engine after the step that runs."""

    async def main() -> None:
        async with AsyncLLMEngine(demo_engine) as engine:
            app = make_app(engine, ServerConfig(served_model_name="tiny"))
            body = {"prompt": prompt, "max_tokens": 500, "ignore_eos": True, "stream": stream, "n": 2}
            connection = FakeConnection(body)
            request = asyncio.create_task(connection.run(app, "/v1/completions"))
            if stream:
                await connection.started.wait()
            while engine.stats().num_running < (1 if isinstance(prompt, str) else 3):
                await asyncio.sleep(0.001)
            connection.leave.set()
            await request
            num_steps = demo_engine._num_steps  # engine.stats() may be some steps behind
            assert engine.num_unfinished == 0
            stats = await engine.call(lambda llm: llm.stats())
            assert stats.num_used_blocks == stats.num_running == stats.num_waiting == 0
            assert stats.num_steps <= num_steps + 1
            assert b"[DONE]" not in connection.sent

    asyncio.run(main())
    assert demo_engine.get_num_unfinished_requests() == 0
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.usefixtures("slow_steps")
def test_an_error_in_mid_stream_is_its_last_event(demo_engine: LLMEngine) -> None:
    async def main() -> None:
        async with AsyncLLMEngine(demo_engine) as engine:
            app = make_app(engine, ServerConfig(served_model_name="tiny"))
            connection = FakeConnection({"prompt": "A class", "max_tokens": 500, "ignore_eos": True, "stream": True})
            request = asyncio.create_task(connection.run(app, "/v1/completions"))
            await connection.started.wait()
            await engine.shutdown()
            await request
            assert connection.status == 200
            *_, error, done, nothing = connection.sent.split(b"\n\n")
            assert (done, nothing) == (b"data: [DONE]", b"")
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "aborted"

    asyncio.run(main())


def test_a_bug_in_mid_stream_is_its_last_event_too() -> None:
    async def send_all(send: SendEvents) -> None:
        await send(b"data: {}\n\n")
        raise KeyError("bug")

    async def main() -> None:
        connection = FakeConnection({})
        await connection._receive()
        with pytest.raises(KeyError):
            await EventStream(send_all)({"type": "http"}, connection._receive, connection._send)
        first, error, done, nothing = connection.sent.split(b"\n\n")
        assert (first, done, nothing) == (b"data: {}", b"data: [DONE]", b"")
        assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "server_error"

    asyncio.run(main())


def test_a_full_queue(demo_engine: LLMEngine) -> None:
    runner = Runner(demo_engine, one_by_one=True)

    async def main() -> None:
        async with AsyncLLMEngine(demo_engine, max_waiting=2) as engine:
            app = make_app(engine, ServerConfig(served_model_name="tiny", max_waiting=2))
            connections = [FakeConnection({"prompt": "A class", "max_tokens": 4}) for _ in range(8)]
            answers = asyncio.gather(*(connection.run(app, "/v1/completions") for connection in connections))
            await until(lambda: 429 in {connection.status for connection in connections})
            runner.free()
            await answers
            assert {connection.status for connection in connections} == {200, 429}
            assert all(b"rate_limit_exceeded" in each.sent for each in connections if each.status == 429)

    try:
        play(main())
    finally:
        del vars(demo_engine.model_runner)["execute"]  # which is the runner; other tests have this engine as well


@pytest.mark.parametrize("prefix_cache_per_key", [False, True])
def test_who_shares_cached_blocks(demo_engine: LLMEngine, serve: Any, prefix_cache_per_key: bool) -> None:
    """Those of one key, if that is asked for, and within it those of one cache_salt."""
    prompt = list(range(100, 140))  # two full blocks, and more
    keys = ("first", "second")

    def num_found(client: Any, key: str, **fields: Any) -> int:
        before = demo_engine.stats().num_found_tokens
        client.http.headers["Authorization"] = f"Bearer {key}"
        client.answer("/v1/completions", prompt=prompt, max_tokens=1, **fields)
        return demo_engine.stats().num_found_tokens - before

    with serve(demo_engine, api_keys=keys, prefix_cache_per_key=prefix_cache_per_key) as client:
        salt = {"cache_salt": f"salt {prefix_cache_per_key}"}  # the engine is shared with other tests
        num_found(client, "first", **salt)
        assert num_found(client, "first", **salt) == 32
        assert num_found(client, "second", **salt) == (0 if prefix_cache_per_key else 32)
        assert num_found(client, "first", cache_salt=f"other {prefix_cache_per_key}") == 0


def test_retry_after_follows_the_speed_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a queue of 100, at the speed of the last minute; between one second and one minute."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ends = RecentEnds()
    with ends.request():
        assert ends.retry_after(100) == 1  # nothing is known yet
        for i in range(20):  # two each second
            now = 1000.5 + i / 2
            ends.add()
        assert ends.retry_after(100) == 25
        now += 30
        assert ends.retry_after(100) == 60 and ends.retry_after(2) == 2
        now += 31
        for _ in range(300):  # five each second
            ends.add()
        assert ends.retry_after(100) == 10 and ends.retry_after(1) == 1


def test_retry_after_leaves_out_the_time_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first request, and between requests: clients that stay away do not make the queue look slow."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def end(place: int, num_tokens: int) -> RequestOutput | Exception | None:
        nonlocal now
        now += 0.25
        if place == 2:
            return EngineBusyError("full")
        return output(1, "stop") if num_tokens == 8 else None

    jobs = FakeEngine(end).jobs()  # max_waiting is 8
    for _ in range(5):  # of two requests in four seconds
        now += 100
        asyncio.run(jobs.outputs(job(2)))
    now += 100
    with pytest.raises(ApiError) as caught:
        asyncio.run(jobs.outputs(job(3)))
    assert caught.value.headers == {"Retry-After": "9"}  # half of 8, of which each takes two seconds, and a bit
