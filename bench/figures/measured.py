"""What runs on this machine: the kernel of figure 18, preemption of figure 19, and transformers beside the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory

import torch
import transformers
from attention.inputs import Attention, Model, Paged
from harness import COLD_BYTES, assert_same, keep_freed_memory, make_inputs, time_interleaved, tolerance
from serve.experiments import EXPERIMENTS, MAX_LEN, Setting
from serve.peers import compare, load_peers, run_in_turns
from serve.run import engine_options, warm_server
from serve.workloads import make_model, make_requests

from figures.deployments import SEED, Effort
from figures.report import Figure, Range, Row
from pagedattn_ext import ops
from pagedattn_serve import DEMO_MODEL, LLMEngine

KERNEL_IN_PAPER = Range(1.20, 1.26)  # its time over that on contiguous memory
RECOMPUTE_IN_PAPER = Range(None, 1.20)  # its time over that of swapping
HEADS = Model("MHA 12x64", 12, 12, 64)
CONTEXTS, BATCHES = (64, 256, 1024), (8, 32)
SWAPPED_TOKENS = 2048  # of a layer, in figure 19
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)


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
        rows = [
            Row(f"copy {SWAPPED_TOKENS:,} tokens, blocks of {size}", 1e3 * time_swap(size), "{:.2f} ms", "measured")
            for size in BLOCK_SIZES
        ]
        make_model(experiment.shape, SEED, directory, MAX_LEN)
        config = transformers.AutoConfig.from_pretrained(directory)
        start = partial(LLMEngine, directory, device="cpu", **engine_options("float32"))
        setting = Setting(
            start, MAX_LEN, config.vocab_size, experiment.num_requests[0], 3 if effort.is_full else 1, SEED
        )
        for row in experiment.measure(setting):
            if row.series == "swap":
                name = f"end to end, {row.place}: time of recomputing over swapping"
                rows.append(Row(name, row.numbers["ratio"], "{:.2f}x", "measured", RECOMPUTE_IN_PAPER))
    return Figure(
        "Figure 19: swapping and recomputing",
        rows,
        f"End to end: {experiment.title}, a LLaMA of shape {experiment.shape} in fp32, CPU time a token. Here both "
        "pools lie in one memory, which copies blocks of any size about as fast; the paper copies over PCIe, where "
        "small blocks are slow. Recomputing a model this small takes little.",
        "copies over PCIe, recomputing timed alone, and blocks of 1, 2 and 4 tokens.",
    )


def time_swap(block_size: int) -> float:
    """Seconds to copy blocks of keys between two pools of one layer, as swapping does."""
    num_blocks, shape = SWAPPED_TOKENS // block_size, (HEADS.num_kv_heads, HEADS.head_size // 4, block_size, 4)
    pairs = torch.stack([torch.randperm(num_blocks), torch.randperm(num_blocks)], dim=1)

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(num_blocks, *shape), torch.randn(num_blocks, *shape)

    num_bytes = 2 * SWAPPED_TOKENS * HEADS.num_kv_heads * HEADS.head_size * 4
    inputs = make_inputs(make, min(num_bytes, COLD_BYTES), "cpu")
    swap = {"swap": lambda pools: ops.swap_blocks(*pools, pairs)}
    return median(time_interleaved(swap, inputs, 9)["swap"])


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
