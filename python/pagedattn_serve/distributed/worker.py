"""Ranks 1 and up: each loads its slice of the model, then runs the steps that rank 0 sends.

Rank 0 sends a step and expects no answer. What the ranks compute together keeps them in step. If a step fails on a
rank, or rank 0 is interrupted amid one, the group of the ranks breaks: each rank says how it was for it, then rank 0
makes a new group. In between, a rank waits for rank 0.
"""

import errno
import os
import pickle
import select
import socket
import time
from contextlib import ExitStack, suppress
from functools import partial
from io import FileIO
from typing import NoReturn

import torch

from pagedattn_serve.distributed.activity import Pulse
from pagedattn_serve.distributed.channel import (
    Address,
    Channel,
    ChannelClosed,
    Hello,
    Listener,
    NetworkChannel,
    connect,
)
from pagedattn_serve.distributed.links import LinkedCommunicator
from pagedattn_serve.distributed.messages import (
    Arrived,
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
    digest,
)
from pagedattn_serve.distributed.pipeline import (
    make_communicator,
    partition_of,
    run_step,
    watch_layers,
)
from pagedattn_serve.distributed.process_group import ProcessGroupCommunicator, find_store
from pagedattn_serve.distributed.processes import end_child, numa_nodes
from pagedattn_serve.errors import describe, portable
from pagedattn_serve.execution.engine_setup import device_of_rank, limit_to_memory, limit_to_model
from pagedattn_serve.execution.fingerprint import capabilities
from pagedattn_serve.execution.model_runner import StepRunner
from pagedattn_serve.loading.directory import model_directory
from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.scheduling.sequence import TableArray

CONNECT_SECONDS = 30.0  # for a rank on another host to take a connection
MAX_ERROR_LENGTH = 10_000  # characters: a message holds it


def main(fd: int) -> NoReturn:
    """The process of a rank, which `launch.start_rank` starts. fd: a socket to rank 0."""
    serve_rank(Channel(socket.socket(fileno=fd)))
    end_child(0)


def serve_remote_rank(rank: int, address: Address, key: bytes) -> None:
    """Serve rank 0, which listens at this address of another host."""
    deadline = time.monotonic() + CONNECT_SECONDS
    connection, pulse = (
        connect(address, key, Hello(purpose, 0, rank), deadline, lambda: None) for purpose in ("messages", "pulse")
    )
    Pulse(pulse).start()
    channel = NetworkChannel(connection)
    with suppress(ChannelClosed):
        channel.send(Arrived(os.getpid(), numa_nodes(os.sched_getaffinity(0))))
        serve_rank(channel)


def serve_rank(channel: Channel | NetworkChannel) -> None:
    """Do all that rank 0 says, until rank 0 closes the channel."""
    try:
        try:
            rank = Rank(channel)
        except Exception as error:
            channel.send(Failed(short(error)))
            return
        while True:
            rank.serve_group()
    except ChannelClosed:
        pass


class Rank:
    """A slice of the model and its cache."""

    def __init__(self, channel: Channel | NetworkChannel) -> None:
        self._channel = channel
        self._group_file: FileIO | None = None  # of the group that this rank has made for its host
        order: RankOrder
        order, _ = channel.receive()
        self._checks_inputs = order.checks_inputs
        if order.cpus is not None:
            os.sched_setaffinity(0, order.cpus)  # before torch starts the threads that it computes with
        torch.set_num_threads(order.num_threads)
        self._hosts = order.hosts
        num_hosts = 1 if order.hosts is None else order.hosts.num_hosts
        ranks_per_host = order.world_size // num_hosts
        config = order.model
        device = device_of_rank(config.device, order.rank % ranks_per_host, ranks_per_host)
        if device != "cpu":
            torch.cuda.set_device(device)
        self._communicator = make_communicator(order.rank, order.world_size, num_hosts, device, order.num_stages)
        self._listener: Listener | None = None
        if order.hosts is not None:
            self._listener = Listener(order.hosts.ip, order.hosts.key)
        partition = partition_of(self._communicator)

        def tell(done: int, total: int) -> None:
            channel.send(Loading(done, total))

        directory = model_directory(config.model, config.allow_download)  # perhaps on another machine than rank 0's
        model = load_model(directory, config.dtype, device, config.quantization, partition, tell, config.load_format)
        watch_layers(model, self._communicator)
        own_cache = limit_to_memory(order.cache, model, limit_to_model(order.scheduler, model), device)
        address = None if self._listener is None else self._listener.address
        room = own_cache.num_blocks, own_cache.num_host_blocks
        states = own_cache.num_state_slots, own_cache.num_host_state_slots
        channel.send(Loaded(*room, *states, address, capabilities(device)))
        agreed: CacheOrder
        agreed, _ = channel.receive()
        self._addresses = agreed.addresses
        self._tables = TableArray(agreed.scheduler, agreed.cache)
        self._runner = StepRunner(model, agreed.cache, self._tables, device, config.enforce_eager)
        channel.send(Ready())

    def serve_group(self) -> None:
        """Join the next group, and run its steps until it ends. Or make the memory of the next group."""
        order: MakeGroup | Join
        order, descriptors = self._channel.receive()
        error = None
        with ExitStack() as until_the_end:  # of what the others notice, after the abort, which says why it ends
            try:
                if descriptors is None:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                if isinstance(order, MakeGroup):
                    self._make_group(order.generation)
                    return
                steps = until_the_end.enter_context(self._open_steps(order, descriptors))
                self._runner.drop_graphs()
                if isinstance(self._communicator, ProcessGroupCommunicator):
                    self._join_process_group(self._communicator, order, steps)
                else:
                    with FileIO(descriptors.pop(1) if order.path is None else order.path, "r+") as memory:
                        self._connect_peers(order, descriptors[1:])
                        self._communicator.join(memory)
                self._channel.send(Joined(order.generation))
                self._run_steps(steps)
            except ChannelClosed:
                raise
            except Exception as failure:
                if self._communicator.broken is None:  # else another rank failed, and this failure follows
                    self._communicator.abort(f"rank {self._communicator.rank}: {describe(failure)}")
                    error = short(failure)
            finally:
                self._communicator.leave()
        self._channel.send(Left(order.generation, error))

    def _make_group(self, generation: int) -> None:
        assert not isinstance(self._communicator, ProcessGroupCommunicator)
        if self._group_file is not None:
            self._group_file.close()
        self._group_file = self._communicator.create_group()
        self._channel.send(GroupMade(generation, f"/proc/{os.getpid()}/fd/{self._group_file.fileno()}"))

    def _open_steps(self, order: Join, descriptors: list[int]) -> socket.socket:
        """The connection for the steps of a group."""
        if descriptors:
            return socket.socket(fileno=descriptors[0])
        return self._connect(0, Hello("steps", order.generation, self._communicator.rank))

    def _join_process_group(self, communicator: ProcessGroupCommunicator, order: Join, steps: socket.socket) -> None:
        assert order.store is not None
        communicator.meet(partial(find_store, order.store))
        communicator.join(time.monotonic() + CONNECT_SECONDS, self._check_is_awaited)
        communicator.watch({"rank 0 has left the group": steps}, select.POLLRDHUP)

    def _connect_peers(self, order: Join, descriptors: list[int]) -> None:
        """Those with lower numbers come first, so that no two ranks wait for each other."""
        if not isinstance(self._communicator, LinkedCommunicator):
            return
        if self._listener is None:
            links = {peer: socket.socket(fileno=each) for peer, each in zip(order.peers, descriptors, strict=True)}
            self._communicator.take_links(links)
            return
        rank, peers = self._communicator.rank, self._communicator.peers
        own = Hello("peers", order.generation, rank)
        links = {peer: self._connect(peer, own) for peer in peers if peer < rank}
        expected = {own._replace(rank=peer) for peer in peers if peer > rank}
        deadline = time.monotonic() + CONNECT_SECONDS
        found = self._listener.gather(expected, deadline, self._check_is_awaited)
        self._communicator.take_links(links | {hello.rank: link for hello, link in found.items()})

    def _connect(self, rank: int, hello: Hello) -> socket.socket:
        address = self._addresses[rank]
        assert self._hosts is not None and address is not None
        deadline = time.monotonic() + CONNECT_SECONDS
        return connect(address, self._hosts.key, hello, deadline, self._check_is_awaited)

    def _check_is_awaited(self) -> None:
        if self._channel.has_message():
            raise RuntimeError("rank 0 has given this group up")

    @torch.inference_mode()
    def _run_steps(self, connection: socket.socket) -> None:
        """Run steps until rank 0 closes the connection, perhaps amid a message."""
        with connection.makefile("rb") as messages:
            while True:
                try:
                    step: Step = pickle.load(messages)
                except (EOFError, pickle.UnpicklingError, OSError):
                    return
                self._runner.make_copies(step.to_swap_out, step.to_swap_in, step.to_copy, step.of_states)
                for write in step.table_writes:
                    self._tables.write(*write)
                if step.inputs is not None:
                    run_step(self._runner, self._communicator, step.inputs, step.cuts)
                    if self._checks_inputs:
                        tables = self._runner.tables_of(step.inputs)
                        data = digest(step.inputs, tables.numpy(), self._runner.block_size)
                        try:
                            connection.sendall(data)
                        except OSError:
                            return


def short(error: Exception) -> Exception:
    """The error as rank 0 can raise it, if its text is not too long for a message."""
    carried: Exception = portable(error)
    return carried if len(str(carried)) <= MAX_ERROR_LENGTH else RuntimeError(describe(error)[:MAX_ERROR_LENGTH])
