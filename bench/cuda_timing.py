"""Time on a GPU: CUDA events around replays of a CUDA graph that find the L2 cold.

A graph holds as many calls as take about BATCH_SECONDS, so that neither the launch of the graph nor the gaps that a
host leaves between kernels count. The calls take the inputs in turn. Together the inputs are larger than the L2, so
each input is cold when its turn comes again. Before the graph, a buffer larger than the L2 is read. (If the buffer were
written, it would be written back within the time measured.) While that runs, the host launches what is timed. What
cannot be captured is launched call by call; the results say so.
"""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import cycle, islice
from math import ceil
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
BATCH_SECONDS = 1e-3
METHOD = "time: CUDA events around CUDA graphs of about 1 ms or one call, cold L2, median of the rounds"


def describe_gpu() -> str:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    l2 = properties.L2_cache_size >> 20
    return f"{properties.name}, {properties.multi_processor_count} SMs, L2 {l2} MiB, driver {driver_version()}"


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return lines[0].strip()  # one for all GPUs


def cold_bytes() -> int:
    """Twice the L2, because the L2 does not always throw out what was used longest ago."""
    return 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


@cache
def flush_buffer() -> Tensor:
    return torch.zeros(2 * cold_bytes() // 4, device="cuda")


def seconds_of(run: Callable[[], object]) -> float:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush_buffer().sum()
    started.record()
    run()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1e3


def capture(run: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def make_batch(
    name: str, function: Callable[[T], object], inputs: Sequence[T], use_graph: bool
) -> tuple[Callable[[], object], int]:
    """What is timed for a function: a batch of calls, and how many calls the batch has."""
    function(inputs[0])  # loads, chooses and allocates what is needed once
    num_calls = ceil(BATCH_SECONDS / seconds_of(lambda: function(inputs[0])))

    def run() -> list[object]:
        # All results live: no call writes where another one did.
        return [function(item) for item in islice(cycle(inputs), num_calls)]

    if use_graph:
        stream = torch.cuda.current_stream()
        try:
            return capture(run), num_calls
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream current
            torch.cuda.synchronize()
            print(f"{name}: call by call, as no graph could be captured: {str(error).splitlines()[0]}")
    return run, num_calls


def time_interleaved(
    functions: Mapping[str, Callable[[T], object]], inputs: Sequence[T], num_rounds: int, use_graphs: bool
) -> dict[str, list[float]]:
    """Seconds of a call of each function in each round; the functions take turns."""
    batches = {name: make_batch(name, function, inputs, use_graphs) for name, function in functions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(num_rounds + 1):
        for name, (run, num_calls) in batches.items():
            duration = seconds_of(run) / num_calls
            if i > 0:  # a graph's first launch moves it to the GPU
                seconds[name].append(duration)
    return seconds


def host_microseconds(function: Callable[[], object], num_calls: int = 1000) -> float:
    """Microseconds of a call until it returns, whatever the GPU does meanwhile."""
    microseconds = []
    for _ in range(num_calls):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        microseconds.append((time.perf_counter() - started) * 1e6)
    return median(microseconds)
