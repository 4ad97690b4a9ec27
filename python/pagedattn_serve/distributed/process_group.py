"""`ProcessGroupCommunicator`: what a rank's slice of a model asks of the other ranks, where each has a CUDA device.

The calls are NCCL's, through a process group of torch.distributed which belongs to the engine: a program may have other
groups. The ranks meet at a store of rank 0, whose port the system chooses.

A kernel of NCCL waits on the device for ranks that may never come, and Python may wait for the device. So a thread of
each rank watches the other ranks, and aborts the group if one dies or fails: then all kernels of the group end.
"""

import select
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # documented all the same
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceOptions,
)

from pagedattn_serve.distributed import communicator
from pagedattn_serve.distributed.channel import Address
from pagedattn_serve.environment import environment_variable
from pagedattn_serve.errors import describe

CHECK_SECONDS = 0.1  # between two looks at whether a group has an end, and whether the ranks that meet go on
GO = "go"  # the key by which rank 0 tells that all are there
MEET_SECONDS = 0.01  # between two looks at whether all ranks have come to the store
STORE_LIMIT = timedelta(seconds=30)  # for the store to answer
CALL_LIMIT = timedelta(days=1)  # of torch for a call: never, as other limits hold here


class ProcessGroupCommunicator:
    """A `models.partition.Communicator`. As with `SharedMemoryCommunicator`, ranks join one group after the other.

    Calls go to the current stream. They return before the sum is there, so an error may come with `finish_step` alone.
    A CUDA graph can hold them.

    A rank that is in no group computes with its own terms alone: enough to see how much memory a step takes.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self._device = device
        self._group: _Group | None = None

    def meet(self, find_store: Callable[[], Store]) -> None:
        """Leave the group before, and begin to connect with all ranks that come to this store."""
        self.leave()
        self._group = _Group(find_store, self.rank, self.world_size, self._device)
        self._group.begin_to_connect()

    def join(self, deadline: float, check: Callable[[], None]) -> None:
        """Wait until all ranks are connected. check: is called again and again. What it raises ends the waiting. Raises
        TimeoutError at `deadline`, a time of `time.monotonic()`."""
        assert self._group is not None
        self._group.wait_until_connected(deadline, check)

    def watch(self, sockets: dict[str, socket.socket], events: int) -> None:
        """Break the group at these events of `select.poll`, which tell that a rank has died or has left. The sockets
        are named by the reason. On rank 0 the group also breaks if a rank does not come in time."""
        assert self._group is not None
        self._group.watch(sockets, events, limits_steps=self.rank == 0)

    def leave(self) -> None:
        if self._group is not None:
            self._group.end()
            self._group = None

    @property
    def broken(self) -> str | None:
        """Why the group is broken, None if it is not."""
        return None if self._group is None else self._group.broken

    def abort(self, reason: str) -> None:
        """Break the group for this rank. The others learn of it from whoever watches this rank."""
        if self._group is not None:
            self._group.abort(reason)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        if self._group is not None:
            options = AllreduceOptions()  # whose operation is the sum
            options.asyncOp = False  # which means: on the current stream
            self._group.call(lambda backend: backend.allreduce([tensor], options))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        out = tensor.new_empty(self.world_size, *tensor.shape)
        if self._group is None:
            return out.copy_(tensor)
        tensor = tensor.contiguous()
        options = AllgatherOptions()
        options.asyncOp = False
        self._group.call(lambda backend: backend._allgather_base(out.view(-1), tensor.view(-1), options))
        return out

    def finish_step(self) -> None:
        """Wait until the device has done all of the step. Raises RuntimeError if the group has broken before."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            while not stream.query():  # unlike `synchronize`, this lets Ctrl-C through
                time.sleep(0)
        if self._group is not None:
            self._group.end_step()


class _Group:
    """A group from the first meeting to its end. broken: why it is broken, None if it is not."""

    def __init__(self, find_store: Callable[[], Store], rank: int, world_size: int, device: torch.device) -> None:
        self.broken: str | None = None
        self._breaking = Lock()
        self._arguments = find_store, rank, world_size, device
        self._backend: Any = None
        self._error: Exception | None = None
        self._waits_since: float | None = None  # the time of a step's first call
        self._connecting = Thread(target=self._connect, name="pagedattn-connect", daemon=True)
        self._watching: Thread | None = None

    def begin_to_connect(self) -> None:
        """Not as the group is made: an interrupt would leave a thread behind, of a group that nobody has."""
        self._connecting.start()

    def _connect(self) -> None:
        find_store, rank, world_size, device = self._arguments
        try:
            store = find_store()
            if not self._meet(store, rank, world_size):
                return
            self._backend = connect_backend(store, rank, world_size, device)
        except Exception as error:
            self._error = error
            return
        if self.broken is not None:  # meanwhile
            self._backend.abort()

    def _meet(self, store: Store, rank: int, world_size: int) -> bool:
        """Wait until rank 0 has seen all ranks at the store. NCCL cannot be interrupted as it connects, so the ranks
        connect all or not at all. False if the group is broken before rank 0 says so."""
        store.set(str(rank), "")
        while True:
            is_broken = self.broken is not None  # comes first: rank 0 gives a group up before the others hear of it
            if store.check([GO]):
                return True
            if is_broken:
                return False
            if rank == 0 and store.check([str(each) for each in range(world_size)]):
                with self._breaking:
                    if self.broken is None:
                        store.set(GO, "")
            else:
                time.sleep(MEET_SECONDS)

    def wait_until_connected(self, deadline: float, check: Callable[[], None]) -> None:
        while self._connecting.is_alive():
            self._connecting.join(CHECK_SECONDS)
            check()
            if time.monotonic() > deadline:
                raise TimeoutError("the ranks have not connected in time")
        if self._error is not None:
            raise RuntimeError(f"the ranks could not connect: {describe(self._error)}")

    def watch(self, sockets: dict[str, socket.socket], events: int, limits_steps: bool) -> None:
        own = {reason: each.dup() for reason, each in sockets.items()}
        arguments = own, events, limits_steps
        self._watching = Thread(target=self._watch, args=arguments, name="pagedattn-watch", daemon=True)
        self._watching.start()

    def _watch(self, sockets: dict[str, socket.socket], events: int, limits_steps: bool) -> None:
        reasons = {each.fileno(): reason for reason, each in sockets.items()}
        poll = select.poll()
        for descriptor in reasons:
            poll.register(descriptor, events)
        while self.broken is None:
            for descriptor, _ in poll.poll(CHECK_SECONDS * 1000):
                self.abort(reasons[descriptor])
            since, patience = self._waits_since, communicator.PATIENCE_SECONDS
            if limits_steps and since is not None and time.monotonic() - since > patience:
                self.abort(f"a rank has not come within {patience:g} seconds")
        for each in sockets.values():
            each.close()

    def call(self, start: Callable[[Any], Any]) -> None:
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        self._raise_if_broken()
        try:
            work = start(self._backend)
            if work is not None:
                work.wait()
        except RuntimeError:
            self._raise_if_broken()  # which says more
            raise

    def end_step(self) -> None:
        self._waits_since = None
        self._raise_if_broken()

    def end(self) -> None:
        """Abort, and wait for the threads. The last of them would drop the backend, and torch ends the process where a
        thread does so as Python ends."""
        self.abort("the group has ended")
        if self._watching is not None and self._watching.is_alive():
            self._watching.join()
        if self._connecting.is_alive():
            self._connecting.join(CHECK_SECONDS)  # no longer: nothing interrupts NCCL as it connects

    def abort(self, reason: str) -> None:
        with self._breaking:
            if self.broken is None:
                self.broken = reason
        if self._backend is not None:
            self._backend.abort()  # again if need be: an interrupt may have come before the first time

    def _raise_if_broken(self) -> None:
        if self.broken is not None:
            raise RuntimeError(f"the group is broken: {self.broken}")


def connect_backend(store: Store, rank: int, world_size: int, device: torch.device) -> Any:
    """NCCL on the device of each rank, once all ranks have called this."""
    from torch.distributed import ProcessGroupNCCL  # which torch for the CPU does not have

    options = ProcessGroupNCCL.Options()
    options._timeout = CALL_LIMIT
    # The group leaves errors to its owner. By default a thread of torch ends the process at an error.
    with environment_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        backend = ProcessGroupNCCL(store, rank, world_size, options)
    backend.eager_connect_single_device(device)
    return backend


def serve_store(ip: str) -> tuple[Store, Address]:
    """A store for ranks to meet at, on a port of this address. It ends with its last user in this process."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.create_server((ip, 0), family=family) as listener:
        address: Address = listener.getsockname()[:2]
        store = TCPStore(
            *address, is_master=True, wait_for_workers=False, timeout=STORE_LIMIT, master_listen_fd=listener.detach()
        )
    return store, address


def find_store(address: Address) -> Store:
    """The store at this address, of another process."""
    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=STORE_LIMIT)
