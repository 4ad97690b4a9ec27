"""What the benchmarks share: options, interleaved timing with cold caches, probes, tables, JSON and the plot.

A share is never taken of a number from a data sheet: a probe (probes.py) runs in the same rounds. Paged caches and what
the probes read and write come from allocate_kv_cache: both lie in huge pages where the system grants them. Ratios are a
peer's time over ours: more than 1 means that ours is faster. With --device cuda the times are those of cuda_timing.py.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, TypeVar

import cuda_timing
import torch
import vllm_kernels
from torch import Tensor

import pagedattn_ext

T = TypeVar("T")
COLD_BYTES = 64 << 20  # buffers rotate over this much, or over more where the last-level cache holds so much
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
BATCH_SECONDS = 3e-4  # short calls are timed in batches of about this long
NUM_WARM_UPS = 4  # calls, before a batch that is to find everything in the caches
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # no longer than the benchmark lives


def parse_args(description: str, has_peers_of_vllm: bool = False) -> argparse.Namespace:
    """The options of every benchmark, with the device found to be usable and the threads set."""
    parser = argparse.ArgumentParser(description=description)
    dtypes = ["float32", "float16", "bfloat16"]
    add_device_option(parser)
    parser.add_argument(
        "--dtype", choices=dtypes, action="append", help="repeatable; default float32 and bfloat16, on cuda bfloat16"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write hardware, command and raw times")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the share of the probe (needs matplotlib)")
    if has_peers_of_vllm:
        vllm_kernels.add_option(parser)
    args = parser.parse_args()
    check_plot(parser, args.plot)
    check_device(parser, args.device)
    if has_peers_of_vllm:
        vllm_kernels.load(parser, args.vllm)
    default = ["bfloat16"] if args.device == "cuda" else ["float32", "bfloat16"]
    args.dtypes = [getattr(torch, name) for name in args.dtype or default]
    prepare(args.threads)
    return args


def check_plot(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """Ends the process with status 2 if a plot is asked for and cannot be drawn."""
    if path and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """Ends the process with status 2 where the device cannot be used."""
    if device == "cuda":
        if not torch._C._dispatch_has_kernel_for_dispatch_key("pagedattn_ext::rms_norm", "CUDA"):
            parser.error("--device cuda: this build of pagedattn_ext has no CUDA ops")
        if not torch.cuda.is_available():
            parser.error("--device cuda: torch finds no CUDA device")
        torch.cuda.init()


def prepare(num_threads: int) -> None:
    """What a process does before it measures."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Keep freed memory up to 32 MiB (as much as glibc allows), so that results do not fetch it from the kernel again.

    Whether page faults occur depends on the history of the heap. With page faults, ratios to torch swing between 2x and
    12x.
    """
    if platform.libc_ver()[0] == "glibc":
        libc, m_trim_threshold, m_mmap_threshold = ctypes.CDLL(None), -1, -3
        libc.mallopt(m_trim_threshold, 1 << 30)
        libc.mallopt(m_mmap_threshold, 32 << 20)


def use_small_pages() -> None:
    """From now on this process gets no huge pages, whatever asks for them."""
    pr_set_thp_disable = 41
    if platform.system() == "Linux" and ctypes.CDLL(None).prctl(pr_set_thp_disable, 1, 0, 0, 0) != 0:
        raise OSError("prctl refuses PR_SET_THP_DISABLE")


def hardware(device: str) -> dict[str, object]:
    """What a number needs beside it; printed too."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    facts = {
        "cpu": names[0] if names else platform.processor() or "unknown CPU",
        "num_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "transparent_huge_pages": pages.read_text().strip() if pages.exists() else "unknown",
        "gpu": cuda_timing.describe_gpu() if device == "cuda" else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "pagedattn_ext": pagedattn_ext.build_info(),
    }
    where = facts["gpu"] or "{cpu}, {num_cpus} CPUs, load {load}; threads: {threads}".format(**facts)
    print(f"{where}; pagedattn_ext {pagedattn_ext.cpu_capability()}; torch {torch.__version__}")
    if device == "cuda":
        print(cuda_timing.METHOD)
    else:
        print(f"transparent huge pages: {facts['transparent_huge_pages']}; caches and probes ask for them")
    return facts


# ---- time -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    name: str
    unit: str
    work: int  # bytes or floating-point operations of a call
    run: Callable[[object], object]


def on_cuda() -> bool:
    return torch.cuda.is_initialized()  # never in a run on CPU


def synchronize() -> None:
    if on_cuda():
        torch.cuda.synchronize()


def cold_bytes(device: str) -> int:
    """How many bytes to touch so that nothing else is left in the caches."""
    return cuda_timing.cold_bytes() if device == "cuda" else max(COLD_BYTES, 2 * last_cache_bytes())


def last_cache_bytes() -> int:
    """Of the largest cache of a CPU, which it may share with others; 0 where the system does not say."""
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes), default=0)


def make_inputs(make: Callable[[], T], num_bytes: int, device: str) -> list[T]:
    """As many inputs as keep one another out of the caches, if a call touches num_bytes."""
    with torch.device(device):  # not while timing: it costs microseconds a call
        return [make() for _ in range(ceil(cold_bytes(device) / num_bytes))]


def time_interleaved(
    functions: Mapping[str, Callable[[T], object]],
    inputs: Sequence[T],
    num_rounds: int,
    use_graphs: bool = True,
    in_cache: bool = False,
) -> dict[str, list[float]]:
    """Seconds of a call of each function in each round. The functions take turns, so that noise falls on all alike.
    The order changes from round to round: a probe leaves its own lines in the caches, and for some twenty calls the
    function that comes next takes up to twice as long. use_graphs is for CUDA, see cuda_timing; in_cache for CPU.

    Every call takes the input that was used longest ago, and its result is kept until that input comes again: neither
    what it reads nor what it allocates is in a cache, if the inputs are enough for that. in_cache is the opposite, with
    one input: a function is called some times before each time that counts. With one CPU thread the time is that of the
    CPU, which other processes disturb less than the wall clock.
    """
    if on_cuda():
        return cuda_timing.time_interleaved(functions, inputs, num_rounds, use_graphs)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    results: list[object] = [None] * len(inputs)
    num_done = 0

    def timed(function: Callable[[T], object], num_calls: int) -> float:
        nonlocal num_done
        if in_cache:
            for _ in range(NUM_WARM_UPS):
                results[0] = function(inputs[0])
        started = clock()
        for i in range(num_done, num_done + num_calls):
            results[i % len(inputs)] = function(inputs[i % len(inputs)])
        num_done += num_calls
        return (clock() - started) / num_calls

    timed(next(iter(functions.values())), len(inputs))  # the memory of the results is fresh only once
    num_calls = {}
    for name, function in functions.items():
        timed(function, 1)
        num_calls[name] = min(100, ceil(BATCH_SECONDS / timed(function, 1)))
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    shuffler = Random(0)
    for _ in range(num_rounds):
        shuffler.shuffle(order)
        for name in order:
            seconds[name].append(timed(functions[name], num_calls[name]))
    return seconds


def assert_same(functions: Mapping[str, Callable[[T], object]], inputs: T, tolerance: float) -> None:
    """Raise unless all functions give the same result, which is a tensor or several."""

    def results(function: Callable[[T], object]) -> list[Tensor]:
        result = function(inputs)
        return [result] if isinstance(result, Tensor) else list(result)

    ours, *peers = (results(function) for function in functions.values())
    for peer in peers:
        for our_tensor, tensor in zip(ours, peer, strict=True):
            largest = tensor[tensor.isfinite()].abs().max().item()
            torch.testing.assert_close(our_tensor, tensor, rtol=tolerance, atol=tolerance * largest)


def check_and_time(
    functions: Mapping[str, Callable[[T], object]],
    inputs: Sequence[T],
    tolerance: float,
    num_rounds: int,
    probe: Probe,
) -> dict[str, list[float]]:
    """Times of functions, which must have the same result, and of the probe."""
    assert_same(functions, inputs[0], tolerance)
    return time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)


def assert_same_effect(functions: Mapping[str, Callable[[T], object]], inputs: T, written: Sequence[Tensor]) -> None:
    """Raise unless all functions leave the same in `written`, bit for bit. `written` is put back afterwards."""
    before = [tensor.clone() for tensor in written]
    effects = []
    for function in functions.values():
        function(inputs)
        synchronize()
        effects.append([tensor.clone() for tensor in written])
        for tensor, old in zip(written, before, strict=True):
            tensor.copy_(old)
    synchronize()
    for effect in effects[1:]:
        assert all(map(torch.equal, effects[0], effect)), f"different results: {', '.join(functions)}"


def tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 2e-2


def latency(function: Callable[[], object], num_calls: int = 2000) -> dict[str, float]:
    """Microseconds of a call, with everything warm, until its result is there."""
    microseconds = []
    for _ in range(num_calls):
        started = time.perf_counter()
        function()
        synchronize()
        microseconds.append((time.perf_counter() - started) * 1e6)
    percentiles = quantiles(microseconds, n=100)
    longest = max(microseconds)
    return {"p50_us": percentiles[49], "p99_us": percentiles[98], "max_us": longest, "num_calls": num_calls}


@contextmanager
def busy_processes(num_processes: int) -> Iterator[None]:
    """Processes that take as much of the CPU as they can get."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(num_processes):
            processes.append(subprocess.Popen([sys.executable, "-c", SPIN, str(os.getpid())]))
        time.sleep(0.5)  # until all of them have started
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


# ---- results --------------------------------------------------------------------------------------------------------


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Row:
    group: str
    case: str
    dtype: torch.dtype
    work: int  # of ours, in the unit of the probe
    probe: Probe
    seconds: dict[str, list[float]]  # "ours", "probe" and the peers
    note: str = ""

    def rate(self) -> float:
        return self.work / median(self.seconds["ours"]) / 1e9

    def share(self) -> float:
        return self.rate() / (self.probe.work / median(self.seconds["probe"]) / 1e9)

    def ratios(self) -> dict[str, float]:
        peers = self.seconds.keys() - {"ours", "probe"}
        return {name: median(s) / median(self.seconds["ours"]) for name, s in self.seconds.items() if name in peers}

    def ratio_ranges(self) -> dict[str, tuple[float, float]]:
        """The least and the largest ratio of a round: what falls on one round falls on both sides."""
        ours = self.seconds["ours"]
        of_rounds = {name: [a / b for a, b in zip(self.seconds[name], ours, strict=True)] for name in self.ratios()}
        return {name: (min(ratios), max(ratios)) for name, ratios in of_rounds.items()}

    def label(self) -> str:
        return f"{self.case}, {dtype_name(self.dtype)}"

    def as_dict(self) -> dict[str, object]:
        derived = {self.probe.unit: self.rate(), f"share_of_{self.probe.name}_probe": self.share()}
        ratios = {f"ratio_to_{name}": ratio for name, ratio in self.ratios().items()}
        raw = {"work": self.work, "probe_work": self.probe.work, "seconds": self.seconds, "note": self.note}
        return {"group": self.group, "case": self.label(), **derived, **ratios, **raw}


def print_rows(rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """One table: rows of one group, each with its note if there are any. Numbers are medians of the rounds; behind them
    stand the least and the largest."""
    peers = list(dict.fromkeys(name for row in rows for name in row.ratios()))
    probe = rows[0].probe
    # On a GPU calls are a thousand times shorter.
    unit, per_second, digits = ("us", 1e6, 1) if on_cuda() else ("ms", 1e3, 3)
    table = [[rows[0].group, unit, probe.unit, f"of {probe.name}", *(f"vs {name}" for name in peers)]]
    for row in rows:
        ours = [seconds * per_second for seconds in row.seconds["ours"]]
        duration = f"{median(ours):.{digits}f} ({min(ours):.{digits}f}-{max(ours):.{digits}f})"
        ratios, ranges = row.ratios(), row.ratio_ranges()
        cells = [
            f"{ratios[name]:.2f}x ({'-'.join(f'{end:.2f}' for end in ranges[name])})" if name in ratios else "-"
            for name in peers
        ]
        table.append([row.label(), duration, f"{row.rate():.1f}", f"{row.share():.0%}", *cells])
    print_table(table, notes or [row.note for row in rows])


def print_table(table: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """A header and rows, each row with its note behind it if there are any."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    print()
    for (first, *rest), note in zip(table, ["", *(notes or [""] * (len(table) - 1))], strict=True):
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells, note]).rstrip(), flush=True)


@dataclass(frozen=True)
class Target:
    """A speed that this project wants to reach."""

    what: str
    required: float
    measure: Callable[[], float]
    form: str
    at_most: bool = False  # rather than at least
    note: Callable[[], str] = str  # printed behind it
    row: Callable[[], Row] | None = None  # that it is taken of, measured once

    def is_met(self, measured: float) -> bool:
        return measured <= self.required if self.at_most else measured >= self.required


def share_target(what: str, required: float, row: Callable[[], Row]) -> Target:
    return Target(f"{what}: share of the probe", required, lambda: row().share(), "{:.1%}", row=row)


def ratio_target(
    what: str,
    peer: str,
    required: float,
    row: Callable[[], Row],
    name: str | None = None,
    note: Callable[[], str] = str,
) -> Target:
    return Target(f"{what}: vs {name or peer}", required, lambda: row().ratios()[peer], "{:.2f}x", note=note, row=row)


def finish(args: argparse.Namespace, facts: dict[str, object], rows: Sequence[Row], **extra: object) -> None:
    """Writes the files that were asked for."""
    write_files(args, facts, partial(plot, rows=rows), {**extra, "rows": [row.as_dict() for row in rows]})


def write_files(
    args: argparse.Namespace,
    facts: dict[str, object],
    draw: Callable[[Path, str], None],
    report: Mapping[str, object],
) -> None:
    """What --json and --plot ask for, both with the command and the hardware. `draw` takes the path and the title."""
    if args.json:
        write_json(args.json, facts, report)
    if args.plot:
        draw(args.plot, f"{command_line()}\n{facts['gpu'] or facts['cpu']}, threads: {facts['threads']}")


def write_json(path: Path, facts: dict[str, object], report: Mapping[str, object]) -> None:
    """Write the whole file. If the process is killed meanwhile, the file keeps what was there before."""
    whole = path.with_name(f"{path.name}.new")
    whole.write_text(json.dumps({"command": command_line(), "hardware": facts, **report}, indent=1) + "\n")
    whole.replace(path)


def command_line() -> str:
    return shlex.join(["python", *sys.argv])


def load_pyplot() -> Any:
    """matplotlib.pyplot, for files only."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Bars of the share of the probe, a place for each case and a colour for each dtype."""
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        place = f"{row.group}: {row.case} (of {row.probe.name})"
        bars.setdefault(dtype_name(row.dtype), {})[place] = row.share()
    figure, axes = draw_bars(bars, "{:.0%}")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("share of the probe in the same run")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=120)


def draw_bars(bars: Mapping[str, Mapping[str, float]], form: str) -> tuple[Any, Any]:
    """Figure and axes with bars[colour][place], each with its number. A place needs no bar of every colour."""
    places = list(dict.fromkeys(place for of_colour in bars.values() for place in of_colour))
    height, num_bars = 0.8 / len(bars), len(bars) * len(places)
    figure, axes = load_pyplot().subplots(figsize=(9, 1.5 + 0.18 * num_bars), layout="constrained")
    for i, (colour, of_colour) in enumerate(bars.items()):
        ys = [places.index(place) + (i - (len(bars) - 1) / 2) * height for place in of_colour]
        drawn = axes.barh(ys, list(of_colour.values()), height, label=colour)
        axes.bar_label(drawn, fmt=form, padding=2, fontsize=7)
    axes.set_yticks(range(len(places)), places, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure, axes
