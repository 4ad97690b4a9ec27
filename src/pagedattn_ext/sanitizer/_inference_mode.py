"""`torch.inference_mode()` for methods that are called many times in a step."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.inference_mode()`, which takes as long as a check, entered only where a caller is not in it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode():
            return function(*args, **kwargs)

    return call
