"""all_reduce_shared and all_gather_shared between two processes, beside gloo (torch.distributed) and beside what two
processes on different hosts do, whose TCP connection is one of this machine here.

Usage: python bench/collectives.py [--quick]

Each process calls from one thread, which is bound to a CPU of its own; gloo's own threads are not bound. In every round
each function is called a few times in a row; the times are those of single calls of rank 0. An input is in the caches
of the CPU that calls, as a layer leaves its output. "copy_" copies as many bytes within one process, from cache to
cache, while the other process does nothing. It is no limit: bytes that another CPU has just written are slower to
fetch. A ratio is gloo's time over ours.
"""

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed
from harness import hardware, prepare, print_table
from torch import Tensor

from pagedattn_ext import SharedMemoryGroup, ops
from pagedattn_serve.distributed.hosts import HostsCommunicator

WORLD_SIZE = 2
KIB = 1 << 10
SIZES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CALLS_IN_A_ROW = 10


@dataclass(frozen=True)
class Case:
    op: str
    dtype: torch.dtype
    num_bytes: int  # of a rank's input

    def functions(self, group: SharedMemoryGroup, hosts: HostsCommunicator) -> dict[str, Callable[[], object]]:
        input = torch.zeros(self.num_bytes // self.dtype.itemsize, dtype=self.dtype)
        target = torch.empty_like(input)
        if self.op == "all_reduce":
            return {
                "ours": lambda: ops.all_reduce_shared(input, group),
                "hosts": lambda: hosts.all_reduce(input),
                "gloo": lambda: torch.distributed.all_reduce(input),
                "copy_": lambda: target.copy_(input),
            }
        out = input.new_empty(WORLD_SIZE * input.numel())
        parts: list[Tensor] = list(out.chunk(WORLD_SIZE))
        return {
            "ours": lambda: ops.all_gather_shared(input, group, out=out),
            "hosts": lambda: hosts.all_gather(input),
            "gloo": lambda: torch.distributed.all_gather(parts, input),
            "copy_": lambda: target.copy_(input),
        }


def all_cases(*, quick: bool) -> list[Case]:
    sizes = SIZES[:-2] if quick else SIZES
    cases = [Case("all_reduce", torch.float32, size) for size in sizes]
    cases += [Case("all_reduce", dtype, 16 * KIB) for dtype in DTYPES[1:]]
    return cases + [Case("all_gather", torch.float32, size) for size in (16 * KIB, 1024 * KIB)]


def measure(case: Case, group: SharedMemoryGroup, hosts: HostsCommunicator, num_rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call, which begins when the ranks have met."""
    seconds: dict[str, list[float]] = {}
    meeting = torch.zeros(1)
    for name, function in case.functions(group, hosts).items():
        seconds[name] = []
        for _ in range(3):
            function()
    functions = case.functions(group, hosts)
    for _ in range(num_rounds):
        for name, function in functions.items():
            ops.all_reduce_shared(meeting, group)
            if name == "copy_" and group.rank != 0:
                continue
            for _ in range(CALLS_IN_A_ROW):
                start = time.perf_counter()
                function()
                seconds[name].append((time.perf_counter() - start) * 1e6)
    return seconds


def work(rank: int, descriptor: int, link: socket.socket, rendezvous: str, *, quick: bool) -> None:
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})  # the calling thread alone
    hosts = HostsCommunicator(rank, WORLD_SIZE, num_hosts=WORLD_SIZE)
    hosts.take_links({1 - rank: link})
    with hosts.create_group() as file:
        hosts.join(file)
    table = [["op", "dtype", "KiB", "us", "p99", "hosts, us", "p99", "gloo, us", "p99", "ratio", "copy_, us"]]
    with SharedMemoryGroup(descriptor, rank) as group:
        for case in all_cases(quick=quick):
            times = measure(case, group, hosts, 20 if quick else 60)
            middle = {name: median(values) for name, values in times.items() if values}
            if rank == 0:
                worst = {name: quantiles(values, n=100)[98] for name, values in times.items()}
                numbers = [each[name] for name in ("ours", "hosts", "gloo") for each in (middle, worst)]
                ratio = f"{middle['gloo'] / middle['ours']:.0f}x"
                dtype = str(case.dtype).removeprefix("torch.")
                cells = [case.op, dtype, str(case.num_bytes // KIB), *(f"{number:.1f}" for number in numbers)]
                table.append([*cells, ratio, f"{middle['copy_']:.1f}"])
        if rank == 0:
            print_table(table)
        ops.all_reduce_shared(torch.zeros(1), group)  # nobody leaves while another one prints
    hosts.leave()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    args = parser.parse_args()
    prepare(num_threads=1)
    hardware("cpu")
    descriptor = SharedMemoryGroup.create(WORLD_SIZE, timeout_seconds=60)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        links = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    for link in links:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"{folder}/rendezvous"
        child = os.fork()
        if child == 0:
            work(1, descriptor, links[1], rendezvous, quick=args.quick)
            os._exit(0)
        work(0, descriptor, links[0], rendezvous, quick=args.quick)
        _, status = os.waitpid(child, 0)
    if status != 0:
        raise SystemExit("bench/collectives.py: rank 1 failed")


if __name__ == "__main__":
    main()
