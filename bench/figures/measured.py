"""What runs on this machine: the kernel of figure 18, preemption of figure 19, and transformers beside the engine."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import torch
import transformers
from attention.inputs import Attention, Model, Paged
from harness import assert_same, keep_freed_memory, make_inputs, time_interleaved, tolerance
from serve.experiments import EXPERIMENTS, MAX_LEN, SWAP_SPACE, Setting
from serve.peers import compare, load_peers, run_in_turns
from serve.run import engine_options, warm_server
from serve.workloads import make_model, make_requests

from figures.deployments import SEED, Effort
from figures.report import Figure, Range, Row
from pagedattn_serve import DEMO_MODEL, LLMEngine, SamplingParams

KERNEL_IN_PAPER = Range(1.20, 1.26)  # its time over that on contiguous memory
RECOMPUTE_IN_PAPER = Range(None, 1.20)  # its time over that of swapping
HEADS = Model("MHA 12x64", 12, 12, 64)
CONTEXTS, BATCHES = (64, 256, 1024), (8, 32)
SWAPPED_TOKENS = 1024  # in figure 19
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@contextmanager
def one_thread() -> Iterator[None]:
    """For measurements: the time is that of the CPU, which other processes disturb least."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Decode:
    """The same keys and values in random blocks and in adjacent blocks."""

    def __init__(self, seq_lens: list[int]) -> None:
        self.attention = Attention(HEADS, seq_lens, 1, torch.float32)
        arguments = self.attention.query, self.attention.key, self.attention.value, seq_lens, torch.float32
        self.adjacent = Paged.make(*arguments, in_order=True)


def kernel(effort: Effort) -> Figure:
    rows = []
    for num_seqs in BATCHES:
        for context in CONTEXTS:
            seconds = time_decode(num_seqs, context, 100 if effort.is_full else 30)
            ratio = median(seconds["paged"]) / median(seconds["adjacent"])
            name = f"{num_seqs} x {context:,} tokens: time over adjacent slots"
            rows.append(Row(name, ratio, "{:.2f}x", "measured", KERNEL_IN_PAPER))
    return Figure(
        "Figure 18, left: the kernel on blocks and on contiguous memory",
        rows,
        f"Decode, {HEADS.name}, fp32, one thread; calls take turns at 64 MiB of inputs, which some CPUs have in their "
        "caches. The paper compares with FasterTransformer's kernel on a GPU. Here adjacent slots are blocks of 16 in "
        "order, under the same kernel, so what differs is where the blocks lie, not the arithmetic. The keys of a head "
        "are 4 KiB of adjacent bytes in each block, so the order of blocks costs a CPU next to nothing. "
        "`bench/attn.py` has torch's attention on contiguous tensors.",
        "the kernel on a GPU.",
    )


def time_decode(num_seqs: int, context: int, num_rounds: int) -> dict[str, list[float]]:
    functions: dict[str, Callable[[Decode], torch.Tensor]] = {
        "paged": lambda inputs: inputs.attention.decode(),
        "adjacent": lambda inputs: inputs.adjacent.decode(),
    }
    num_bytes = 2 * num_seqs * context * HEADS.num_kv_heads * HEADS.head_size * 4
    with one_thread():
        inputs = make_inputs(partial(Decode, [context] * num_seqs), num_bytes, "cpu")
        assert_same(functions, inputs[0], tolerance(torch.float32))
        return time_interleaved(functions, inputs, num_rounds)


def preemption(effort: Effort) -> Figure:
    """By themselves, and in the engine."""
    experiment = EXPERIMENTS["preemption"]
    with one_thread(), TemporaryDirectory() as directory:
        make_model(experiment.shape, SEED, directory, MAX_LEN)
        alone = {size: time_alone(directory, size) for size in BLOCK_SIZES}
        rows = [
            Row(f"{name} {SWAPPED_TOKENS:,} tokens, blocks of {size}", 1e3 * seconds, "{:.2f} ms", "measured")
            for size, each in alone.items()
            for name, seconds in each.items()
        ]
        config = transformers.AutoConfig.from_pretrained(directory)
        start = partial(LLMEngine, directory, device="cpu", **engine_options("float32"))
        setting = Setting(
            directory,
            "float32",
            start,
            MAX_LEN,
            config.vocab_size,
            experiment.num_requests[0],
            3 if effort.is_full else 1,
            SEED,
        )
        for row in experiment.measure(setting):
            if row.series == "swap":
                name = f"end to end, {row.place}: time of recomputing over swapping"
                rows.append(Row(name, row.numbers["ratio"], "{:.2f}x", "measured", RECOMPUTE_IN_PAPER))
    factors = [each["recompute"] / (each["swap out"] + each["swap in"]) for each in alone.values()]
    return Figure(
        "Figure 19: swapping and recomputing",
        rows,
        f"End to end: {experiment.title}, a LLaMA of shape {experiment.shape} in fp32, CPU time a token. Here both "
        "pools lie in one memory, which copies blocks of 8 tokens and more about as fast; the paper copies over PCIe, "
        "where small blocks are slow. Alone, the cache of all layers is copied or computed. A CPU computes slowly and "
        f"copies fast, so recomputing takes {min(factors):.0f} to {max(factors):.0f} times as long as copying out "
        "and back; end to end few sequences are preempted.",
        "copies over PCIe.",
    )


def time_alone(directory: str, block_size: int) -> dict[str, float]:
    """Seconds of the CPU for the keys and values of SWAPPED_TOKENS: to copy them to the host's pool and back, as the
    engine does, each time to and from other blocks of pools that are 16 times as large; and to compute them."""
    num_swapped, num_blocks = SWAPPED_TOKENS // block_size, 16 * SWAPPED_TOKENS // block_size
    engine = LLMEngine(
        directory,
        device="cpu",
        block_size=block_size,
        num_blocks=num_blocks,
        swap_space=SWAP_SPACE,
        max_num_batched_tokens=SWAPPED_TOKENS,
        enable_prefix_caching=False,
        **engine_options("float32"),
    )
    cache, random = engine.model_runner.cache_engine, Random(SEED)
    seconds: dict[str, list[float]] = {"swap out": [], "swap in": [], "recompute": []}

    def time_call(name: str, call: Callable[[], object]) -> None:
        started = time.thread_time()
        call()
        seconds[name].append(time.thread_time() - started)

    for _ in range(9):
        for name, swap in (("swap out", cache.swap_out), ("swap in", cache.swap_in)):
            blocks = (random.sample(range(num_blocks), num_swapped) for _ in range(2))
            time_call(name, partial(swap, list(zip(*blocks, strict=True))))
    params = SamplingParams(temperature=0, max_tokens=1)
    for i in range(3):
        engine.add_request(str(i), None, params, random.choices(range(1000), k=SWAPPED_TOKENS))
        time_call("recompute", engine.step)
    return {name: median(each) for name, each in seconds.items()}


def beside_transformers(effort: Effort) -> Figure:
    rows: list[Row] = []
    with one_thread(), TemporaryDirectory() as made:
        models = {"demo model": str(DEMO_MODEL)}
        if effort.is_full:
            make_model("1B", SEED, made, MAX_LEN)
            models["LLaMA of shape 1B"] = made
        for name, directory in models.items():
            rows += time_peers(name, directory, num_rounds=3 if effort.is_full else 1)
    return Figure(
        "Beside transformers",
        rows,
        "Tokens of a CPU-second, those of the engine over those of the other; greedy, fp32, one thread, 8 requests "
        "with the lengths of Alpaca, all there at once. The paper does not have this comparison.",
        "" if effort.is_full else "a LLaMA of 1 billion parameters, in the quick form.",
    )


def time_peers(name: str, directory: str, num_rounds: int) -> list[Row]:
    config = transformers.AutoConfig.from_pretrained(directory)
    engine = LLMEngine(directory, device="cpu", enable_prefix_caching=False, **engine_options("float32"))
    requests = make_requests("alpaca", 8, engine.max_model_len, config.vocab_size, SEED)
    systems = {"engine": warm_server(engine), **load_peers(directory, "float32")}
    comparison = compare(run_in_turns(systems, requests, num_rounds))
    return [
        Row(f"{name}: engine over {peer}", numbers["cpu_ratio"], "{:.2f}x", "measured")
        for peer, numbers in comparison.items()
        if peer != "engine"
    ]
