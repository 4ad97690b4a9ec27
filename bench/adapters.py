"""What a call of another library's function costs over the ops that it calls: µs of CPU time.

Usage: python bench/adapters.py [--rounds N] [NAME ...]

Each call is one of a decode step: 2 sequences, 8 heads of 64 elements, 2 KV heads, fp32. "ops" are the ops that the
call runs, called directly with the arguments that they get there. Both take turns, and each number is the tenth
percentile of the rounds: what else runs on a machine makes a call slower, and never faster.
"""

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

from pagedattn_ext.ops import _call

Call = Callable[[], object]

BATCH, HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE, NUM_PAGES, VOCAB_SIZE = 2, 8, 2, 64, 16, 32, 1024
CACHED = 40  # tokens of each sequence before the step
CALLS_A_ROUND = 20


def flash_attn_calls(module: Any) -> dict[str, Call]:
    q, k, v, caches = new_tokens()
    dense = [torch.randn(BATCH, CACHED, KV_HEADS, HEAD_SIZE) for _ in "kv"]
    packed, rows, two_rows = [tensor.flatten(0, 1) for tensor in dense], q[:, 0], torch.cat([q, q], 1)
    starts, key_starts = ints(range(BATCH + 1)), ints(range(0, BATCH * CACHED + 1, CACHED))
    step = {"cache_seqlens": ints([CACHED] * BATCH), "block_table": pages_of_sequences(), "causal": True}
    cos, sin = torch.rand(2, 64, HEAD_SIZE // 2)
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    with_kvcache, varlen = module.flash_attn_with_kvcache, module.flash_attn_varlen_func
    over_pages = {"max_seqlen_q": 1, "max_seqlen_k": CACHED, "causal": True, "block_table": pages_of_sequences()}
    ragged = over_pages | {"block_table": None}
    whole = [torch.randn(BATCH, 64, KV_HEADS, HEAD_SIZE) for _ in "kv"]
    of_whole = step | {"block_table": None}
    return {
        "flash_attn_with_kvcache, append": lambda: with_kvcache(q, *caches, k, v, **step),
        "flash_attn_with_kvcache, append and rotary": lambda: with_kvcache(q, *caches, k, v, **rotary, **step),
        "flash_attn_with_kvcache": lambda: with_kvcache(q, *caches, **step),
        "flash_attn_with_kvcache, no pages, append": lambda: with_kvcache(q, *whole, k, v, **of_whole),
        "flash_attn_with_kvcache, no pages": lambda: with_kvcache(q, *whole, **of_whole),
        "flash_attn_varlen_func": lambda: varlen(rows, *packed, starts, key_starts, **ragged),
        "flash_attn_varlen_func, pages": lambda: varlen(rows, *caches, starts, key_starts, **over_pages),
        "flash_attn_func": lambda: module.flash_attn_func(q, *dense, causal=True),
        "flash_attn_func, 2 rows": lambda: module.flash_attn_func(two_rows, *dense, causal=True),
    }


def flash_attn_3_calls(module: Any) -> dict[str, Call]:
    q, k, v, caches = new_tokens()
    dense = [torch.randn(BATCH, CACHED, KV_HEADS, HEAD_SIZE) for _ in "kv"]
    packed, rows = [tensor.flatten(0, 1) for tensor in dense], q[:, 0]
    starts, key_starts = ints(range(BATCH + 1)), ints(range(0, BATCH * CACHED + 1, CACHED))
    step = {"cache_seqlens": ints([CACHED] * BATCH), "page_table": pages_of_sequences(), "causal": True}
    with_kvcache, varlen = module.flash_attn_with_kvcache, module.flash_attn_varlen_func
    return {
        "flash_attn_with_kvcache, append": lambda: with_kvcache(q, *caches, k, v, **step),
        "flash_attn_with_kvcache": lambda: with_kvcache(q, *caches, **step),
        "flash_attn_varlen_func": lambda: varlen(rows, *packed, starts, key_starts, 1, CACHED, causal=True),
        "flash_attn_func": lambda: module.flash_attn_func(q, *dense, causal=True),
    }


def vllm_flash_attn_calls(module: Any) -> dict[str, Call]:
    q, _, _, caches = new_tokens()
    step = {"seqused_k": ints([CACHED] * BATCH), "block_table": pages_of_sequences(), "causal": True}
    step |= {"max_seqlen_q": 1, "cu_seqlens_q": ints(range(BATCH + 1)), "max_seqlen_k": CACHED, "q": q[:, 0]}
    step |= {"k": caches[0], "v": caches[1], "out": torch.empty_like(q[:, 0])}
    return {"flash_attn_varlen_func": lambda: module.flash_attn_varlen_func(**step)}


def flashinfer_calls(module: Any) -> dict[str, Call]:
    q, k, v, caches = (tensors if isinstance(tensors, list) else tensors[:, 0] for tensors in new_tokens())
    lists = page_lists()
    rows, first = ints(range(BATCH + 1)), ints([CACHED] * BATCH)
    sequences, positions = ints(range(BATCH)), ints([CACHED] * BATCH)
    sizes = HEADS, KV_HEADS, HEAD_SIZE, PAGE_SIZE
    decode = module.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0))
    decode.plan(*lists, *sizes)
    prefill = module.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0))
    prefill.plan(rows, *lists, *sizes, causal=True)
    cos_sin = torch.rand(64, HEAD_SIZE)
    wide = torch.randn(BATCH, HEADS * HEAD_SIZE)
    weight, residual = torch.rand(HEADS * HEAD_SIZE), torch.randn_like(wide)
    gates = torch.randn(BATCH, 2 * HEADS * HEAD_SIZE)
    indptr_and_last = lists[0], lists[2]
    appended = k, v, sequences, positions, tuple(caches), lists[1], *indptr_and_last
    state = torch.randn(BATCH, HEADS)
    return {
        "decode.run": lambda: decode.run(q, tuple(caches)),
        "decode.run, return_lse": lambda: decode.run(q, tuple(caches), return_lse=True),
        "prefill.run": lambda: prefill.run(q, tuple(caches)),
        "append_paged_kv_cache": lambda: module.append_paged_kv_cache(*appended),
        "get_batch_indices_positions": lambda: module.get_batch_indices_positions(rows, first, BATCH),
        "get_seq_lens": lambda: module.get_seq_lens(*indptr_and_last, PAGE_SIZE),
        "single_decode_with_kv_cache": lambda: module.single_decode_with_kv_cache(q[0], caches[0][0], caches[1][0]),
        "apply_rope": lambda: module.apply_rope(q, k, rows, first),
        "apply_rope_inplace": lambda: module.apply_rope_inplace(q, k, rows, first),
        "apply_rope_pos_ids": lambda: module.apply_rope_pos_ids(q, k, positions),
        "apply_rope_pos_ids_inplace": lambda: module.apply_rope_pos_ids_inplace(q, k, positions),
        "apply_llama31_rope_inplace": lambda: module.apply_llama31_rope_inplace(q, k, rows, first),
        "apply_llama31_rope_pos_ids_inplace": lambda: module.apply_llama31_rope_pos_ids_inplace(q, k, positions),
        "apply_rope_with_cos_sin_cache": lambda: module.apply_rope_with_cos_sin_cache(
            positions, q, k, HEAD_SIZE, cos_sin
        ),
        "apply_rope_with_cos_sin_cache_inplace": lambda: module.apply_rope_with_cos_sin_cache_inplace(
            positions, q, k, HEAD_SIZE, cos_sin
        ),
        "rmsnorm": lambda: module.rmsnorm(wide, weight),
        "fused_add_rmsnorm": lambda: module.fused_add_rmsnorm(wide, residual, weight),
        "gemma_rmsnorm": lambda: module.gemma_rmsnorm(wide, weight),
        "layernorm": lambda: module.layernorm(wide, weight, weight),
        "silu_and_mul": lambda: module.silu_and_mul(gates),
        "merge_state": lambda: module.merge_state(q, state, q, state),
    }


def sampling_calls(module: Any) -> dict[str, Call]:
    logits = torch.randn(BATCH, VOCAB_SIZE)
    probs, greedy = logits.softmax(-1), {"seed": 1, "offset": 2}
    of_rows = {"seed": torch.tensor([1]), "offset": torch.tensor([2])}
    top_k, top_p = ints([20] * BATCH), torch.full((BATCH,), 0.9)
    return {
        "softmax": lambda: module.softmax(logits),
        "softmax, temperature": lambda: module.softmax(logits, 0.7),
        "sampling_from_probs": lambda: module.sampling_from_probs(probs, **greedy),
        "sampling_from_probs, generator": lambda: module.sampling_from_probs(probs),
        "sampling_from_probs, tensors": lambda: module.sampling_from_probs(probs, **of_rows),
        "sampling_from_logits": lambda: module.sampling_from_logits(logits, **greedy),
        "top_p_sampling_from_probs": lambda: module.top_p_sampling_from_probs(probs, 0.9, **greedy),
        "top_k_sampling_from_probs": lambda: module.top_k_sampling_from_probs(probs, 20, **greedy),
        "min_p_sampling_from_probs": lambda: module.min_p_sampling_from_probs(probs, 0.1, **greedy),
        "top_k_top_p_sampling_from_probs": lambda: module.top_k_top_p_sampling_from_probs(probs, 20, 0.9, **greedy),
        "top_k_top_p_sampling_from_probs, tensors": lambda: module.top_k_top_p_sampling_from_probs(
            probs, top_k, top_p, **of_rows
        ),
        "top_k_top_p_sampling_from_logits": lambda: module.top_k_top_p_sampling_from_logits(logits, 20, 0.9, **greedy),
        "top_k_top_p_sampling_from_logits, generator": lambda: module.top_k_top_p_sampling_from_logits(logits, 20, 0.9),
        "top_p_renorm_probs": lambda: module.top_p_renorm_probs(probs, 0.9),
        "top_k_renorm_probs": lambda: module.top_k_renorm_probs(probs, 20),
        "top_k_mask_logits": lambda: module.top_k_mask_logits(logits, 20),
    }


def vllm_calls(module: Any) -> dict[str, Call]:
    q, k, v, caches = (tensors if isinstance(tensors, list) else tensors[:, 0] for tensors in new_tokens())
    slots, tables, lengths = torch.tensor([44, 60]), pages_of_sequences(), ints([CACHED] * BATCH)
    out = torch.empty_like(q)
    attention = out, q, *caches, KV_HEADS, 0.125, tables, lengths, PAGE_SIZE, 64, None
    scales = "auto", 1.0, 1.0
    positions, cos_sin = torch.tensor([CACHED] * BATCH), torch.rand(64, HEAD_SIZE)
    wide = torch.randn(BATCH, HEADS * HEAD_SIZE)
    weight, residual, normed = torch.rand(HEADS * HEAD_SIZE), torch.randn_like(wide), torch.empty_like(wide)
    gates = torch.randn(BATCH, 2 * HEADS * HEAD_SIZE)
    state = torch.randn(HEADS, BATCH)
    heads_first = [cache.transpose(1, 2).contiguous() for cache in caches]
    cpu = q, *heads_first, out, ints(range(BATCH + 1)), lengths, 0.125, True, None, -1, tables, 0.0, None, None
    return {
        "paged_attention_v1": lambda: module.paged_attention_v1(*attention),
        "paged_attention_v1, scales": lambda: module.paged_attention_v1(*attention, *scales),
        "reshape_and_cache_flash": lambda: module.reshape_and_cache_flash(k, v, *caches, slots),
        "reshape_and_cache_flash, scales": lambda: module.reshape_and_cache_flash(k, v, *caches, slots, *scales),
        "rotary_embedding": lambda: module.rotary_embedding(positions, q, k, HEAD_SIZE, cos_sin, True),
        "rms_norm": lambda: module.rms_norm(normed, wide, weight, 1e-6),
        "rms_norm, no weight": lambda: module.rms_norm(normed, wide, None, 1e-6),
        "fused_add_rms_norm": lambda: module.fused_add_rms_norm(wide, residual, weight, 1e-6),
        "silu_and_mul": lambda: module.silu_and_mul(normed, gates),
        "merge_attn_states": lambda: module.merge_attn_states(out, q, state, q, state, torch.empty_like(state)),
        "cpu_attention_with_kv_cache": lambda: module.cpu_attention_with_kv_cache(*cpu),
        "cpu_attn_reshape_and_cache": lambda: module.cpu_attn_reshape_and_cache(k, v, *heads_first, slots, "vec"),
    }


MODULES: dict[str, Callable[[Any], dict[str, Call]]] = {
    "flash_attn": flash_attn_calls,
    "flash_attn_interface": flash_attn_3_calls,
    "vllm_flash_attn": vllm_flash_attn_calls,
    "flashinfer": flashinfer_calls,
    "flashinfer.sampling": sampling_calls,
    "vllm_ops": vllm_calls,
}


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int32)


def new_tokens() -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """One of each sequence, and the caches."""
    q, k, v = (torch.randn(BATCH, 1, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v, [torch.randn(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_SIZE) for _ in "kv"]


def pages_of_sequences() -> Tensor:
    return torch.arange(BATCH * 4, dtype=torch.int32).view(BATCH, 4)


def page_lists() -> tuple[Tensor, Tensor, Tensor]:
    return ints(range(0, BATCH * 3 + 1, 3)), ints(range(BATCH * 3)), ints([9] * BATCH)


def ops_of(call: Call) -> Call:
    """The ops that the call runs, with the same arguments."""
    calls = []

    def recorded(op: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append(partial(op, *args, **kwargs))
            return op(*args, **kwargs)

        return record

    overloads = _call.overloads
    _call.overloads = {name: recorded(op) for name, op in overloads.items()}
    call()
    _call.overloads = overloads

    def replay() -> None:
        for run_op in calls:
            run_op()

    return replay


def microseconds(calls: Sequence[Call], num_rounds: int) -> list[float]:
    """Tenth percentiles of calls that take turns."""
    times: list[list[int]] = [[] for _ in calls]
    for _ in range(num_rounds):
        for call, of_call in zip(calls, times, strict=True):
            start = time.thread_time_ns()
            for _ in range(CALLS_A_ROUND):
                call()
            of_call.append(time.thread_time_ns() - start)
    return [quantiles(of_call, n=10)[0] / CALLS_A_ROUND / 1e3 for of_call in times]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of calls; default all")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    print(f"{'':80} call   ops  over")
    for name, calls_of in MODULES.items():
        for title, call in calls_of(importlib.import_module(f"pagedattn_ext.{name}")).items():
            if any(part in title for part in arguments.names or [""]):
                whole, of_ops = microseconds([call, ops_of(call)], arguments.rounds)
                print(f"{name}.{title}".ljust(78), f"{whole:6.1f}{of_ops:6.1f}{whole - of_ops:6.1f}")
