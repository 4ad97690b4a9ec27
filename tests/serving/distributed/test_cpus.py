"""Which CPUs the ranks bind to, on machines that are not at hand."""

import gc
import os
from pathlib import Path

import pytest
import torch
from checkpoints import Checkpoint
from hypothesis import given
from hypothesis import strategies as st
from warm_ranks import StartedRanks

from pagedattn_serve import LLMEngine
from pagedattn_serve.distributed import workers
from pagedattn_serve.distributed.launch import take_share
from pagedattn_serve.distributed.processes import cpus_of_rank, numa_nodes


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """/sys of two sockets with four cores of two threads, and a third node that has memory alone."""
    for node, cpus in enumerate(["0-3,8-11\n", "4-7,12-15\n", "\n"]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    return tmp_path


def test_nodes_of_the_allowed_cpus(two_nodes: Path, tmp_path: Path) -> None:
    assert numa_nodes(set(range(16)), two_nodes) == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]
    assert numa_nodes({2, 3, 4}, two_nodes) == [{2, 3}, {4}]
    assert numa_nodes({2, 3}, two_nodes) == [{2, 3}]
    assert numa_nodes({0, 1}, tmp_path / "none") == [{0, 1}]


@pytest.mark.parametrize(
    ("world_size", "nodes", "expected"),
    [
        (2, [{0, 1, 2, 3}], [None, None]),
        (2, [{0, 1}, {2, 3}], [{0, 1}, {2, 3}]),
        (4, [{0, 1}, {2, 3}], [{0}, {1}, {2}, {3}]),
        (2, [{0}, {1}, {2}, {3}], [{0, 1}, {2, 3}]),
        (4, [{0}, {1, 2}], [{0}, {0}, {1}, {2}]),
    ],
)
def test_cpus_of_ranks(world_size: int, nodes: list[set[int]], expected: list[set[int] | None]) -> None:
    assert [cpus_of_rank(rank, world_size, nodes) for rank in range(world_size)] == expected


@given(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_every_cpu_has_a_rank(world_size: int, sizes: list[int]) -> None:
    """And each rank has a CPU, on one node if there are enough ranks."""
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    nodes = [set(range(begin, begin + size)) for begin, size in zip(begins, sizes, strict=True)]
    shares = [cpus_of_rank(rank, world_size, nodes) or set() for rank in range(world_size)]
    assert all(shares) and set().union(*shares) == set().union(*nodes)
    if world_size >= len(nodes):
        assert all(any(share <= node for node in nodes) for share in shares)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_cpus_that_somebody_has_chosen_since_stay() -> None:
    before = os.sched_getaffinity(0)
    first, second, *_ = sorted(before)
    try:
        give_back = take_share(torch.get_num_threads(), {first})
        os.sched_setaffinity(0, {second})
        give_back()
        assert os.sched_getaffinity(0) == {second}
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_ranks_bind_and_rank_0_gives_back(
    llama: Checkpoint, ranks: StartedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two CPUs of this test stand for two nodes."""
    before = os.sched_getaffinity(0)
    first, second, *_ = sorted(before)
    monkeypatch.setattr(workers, "numa_nodes", lambda _: [{first}, {second}])
    engine = LLMEngine(llama.path, num_blocks=8, tensor_parallel_size=2)
    assert os.sched_getaffinity(0) == {first} and os.sched_getaffinity(ranks.pids[-1]) == {second}
    del engine
    gc.collect()
    assert os.sched_getaffinity(0) == before
