"""What the benchmarks share: interleaved timing, a bandwidth probe, the hardware, a table."""

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import pagedattn_ext

PROBE_BYTES = 512 << 20  # far beyond any cache


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args


def time_interleaved(functions: dict[str, Callable[[int], object]], num_rounds: int) -> dict[str, float]:
    """Median seconds of each function, called in turn as function(round), so that noise falls on all alike.

    With one thread the time is that of the CPU, which other processes disturb less than the wall clock.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(num_rounds + 1):
        for name, function in functions.items():
            started = clock()
            function(i)
            if i > 0:  # the first round warms up
                seconds[name].append(clock() - started)
    return {name: median(values) for name, values in seconds.items()}


def make_read_probe() -> Callable[[int], object]:
    """torch.sum over PROBE_BYTES of fp32: the bandwidth that reading once can reach here."""
    data = torch.ones(PROBE_BYTES // 4)  # written: pages of untouched zeros would all be the same one
    return lambda _: data.sum()


def print_hardware() -> None:
    cpu = platform.processor() or "unknown CPU"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = f"{names[0]}, {len(names)} CPUs" if names else cpu
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    huge_pages = pages.read_text().strip() if pages.exists() else "unknown"
    capability = pagedattn_ext.cpu_capability()
    print(f"{cpu}; {torch.get_num_threads()} threads; pagedattn_ext {capability}; torch {torch.__version__}")
    print(f"transparent huge pages: {huge_pages}")


def print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(row)))
