"""Ranks as threads of one process: what each rank's part of a test is called with, and how the ranks meet."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
TIMEOUT = 60  # seconds that a rank waits for the others


class Ranks:
    """What the ranks share."""

    def __init__(self, world_size: int) -> None:
        self.tensors: list[Tensor] = [torch.empty(0)] * world_size
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.tensors[rank] = tensor
        self.barrier.wait()
        tensors = [tensor.clone() for tensor in self.tensors]
        self.barrier.wait()  # nobody changes a tensor before all have it
        return tensors


@dataclass(slots=True)
class ThreadCommunicator:
    """A `Communicator`. It counts its calls, and lets no rank call with another shape or dtype than the others."""

    ranks: Ranks
    rank: int
    world_size: int
    num_calls: int = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._all(tensor).float().sum(0).to(tensor.dtype)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._all(tensor)

    def _all(self, tensor: Tensor) -> Tensor:
        self.num_calls += 1
        tensors = self.ranks.exchange(self.rank, tensor)
        assert {(of_rank.shape, of_rank.dtype) for of_rank in tensors} == {(tensor.shape, tensor.dtype)}
        return torch.stack(tensors)


def run_ranks(world_size: int, function: Callable[[ThreadCommunicator], T]) -> list[T]:
    """What the function returns on each rank. If it fails on one, the others do not wait for that rank."""
    ranks = Ranks(world_size)

    def run(rank: int) -> T:
        try:
            with torch.inference_mode():
                return function(ThreadCommunicator(ranks, rank, world_size))
        except BaseException:
            ranks.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        results = [pool.submit(run, rank) for rank in range(world_size)]
    errors = [error for result in results if (error := result.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return [result.result() for result in results]
