"""Rank 0 of several ranks: the processes of the other ranks, and a `ModelRunner` that runs each batch on all ranks.

Rank 0 is the process of the engine. It sends the other ranks what the model reads, runs its own slice, and samples.
"""

import os
import pickle
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from pagedattn_serve.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pagedattn_serve.distributed.channel import Channel, ChannelClosed
from pagedattn_serve.distributed.communicator import PATIENCE_SECONDS, SharedMemoryCommunicator
from pagedattn_serve.distributed.cpus import cpus_of_rank, numa_nodes
from pagedattn_serve.distributed.messages import (
    DIGEST_BYTES,
    CacheOrder,
    Failed,
    Join,
    Joined,
    Left,
    Loaded,
    RankOrder,
    Ready,
    Step,
    digest,
    without_tables,
)
from pagedattn_serve.distributed.processes import PeerProcess, RankProcess, how_it_ended, start_process
from pagedattn_serve.distributed.ray_cpus import reserve_cpus
from pagedattn_serve.distributed.torchrun import accept, listen, rank_of_torchrun
from pagedattn_serve.errors import ExecutorDeadError, describe
from pagedattn_serve.execution.model_runner import ModelRunner
from pagedattn_serve.execution.sampler import SamplerOutput
from pagedattn_serve.models.causal_lm import CausalLM
from pagedattn_serve.models.partition import Partition
from pagedattn_serve.scheduling.batch import ScheduledBatch

ANSWER_SECONDS = 30.0  # for a rank to leave a group that has broken: at most the time of a layer
END_SECONDS = 1.0  # for a process to end once its socket is closed

Message = TypeVar("Message")


class Worker:
    """A rank, as rank 0 sees it.

    steps: the socket for the steps of the group that the rank is in.
    """

    def __init__(self, rank: int, channel: Channel, process: RankProcess) -> None:
        self.rank = rank
        self.channel = channel
        self.steps: socket.socket | None = None
        self._process = process

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self._process.pid})"

    def join(self, generation: int, group: int) -> None:
        """Send the rank into a group, whose descriptor this is."""
        self.steps, theirs = socket.socketpair()
        self.steps.settimeout(PATIENCE_SECONDS)
        with theirs:
            self.channel.send(Join(generation), (group, theirs.fileno()))

    def end_steps(self) -> None:
        if self.steps is not None:
            self.steps.close()
            self.steps = None

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def death(self) -> str:
        """How the process ended, which has closed its channel."""
        try:
            self._process.wait(END_SECONDS)
        except Exception:
            self._process.kill()
            self._process.wait()
        return f"{self.name} {how_it_ended(self._process)}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.end_steps()
        self.channel.close()


class Workers:
    """The processes of ranks 1 and up. They end with this object, with `close`, and with this process.

    Methods raise ExecutorDeadError if a process has died or does not answer. From then on every call raises it.
    """

    def __init__(
        self, parallel: ParallelConfig, model: ModelConfig, cache: CacheConfig, scheduler: SchedulerConfig
    ) -> None:
        world_size = parallel.tensor_parallel_size
        self.communicator = SharedMemoryCommunicator(0, world_size)
        self.checks_inputs = os.environ.get("PAGEDATTN_CHECK") == "1"
        self._generation = 0  # of the group
        self._death: str | None = None
        self._workers: list[Worker] = []
        by_torchrun = rank_of_torchrun(world_size) is not None
        num_threads = torch.get_num_threads()
        if not by_torchrun:  # else that is the number for a process already
            num_threads = max(1, num_threads // world_size)
        undo: list[Callable[[], None]] = []
        if parallel.distributed_executor_backend == "ray":
            undo.append(reserve_cpus(world_size, num_threads))
        nodes = numa_nodes(os.sched_getaffinity(0))
        undo.append(take_share(num_threads, cpus_of_rank(0, world_size, nodes)))
        self.close = weakref.finalize(self, _end, self._workers, os.getpid(), undo)
        try:
            for worker in accept_ranks(world_size) if by_torchrun else map(start_rank, range(1, world_size)):
                self._workers.append(worker)
                cpus = cpus_of_rank(worker.rank, world_size, nodes)
                order = RankOrder(
                    worker.rank, world_size, num_threads, cpus, self.checks_inputs, model, cache, scheduler
                )
                self._send(worker, order)
        except BaseException:
            self.close()
            raise

    @property
    def partition(self) -> Partition:
        """The slice of the model that rank 0 holds."""
        return Partition(0, self.communicator.world_size, self.communicator)

    def smallest(self, cache: CacheConfig) -> CacheConfig:
        """Wait until all ranks have loaded; the config with as many blocks as every rank has room for. Raises what
        failed on a rank."""
        loaded = [self._receive(worker, Loaded) for worker in self._workers]
        return replace(
            cache,
            num_blocks=min(cache.num_blocks, *(each.num_blocks for each in loaded)),
            num_host_blocks=min(cache.num_host_blocks, *(each.num_host_blocks for each in loaded)),
        )

    def order_caches(self, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
        for worker in self._workers:
            self._send(worker, CacheOrder(cache, scheduler))

    def wait_until_ready(self) -> None:
        """Wait until all ranks have caches. Raises what failed on a rank."""
        for worker in self._workers:
            self._receive(worker, Ready)

    def join(self) -> None:
        """Bring all ranks together in a new group, wherever they are."""
        self.end_steps()
        self.communicator.leave()
        self._generation += 1
        with self.communicator.create_group() as group:
            for worker in self._workers:
                try:
                    worker.join(self._generation, group.fileno())
                except ChannelClosed:
                    raise self._dead(worker.death()) from None
            deadline = time.monotonic() + ANSWER_SECONDS
            for worker in self._workers:
                self._receive(worker, Joined, deadline)
            self.communicator.join(group)

    def send_step(self, step: Step) -> None:
        data = pickle.dumps(step, pickle.HIGHEST_PROTOCOL)
        for worker in self._workers:
            assert worker.steps is not None
            worker.steps.sendall(data)

    def check_digests(self, expected: bytes) -> None:
        """Compare what the ranks say of their inputs. Raises RuntimeError, which names a rank that has others."""
        for worker in self._workers:
            assert worker.steps is not None
            found = worker.steps.recv(DIGEST_BYTES, socket.MSG_WAITALL)
            if found != expected:
                raise RuntimeError(f"PAGEDATTN_CHECK: the inputs of {worker.name} are not those of rank 0")

    def end_steps(self) -> None:
        """Let the ranks leave the group, once they see it."""
        for worker in self._workers:
            worker.end_steps()

    def raise_cause(self, error: Exception) -> None:
        """After a step that raised `error` on rank 0: wait until all ranks have left the group. Raises RuntimeError if
        something failed on another rank."""
        self.end_steps()
        deadline = time.monotonic() + ANSWER_SECONDS
        failures = []
        for worker in self._workers:
            cause = self._receive(worker, Left, deadline, f", after {describe(error)}").error
            if cause is not None:
                failures.append(f"{worker.name}: {describe(cause)}")
        if failures:
            raise RuntimeError(failures[0]) from error

    def check_health(self) -> None:
        """Raise ExecutorDeadError if a process has ended."""
        self.raise_if_dead()
        for worker in self._workers:
            if worker.has_ended:
                raise self._dead(worker.death())

    def raise_if_dead(self) -> None:
        if self._death is not None:
            raise ExecutorDeadError(self._death)

    def _send(self, worker: Worker, message: Any) -> None:
        self.raise_if_dead()
        try:
            worker.channel.send(message)
        except ChannelClosed:
            raise self._dead(worker.death()) from None

    def _receive(
        self, worker: Worker, kind: type[Message], deadline: float | None = None, circumstance: str = ""
    ) -> Message:
        """The next message of this kind. Messages about earlier groups are passed over."""
        self.raise_if_dead()
        while True:
            try:
                message, _ = worker.channel.receive(deadline)
            except ChannelClosed:
                raise self._dead(worker.death()) from None
            except TimeoutError:
                text = f"{worker.name} has not answered for {ANSWER_SECONDS:g} s{circumstance}"
                raise self._dead(text) from None
            if isinstance(message, Failed):
                try:
                    raise message.error
                finally:
                    del message  # or the error would keep this frame, and the frame the error
            if isinstance(message, Joined | Left) and message.generation != self._generation:
                continue
            if isinstance(message, kind):
                return message
            if isinstance(message, Left):  # in place of Joined
                raise RuntimeError(f"{worker.name}: {message.error}")

    def _dead(self, text: str) -> ExecutorDeadError:
        self._death = text
        self.communicator.leave()
        self.close()
        return ExecutorDeadError(text)


def start_rank(rank: int) -> Worker:
    """Start the process of a rank."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        return Worker(rank, Channel(ours), start_process("pagedattn_serve.distributed.worker_main", theirs))


def accept_ranks(world_size: int) -> Iterator[Worker]:
    """Wait for the ranks that torchrun has started, which `torchrun.serve_as_rank` runs."""
    listener = listen()
    for _ in range(1, world_size):
        rank, connection, pid = accept(listener)
        yield Worker(rank, Channel(connection), PeerProcess(pid))


def take_share(num_threads: int, cpus: set[int] | None) -> Callable[[], None]:
    """Compute with so many threads from now on, and on these CPUs unless None. Returns what takes that back."""
    num_threads_before, cpus_before = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(num_threads)
    if cpus is not None:
        os.sched_setaffinity(0, cpus)

    def give_back() -> None:
        if torch.get_num_threads() == num_threads:  # else somebody has set it since
            torch.set_num_threads(num_threads_before)
        if cpus is not None and os.sched_getaffinity(0) == cpus:
            os.sched_setaffinity(0, cpus_before)

    return give_back


def _end(workers: list[Worker], owner: int, undo: list[Callable[[], None]]) -> None:
    """Kill the processes: they have nothing that is to be kept."""
    if os.getpid() != owner:  # a child that was forked
        return
    for worker in workers:
        worker.kill()
    workers.clear()
    for give_back in undo:
        give_back()


class Executor(ModelRunner):
    """Runs each batch on all ranks. The arguments are those of `ModelRunner`, for rank 0.

    Raises ExecutorDeadError if a rank has died or does not answer: then nothing runs any more.
    """

    def __init__(
        self,
        workers: Workers,
        model: CausalLM,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        device: str,
        seed: int,
        enforce_eager: bool = False,
    ) -> None:
        workers.order_caches(cache_config, scheduler_config)
        super().__init__(model, scheduler_config, cache_config, device, seed, enforce_eager)
        workers.wait_until_ready()
        self._workers = workers
        self._are_in_step = False  # whether all ranks have done the same, and wait for the next step
        self._join()

    @property
    def can_run_again(self) -> bool:
        return self._are_in_step

    def check_health(self) -> None:
        self._workers.check_health()

    def _join(self) -> None:
        self._workers.raise_if_dead()
        self.drop_graphs()  # which have the old group
        self._workers.join()
        self._are_in_step = True

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> SamplerOutput:
        """As `ModelRunner.execute`. An error of another rank is a RuntimeError that names the rank."""
        if not self._are_in_step:
            self._join()
        self._are_in_step = False
        copies = (batch.blocks_to_swap_out, batch.blocks_to_swap_in, batch.blocks_to_copy)
        inputs = changes = logits = None
        if batch.sequences:
            inputs, changes = self.prepare_inputs(batch)
        try:
            self._workers.send_step(Step(*copies, None if inputs is None else without_tables(inputs), changes))
            self.copy_blocks(*copies)
            if inputs is not None and changes is not None:
                logits = self.run_model(inputs)
                if self._workers.checks_inputs:
                    self._workers.check_digests(digest(inputs, changes.lengths))
        except Exception as error:
            self._workers.communicator.abort(f"rank 0: {describe(error)}")
            self._workers.raise_cause(error)
            raise
        except BaseException as interrupt:
            self._workers.communicator.abort(f"rank 0: {describe(interrupt)}")
            self._workers.end_steps()
            raise
        self._are_in_step = True
        return SamplerOutput() if logits is None else self.sample(batch, logits)
