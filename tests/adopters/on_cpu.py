"""Lets a program that is written for CUDA run on a CPU: its calls of torch are changed as they are made.

A device "cuda" becomes "cpu", and memory is not pinned. torch.cuda says that there is one H100, whose streams and
events have nothing to wait for, and CUDAGraph is our CPUGraph.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pagedattn_ext import CPUGraph

CAPABILITY = (9, 0)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    total_memory=80 * 2**30,
    shared_memory_per_block_optin=227 * 2**10,
)


def on_cpu(argument: Any) -> Any:
    """A device that is CUDA becomes the CPU, anything else stays."""
    is_cuda = isinstance(argument, str) and argument.split(":")[0] == "cuda"
    is_cuda = is_cuda or (isinstance(argument, torch.device) and argument.type == "cuda")
    return torch.device("cpu") if is_cuda else argument


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(map(on_cpu, args))
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        match getattr(function, "__name__", ""), args:
            case ("cuda" | "pin_memory", (Tensor(), *_)) | ("to", (Tensor(), int(), *_)):
                return args[0]
        return function(*args, **kwargs)


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, on_cpu(device))


class Graph(CPUGraph):
    """As a torch.cuda.CUDAGraph."""

    def pool(self) -> None: ...


class GraphCapture:
    """As torch.cuda.graph."""

    def __init__(self, graph: CPUGraph, **options: object) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        self.contexts = contextlib.ExitStack()
        self.contexts.enter_context(torch.inference_mode())
        self.contexts.enter_context(self.graph.capture())

    def __exit__(self, *error: Any) -> bool | None:
        return self.contexts.__exit__(*error)


class Stream:
    """As a torch.cuda.Stream or Event, and all are one: what a CPU is told to do is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *args: object, **options: object) -> None: ...
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def wait_stream(self, stream: "Stream") -> None: ...
    def record(self, stream: "Stream | None" = None) -> None: ...
    def synchronize(self) -> None: ...


def use_cpu() -> None:
    """From now on, for this process."""
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "set_stream", "manual_seed", "manual_seed_all"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.reset_peak_memory_stats = lambda *device: None
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *device: CAPABILITY
    cuda.get_device_properties = lambda *device: PROPERTIES
    cuda.mem_get_info = lambda *device: (PROPERTIES.total_memory, PROPERTIES.total_memory)
    cuda.CUDAGraph, cuda.graph = Graph, GraphCapture
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = lambda *device: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()
    set_default_device = torch.set_default_device
    torch.set_default_device = lambda device: set_default_device(on_cpu(device))
    torch.Generator = Generator
    OnCPU().__enter__()
