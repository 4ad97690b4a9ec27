"""Ranks 1 and up: each loads its slice of the model, then runs the steps that rank 0 sends.

Rank 0 sends a step and expects no answer. What the ranks compute together keeps them in step. If a step fails on a
rank, or rank 0 is interrupted amid one, the group of the ranks breaks: each rank says how it was for it, then rank 0
makes a new group. In between, a rank waits for rank 0.
"""

import os
import pickle
import socket
from dataclasses import replace
from io import FileIO

import torch

from pagedattn_serve.distributed.channel import Channel, ChannelClosed
from pagedattn_serve.distributed.communicator import SharedMemoryCommunicator
from pagedattn_serve.distributed.messages import (
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
)
from pagedattn_serve.engine_setup import limit_to_memory, limit_to_model
from pagedattn_serve.errors import describe, portable
from pagedattn_serve.execution.block_tables import TableArray
from pagedattn_serve.execution.step_runner import StepRunner, max_num_blocks_per_seq
from pagedattn_serve.loading.loader import load_model
from pagedattn_serve.models.partition import Partition

DEVICE = "cpu"
MAX_ERROR_LENGTH = 10_000  # characters: a message holds it


def serve_rank(channel: Channel) -> None:
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

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        order: RankOrder
        order, _ = channel.receive()
        self._checks_inputs = order.checks_inputs
        if order.cpus is not None:
            os.sched_setaffinity(0, order.cpus)  # before torch starts the threads that it computes with
        torch.set_num_threads(order.num_threads)
        self._communicator = SharedMemoryCommunicator(order.rank, order.world_size)
        partition = Partition(order.rank, order.world_size, self._communicator)
        config = order.model
        model = load_model(config.model, config.dtype, DEVICE, config.quantization, partition)
        own_cache = limit_to_memory(order.cache, model, limit_to_model(order.scheduler, model), DEVICE)
        channel.send(Loaded(own_cache.num_blocks, own_cache.num_host_blocks))
        agreed: CacheOrder
        agreed, _ = channel.receive()
        self._runner = StepRunner(model, agreed.scheduler, agreed.cache, DEVICE, config.enforce_eager)
        self._tables = TableArray(agreed.scheduler.max_num_seqs, max_num_blocks_per_seq(agreed.scheduler, agreed.cache))
        channel.send(Ready())

    def serve_group(self) -> None:
        """Join the next group, and run its steps until it ends."""
        order: Join
        order, [group, steps] = self._channel.receive()
        error = None
        try:
            with socket.socket(fileno=steps) as connection:
                self._runner.drop_graphs()
                with FileIO(group, "r+") as file:
                    self._communicator.join(file)
                self._channel.send(Joined(order.generation))
                self._run_steps(connection)
        except ChannelClosed:
            raise
        except Exception as failure:
            if not self._communicator.is_broken:  # else another rank failed, and this failure follows
                self._communicator.abort(f"rank {self._communicator.rank}: {describe(failure)}")
                error = short(failure)
        finally:
            self._communicator.leave()
        self._channel.send(Left(order.generation, error))

    @torch.inference_mode()
    def _run_steps(self, connection: socket.socket) -> None:
        """Run steps until rank 0 closes the connection, perhaps amid a message."""
        with connection.makefile("rb") as messages:
            while True:
                try:
                    step: Step = pickle.load(messages)
                except (EOFError, pickle.UnpicklingError, ConnectionResetError):
                    return
                self._runner.copy_blocks(step.to_swap_out, step.to_swap_in, step.to_copy)
                if step.inputs is not None:
                    assert step.changes is not None
                    inputs = replace(step.inputs, block_tables=self._tables.apply(step.changes))
                    self._runner.run_model(inputs)
                    if self._checks_inputs:
                        connection.sendall(digest(inputs, step.changes.lengths))


def short(error: Exception) -> Exception:
    """The error as rank 0 can raise it, if its text is not too long for a message."""
    carried: Exception = portable(error)
    return carried if len(str(carried)) <= MAX_ERROR_LENGTH else RuntimeError(describe(error)[:MAX_ERROR_LENGTH])
