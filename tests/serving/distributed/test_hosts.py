"""`HostsCommunicator`: ranks on several hosts, here threads of this process with real sockets and shared memory."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from server_process import AT_ONCE_SECONDS
from torch import Tensor

from pagedattn_serve.distributed import communicator
from pagedattn_serve.distributed.hosts import HostsCommunicator

T = TypeVar("T")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def connect(ranks: list[HostsCommunicator], ranks_per_host: int) -> None:
    """Bring the ranks together in a new group."""
    links: list[dict[int, socket.socket]] = [{} for _ in ranks]
    for rank, each in enumerate(ranks):
        for peer in each.peers:
            if peer > rank:
                with socket.create_server(("127.0.0.1", 0)) as listener:
                    links[rank][peer] = socket.create_connection(listener.getsockname())
                    links[peer][rank], _ = listener.accept()
    for first in range(0, len(ranks), ranks_per_host):
        with ranks[first].create_group() as group:
            for rank in range(first, first + ranks_per_host):
                ranks[rank].take_links(links[rank])
                ranks[rank].join(group)


@pytest.fixture
def make_ranks() -> Iterator[Callable[[int, int], list[HostsCommunicator]]]:
    made = []

    def make(num_hosts: int, ranks_per_host: int) -> list[HostsCommunicator]:
        world_size = num_hosts * ranks_per_host
        ranks = [HostsCommunicator(rank, world_size, num_hosts) for rank in range(world_size)]
        connect(ranks, ranks_per_host)
        made.extend(ranks)
        return ranks

    yield make
    for rank in made:
        rank.leave()


def run(ranks: list[HostsCommunicator], function: Callable[[HostsCommunicator], T]) -> list[T]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(function, ranks))


def inputs(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 1), (2, 2), (3, 2), (2, 3)])
def test_sums_have_the_same_bits_everywhere(
    make_ranks: Callable[[int, int], list[HostsCommunicator]], num_hosts: int, ranks_per_host: int, dtype: torch.dtype
) -> None:
    """Of sizes that no number of ranks divides, of nothing, and of more than sockets hold. A rank that added up its
    own elements first would have others."""
    ranks = make_ranks(num_hosts, ranks_per_host)
    for shape in [(1,), (3, 7), (0, 4), (5, 512), (1031, 517)]:
        sums = run(ranks, lambda rank, shape=shape: rank.all_reduce(inputs(rank.rank, shape, dtype)))
        exact = sum(inputs(rank, shape, dtype).double() for rank in range(len(ranks)))
        for each in sums:
            assert each.dtype == dtype and torch.equal(each, sums[0])
        torch.testing.assert_close(sums[0].double(), exact, atol=0.03 if dtype != torch.float32 else 1e-5, rtol=2e-2)


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(2, 1), (2, 2), (3, 2)])
def test_tensors_are_gathered_in_the_order_of_the_ranks(
    make_ranks: Callable[[int, int], list[HostsCommunicator]], num_hosts: int, ranks_per_host: int
) -> None:
    ranks = make_ranks(num_hosts, ranks_per_host)
    for shape in [(2, 3), (0, 3), (7, 32000)]:
        expected = torch.stack([inputs(rank, shape, torch.float32) for rank in range(len(ranks))])
        for each in run(ranks, lambda rank, tensors=expected: rank.all_gather(tensors[rank.rank])):
            assert torch.equal(each, expected)


def errors_without(ranks: list[HostsCommunicator], missing: int, end: Callable[[], None]) -> list[str]:
    """What the other ranks' sums raise, one of which ends as they wait."""

    def reduce(rank: HostsCommunicator) -> str:
        with pytest.raises(RuntimeError) as error:
            rank.all_reduce(torch.ones(100_000))
        rank.leave()  # as every rank does after a step that failed
        return str(error.value)

    timer = threading.Timer(0.1, end)
    timer.start()
    errors = run([rank for rank in ranks if rank.rank != missing], reduce)
    timer.join()  # the others may see the end before it is at its own end
    return errors


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_no_rank_waits_for_one_that_has_given_up(
    make_ranks: Callable[[int, int], list[HostsCommunicator]], missing: int
) -> None:
    """Whether it leaves, as a process that dies does, or aborts. Then the same ranks go on in a new group."""
    ranks = make_ranks(2, 2)
    for end in (ranks[missing].leave, lambda: ranks[missing].abort("no memory")):
        started = time.monotonic()
        errors = errors_without(ranks, missing, end)
        assert time.monotonic() - started < AT_ONCE_SECONDS
        assert any("no memory" in error or f"rank {missing} has died, or has left" in error for error in errors), errors
        assert all("the group is broken" in error for error in errors), errors
        connect(ranks, 2)
        for total in run(ranks, lambda rank: rank.all_reduce(torch.ones(3))):
            assert total.tolist() == [4, 4, 4]


def test_a_rank_that_waits_for_a_peer(make_ranks: Callable[[int, int], list[HostsCommunicator]]) -> None:
    """It sees that another rank of its host has given up, though its peer has not come and lives."""
    ranks = make_ranks(2, 2)
    timer = threading.Timer(0.1, ranks[1].abort, ["no memory"])
    timer.start()
    with pytest.raises(RuntimeError, match=r"^the group is broken: no memory$"):
        ranks[0].all_gather(torch.ones(3))
    timer.join()


def test_a_rank_that_does_not_come(
    make_ranks: Callable[[int, int], list[HostsCommunicator]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator, "PATIENCE_SECONDS", 0.3)
    ranks = make_ranks(2, 1)
    assert ranks[0].broken is None
    with pytest.raises(RuntimeError, match=r"^the group is broken: rank 1 has not come within 0.3 seconds$"):
        ranks[0].all_reduce(torch.ones(3))
    assert ranks[0].broken is not None
    ranks[1].all_reduce(torch.ones(3))  # of which rank 0 had sent its part
    with pytest.raises(RuntimeError, match=r"^the group is broken: rank 0 has died, or has left the group$"):
        ranks[1].all_reduce(torch.ones(3))
