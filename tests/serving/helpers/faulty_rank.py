"""The program of a rank with a fault.

fault: "start", "load", "cache" or "join": when the process is killed. "memory": loading finds no memory. "connect": the
rank cannot connect with others. "room": the rank is on another kind of machine, with room for 11 blocks, and for 5 on
the host. "output": standard output is closed, as Python has that. "tokens": a step that has one of the tokens below
fails on the way, once, between two calls of the other ranks.
"""

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.distributed import process_group, worker
from pagedattn_serve.distributed.communicator import SharedMemoryCommunicator
from pagedattn_serve.distributed.pipeline import PipelineCommunicator
from pagedattn_serve.distributed.process_group import ProcessGroupCommunicator
from pagedattn_serve.execution.model_runner import StepInputs, StepRunner
from pagedattn_serve.models.causal_lm import ModelOutput

RAISES, IS_KILLED, STOPS, HAS_OTHER_INPUTS, HANGS = 90, 91, 92, 93, 94

OTHER_CAPABILITIES = ("none of torch", "none of the ops")
run_model, send = StepRunner.run_model, PipelineCommunicator.send
done: set[int] = set()  # faults, by token
ahead: list[int] = []  # the fault of this step, if one is to come


def die(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def no_memory(*_: Any) -> NoReturn:
    raise MemoryError("no memory for a slice")


def no_connection(*_: Any) -> NoReturn:
    raise RuntimeError("no socket interface found")


def run_faulty_step(runner: StepRunner, inputs: StepInputs, *carried: Tensor | None) -> ModelOutput:
    ahead[:] = [token for token in (RAISES, IS_KILLED, STOPS, HAS_OTHER_INPUTS, HANGS) if token in inputs.token_ids]
    if ahead == [HAS_OTHER_INPUTS]:
        inputs.positions[0] += 1
    return run_model(runner, inputs, *carried)


def fail() -> None:
    """With the fault of this step, once."""
    if ahead and ahead[0] not in done:
        done.add(ahead[0])
        match ahead[0]:
            case 90:
                raise MemoryError("no memory amid a step")
            case 91:
                die()
            case 92:
                os.kill(os.getpid(), signal.SIGSTOP)
            case 94:
                ctypes.CDLL(None).pause()


def faulty(all_reduce: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def faulty_all_reduce(communicator: object, tensor: Tensor) -> Tensor:
        result = all_reduce(communicator, tensor)
        fail()
        return result

    return faulty_all_reduce


def faulty_send(pipeline: PipelineCommunicator, carried: Tensor) -> None:
    fail()
    send(pipeline, carried)


def main(fd: int, fault: str, module: str, *arguments: str) -> None:
    """module, arguments: whose main the program is, once it has the fault."""
    match fault:
        case "start":
            die()
        case "load":
            worker.load_model = die
        case "cache":
            worker.StepRunner = die  # type: ignore[assignment, misc]
        case "join":
            worker.Rank._connect_peers = die  # type: ignore[method-assign]
            process_group.connect_backend = die
        case "connect":
            process_group.connect_backend = no_connection
        case "memory":
            worker.load_model = no_memory
        case "room":
            worker.limit_to_memory = lambda *_: CacheConfig(num_blocks=11, num_host_blocks=5)
            worker.capabilities = lambda _: OTHER_CAPABILITIES
        case "output":
            sys.stdout = None  # type: ignore[assignment]
        case "tokens":
            StepRunner.run_model = run_faulty_step  # type: ignore[method-assign, assignment]
            PipelineCommunicator.send = faulty_send  # type: ignore[method-assign]
            for communicator in SharedMemoryCommunicator, ProcessGroupCommunicator:
                communicator.all_reduce = faulty(communicator.all_reduce)  # type: ignore[method-assign]
    importlib.import_module(module).main(fd, *arguments)
