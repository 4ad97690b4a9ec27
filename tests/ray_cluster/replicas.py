"""Replicas of the demo model, and their processes."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ray import serve
from server_process import children_of

from pagedattn_serve import ray_serve

HEALTH_CHECK_SECONDS = 5  # Ray Serve replaces a replica when three in a row have failed
BODY = {"model": "demo_model", "prompt": "A class", "max_tokens": 8, "temperature": 0}
TEXT = " can be parameterized\n(see below"  # in fp32
NODE = {"num_cpus": 1, "resources": {"room for a replica": 1}}
OPTIONS = {"dtype": "float32", "num_blocks": 256}


class Replica(NamedTuple):
    pid: int
    core_pid: int

    def freeze(self) -> None:
        """No step from here on: a request stays where it is until `thaw`, or until Ray Serve replaces the replica, as
        an engine that hangs is not healthy."""
        os.kill(self.core_pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.core_pid, signal.SIGCONT)


def run(name: str, health_check_period_s: float = HEALTH_CHECK_SECONDS, **options: Any) -> None:
    """Deploy, or deploy anew, with these options of Ray Serve. Returns when it serves."""
    replica = ray_serve.Engine.options(
        health_check_period_s=health_check_period_s,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options=NODE,
        **options,
    )
    serve.run(replica.bind(*ray_serve.read_args(OPTIONS)), name=name)


def replicas_of(name: str) -> list[Replica]:
    """Those that have an engine."""
    replicas = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if cmdline.read_bytes().startswith(f"ray::ServeReplica:{name}:Engine".encode()):
                pid = int(cmdline.parent.name)
                replicas += [Replica(pid, core_pid) for core_pid in children_of(pid)]
    return replicas


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
