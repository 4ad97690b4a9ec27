"""Hundreds of streams at once, of clients that leave, stop reading or are killed: nothing lost, nothing leaked."""

import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from server_process import ServerProcess, wait_for

NUM_REQUESTS = 300
NUM_AT_ONCE = 200
MAX_TOKENS = 24
PROMPTS = [f"{start} {number}" for start in ("The with statement", "A class", "Return the") for number in range(10)]
LEAVING_SHARE = 0.25  # of the clients, after some events or before the first
WARM_UP_ROUNDS = 4  # until the allocator of the process that clients talk to has its pools
MEMORY_SLACK = 8 << 20  # bytes that two rounds may add


@dataclass
class Stream:
    """What one client has seen. seconds: to the first event and to the end; is_whole: it ended with [DONE]."""

    prompt: str
    text: str = ""
    first_seconds: float = 0.0
    total_seconds: float = 0.0
    is_whole: bool = False
    is_left: bool = False


@pytest.fixture(scope="module")
def loaded_server(serve: Any) -> Iterator[ServerProcess]:
    """One whose memory is looked at: the system gives it the cache page by page, so a small one is soon all there."""
    with serve("--num-blocks", "640", "--log-level", "warning", environment={"MALLOC_ARENA_MAX": "2"}) as server:
        yield server


@pytest.fixture(scope="module")
def texts(reference: Callable[..., Any]) -> dict[str, str]:
    """What each prompt is followed by, alone and offline."""
    return dict(zip(PROMPTS, reference("greedy_texts", PROMPTS, MAX_TOKENS, []), strict=True))


def body(server: ServerProcess, prompt: str, max_tokens: int = MAX_TOKENS, **fields: Any) -> bytes:
    return json.dumps(
        {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **fields}
    ).encode()


def request(server: ServerProcess, content: bytes) -> bytes:
    """As the bytes of HTTP: the server closes the connection behind its answer."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {server.url.removeprefix('http://')}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


async def stream(server: ServerProcess, prompt: str, events: float = float("inf"), **fields: Any) -> Stream:
    """One client; it leaves after so many events."""
    seen = Stream(prompt)
    host, port = server.url.removeprefix("http://").split(":")
    started = time.monotonic()
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request(server, body(server, prompt, **fields)))
        while not seen.is_whole:
            if events <= 0:
                seen.is_left = True
                return seen
            line = await reader.readline()
            assert line, f"the stream ended after {seen.text!r}"
            if not line.startswith(b"data: "):
                assert not line.startswith(b"HTTP/1.1") or b" 200 " in line, line
                continue
            events -= 1
            seen.first_seconds = seen.first_seconds or time.monotonic() - started
            if line == b"data: [DONE]\n":
                seen.is_whole = True
            else:
                seen.text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
        seen.total_seconds = time.monotonic() - started
    finally:
        writer.close()
    return seen


async def load(server: ServerProcess, seed: int) -> list[Stream]:
    """All the clients, so many of them at once, some of which leave."""
    rng = random.Random(seed)
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def client(prompt: str, events: float) -> Stream:
        async with places:
            return await stream(server, prompt, events)

    leave = [
        rng.randrange(MAX_TOKENS // 2) if rng.random() < LEAVING_SHARE else float("inf") for _ in range(NUM_REQUESTS)
    ]
    return await asyncio.gather(*(client(rng.choice(PROMPTS), events) for events in leave))


def percentiles(seconds: list[float]) -> str:
    cuts = statistics.quantiles(seconds, n=100)
    return f"p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s"


def test_many_streams(loaded_server: ServerProcess, texts: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    memory, files = [], []
    for seed in range(WARM_UP_ROUNDS + 2):
        streams = asyncio.run(load(loaded_server, seed))
        stayed = [each for each in streams if not each.is_left]
        assert len(stayed) > NUM_REQUESTS / 2
        assert all(each.is_whole for each in stayed)
        assert [each.text for each in stayed] == [texts[each.prompt] for each in stayed]
        for each in streams:
            assert texts[each.prompt].startswith(each.text)
        loaded_server.wait_until_idle()
        if files:  # the last connections may be closed a little later
            wait_for(lambda: loaded_server.metrics()["process_open_fds"] <= files[0])
        metrics = loaded_server.metrics()
        memory.append(metrics["process_resident_memory_bytes"])
        files.append(metrics["process_open_fds"])
        with capsys.disabled():
            print(
                f"\n{len(stayed)} of {len(streams)} clients stayed, {NUM_AT_ONCE} at once, {MAX_TOKENS} tokens each:"
                f" first token {percentiles([each.first_seconds for each in stayed])},"
                f" whole {percentiles([each.total_seconds for each in stayed])}, {memory[-1] / 2**20:.1f} MiB"
            )
    assert memory[-1] - memory[-3] < MEMORY_SLACK


NUM_SLOW = 2
SLOW: dict[str, Any] = {"max_tokens": 400, "n": 4, "ignore_eos": True, "logprobs": 20}  # a megabyte and more


def test_clients_that_stop_reading(loaded_server: ServerProcess, texts: dict[str, str]) -> None:
    """They slow nobody and cost no memory that stays; what they left lying is there when they read on."""
    server = loaded_server
    memory = []
    for _ in range(4):
        slow = [slow_client(server) for _ in range(NUM_SLOW)]
        seen = asyncio.run(stream(server, PROMPTS[0]))
        assert seen.text == texts[PROMPTS[0]]
        wait_for(lambda: server.num_unfinished() == 0, 60)  # the engine does not wait for its readers
        quick = asyncio.run(gather(*(stream(server, each) for each in PROMPTS)))
        assert [each.text for each in quick] == [texts[each.prompt] for each in quick]
        received = read_all(slow[0])
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        for client in slow:
            client.close()
        server.wait_until_idle()
        memory.append(server.metrics()["process_resident_memory_bytes"])
    assert memory[-1] - memory[-3] < MEMORY_SLACK


def slow_client(server: ServerProcess) -> socket.socket:
    """One that has asked, and reads nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    client.sendall(request(server, body(server, PROMPTS[0], **SLOW)))
    return client


def read_all(client: socket.socket) -> bytes:
    client.settimeout(60)
    received = bytearray()
    while data := client.recv(1 << 16):
        received += data
    return bytes(received)


async def gather(*streams: Any) -> list[Stream]:
    return await asyncio.gather(*streams)


CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.stdin.buffer.read(), {"Content-Type": "application/json"})
with urllib.request.urlopen(request) as response:
    for line in response:
        print(line, flush=True)
"""


def test_a_client_that_is_killed(loaded_server: ServerProcess) -> None:
    content = body(loaded_server, PROMPTS[0], 500, ignore_eos=True, n=8)
    url = f"{loaded_server.url}/v1/completions"
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(content)
        process.stdin.close()
        assert process.stdout.readline().startswith(b"b'data: ")
        wait_for(lambda: loaded_server.num_unfinished() == 1)  # counts may be some steps old
        process.kill()
    loaded_server.wait_until_idle()


@pytest.mark.parametrize("shutdown_timeout", ["60", "0.5"], ids=["enough time", "too little time"])
def test_sigterm_under_load(serve: Any, shutdown_timeout: str) -> None:
    """Streams end as they would, or where there is no time for that with an error; the status is 0 either way."""
    num_tokens = 200
    begun: list[float] = []

    async def streams(server: ServerProcess) -> list[bytes]:
        host, port = server.url.removeprefix("http://").split(":")
        content = request(server, body(server, PROMPTS[0], num_tokens, ignore_eos=True))

        async def client() -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
            writer.write(content)
            received = await reader.readuntil(b"data: ")
            started.append(writer)
            if len(started) == 50:
                server.process.terminate()
                begun.append(time.monotonic())
            received += await reader.read()
            writer.close()
            return received

        started: list[Any] = []
        return await asyncio.gather(*(client() for _ in range(50)))

    with serve("--shutdown-timeout", shutdown_timeout) as server:
        received = asyncio.run(streams(server))
        assert server.process.wait(60) == 0
        seconds = time.monotonic() - begun[0]
    assert all(b"data: [DONE]\n\n" in each for each in received)
    cut = [b'"error"' in each for each in received]
    assert not any(cut) or shutdown_timeout != "60"
    assert all(b'"finish_reason":"length"' in each for each, is_cut in zip(received, cut, strict=True) if not is_cut)
    if shutdown_timeout == "0.5":
        assert seconds < 30
