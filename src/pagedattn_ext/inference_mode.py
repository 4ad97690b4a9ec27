"""torch's inference mode, which an interrupt cannot leave on."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def inference_mode(enabled: bool = True) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """As the decorator `torch.inference_mode`, whose `__exit__` is Python: an interrupt at its first line, before the
    mode is left, lets it last as long as the traceback does. That of the context within it is a single call of C."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with torch._C._InferenceMode(enabled):
                return function(*args, **kwargs)

        return run

    return decorate
