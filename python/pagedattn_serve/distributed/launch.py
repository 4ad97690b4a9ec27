"""Who starts the ranks of a model: the process of rank 0, torchrun or Ray. And what rank 0 itself computes with."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from pagedattn_serve.config import ParallelConfig
from pagedattn_serve.distributed.channel import Channel
from pagedattn_serve.distributed.processes import PeerProcess, RankProcess, start_process
from pagedattn_serve.distributed.ray_placement import OPTION, RayPlacement
from pagedattn_serve.distributed.remote import Placement
from pagedattn_serve.distributed.torchrun import TorchrunPlacement, accept, listen, rank_of_torchrun
from pagedattn_serve.errors import ArgumentError


class LocalRank(NamedTuple):
    """A rank on this host, which has started."""

    rank: int
    channel: Channel
    process: RankProcess


class Launch(NamedTuple):
    """How the ranks of a model start.

    num_threads: of each rank. start_on_this_host: starts ranks 1 and up, of so many on this host. placement: of the
    ranks on other hosts; None if there can be none.
    """

    num_threads: int
    start_on_this_host: Callable[[int], Iterator[LocalRank]]
    placement: Placement | None


def choose_launch(parallel: ParallelConfig, device: str) -> Launch:
    """Raises ArgumentError where torchrun has started this process and Ray is asked for, too, and for Ray or stages on
    CUDA."""
    world_size, num_stages = parallel.num_ranks, parallel.pipeline_parallel_size
    if num_stages > 1 and device != "cpu":
        raise ArgumentError("pipeline_parallel_size", f"1 on {device}, as stages are on CPUs alone", num_stages)
    by_torchrun = rank_of_torchrun(world_size) is not None
    by_ray = parallel.distributed_executor_backend == "ray"
    if by_torchrun and by_ray:
        raise ArgumentError(OPTION, "mp with ranks that torchrun has started", "ray")
    if by_ray and device != "cpu":
        raise ArgumentError(OPTION, f"mp, or torchrun, on {device}, as Ray places ranks on CPUs alone", "ray")
    if by_torchrun:
        return launch_by_torchrun()
    return launch_by_ray(world_size) if by_ray else launch_processes(world_size)


def launch_processes(world_size: int) -> Launch:
    """All ranks are processes that this one starts."""
    return Launch(threads_of_rank(world_size), start_ranks, None)


def launch_by_torchrun() -> Launch:
    """torchrun has started all ranks. It has also said how many threads each of them takes."""
    return Launch(torch.get_num_threads(), accept_ranks, TorchrunPlacement())


def launch_by_ray(world_size: int) -> Launch:
    """Ray has the CPUs, and starts the ranks on other hosts."""
    num_threads = threads_of_rank(world_size)
    return Launch(num_threads, start_ranks, RayPlacement(world_size, num_threads))


def threads_of_rank(world_size: int) -> int:
    """If all ranks share the threads of this process: those that it has without engines."""
    return max(1, shares_of_thread().before_all().num_threads // world_size)


def start_ranks(ranks_per_host: int) -> Iterator[LocalRank]:
    """Start the processes of the ranks of this host."""
    return map(start_rank, range(1, ranks_per_host))


def start_rank(rank: int) -> LocalRank:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        return LocalRank(rank, Channel(ours), start_process("pagedattn_serve.distributed.worker", theirs))


def accept_ranks(ranks_per_host: int) -> Iterator[LocalRank]:
    """Wait for the ranks that torchrun has started on this host, which `torchrun.serve_as_rank` runs."""
    listener = listen()
    for _ in range(1, ranks_per_host):
        rank, connection, pid = accept(listener)
        yield LocalRank(rank, Channel(connection), PeerProcess(pid))


# ---- threads and CPUs -----------------------------------------------------------------------------------------------


def take_share(num_threads: int, cpus: set[int] | None) -> Callable[[], None]:
    """Compute with so many threads from now on, and on these CPUs unless None. Returns what takes that back; several
    engines may do that in any order."""
    shares = shares_of_thread()
    share = Share(num_threads, cpus or os.sched_getaffinity(0))
    shares.take(share)
    return partial(shares.give_back, share)


class Share(NamedTuple):
    """How many threads compute, and on which CPUs."""

    num_threads: int
    cpus: set[int]

    @classmethod
    def now(cls) -> "Share":
        """That of this thread."""
        return cls(torch.get_num_threads(), os.sched_getaffinity(0))

    def apply(self) -> None:
        now = Share.now()
        if now.num_threads != self.num_threads:
            torch.set_num_threads(self.num_threads)
        if now.cpus != self.cpus:
            os.sched_setaffinity(0, self.cpus)


class Shares:
    """What the engines of a thread have taken, the newest last, and what there was before."""

    def __init__(self) -> None:
        self._taken: list[Share] = []
        self._first = Share.now()

    def before_all(self) -> Share:
        """What there would be without engines."""
        return self._back_to(self._first) if self._taken else Share.now()

    def take(self, share: Share) -> None:
        self._first = self.before_all()
        if self._taken and Share.now() != self._taken[-1]:
            self._taken = []  # somebody has set it since: there is nothing to go back to behind that
        self._taken.append(share)
        share.apply()

    def give_back(self, share: Share) -> None:
        if not any(each is share for each in self._taken):
            return
        others = [each for each in self._taken if each is not share]
        self._back_to(others[-1] if others else self._first).apply()
        self._taken = others

    def _back_to(self, before: Share) -> Share:
        """What is as the newest engine has set it becomes what it was before. Somebody may have set the rest since."""
        now, newest = Share.now(), self._taken[-1]
        return Share(
            before.num_threads if now.num_threads == newest.num_threads else now.num_threads,
            before.cpus if now.cpus == newest.cpus else now.cpus,
        )


_of_thread = threading.local()  # torch and the system count threads and CPUs for each thread


def shares_of_thread() -> Shares:
    if not hasattr(_of_thread, "shares"):
        _of_thread.shares = Shares()
    shares: Shares = _of_thread.shares
    return shares
