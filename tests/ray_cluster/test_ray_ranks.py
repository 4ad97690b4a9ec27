"""distributed_executor_backend="ray": the ranks of a model on the head, on which the driver is, and on other nodes.

The nodes are on this machine. Ranks on another node than the driver's have connections all the same, and share memory
with the ranks of their own node alone.
"""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from replicas import BODY, TEXT
from server_process import AT_ONCE_SECONDS, is_running, wait_for

from pagedattn_serve import DEMO_MODEL, LLM, SamplingParams
from pagedattn_serve.distributed import ray_placement
from pagedattn_serve.errors import ExecutorDeadError

NUM_CPUS = 2  # of the head
PARAMS = SamplingParams(temperature=0, max_tokens=BODY["max_tokens"])


def make_llm(num_ranks: int, num_threads: int) -> LLM:
    """num_threads: of all ranks together."""
    torch.set_num_threads(num_threads)
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "distributed_executor_backend": "ray"}
    return LLM(DEMO_MODEL, tensor_parallel_size=num_ranks, **options)


def text_of(llm: LLM) -> str:
    return llm.generate(BODY["prompt"], PARAMS, use_tqdm=False)[0].outputs[0].text


def num_free_cpus() -> float:
    return ray.available_resources().get("CPU", 0)


def remote_ranks(llm: LLM) -> list[int]:
    """The processes of its ranks on other nodes."""
    executor: Any = llm.llm_engine.executor
    return [worker._process.pid for worker in executor._workers._workers if worker.ip]


@pytest.fixture(scope="module")
def other_node(cluster: Cluster) -> Iterator[Any]:
    """Has two CPUs, which no other node but the head has."""
    node = cluster.add_node(num_cpus=2)
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node)


def test_ranks_on_reserved_cpus(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_placement, "RESERVE_SECONDS", 1)
    before = num_free_cpus()
    llm = make_llm(2, NUM_CPUS)
    wait_for(lambda: num_free_cpus() == before - NUM_CPUS)
    assert text_of(llm) == TEXT and not remote_ranks(llm)
    with pytest.raises(ValueError, match=r"expected 2 CPUs that are free within 1 seconds, .* for 2 ranks of 1 thr"):
        make_llm(2, NUM_CPUS)
    del llm
    gc.collect()
    wait_for(lambda: num_free_cpus() == before)


def test_cpus_that_are_not_there(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_placement, "RESERVE_SECONDS", 0.1)
    message = (
        r"expected 8 CPUs .* for 4 ranks of 2 threads, got 2 on this machine and 1, 1 on others, some of which may"
    )
    with pytest.raises(ValueError, match=message):
        make_llm(4, num_threads=8)


def test_a_rank_on_another_node_is_killed(other_node: Any) -> None:
    """Two ranks on each of two nodes give the tokens of one. Then one is killed: a step says so, and all CPUs are
    free."""
    before = num_free_cpus()
    llm = make_llm(4, num_threads=4)
    assert text_of(llm) == TEXT
    ranks = remote_ranks(llm)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ExecutorDeadError, match=rf"rank \d \(process {ranks[0]} on .*\) has ended"):
        text_of(llm)
    assert time.monotonic() - started < AT_ONCE_SECONDS
    wait_for(lambda: not any(map(is_running, ranks)))
    wait_for(lambda: num_free_cpus() == before)


PROGRAM = """
import sys
from test_ray_ranks import make_llm, remote_ranks
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
llm = make_llm(2, num_threads=4)
print("loaded", *remote_ranks(llm), flush=True)
sys.stdin.read()
"""


def test_the_driver_is_killed(cluster: Cluster, other_node: Any) -> None:
    """Its rank on another node ends with it."""
    before = num_free_cpus()
    command = [sys.executable, "-c", PROGRAM, cluster.address]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as driver:
        assert driver.stdout is not None
        word, rank = driver.stdout.readline().split()
        assert word == "loaded" and is_running(int(rank))
        driver.kill()
    wait_for(lambda: not is_running(int(rank)), 30)
    wait_for(lambda: num_free_cpus() == before)


def test_a_node_is_lost(cluster: Cluster, other_node: Any) -> None:
    llm = make_llm(2, num_threads=4)
    [rank] = remote_ranks(llm)
    cluster.remove_node(other_node, allow_graceful=False)
    with pytest.raises(ExecutorDeadError, match=rf"rank 1 \(process {rank} on .*\) has ended"):
        while True:
            text_of(llm)
    wait_for(lambda: not is_running(rank), 30)
