"""What a machine reaches without our ops: reading and copying memory, and multiplying matrices.

A probe is the fastest of several ways, found out where it is made. A slow one would flatter what is compared with it:
on an Intel Sapphire Rapids Xeon torch's sum reads 16 GB/s in huge pages, its product with a vector 22.
"""

import ctypes
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch
from compiled import COMPILER, compile_library
from harness import Probe, cold_bytes, time_interleaved
from torch import Tensor

import pagedattn_ext

MIN_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
ROW = 4096  # elements, which stay in the first-level cache
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
NUM_STREAMS = (8, 16)

Way = Callable[[object], object]


def probe_memory() -> Tensor:
    """Memory like that of caches: MIN_BYTES, or four times the last-level cache if that is more. It is written, because
    untouched pages would all be the same page."""
    head_size, block_size = 256, 64
    device = torch.get_default_device()
    num_bytes = max(MIN_BYTES[device.type], 2 * cold_bytes(device.type))
    num_blocks = num_bytes // (4 * head_size * block_size)
    ((data, _),) = pagedattn_ext.allocate_kv_cache(num_blocks, 1, head_size, block_size, device=device)
    return data.flatten().fill_(1)


def read_probe() -> Probe:
    data = probe_memory()
    first, second = data.chunk(2)
    rows = data.view(-1, ROW)
    vector = rows.new_ones(ROW)
    ways: dict[str, Way] = {
        "sum": lambda _: data.sum(),
        "dot product of the halves": lambda _: first.dot(second),
        "product with a vector": lambda _: rows.mv(vector),
    }
    return Probe("read", "GB/s", data.nbytes, fastest(ways | stream_ways(data)))


def stream_ways(data: Tensor) -> dict[str, Way]:
    """Several streams side by side, as probes.cpp reads them. Needs a C++ compiler."""
    if data.is_cuda or shutil.which(COMPILER) is None:
        return {}
    library = compile_library([Path(__file__).with_suffix(".cpp")], "-march=native")
    library.read_streams.restype = ctypes.c_float

    def read(num_streams: int, begin: int, end: int) -> None:
        address = ctypes.c_void_p(data.data_ptr() + begin * ROW * data.itemsize)
        library.read_streams(address, ctypes.c_int64((end - begin) * ROW), ctypes.c_int64(num_streams))

    return {f"{n} streams": in_threads(partial(read, n), data.numel() // ROW) for n in NUM_STREAMS}


def copy_probe() -> Probe:
    data = probe_memory()
    source, target = data.chunk(2)
    row_bytes = ROW * data.itemsize

    def copy(begin: int, end: int) -> None:
        to, of = (half.data_ptr() + begin * row_bytes for half in (target, source))
        ctypes.memmove(to, of, (end - begin) * row_bytes)

    ways: dict[str, Way] = {"copy_": lambda _: target.copy_(source)}
    if not data.is_cuda:
        ways["memcpy"] = in_threads(copy, source.numel() // ROW)
    return Probe("copy", "GB/s", data.nbytes, fastest(ways))


def matmul_probe(dtype: torch.dtype) -> Probe:
    """Of fp32 where torch multiplies that faster: without instructions for bf16, bf16 takes a hundred times as long."""
    n = MATMUL_SIZE[torch.get_default_device().type]
    a, b = torch.randn(2, n, n, dtype=dtype)
    ways: dict[str, Way] = {"as it is": lambda _: a @ b}
    if not a.is_cuda and dtype != torch.float32:
        wide_a, wide_b = a.float(), b.float()
        ways["in fp32"] = lambda _: wide_a @ wide_b
    return Probe("matmul", "GFLOP/s", 2 * n**3, fastest(ways))


def fastest(ways: Mapping[str, Way]) -> Way:
    if len(ways) == 1:
        return next(iter(ways.values()))
    seconds = time_interleaved(ways, [None], num_rounds=5)
    return ways[min(ways, key=lambda way: median(seconds[way]))]


def in_threads(run: Callable[[int, int], object], num_rows: int) -> Way:
    """A call of `run` for each of torch's threads, with the range of rows that is its own."""
    pool = ThreadPoolExecutor()  # its threads begin when there is work for them

    def way(_: object) -> None:
        num_threads = torch.get_num_threads()
        bounds = [num_rows * i // num_threads for i in range(num_threads + 1)]
        if num_threads == 1:
            run(*bounds)
        else:
            list(pool.map(run, bounds, bounds[1:]))

    return way


def print_probes(*probes: Probe) -> None:
    """Print what the device reaches without our ops. Each row runs its probe once more, in the same rounds."""
    seconds = time_interleaved({probe.name: probe.run for probe in probes}, [None], num_rounds=9)
    rates = [f"{probe.name} {probe.work / median(seconds[probe.name]) / 1e9:.0f} {probe.unit}" for probe in probes]
    print("probes: " + ", ".join(rates))
