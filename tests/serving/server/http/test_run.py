"""The server as a process: how it starts, how it is told to end, and what it does then."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from server_process import (
    COMMAND,
    SLOW_COMMAND,
    STOP_SECONDS,
    WAIT_SECONDS,
    ServerProcess,
    children_of,
    is_running,
    running,
    serving,
    wait_for,
)
from test_connection import FakeEngine

from pagedattn_serve import DEMO_MODEL
from pagedattn_serve.cli import main
from pagedattn_serve.server.http import run
from pagedattn_serve.server.http.config import ServerConfig
from pagedattn_serve.server.http.run import with_hosts
from pagedattn_serve.server.http.sockets import bind, bind_unix, listen, port_of

get, head, post = (partial(ask, timeout=WAIT_SECONDS) for ask in (httpx.get, httpx.head, httpx.post))

# 500 tokens of the demo model, at SLOW_COMMAND: a second or more.
HOSTS = ("localhost", "name-of-a-page.example")
LONG = {"model": "demo_model", "prompt": "A class", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


class Streams:
    """Clients that stream at once, each in a thread; `texts` has what each was sent, or its error."""

    def __init__(self, server: ServerProcess, count: int) -> None:
        self.texts = [""] * count
        self._threads = [threading.Thread(target=self._read, args=(server.url, i)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        while not all(self.texts):  # each has got its first bytes
            time.sleep(0.01)

    def _read(self, url: str, i: int) -> None:
        body = {**LONG, "prompt": f"A class {i}", "stream": True}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_SECONDS) as response:
                for text in response.iter_text():
                    self.texts[i] += text
        except httpx.HTTPError as error:
            self.texts[i] += repr(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def test_its_life() -> None:
    """Table, answers, and SIGTERM while requests run: they end as if nothing was, and no new one begins."""
    with running(python=sys.executable, program=SLOW_COMMAND) as server:
        names = [line[:15].rstrip() for line in server.stdout.splitlines()]
        assert names == ["model", "architecture", "device", "dtype", "cache", "limits", "API key", "URL"]
        assert get(f"{server.url}/health").status_code == head(f"{server.url}/health").status_code == 200
        assert [get(f"{server.url}/state", headers={"Host": host}).status_code for host in HOSTS] == [200, 421]
        streams = Streams(server, 4)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.TransportError):  # soon: it looks for signals ten times a second
            while True:
                get(f"{server.url}/health")
                time.sleep(0.02)
        streams.join()
        assert server.process.wait(STOP_SECONDS) == 0
        for text in streams.texts:
            assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
        assert "Traceback" not in server.stderr and server.stderr.count("status=200") == 4
        assert "in_flight=4" in server.stderr and server.stderr.rstrip().endswith("stopped")


def test_the_process_that_clients_talk_to_has_no_torch() -> None:
    """But all that the API needs: texts, chats and metrics, those of the engine's process among them."""
    with serving(python=sys.executable) as server:
        body = {"model": server.model, "messages": [{"role": "user", "content": "A class"}], "max_tokens": 3}
        answer = post(f"{server.url}/v1/chat/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["message"]["content"]
        tokens = post(f"{server.url}/tokenize", json={"prompt": "A class"}).json()["tokens"]
        assert post(f"{server.url}/detokenize", json={"tokens": tokens}).json() == {"prompt": "A class"}
        pids = (server.process.pid, server.core_pid)
        assert ["libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids] == [False, True]
        metrics = server.metrics()
        assert metrics["engine_core_process_cpu_seconds_total"] > 0 and metrics["process_cpu_seconds_total"] > 0


def test_what_does_not_end_in_time_is_aborted() -> None:
    """With an answer that says so. The log is JSON here, and has neither key nor prompt."""
    options = ["--shutdown-timeout", "0", "--log-format", "json", "--served-model-name", "demo_model"]
    environment = {"PAGEDATTN_API_KEY": "first-key,second-key"}
    with running(*options, python=sys.executable, environment=environment, program=SLOW_COMMAND) as server:
        headers = {"Authorization": "Bearer second-key"}
        assert post(f"{server.url}/v1/completions", json=LONG).status_code == 401
        body = {**LONG, "max_tokens": 2, "prompt": "secret-prompt"}
        assert post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
        responses: list[httpx.Response] = []

        def ask() -> None:
            responses.append(post(f"{server.url}/v1/completions", json=LONG, headers=headers))

        asking = threading.Thread(target=ask)
        asking.start()
        while 'num_requests_running{model_name="demo_model"} 1.0' not in get(f"{server.url}/metrics").text:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        asking.join()
        assert server.process.wait(STOP_SECONDS) == 0
        [response] = responses
        assert response.status_code == 503 and set(response.json()) == {"error"}
        lines = [json.loads(line) for line in server.stderr.splitlines()]
        [serving] = [line for line in lines if line["message"] == "serving"]
        assert server.stdout == "" and serving["API key"] == "asked for, any of 2"
        requests = [line for line in lines if line["message"] == "request"]
        assert [(line["status"], line.get("key")) for line in requests] == [(401, None), (200, 2), (503, 2)]
        assert requests[1]["output_tokens"] == 2 and requests[1]["prompt_tokens"] > 0
        assert not any(word in server.stderr for word in ("first-key", "second-key", "secret-prompt", "A class"))


def test_a_second_signal_waits_for_nothing() -> None:
    with running(python=sys.executable, program=SLOW_COMMAND) as server:
        streams = Streams(server, 2)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping" in server.stderr)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_SECONDS) == 128 + signal.SIGTERM
        streams.join()
        assert not any("[DONE]" in text for text in streams.texts) and "Traceback" not in server.stderr


BREAKS = SLOW_COMMAND.replace("set_up_logs_and_slow_steps", "set_up_logs_and_fail_steps")


def test_an_engine_that_breaks_ends_the_process_with_1() -> None:
    """Its requests have their errors before. The engine's process writes to the same log, in the same form."""
    with running("--log-format", "json", python=sys.executable, program=BREAKS) as server:
        statuses = []
        while server.process.poll() is None and len(statuses) < 20:
            try:
                statuses.append(post(f"{server.url}/v1/completions", json=LONG).status_code)
            except httpx.TransportError:
                break
        assert server.process.wait(STOP_SECONDS) == 1
        assert statuses and set(statuses) <= {500, 503}
        lines = [json.loads(line) for line in server.stderr.splitlines()]
        messages = {line["logger"]: line for line in lines}
        assert "the engine broke: RuntimeError: planted" in messages["pagedattn_serve.server.http.run"]["message"]
        assert "RuntimeError: planted" in messages["pagedattn_serve.async_engine.core"]["exception"]


def test_an_engine_that_is_killed_ends_the_process_with_1() -> None:
    """Each stream has its error, and /health says so; the log has what died."""
    with running(python=sys.executable, program=SLOW_COMMAND) as server:
        streams, pid = Streams(server, 4), server.core_pid
        os.kill(pid, signal.SIGKILL)
        streams.join()
        died = f"the engine broke: the engine core (process {pid}) was killed by SIGKILL"
        for text in streams.texts:
            *_, error, done, nothing = text.split("\n\n")
            assert (done, nothing) == ("data: [DONE]", "")
            told = json.loads(error.removeprefix("data: "))["error"]
            assert (told["message"], told["code"]) == (died, "engine_dead")
        assert server.process.wait(STOP_SECONDS) == 1
        assert died in server.stderr and "Traceback" not in server.stderr


def expect_news_of_the_start(server: ServerProcess) -> None:
    """The log, which is a file here: what is loaded, from where; how far each replica is; when all is ready."""
    first, *lines = server.stderr.splitlines()
    assert f"INFO loading LlamaForCausalLM, in bfloat16 from {DEMO_MODEL}; replicas: 2, ranks of each: 1" in first
    for replica in range(2):
        name = f" INFO replica {replica}, rank 0: "
        shares = [int(line.partition(name)[2].partition("%")[0]) for line in lines if name in line]
        assert shares[0] == 0 and shares[-1] == 100 and shares == sorted(shares) and 3 <= len(shares) <= 5
    [ready] = [i for i, line in enumerate(lines) if " INFO ready after " in line]
    assert re.search(rf"ready after [0-9.]+ s: {server.url}$", lines[ready])
    assert max(i for i, line in enumerate(lines) if " of the weights are loaded, after " in line) < ready


def test_replicas_that_are_killed() -> None:
    """Streams of the first get an error, those of the second go on. When none is left, the server says so, and a signal
    ends it while the replicas start anew."""
    with running("--data-parallel-size", "2", python=sys.executable, program=SLOW_COMMAND) as server:
        pids = [int(pid) for pid in re.findall(r"replicas +2 \(processes (\d+), (\d+)\)", server.stdout)[0]]
        assert sorted(pids) == sorted(children_of(server.process.pid))
        expect_news_of_the_start(server)
        streams = Streams(server, 4)
        running_on = [f'num_requests_running{{replica="{i}"}}' for i in range(2)]
        wait_for(lambda: [server.metrics()[name] for name in running_on] == [2, 2])  # counts may be some steps old
        metrics = server.metrics()
        assert all(metrics[f'engine_core_process_cpu_seconds_total{{replica="{i}"}}'] > 0 for i in range(2))
        os.kill(pids[0], signal.SIGKILL)
        streams.join()
        died = f"replica 0 died: the engine core (process {pids[0]}) was killed by SIGKILL"
        assert sum(died in text for text in streams.texts) == 2
        assert sum('"finish_reason":"length"' in text for text in streams.texts) == 2
        health = get(f"{server.url}/health")
        assert health.status_code == 200 and [each["is_running"] for each in health.json()["replicas"]] == [False, True]
        metrics = server.metrics()
        assert [metrics[f'replica_up{{replica="{i}"}}'] for i in range(2)] == [0, 1]
        assert get(f"{server.url}/state?replica=1").json()["replicas"] == [False, True]
        for number, status in ((0, 503), (2, 400)):
            assert get(f"{server.url}/state?replica={number}").status_code == status
        os.kill(pids[1], signal.SIGKILL)
        wait_for(lambda: get(f"{server.url}/health").status_code == 503)
        answer = post(f"{server.url}/v1/completions", json=LONG)
        assert answer.status_code == 503 and f"{died}; replica 1 died: " in answer.json()["error"]["message"]
        wait_for(lambda: server.metrics()['replica_restarts_total{replica="0"}'] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_SECONDS) == 0
        assert "Traceback" not in server.stderr and died in server.stderr


def test_signals_reach_both_processes_and_end_neither_at_once() -> None:
    """A terminal sends SIGINT to all processes of a group, and systemd sends SIGTERM to all processes of a service: the
    process that clients talk to decides."""
    with running(python=sys.executable, program=SLOW_COMMAND) as server:
        streams, pid = Streams(server, 4), server.core_pid
        os.kill(pid, signal.SIGTERM)
        for each in (pid, server.process.pid):
            os.kill(each, signal.SIGINT)
        streams.join()
        assert server.process.wait(STOP_SECONDS) == 0
        assert all('"finish_reason":"length"' in text for text in streams.texts)
        assert "Traceback" not in server.stderr
        assert not is_running(pid)


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """SIGTERM that reaches no handler of a server."""
    numbers: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, previous)


def serve_until_announced(path: Path, announce: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Serve no engine on a unix socket, in this process. Returns the status."""

    async def serve() -> int:
        config, make_app = ServerConfig(uds=str(path)), lambda *_: None
        async with asyncio.timeout(WAIT_SECONDS):
            return await run.serve(make_app, FakeEngine(), config, bind_unix(str(path)))  # type: ignore[arg-type]

    monkeypatch.setattr(run, "announce", lambda *_: announce())
    return asyncio.run(serve())


def test_a_signal_as_soon_as_the_server_says_that_it_is_ready(
    signals: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends the server as later signals do, and no socket is left."""
    path = tmp_path / "server"
    assert serve_until_announced(path, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch) == 0
    assert signals == [] and not path.exists()


@pytest.mark.usefixtures("signals")
def test_a_socket_of_another_server_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the place of this server's, which somebody has removed."""
    path = tmp_path / "server"
    others: list[socket.socket] = []

    def give_way_and_end() -> None:
        path.unlink()
        others.extend(bind_unix(str(path)))
        os.kill(os.getpid(), signal.SIGTERM)

    assert serve_until_announced(path, give_way_and_end, monkeypatch) == 0
    assert path.exists()
    for each in others:
        each.close()


# --- what keeps it from starting ---


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """It is found before anything that loads a model is imported."""
    sockets = bind("127.0.0.1", 0)
    listen("127.0.0.1", sockets)
    port = port_of(sockets[0])
    assert main(["serve", "--port", str(port)]) == 2
    sockets[0].close()
    message = f"pagedattn: error: --port: expected one that is free on 127.0.0.1, got {port} (Address already in use)\n"
    assert capsys.readouterr() == ("", message)


def test_a_port_that_is_taken_while_the_model_is_loaded() -> None:
    first, second = bind("127.0.0.1", 0), []
    try:
        second = bind("127.0.0.1", port_of(first[0]))  # as nobody listens yet
        listen("127.0.0.1", second)
        with pytest.raises(OSError, match=rf"^port: expected one that is free on 127.0.0.1, got {port_of(first[0])} "):
            listen("127.0.0.1", first)
    finally:
        for each in (*first, *second):
            each.close()


def test_a_host_that_is_none_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "no.such.host.invalid"]) == 2
    assert "--host: expected a name or an address of this machine, got no.such.host.invalid" in capsys.readouterr().err


def test_a_name_with_several_addresses_has_one_port() -> None:
    sockets = bind("localhost", 0)
    assert len({port_of(each) for each in sockets}) == 1
    assert all(each.family in (socket.AF_INET, socket.AF_INET6) for each in sockets)
    for each in sockets:
        each.close()


@pytest.mark.parametrize(
    ("host", "given", "decided"),
    [
        ("127.0.0.1", None, ()),
        ("localhost", None, ()),
        ("127.0.0.1", ("box.example",), ("box.example",)),
        ("0.0.0.0", None, None),
        ("0.0.0.0", ("box.example",), ("box.example",)),
    ],
)
def test_which_names_a_server_answers(
    host: str, given: tuple[str, ...] | None, decided: tuple[str, ...] | None
) -> None:
    """None: all of them. Whoever opens a server to other machines knows what they call it, and may not say."""
    sockets = bind(host, 0)
    assert with_hosts(ServerConfig(host=host, allowed_hosts=given), sockets).allowed_hosts == decided
    for each in sockets:
        each.close()


INTERRUPTED = """
import os, sys
import pagedattn_serve.cli.serve as serve
from pagedattn_serve.cli import main

def make_engine(engine_args, config):
    os.kill(os.getpid(), int(sys.argv[1]))
    while True:
        pass

serve.make_engine = make_engine
sys.exit(main(["serve", "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_process_of_the_engine_starts(number: signal.Signals) -> None:
    """Both processes end at once, without a word."""
    command = [sys.executable, "-c", COMMAND]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: children_of(process.pid) != [], 60)
        [pid] = children_of(process.pid)
        wait_for(lambda: "libtorch" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8"), 60)
        for each in (pid, process.pid) if number == signal.SIGINT else (process.pid,):
            os.kill(each, number)
        stdout, stderr = process.communicate(timeout=60)  # the engine's process has closed its end, too
        assert stdout == "" and all(" INFO " in line for line in stderr.splitlines()), stderr
        assert process.returncode == 128 + number
        wait_for(lambda: not is_running(pid), 5)  # a process closes its files somewhat before it has ended


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_is_loaded(number: signal.Signals) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(int(number))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (128 + number, "", "")
