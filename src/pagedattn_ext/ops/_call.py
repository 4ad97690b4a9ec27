"""What the functions of all families share: the call of a raw op, with its checks and its errors."""

from typing import Any

import torch
from torch import Tensor

SEVERAL_DEVICES = "the tensors are on several devices"

raw_ops = torch.ops.pagedattn_ext


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a raw op and gives its errors the Python types that `pagedattn_ext.ops` promises."""
    op = getattr(raw_ops, name)
    if torch.is_grad_enabled():
        _refuse_grad(op, args, kwargs)
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        message = str(error)
        if any(text in message for text in (": expected dtype", ": expected a tensor,", "Expected a value of type")):
            raise TypeError(message) from None
        if ": expected " in message:
            raise ValueError(message) from None
        if isinstance(error, NotImplementedError) or SEVERAL_DEVICES in message:
            _name_other_device(op, args, kwargs)  # the error does not say which argument it is
        raise


def _name_other_device(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ValueError if the tensors are on several devices."""
    names = [argument.name for argument in op.default._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    expected = next((tensor.device for tensor in tensors.values()), None)
    for name, tensor in tensors.items():
        if tensor.device != expected:
            message = f"{op.__name__}: {name}: expected a tensor on {expected}, got one on {tensor.device}"
            raise ValueError(message) from None


def _refuse_grad(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An op writes behind autograd's back: a tensor that requires grad would silently lose its gradient."""
    for i, argument in enumerate((*args, *kwargs.values())):
        if _requires_grad(argument) or (isinstance(argument, list) and any(map(_requires_grad, argument))):
            name = op.default._schema.arguments[i].name if i < len(args) else list(kwargs)[i - len(args)]
            raise RuntimeError(
                f"{op.__name__}: {name}: requires grad, but the ops have no backward: call them under "
                "torch.no_grad() or torch.inference_mode()"
            )


def _requires_grad(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad


def check_tensors(op: str, **tensors: object) -> None:
    """For functions that look at an argument before the op does."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name}: expected a torch.Tensor, got {type(tensor).__name__}")
