"""Norms, activations, rotary embedding and token masks, beside what torch offers for them.

Usage: python bench/elementwise.py [--device cuda] [--quick] [--dtype float32] [--threads N] [--vllm PYTHON]
       [--json FILE] [--plot FILE.png]

On a CPU each row is printed twice. First, inputs and outputs are in no cache. Then, "in cache", they are those of the
calls just before, as far as the caches hold them, as a model's layers leave their activations to each other.

GB/s counts each input and output once; the share is of the fastest copy from memory to memory. If there is an output,
both sides allocate it. fused_add_rms_norm and rotary_embedding_neox work in place; memory then moves one stream less,
so their share can pass 100%. apply_token_bitmask works in place, too; each logit counts once, though many stay as they
are. Torch's forms work in place as well, but for the rotary embedding, which is that of Hugging Face's models. The
probe's memory lies in huge pages where the system grants them; inputs and outputs lie where torch puts them.
cuda_timing.py says how it is timed on a GPU. With --vllm (vllm_kernels.py), vLLM's kernels are peers where it has them.

On a CPU a second table has what a call costs beside its kernel: microseconds of a call with a row of 16 numbers. "raw"
is the op without its function in pagedattn_ext.ops, with the output given. First, everything is in the caches. Then,
"cold", the call comes after so much other memory that its code and its objects must be fetched as well.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import vllm_kernels
from harness import (
    Probe,
    Row,
    assert_same,
    cold_bytes,
    finish,
    hardware,
    make_inputs,
    parse_args,
    print_rows,
    print_table,
    time_interleaved,
    tolerance,
)
from probes import copy_probe, print_probes, read_probe
from torch import Tensor
from torch.nn import functional as F

from pagedattn_ext import ops

NUM_TOKENS = {"cpu": (1, 32, 512), "cuda": (32, 8192)}
HIDDEN_SIZE = 4096
INTERMEDIATE_SIZE = 11008
NUM_HEADS, HEAD_SIZE = 32, 128
NUM_COLUMNS = 16  # where the call itself is measured
VOCAB_SIZE = 32000
EPSILON = 1e-6

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[int, torch.dtype], Inputs]  # of a number of tokens
    ours: Callable[[Inputs], object]
    theirs: Callable[[Inputs], object]
    num_elements: Callable[[int], int]  # read and written, of a number of tokens
    vllm: Callable[[Inputs], object] | None = None


def make_norm(num_tokens: int, dtype: torch.dtype) -> Inputs:
    hidden, residual = torch.randn(2, num_tokens, HIDDEN_SIZE, dtype=dtype)
    return hidden, residual, torch.randn(HIDDEN_SIZE, dtype=dtype)


def make_rotary(num_tokens: int, dtype: torch.dtype) -> Inputs:
    """Our op reads cos and sin from the table; the models of Hugging Face read them repeated for both halves."""
    query, key = torch.randn(2, num_tokens, NUM_HEADS, HEAD_SIZE, dtype=dtype)
    angles = torch.rand(num_tokens, HEAD_SIZE // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    repeated = (torch.cat((t, t), dim=-1)[:, None] for t in (cos, sin))
    return torch.arange(num_tokens), query, key, torch.cat((cos, sin), dim=-1), *repeated


def make_masked(num_tokens: int, dtype: torch.dtype) -> Inputs:
    """A row of logits for each token, masked as a grammar of JSON does it. Every second row is at the structure of a
    document, where 20 tokens may follow. All other rows are within a string, where all but 1% of the tokens may."""
    one_bit = 1 << torch.arange(32, dtype=torch.int32)
    is_allowed = torch.rand(num_tokens, VOCAB_SIZE) < 0.99
    is_allowed[::2] = torch.rand(VOCAB_SIZE).argsort() < 20
    bitmask = (is_allowed.view(num_tokens, -1, 32) * one_bit).sum(-1, dtype=torch.int32)
    return torch.randn(num_tokens, VOCAB_SIZE, dtype=dtype), bitmask, one_bit


def apply_token_bitmask_eager(inputs: Inputs) -> Tensor:
    logits, bitmask, one_bit = inputs
    return logits.masked_fill_((bitmask.unsqueeze(-1) & one_bit).flatten(1) == 0, -math.inf)


def fused_add_rms_norm_eager(inputs: Inputs) -> Inputs:
    hidden, residual, weight = inputs
    residual.add_(hidden)
    return F.rms_norm(residual, (HIDDEN_SIZE,), weight, EPSILON), residual


def silu_and_mul_eager(inputs: Inputs) -> Tensor:
    gate, up = inputs[0].chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotary_eager(inputs: Inputs) -> Inputs:
    _, query, key, _, cos, sin = inputs

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotated(query), rotated(key)


def rms_norm_vllm(inputs: Inputs) -> Tensor:
    hidden, _, weight = inputs
    out = torch.empty_like(hidden)
    torch.ops._C.rms_norm(out, hidden, weight, EPSILON)
    return out


def fused_add_rms_norm_vllm(inputs: Inputs) -> Inputs:
    torch.ops._C.fused_add_rms_norm(*inputs, EPSILON)
    return inputs[:2]


def silu_and_mul_vllm(inputs: Inputs) -> Tensor:
    out = inputs[0].new_empty(len(inputs[0]), INTERMEDIATE_SIZE)
    torch.ops._C.silu_and_mul(out, inputs[0])
    return out


CASES = [
    Case(
        "rms_norm",
        make_norm,
        lambda t: ops.rms_norm(t[0], t[2], EPSILON),
        lambda t: F.rms_norm(t[0], (HIDDEN_SIZE,), t[2], EPSILON),
        lambda num_tokens: (2 * num_tokens + 1) * HIDDEN_SIZE,
        rms_norm_vllm,
    ),
    Case(
        "fused_add_rms_norm",
        make_norm,
        lambda t: ops.fused_add_rms_norm(*t, EPSILON),
        fused_add_rms_norm_eager,
        lambda num_tokens: (4 * num_tokens + 1) * HIDDEN_SIZE,
        fused_add_rms_norm_vllm,
    ),
    Case(
        "gemma_rms_norm",
        make_norm,
        lambda t: ops.gemma_rms_norm(t[0], t[2], EPSILON),
        lambda t: F.rms_norm(t[0], (HIDDEN_SIZE,), 1 + t[2], EPSILON),
        lambda num_tokens: (2 * num_tokens + 1) * HIDDEN_SIZE,
    ),
    Case(
        "layer_norm",
        make_norm,
        lambda t: ops.layer_norm(t[0], t[2], t[2], EPSILON),
        lambda t: F.layer_norm(t[0], (HIDDEN_SIZE,), t[2], t[2], EPSILON),
        lambda num_tokens: (2 * num_tokens + 2) * HIDDEN_SIZE,
    ),
    Case(
        "silu_and_mul",
        lambda num_tokens, dtype: (torch.randn(num_tokens, 2 * INTERMEDIATE_SIZE, dtype=dtype),),
        lambda t: ops.silu_and_mul(t[0]),
        silu_and_mul_eager,
        lambda num_tokens: 3 * num_tokens * INTERMEDIATE_SIZE,
        silu_and_mul_vllm,
    ),
    Case(
        "gelu_new",
        lambda num_tokens, dtype: (torch.randn(num_tokens, INTERMEDIATE_SIZE, dtype=dtype),),
        lambda t: ops.gelu_new(t[0]),
        lambda t: F.gelu(t[0], approximate="tanh"),
        lambda num_tokens: 2 * num_tokens * INTERMEDIATE_SIZE,
    ),
    Case(
        "rotary_embedding_neox",
        make_rotary,
        lambda t: ops.rotary_embedding_neox(*t[:3], HEAD_SIZE, t[3]),
        rotary_eager,
        lambda num_tokens: num_tokens * (4 * NUM_HEADS + 1) * HEAD_SIZE,
    ),
    Case(
        "apply_token_bitmask",
        make_masked,
        lambda t: ops.apply_token_bitmask(t[0], t[1]),
        apply_token_bitmask_eager,
        lambda num_tokens: num_tokens * VOCAB_SIZE,
    ),
]


def bench(
    case: Case,
    num_tokens: int,
    dtype: torch.dtype,
    device: str,
    num_rounds: int,
    probe: Probe,
    in_cache: bool = False,
) -> Row:
    num_bytes = case.num_elements(num_tokens) * dtype.itemsize
    # Half of the bytes: what is read and what is written is the same memory where an op works in place.
    bytes_apart = cold_bytes(device) if in_cache else num_bytes // 2
    inputs = make_inputs(lambda: case.make(num_tokens, dtype), bytes_apart, device)
    functions = {"ours": case.ours, "torch": case.theirs}
    if case.vllm is not None and vllm_kernels.are_loaded():
        functions["vLLM"] = case.vllm
    assert_same({name: on_copies(function) for name, function in functions.items()}, inputs[0], tolerance(dtype))
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds, in_cache=in_cache)
    name = f"{case.name}, {num_tokens} token{'s' * (num_tokens > 1)}{', in cache' * in_cache}"
    return Row("elementwise", name, dtype, num_bytes, probe, seconds)


def on_copies(function: Callable[[Inputs], object]) -> Callable[[Inputs], object]:
    """For ops that work in place."""
    return lambda inputs: function(tuple(tensor.clone() for tensor in inputs))


def bench_calls(num_rounds: int, probe: Probe) -> dict[str, dict[str, list[float]]]:
    """Seconds of calls that have next to nothing to compute."""
    raw_norm, raw_add, raw_silu = (
        getattr(torch.ops.pagedattn_ext, name).default for name in ("rms_norm", "fused_add_rms_norm", "silu_and_mul")
    )
    input, residual, weight, out = torch.randn(4, 1, NUM_COLUMNS).unbind()
    weight = weight[0]
    half = out[:, : NUM_COLUMNS // 2]
    norm = partial(F.rms_norm, normalized_shape=(NUM_COLUMNS,), weight=weight, eps=EPSILON)
    calls: dict[str, dict[str, Callable[[object], object]]] = {
        "rms_norm": {
            "ours": lambda _: ops.rms_norm(input, weight, EPSILON),
            "raw": lambda _: raw_norm(out, input, weight, EPSILON),
            "torch": lambda _: norm(input),
        },
        "fused_add_rms_norm": {
            "ours": lambda _: ops.fused_add_rms_norm(input, residual, weight, EPSILON),
            "raw": lambda _: raw_add(input, residual, weight, EPSILON),
            "torch": lambda _: norm(residual.add_(input)),
        },
        "silu_and_mul": {
            "ours": lambda _: ops.silu_and_mul(input),
            "raw": lambda _: raw_silu(half, input),
            "torch": lambda _: silu_and_mul_eager((input,)),
        },
    }
    seconds = {}
    for name, functions in calls.items():
        cold = {f"{who}, cold": cold_seconds(function, num_rounds, probe) for who, function in functions.items()}
        seconds[name] = {**time_interleaved(functions, [None], num_rounds), **cold}
    return seconds


def print_calls(seconds: Mapping[str, Mapping[str, list[float]]]) -> None:
    columns = list(seconds["rms_norm"])
    cells = [[name, *(f"{median(times[column]) * 1e6:.1f}" for column in columns)] for name, times in seconds.items()]
    print_table([[f"us of a call, {NUM_COLUMNS} columns", *columns], *cells])


def cold_seconds(function: Callable[[object], object], num_rounds: int, probe: Probe) -> list[float]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter  # as time_interleaved
    seconds = []
    for _ in range(num_rounds):
        probe.run(None)
        started = clock()
        function(None)
        seconds.append(clock() - started)
    return seconds


def main() -> None:
    args = parse_args(__doc__.splitlines()[0], has_peers_of_vllm=True)
    facts = hardware(args.device)
    cases = [(case, num_tokens) for case in CASES for num_tokens in NUM_TOKENS[args.device]]
    in_cache = [False, True] if args.device == "cpu" else [False]
    with torch.device(args.device):
        probe = copy_probe()
        if args.device == "cuda":
            print_probes(read_probe(), probe)
    num_rounds = 5 if args.quick else 25
    rows = [
        bench(*case, dtype, args.device, num_rounds, probe, cached)
        for dtype in args.dtypes
        for case in cases
        for cached in in_cache
    ]
    print_rows(rows)
    calls = bench_calls(num_rounds, probe) if args.device == "cpu" else {}
    if calls:
        print_calls(calls)
    finish(args, facts, rows, calls=calls)


if __name__ == "__main__":
    main()
