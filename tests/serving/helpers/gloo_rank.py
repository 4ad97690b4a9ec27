"""Ranks whose process group is one of gloo, on CPU tensors: it stands in for NCCL, which no test here can run.

As a program it is such a rank.
"""

import importlib
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work

from pagedattn_serve.distributed import process_group, worker, workers
from pagedattn_serve.distributed.process_group import ProcessGroupCommunicator

WAIT_SECONDS = 1e-3
stuck: list[ProcessGroupGloo] = []  # whose end would wait for what another rank does not do


class AbortableGloo:
    """The part of `ProcessGroupNCCL` that is used. As with NCCL, a call waits for ranks that are gone, and `abort` ends
    the waiting."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(minutes=5)
        self._gloo = ProcessGroupGloo(store, rank, world_size, options)
        self._is_aborted = Event()

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        self._wait(self._gloo.allreduce(tensors, options))

    def _allgather_base(self, output: Tensor, input: Tensor, options: Any) -> None:
        self._wait(self._gloo._allgather_base(output, input, options))

    def abort(self) -> None:
        self._is_aborted.set()

    def _wait(self, work: Work) -> None:
        while not work.is_completed():
            if self._is_aborted.wait(WAIT_SECONDS):
                stuck.append(self._gloo)
                raise RuntimeError("aborted")
        try:
            work.wait()
        except RuntimeError:  # gloo sees that a rank has gone
            self._is_aborted.wait()
            raise


def connect_gloo(store: Store, rank: int, world_size: int, _: torch.device) -> AbortableGloo:
    return AbortableGloo(store, rank, world_size)


def make_communicator(rank: int, world_size: int, *_: object) -> ProcessGroupCommunicator:
    return ProcessGroupCommunicator(rank, world_size, torch.device("cpu"))


def use_gloo(patch: pytest.MonkeyPatch) -> None:
    """In this process. The other ranks have to be this program."""
    patch.setattr(process_group, "connect_backend", connect_gloo)
    for module in (workers, worker):
        patch.setattr(module, "make_communicator", make_communicator)


def main(fd: int, module: str) -> None:
    """module: whose main the program is otherwise."""
    # A fault of this rank stays: it may be that the rank does not connect.
    if process_group.connect_backend.__module__ == process_group.__name__:
        process_group.connect_backend = connect_gloo
    worker.make_communicator = make_communicator
    importlib.import_module(module).main(fd)
