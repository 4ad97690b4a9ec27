"""Lets tests that are written for a GPU run on a CPU: torch's calls that name CUDA are changed as they are made.

A device "cuda" becomes "cpu"; torch.cuda says that there is one H100, and its CUDAGraph is our CPUGraph. Nothing
requires grad: the backward of both sides gives zeros, so that what a test says of the forward is still checked.
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
    if (isinstance(argument, str) and argument.split(":")[0] == "cuda") or (
        isinstance(argument, torch.device) and argument.type == "cuda"
    ):
        return torch.device("cpu")
    return argument


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(on_cpu, args))
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        kwargs.pop("requires_grad", None)
        match getattr(function, "__name__", ""), args:
            case ("cuda" | "requires_grad_", _) | ("to", (Tensor(), int())):
                return args[0]
            case ("backward" | "retain_grad", (Tensor(), *_)):
                return None
            case "__set__", (Tensor(), bool()) if function == Tensor.requires_grad.__set__:
                return None
            case "__get__", _ if function == Tensor.grad.__get__:
                return torch.zeros_like(args[0])
            case "__get__", _ if function == Tensor.requires_grad.__get__:
                return True
        return function(*args, **kwargs)


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls, on_cpu(device))


class Graph:
    """`torch.cuda.graph` on a CPUGraph."""

    def __init__(self, graph: CPUGraph, **options: object) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        self.inference = torch.inference_mode()
        self.inference.__enter__()
        self.capture = self.graph.capture()
        self.capture.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.capture.__exit__(*error)
        self.inference.__exit__(*error)


class Stream:
    """Work on a CPU is done when its call returns, so a stream has nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, stream: "Stream") -> None: ...
    def synchronize(self) -> None: ...


def zeros(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """In place of `torch.autograd.grad`."""
    return tuple(map(torch.zeros_like, [inputs] if isinstance(inputs, Tensor) else inputs))


def use_cpu() -> None:
    """From now on, for this process."""
    cuda = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *device: CAPABILITY
    cuda.get_device_properties = lambda *device: PROPERTIES
    cuda.mem_get_info = lambda *device: (PROPERTIES.total_memory, PROPERTIES.total_memory)
    cuda.CUDAGraph, cuda.graph = CPUGraph, Graph  # type: ignore[assignment,misc]
    cuda.Stream = Stream  # type: ignore[assignment,misc]
    cuda.current_stream = lambda *device: Stream()  # type: ignore[assignment]
    cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.Generator = Generator  # type: ignore[misc]
    torch.autograd.grad = zeros
    set_default_device = torch.set_default_device
    torch.set_default_device = lambda device: set_default_device(on_cpu(device))
    torch.set_grad_enabled(False)
    OnCPU().__enter__()  # type: ignore[no-untyped-call]
