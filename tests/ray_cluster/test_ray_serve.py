"""pagedattn_serve.ray_serve on a cluster: what clients see, also when replicas, nodes and engines end.

The tests are one after the other on one cluster. A frozen engine keeps a request in flight for as long as a test likes.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from ray.cluster_utils import Cluster
from replicas import BODY, HEALTH_CHECK_SECONDS, NODE, TEXT, Replica, free_port, replicas_of, run
from server_process import in_pieces, is_running, wait_for

NAME = "test"
SECONDS = 240  # for what takes 5 on an idle machine: a replica starts Python twice, with torch

pytestmark = pytest.mark.timeout(3 * SECONDS)


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=SECONDS) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def complete(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/completions", json=BODY)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def streamed_texts(client: httpx.Client) -> list[str]:
    with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        *events, last = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert last == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events]


def only_replica() -> Replica:
    """Once there is one."""
    wait_for(lambda: len(replicas_of(NAME)) == 1, SECONDS)
    [replica] = replicas_of(NAME)
    return replica


def sent_to_frozen(
    replica: Replica, pool: ThreadPoolExecutor, client: httpx.Client, number: int = 1
) -> list[Future[httpx.Response]]:
    """Requests in flight at a replica, which is frozen."""
    replica.freeze()
    answers = [pool.submit(complete, client) for _ in range(number)]
    with pytest.raises(TimeoutError):
        answers[-1].result(timeout=1)
    return answers


# One replica, or two if more requests than one are in flight for longer than the look back of Ray Serve: a request of a
# client that has left still counts that long.
DELAYS = {"metrics_interval_s": 0.5, "look_back_period_s": 1, "upscale_delay_s": 3, "downscale_delay_s": 1}
SCALING = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, **DELAYS}


@pytest.fixture(scope="module", autouse=True)
def deployment(url: str) -> None:
    run(NAME, autoscaling_config=SCALING)


def test_requests(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert text_of(complete(client)) == TEXT == "".join(in_pieces(lambda: streamed_texts(client)))
    refused = client.post("/v1/completions", json={**BODY, "max_tokens": -1})
    assert refused.status_code == 400 and "max_tokens" in refused.json()["error"]["message"]

    replica = only_replica()
    replica.freeze()
    with pytest.raises(httpx.ReadTimeout):  # upon which the client leaves
        client.post("/v1/completions", json=BODY, timeout=1)
    replica.thaw()
    wait_for(lambda: 'finished_reason="abort",model_name="demo_model"} 1' in client.get("/metrics").text)


def test_dead_engine_is_replaced(client: httpx.Client, pool: ThreadPoolExecutor) -> None:
    replica = only_replica()
    [answer] = sent_to_frozen(replica, pool, client)
    os.kill(replica.core_pid, signal.SIGKILL)
    assert answer.result().status_code == 503
    assert f"(process {replica.core_pid}) was killed by SIGKILL" in answer.result().text
    wait_for(lambda: not is_running(replica.pid), 2 * HEALTH_CHECK_SECONDS)  # sooner than Ray Serve sees what is wrong
    wait_for(lambda: complete(client).status_code == 200, SECONDS)
    assert {*replica}.isdisjoint(only_replica())


def test_scale_up_and_down(client: httpx.Client, pool: ThreadPoolExecutor) -> None:
    run(NAME, health_check_period_s=SECONDS, autoscaling_config=SCALING)  # the second may take long to start
    replica = only_replica()
    answers = sent_to_frozen(replica, pool, client, number=3)
    wait_for(lambda: len(replicas_of(NAME)) == 2, SECONDS)
    replica.thaw()
    assert [text_of(answer.result()) for answer in answers] == 3 * [TEXT]
    wait_for(lambda: len(replicas_of(NAME)) == 1, SECONDS)
    assert text_of(complete(client)) == TEXT


def test_rolling_update(client: httpx.Client, pool: ThreadPoolExecutor) -> None:
    replica = only_replica()
    [answer] = sent_to_frozen(replica, pool, client)
    update = pool.submit(run, NAME, num_replicas=2)
    with pytest.raises(TimeoutError):  # the replica ends when its request has ended
        update.result(timeout=2)
    replica.thaw()
    assert text_of(answer.result()) == TEXT
    update.result()
    assert len(replicas_of(NAME)) == 2 and not is_running(replica.pid)


def test_killed_replica_and_node(client: httpx.Client, pool: ThreadPoolExecutor, cluster: Cluster) -> None:
    first, second = replicas_of(NAME)
    second.freeze()
    answers = sent_to_frozen(first, pool, client, number=6)
    os.kill(first.pid, signal.SIGKILL)
    first.thaw()
    second.thaw()
    assert {answer.result().status_code for answer in answers} == {200, 500}  # those of one go on
    wait_for(lambda: not is_running(first.core_pid))  # no orphan
    wait_for(lambda: complete(client).status_code == 200, SECONDS)
    wait_for(lambda: len(replicas_of(NAME)) == 2, SECONDS)

    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    wait_for(lambda: len(replicas_of(NAME)) == 1)
    wait_for(lambda: complete(client).status_code == 200, SECONDS)
    cluster.add_node(**NODE)
    wait_for(lambda: len(replicas_of(NAME)) == 2, SECONDS)
    assert text_of(complete(client)) == TEXT


def test_two_clusters(client: httpx.Client) -> None:
    port = free_port()
    command = [sys.executable, Path(__file__).with_name("neighbour.py"), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        [replica] = replicas_of("neighbour")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as neighbour:
            assert text_of(complete(neighbour)) == text_of(complete(client)) == TEXT
        process.stdin.close()
        process.stdout.read()  # what Ray says as it ends finds a reader
    assert process.returncode == 0 and not is_running(replica.core_pid)
    assert text_of(complete(client)) == TEXT  # the end of one is not the end of the other
