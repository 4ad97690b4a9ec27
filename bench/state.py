"""Layers with a state: the ops beside the plain torch forms that transformers has for them.

Usage: python bench/state.py [--device cuda] [--quick] [--dtype float32] [--threads N] [--json FILE] [--plot FILE.png]

Sizes are those of Qwen3-Next (16 key heads and 32 value heads of 128) and of a Mamba 2 of 2.7B (80 heads of 64, a state
of 128). A decode is one row of each of 32 sequences, whose states are in no cache: GB/s counts each state as read and
written once, and the share is of tensor.copy_. A prompt is one sequence; the share is of a product of matrices, and the
work is what the recurrence multiplies and adds. transformers' convolution has its rows and states channel by channel
(each channel's tokens are adjacent). "by channel" is ours on the same states; its rows are token by token always.

With 2,048 tokens, tensors have more than 32 MiB, and malloc fetches them from the kernel with each call (harness.py).
This is a third to four fifths of torch's time there, and in fp32 sometimes most of causal_conv1d's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from harness import (
    Probe,
    Row,
    assert_same,
    finish,
    hardware,
    make_inputs,
    parse_args,
    print_rows,
    time_interleaved,
    tolerance,
)
from probes import copy_probe, matmul_probe, print_probes
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan, mamba2_selective_state_update
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_update,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from pagedattn_ext import ops

NUM_SEQS = 32
DIM, WIDTH = 8192, 4
KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128
HEADS, CHANNELS, STATE_SIZE = 80, 64, 128
CHUNK_SIZE = 256

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[int, int, torch.dtype], Inputs]  # of sequences, of their tokens
    ours: Callable[[Inputs], Tensor]
    theirs: Callable[[Inputs], Tensor]
    state_elements: int  # of a sequence
    multiply_adds: int  # of a token


def sequences(num_seqs: int, num_tokens: int) -> Inputs:
    return {"query_start_loc": torch.arange(num_seqs + 1) * num_tokens}


def make_conv(num_seqs: int, num_tokens: int, dtype: torch.dtype) -> Inputs:
    x = torch.randn(num_seqs, DIM, num_tokens, dtype=dtype)
    states = torch.zeros(num_seqs, WIDTH, DIM, dtype=dtype).transpose(1, 2)
    rows = x.transpose(1, 2).reshape(-1, DIM).contiguous()
    weight = torch.randn(DIM, WIDTH, dtype=dtype)
    by_channel = states.contiguous()
    same = {"their_states": by_channel.clone(), "by_channel": by_channel}
    return {"x": x, "rows": rows, "states": states, "weight": weight} | same | sequences(num_seqs, num_tokens)


def our_conv(t: Inputs, states: str = "states") -> Tensor:
    t[states].zero_()
    return ops.causal_conv1d(t["rows"], t[states], t["weight"], None, "silu", query_start_loc=t["query_start_loc"])


def their_conv(t: Inputs) -> Tensor:
    t["their_states"].zero_()
    out = causal_conv1d_update(t["x"], t["their_states"], t["weight"], None, "silu")
    return out.transpose(1, 2).flatten(0, 1)


def make_delta(num_seqs: int, num_tokens: int, dtype: torch.dtype) -> Inputs:
    q, k = torch.randn(2, num_seqs, num_tokens, KEY_HEADS, HEAD_DIM, dtype=dtype)
    v = torch.randn(num_seqs, num_tokens, VALUE_HEADS, HEAD_DIM, dtype=dtype)
    g, beta = torch.rand(2, num_seqs, num_tokens, VALUE_HEADS)
    states = torch.zeros(num_seqs, VALUE_HEADS, HEAD_DIM, HEAD_DIM)
    tensors = {"q": q, "k": k, "v": v, "g": -g, "beta": beta.to(dtype), "states": states}
    return tensors | {"their_states": states.clone()} | sequences(num_seqs, num_tokens)


def our_delta(t: Inputs) -> Tensor:
    rows = (t[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
    return ops.gated_delta_rule(*rows, t["states"], use_qk_l2norm=True, query_start_loc=t["query_start_loc"])


def their_delta(t: Inputs) -> Tensor:
    options: dict[str, Any] = dict(g=t["g"], beta=t["beta"], output_final_state=True, use_qk_l2norm_in_kernel=True)
    function = torch_recurrent_gated_delta_rule if t["q"].shape[1] == 1 else torch_chunk_gated_delta_rule
    out, states = function(t["q"], t["k"], t["v"], **options, initial_state=t["their_states"])
    t["their_states"].copy_(states)
    return out.flatten(0, 1)


def make_scan(num_seqs: int, num_tokens: int, dtype: torch.dtype) -> Inputs:
    x = torch.randn(num_seqs, num_tokens, HEADS, CHANNELS, dtype=dtype)
    B, C = torch.randn(2, num_seqs, num_tokens, 1, STATE_SIZE, dtype=dtype)
    dt = torch.randn(num_seqs, num_tokens, HEADS, dtype=dtype)
    A, D, dt_bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS) - 4
    states = torch.zeros(num_seqs, HEADS, CHANNELS, STATE_SIZE)
    tensors = {"x": x, "B": B, "C": C, "dt": dt, "A": A, "D": D, "dt_bias": dt_bias, "states": states}
    return tensors | {"their_states": states.clone()} | sequences(num_seqs, num_tokens)


def our_scan(t: Inputs) -> Tensor:
    x, dt, B, C = (t[name].flatten(0, 1) for name in ("x", "dt", "B", "C"))
    return ops.selective_scan(
        x, dt, t["A"], B, C, t["states"], D=t["D"], dt_bias=t["dt_bias"], dt_softplus=True,
        query_start_loc=t["query_start_loc"],
    ).flatten(1)  # fmt: skip


def their_scan(t: Inputs) -> Tensor:
    if t["x"].shape[1] == 1:
        x, dt, B, C = (t[name][:, 0] for name in ("x", "dt", "B", "C"))
        D, dt_bias = (t[name][:, None].expand(-1, CHANNELS) for name in ("D", "dt_bias"))
        A = t["A"][:, None, None].expand(-1, CHANNELS, STATE_SIZE)
        dt = dt[:, :, None].expand(-1, -1, CHANNELS)
        out = mamba2_selective_state_update(t["their_states"], x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True)
        return out.flatten(1)
    out, states = mamba2_chunk_scan(
        *(t[name] for name in ("x", "dt", "A", "B", "C")), CHUNK_SIZE, D=t["D"], dt_bias=t["dt_bias"],
        initial_states=t["their_states"], dt_softplus=True, return_final_states=True,
    )  # fmt: skip
    t["their_states"].copy_(states)
    return out.to(t["x"].dtype).flatten(2).flatten(0, 1)


CASES = [
    Case("causal_conv1d", make_conv, our_conv, their_conv, DIM * WIDTH, DIM * WIDTH),
    Case(
        "causal_conv1d by channel", make_conv, lambda t: our_conv(t, "by_channel"), their_conv, DIM * WIDTH, DIM * WIDTH
    ),
    Case(
        "gated_delta_rule", make_delta, our_delta, their_delta,
        VALUE_HEADS * HEAD_DIM**2, 3 * VALUE_HEADS * HEAD_DIM**2,
    ),
    Case(
        "selective_scan", make_scan, our_scan, their_scan,
        HEADS * CHANNELS * STATE_SIZE, 2 * HEADS * CHANNELS * STATE_SIZE,
    ),
]  # fmt: skip


def bench_decode(case: Case, dtype: torch.dtype, device: str, num_rounds: int, probe: Probe) -> Row:
    element_size = dtype.itemsize if case.make is make_conv else 4
    num_bytes = 2 * NUM_SEQS * case.state_elements * element_size
    inputs = make_inputs(lambda: case.make(NUM_SEQS, 1, dtype), num_bytes, device)
    functions = {"ours": case.ours, "torch": case.theirs}
    assert_same(functions, inputs[0], tolerance(dtype))
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
    return Row(f"decode of {NUM_SEQS} sequences", case.name, dtype, num_bytes, probe, seconds)


def bench_prompt(case: Case, num_tokens: int, dtype: torch.dtype, device: str, num_rounds: int, probe: Probe) -> Row:
    with torch.device(device):
        inputs = [case.make(1, num_tokens, dtype)]
    functions = {"ours": case.ours, "torch": case.theirs}
    assert_same(functions, inputs[0], tolerance(dtype))
    seconds = time_interleaved({**functions, "probe": probe.run}, inputs, num_rounds)
    return Row("prompt", f"{case.name}, {num_tokens}", dtype, 2 * num_tokens * case.multiply_adds, probe, seconds)


def main() -> None:
    args = parse_args(__doc__.splitlines()[0])
    facts = hardware(args.device)
    with torch.device(args.device):
        copy, matmul = copy_probe(), matmul_probe(torch.float32)
        print_probes(copy, matmul)
    num_rounds = 3 if args.quick else 9
    decodes = [bench_decode(case, dtype, args.device, num_rounds, copy) for case in CASES for dtype in args.dtypes]
    print_rows(decodes)
    prompts = [
        bench_prompt(case, num_tokens, dtype, args.device, num_rounds, matmul)
        for num_tokens in ([512] if args.quick else [512, 2048])
        for case in CASES
        for dtype in args.dtypes
    ]
    print_rows(prompts)
    finish(args, facts, decodes + prompts)


if __name__ == "__main__":
    main()
