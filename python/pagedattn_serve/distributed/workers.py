"""The ranks of a model as rank 0 sees them: how they start, come together, fail and end.

Rank 0 is the process of the engine. `launch` says who starts the other ranks.
"""

import os
import pickle
import select
import socket
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pagedattn_ext.switches import is_on
from pagedattn_serve.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pagedattn_serve.distributed.activity import LocalWatch, RemoteWatch
from pagedattn_serve.distributed.channel import Address, Channel, ChannelClosed, NetworkChannel
from pagedattn_serve.distributed.communicator import PATIENCE_SECONDS
from pagedattn_serve.distributed.hosts import HostsCommunicator
from pagedattn_serve.distributed.launch import choose_launch, take_share
from pagedattn_serve.distributed.links import LinkedCommunicator
from pagedattn_serve.distributed.messages import (
    DIGEST_BYTES,
    CacheOrder,
    Failed,
    GroupMade,
    Join,
    Joined,
    Left,
    Loaded,
    Loading,
    MakeGroup,
    RankOrder,
    Ready,
    Step,
)
from pagedattn_serve.distributed.pipeline import PipelineCommunicator, make_communicator, partition_of
from pagedattn_serve.distributed.process_group import ProcessGroupCommunicator, serve_store
from pagedattn_serve.distributed.processes import RankProcess, cpus_of_rank, how_it_ended, numa_nodes
from pagedattn_serve.distributed.remote import OtherHosts, RemoteRank, absolute
from pagedattn_serve.errors import ArgumentError, ExecutorDeadError, describe
from pagedattn_serve.execution.engine_setup import device_of_rank
from pagedattn_serve.execution.fingerprint import capabilities
from pagedattn_serve.loading.loader import build_model
from pagedattn_serve.models.partition import Partition

ANSWER_SECONDS = 30.0  # for a rank to leave a group that has broken: at most the time of a layer
CHECK_SECONDS = 0.1  # between two looks at whether all ranks live, while one is waited for
LOOPBACK = "127.0.0.1"
END_SECONDS = 1.0  # for a process to end once its socket is closed

Message = TypeVar("Message")


class Worker:
    """A rank, as rank 0 sees it.

    ip, nodes, watch: of a rank on another host: the host's address, and the CPUs of its NUMA nodes; what looks at it.
    steps: the socket for the steps of the group that the rank is in.
    unread: a message that was received, but not asked for yet; None if there is none.
    """

    def __init__(
        self,
        rank: int,
        channel: Channel | NetworkChannel,
        process: RankProcess,
        ip: str = "",
        nodes: list[set[int]] | None = None,
        watch: RemoteWatch | None = None,
    ) -> None:
        self.rank = rank
        self.channel = channel
        self.ip = ip
        self.nodes = nodes
        self.watch = LocalWatch(process.pid) if watch is None else watch
        self.steps: socket.socket | None = None
        self.unread: Any = None
        self._process = process

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self._process.pid}" + (f" on {self.ip})" if self.ip else ")")

    def join(self, order: Join, *descriptors: int) -> None:
        """Send the rank into a group. descriptors: those that come along behind that of the steps, on this host."""
        if isinstance(self.channel, NetworkChannel):
            self.channel.send(order)
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self.begin_steps(ours)
            self.channel.send(order, (theirs.fileno(), *descriptors))

    def begin_steps(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_SECONDS)
        self.steps = connection

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
        self.watch.close()


class Workers:
    """The processes of ranks 1 and up. They end with this object, with `close`, and with this process.

    device: of rank 0.
    on_loading: is called with (rank, done, total), some times, as each rank loads its weights.

    Methods raise ExecutorDeadError if a process has died or does not answer. From then on every call raises it.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        on_loading: Callable[[int, int, int], object] | None = None,
    ) -> None:
        world_size, num_stages = parallel.num_ranks, parallel.pipeline_parallel_size
        self.checks_inputs = is_on("PAGEDATTN_CHECK")
        self._on_loading = on_loading
        self._generation = 0  # of the group
        self._death: str | None = None
        self._workers: list[Worker] = []
        self._other_hosts: OtherHosts | None = None
        self._addresses: list[Address | None] = []  # where each rank listens to ranks on other hosts
        self._capabilities: list[tuple[str, str]] = []  # of ranks 1 and up
        undo: list[Callable[[], None]] = []
        self.close = weakref.finalize(self, _end, self._workers, os.getpid(), undo)
        try:
            launch = choose_launch(parallel, model.device)
            if launch.placement is not None:
                undo.append(launch.placement.give_back)
                if launch.placement.num_hosts > 1:
                    self._other_hosts = OtherHosts(launch.placement, world_size)
                    undo.append(self._other_hosts.close)
                    model = replace(model, model=absolute(model.model))
            others = self._other_hosts
            ranks_per_host, num_hosts = (world_size, 1) if others is None else (others.ranks_per_host, others.num_hosts)
            self.device = device_of_rank(model.device, 0, ranks_per_host)
            if num_stages > 1 and ranks_per_host % parallel.tensor_parallel_size:
                expected = f"a divisor of the {ranks_per_host} ranks of a machine, so that a stage is on one machine"
                raise ArgumentError("tensor_parallel_size", expected, parallel.tensor_parallel_size)
            self.communicator = make_communicator(0, world_size, num_hosts, self.device, num_stages)
            if isinstance(self.communicator, PipelineCommunicator):
                if launch.placement is None:  # a model that has no such stages is refused before processes start
                    build_model(model.model, model.dtype, self.partition)
                self.communicator.at_work = partial(_any_works, self._workers)
            if isinstance(self.communicator, ProcessGroupCommunicator):
                undo.append(self.communicator.leave)
            if not self.has_graphs:
                model = replace(model, enforce_eager=True)
            nodes = numa_nodes(os.sched_getaffinity(0))
            undo.append(take_share(launch.num_threads, cpus_of_rank(0, ranks_per_host, nodes)))
            for started in launch.start_on_this_host(ranks_per_host):
                self._workers.append(Worker(*started))
            for remote in [] if others is None else others.start():
                self._workers.append(worker_of(remote))
            for worker in self._workers:
                cpus = cpus_of_rank(worker.rank % ranks_per_host, ranks_per_host, worker.nodes or nodes)
                hosts = None if others is None else others.seen_from(worker.ip or others.address[0])
                how = (worker.rank, world_size, num_stages, launch.num_threads, cpus, hosts, self.checks_inputs)
                self._send(worker, RankOrder(*how, model, cache, scheduler))
        except BaseException:
            self.close()
            raise

    @property
    def has_graphs(self) -> bool:
        """Whether CPU graphs can hold what the ranks compute together."""
        return not isinstance(self.communicator, HostsCommunicator | ProcessGroupCommunicator)

    @property
    def partition(self) -> Partition:
        """The slice of the model that rank 0 holds."""
        return partition_of(self.communicator)

    @property
    def facts(self) -> tuple[object, ...]:
        """What of the ranks decides about bits, beside their number and what rank 0 runs on: nothing, if they are alike
        and on one host. This is known when all ranks have loaded."""
        facts: list[object] = []
        others = self._other_hosts
        # A sum over several hosts begins with the sum of each host. A stage is on one host.
        if others is not None and others.ranks_per_host > 1 and not isinstance(self.communicator, PipelineCommunicator):
            facts.append(others.num_hosts)
        if set(self._capabilities) != {capabilities(self.device)}:
            facts.append(self._capabilities)
        return tuple(facts)

    def tell_loading(self, done: int, total: int) -> None:
        """Rank 0 has loaded so much. What the other ranks have said until now is told, too."""
        self._tell_loading(0, done, total)
        for worker in self._workers:
            while worker.unread is None and worker.channel.has_message():
                message = self._next_message(worker)
                if isinstance(message, Loading):
                    self._tell_loading(worker.rank, *message)
                else:
                    worker.unread = message

    def _tell_loading(self, rank: int, done: int, total: int) -> None:
        if self._on_loading is not None:
            self._on_loading(rank, done, total)

    def smallest(self, cache: CacheConfig) -> CacheConfig:
        """Wait until all ranks have loaded; the config with as many blocks and states as every rank has room for.
        Raises what failed on a rank."""
        loaded = [self._receive(worker, Loaded) for worker in self._workers]
        own_address = None if self._other_hosts is None else self._other_hosts.address
        self._addresses = [own_address, *(each.address for each in loaded)]
        self._capabilities = [each.capabilities for each in loaded]
        kinds = ("num_blocks", "num_host_blocks", "num_state_slots", "num_host_state_slots")
        return replace(cache, **{kind: min(getattr(each, kind) for each in (cache, *loaded)) for kind in kinds})

    def order_caches(self, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
        for worker in self._workers:
            self._send(worker, CacheOrder(cache, scheduler, self._addresses))

    def wait_until_ready(self) -> None:
        """Wait until all ranks have caches. Raises what failed on a rank."""
        for worker in self._workers:
            self._receive(worker, Ready)

    def join(self) -> None:
        """Bring all ranks together in a new group, wherever they are."""
        self.end_steps()
        self.communicator.leave()
        self._generation += 1
        deadline = time.monotonic() + ANSWER_SECONDS
        if isinstance(self.communicator, ProcessGroupCommunicator):
            self._join_process_group(self.communicator, deadline)
            return
        paths = self._make_groups(deadline)
        with self.communicator.create_group() as group, ExitStack() as sent:
            own_links, links_of = self._make_links()
            orders, descriptors = {}, {}
            for rank, path in paths.items():
                links = {peer: sent.enter_context(link) for peer, link in links_of[rank].items()}
                orders[rank] = Join(self._generation, path, None, tuple(links))
                memory = [group.fileno()] if path is None else []
                descriptors[rank] = [*memory, *(link.fileno() for link in links.values())]
            self._send_into_group(orders, deadline, descriptors)
            if own_links and isinstance(self.communicator, PipelineCommunicator):
                self.communicator.take_links(own_links)
            for worker in self._workers:
                self._receive(worker, Joined, deadline)
            self.communicator.join(group)

    def _join_process_group(self, communicator: ProcessGroupCommunicator, deadline: float) -> None:
        store, address = serve_store(LOOPBACK if self._other_hosts is None else self._other_hosts.address[0])
        communicator.meet(lambda: store)
        order = Join(self._generation, None, address)
        self._send_into_group({worker.rank: order for worker in self._workers}, deadline, {})
        for worker in self._workers:
            self._receive(worker, Joined, deadline)
        try:
            communicator.join(deadline, self.check_health)
        except TimeoutError as error:
            raise self._dead(str(error)) from None
        # A rank says something amid steps only if it leaves.
        channels = {f"{worker.name} has died, or has left the group": worker.channel.socket for worker in self._workers}
        communicator.watch(channels, select.POLLIN)

    def _send_into_group(self, orders: dict[int, Join], deadline: float, descriptors: dict[int, list[int]]) -> None:
        """orders, descriptors: by rank."""
        for worker in self._workers:
            try:
                worker.join(orders[worker.rank], *descriptors.get(worker.rank, ()))
            except ChannelClosed:
                raise self._dead(worker.death()) from None
        if self._other_hosts is not None:
            self._connect(self._other_hosts, deadline)

    def _make_groups(self, deadline: float) -> dict[int, str | None]:
        """Let each of the other hosts, or stages, have the memory of a group. Where a rank finds its group; None: this
        process has it."""
        paths: dict[int, str | None] = {worker.rank: None for worker in self._workers}
        ranks_per_group = len(self._workers) + 1
        if isinstance(self.communicator, PipelineCommunicator):
            ranks_per_group = self.communicator.world_size
        elif self._other_hosts is not None:
            ranks_per_group = self._other_hosts.ranks_per_host
        firsts = [worker for worker in self._workers if worker.rank % ranks_per_group == 0]
        for worker in firsts:
            self._send(worker, MakeGroup(self._generation))
        for worker in firsts:
            made = self._receive(worker, GroupMade, deadline)
            paths |= {worker.rank + i: made.path for i in range(ranks_per_group)}
        return paths

    def _make_links(self) -> tuple[dict[int, socket.socket], dict[int, dict[int, socket.socket]]]:
        """Sockets between the stages, if all ranks are on this host: those of rank 0 and of all others, by the rank at
        the other end."""
        links: dict[int, dict[int, socket.socket]] = {rank: {} for rank in range(len(self._workers) + 1)}
        if isinstance(self.communicator, PipelineCommunicator) and self._other_hosts is None:
            for rank in range(self.communicator.world_size, len(links)):
                peer = rank - self.communicator.world_size
                links[rank][peer], links[peer][rank] = socket.socketpair()
        return links.pop(0), links

    def _connect(self, others: OtherHosts, deadline: float) -> None:
        """Wait for what the ranks on other hosts connect with this one."""
        ranks = self.communicator if isinstance(self.communicator, LinkedCommunicator) else None
        peers = [] if ranks is None else ranks.peers
        try:
            steps, links = others.connect(self._generation, peers, deadline, self.check_health)
        except TimeoutError as error:
            raise self._dead(str(error)) from None
        for worker in self._workers:
            if worker.rank in steps:
                worker.begin_steps(steps[worker.rank])
        if ranks is not None:
            ranks.take_links(links)

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
            if len(found) < DIGEST_BYTES:
                raise RuntimeError(f"{worker.name} has left the group")
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

    def find_hang(self) -> str | None:
        """Which ranks hang, and how; None if none does. To be called every LOOK_SECONDS, by any thread."""
        looks = {worker.name: worker.watch.look() for worker in list(self._workers)}
        return "; ".join(f"{name} {hang}" for name, hang in looks.items() if hang is not None) or None

    def at_work(self) -> bool:
        """Whether a rank computes."""
        return any([worker.watch.works() for worker in list(self._workers)])  # a look at each of them

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
        """The next message of this kind. Messages about earlier groups are passed over. With a deadline, the rank may
        wait for other ranks: if one of these ends, nobody waits any more."""
        self.raise_if_dead()
        while True:
            if deadline is not None:
                while not worker.channel.has_message(CHECK_SECONDS) and time.monotonic() < deadline:
                    self.check_health()
            message, worker.unread = worker.unread, None
            try:
                if message is None:
                    message = self._next_message(worker, deadline)
            except TimeoutError:
                text = f"{worker.name} has not answered for {ANSWER_SECONDS:g} s{circumstance}"
                raise self._dead(text) from None
            if isinstance(message, Failed):
                try:
                    raise message.error
                finally:
                    del message  # or the error would keep this frame, and the frame the error
            if isinstance(message, Loading):
                self._tell_loading(worker.rank, *message)
                continue
            if isinstance(message, GroupMade | Joined | Left) and message.generation != self._generation:
                continue
            if isinstance(message, kind):
                return message
            if isinstance(message, Left):  # in place of GroupMade or Joined
                self.check_health()
                raise RuntimeError(f"{worker.name}: {message.error}")

    def _next_message(self, worker: Worker, deadline: float | None = None) -> Any:
        try:
            message, _ = worker.channel.receive(deadline)
        except ChannelClosed:
            raise self._dead(worker.death()) from None
        return message

    def _dead(self, text: str) -> ExecutorDeadError:
        self._death = text
        self.communicator.leave()
        self.close()
        return ExecutorDeadError(text)


def worker_of(remote: RemoteRank) -> Worker:
    """The worker of a rank on another host, which has connected."""
    watch = RemoteWatch(remote.pulse)
    return Worker(remote.rank, remote.channel, remote.process, remote.ip, remote.nodes, watch)


def _any_works(workers: list[Worker]) -> bool:
    """Whether a rank computes, after a look at each of them."""
    for worker in list(workers):
        worker.watch.look()
    return any([worker.watch.works() for worker in list(workers)])


def _end(workers: list[Worker], owner: int, undo: list[Callable[[], None]]) -> None:
    """Kill the processes: they have nothing that is to be kept."""
    if os.getpid() != owner:  # a child that was forked
        return
    for worker in workers:
        worker.kill()
    workers.clear()
    for give_back in reversed(undo):
        give_back()
