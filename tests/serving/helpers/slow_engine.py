"""Engines whose steps wait or fail, in processes of their own. To import this takes no torch, which would take seconds:
the process that makes such an engine has no torch either."""

import time
from collections.abc import Callable
from typing import Any

from pagedattn_serve.server.http.logs import set_up_logs


def slowed(execute: Callable[..., Any], seconds: float = 0.003) -> Callable[..., Any]:
    """`ModelRunner.execute` with a wait before each step: those of models this small are over before an event loop gets
    its turn."""

    def slow(*args: Any) -> Any:
        time.sleep(seconds)
        return execute(*args)

    return slow


def slow_steps(seconds: float = 0.01) -> None:
    """For an engine in a process of its own, before it is made: its callers may wait for a CPU while it computes."""
    from pagedattn_serve.execution.model_runner import ModelRunner

    ModelRunner.execute = slowed(ModelRunner.execute, seconds)  # type: ignore[method-assign]


def set_up_logs_and_slow_steps(log_format: str, level: str) -> None:
    """For the engine of a server."""
    set_up_logs(log_format, level)
    slow_steps(0.003)  # streams of a server have more tokens


def set_up_logs_and_fail_steps(log_format: str, level: str) -> None:
    from pagedattn_serve.execution.model_runner import ModelRunner

    def fail(*_: Any) -> Any:
        raise RuntimeError("planted")

    set_up_logs(log_format, level)
    ModelRunner.execute = fail  # type: ignore[method-assign]
