"""vLLM's functions on the ops of this package, for code that calls `vllm._custom_ops`, or the ops of the first vLLM.

    from pagedattn_ext import vllm_ops as ops

Names, order and meaning of the arguments are vLLM's: results first, which are written and not returned. Caches have
either layout of `pagedattn_ext.ops`. From the first vLLM are `single_query_cached_kv_attention` with a head_mapping,
`gather_cached_kv`, `rotary_embedding_neox`, and block mappings that are dicts. k_scale and v_scale may be floats.

Taken, and without effect: tp_rank. Refused, with a ValueError that names the argument: blocksparse_vert_stride, and
output_scale and prefill_tokens_with_context of `merge_attn_states`. `swap_blocks` is that of vLLM before 0.13, without
block_size_in_bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from ._adapters import expect_defaults, scale_tensor
from .ops._call import call

__all__ = [
    "convert_fp8",
    "copy_blocks",
    "fused_add_rms_norm",
    "gather_cached_kv",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "merge_attn_states",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_neox",
    "silu_and_mul",
    "single_query_cached_kv_attention",
    "swap_blocks",
]

Scale = float | Tensor | None
# {source: target} or {source: [target, ...]}, pairs, or int64 [num_pairs, 2]
BlockMapping = Mapping[int, int | Sequence[int]] | Sequence[tuple[int, int]] | Tensor


# ---- attention -------------------------------------------------------------------------------------------------------


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = None,
    v_scale: Scale = None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """`ops.paged_attention_v1` in vLLM's order."""
    _refuse_block_sparse(paged_attention_v1, blocksparse_vert_stride)
    call(
        "paged_attention_v1", out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
        block_size, max_seq_len, alibi_slopes, kv_cache_dtype,
        *_scales(paged_attention_v1, k_scale, v_scale),
    )  # fmt: skip


def paged_attention_v2(
    out: Tensor,
    exp_sum: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = None,
    v_scale: Scale = None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """`ops.paged_attention_v2` in vLLM's order. Scratch is checked, and not used."""
    _refuse_block_sparse(paged_attention_v2, blocksparse_vert_stride)
    call(
        "paged_attention_v2", out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache, num_kv_heads, scale,
        block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype,
        *_scales(paged_attention_v2, k_scale, v_scale),
    )  # fmt: skip


def single_query_cached_kv_attention(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    head_mapping: Tensor,
    scale: float,
    block_tables: Tensor,
    context_lens: Tensor,
    block_size: int,
    max_context_len: int,
    alibi_slopes: Tensor | None = None,
) -> None:
    """`paged_attention_v1` of the first vLLM.

    Args:
        head_mapping: int [num_heads], the KV head of each head. Heads may be mapped in any way, and a map may have any
            shape of num_heads elements, such as [num_kv_heads, heads of each].
        context_lens: seq_lens.
        max_context_len: max_seq_len; also a tensor of one element.
    """
    num_heads, num_kv_heads = query.shape[1], value_cache.shape[1 if key_cache.dim() == 5 else 2]
    kv_heads = head_mapping.flatten().long()
    if len(kv_heads) != num_heads or not 0 <= int(kv_heads.min()) <= int(kv_heads.max()) < num_kv_heads:
        raise ValueError(
            f"single_query_cached_kv_attention: head_mapping: expected {num_heads} elements from 0 to "
            f"{num_kv_heads - 1}, got {head_mapping.tolist()}"
        )
    # The ops take equally many heads for each KV head, side by side: each head gets a place of its own.
    place_in_group = (kv_heads[:, None] == kv_heads).tril(-1).sum(1)
    group_size = int(place_in_group.max()) + 1
    places = kv_heads * group_size + place_in_group
    grouped = query.new_zeros(query.shape[0], num_kv_heads * group_size, query.shape[2])
    grouped[:, places] = query
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.new_zeros(grouped.shape[1]).index_copy(0, places, alibi_slopes)
    results = torch.empty_like(grouped)
    paged_attention_v1(
        results, grouped, key_cache, value_cache, num_kv_heads, scale, block_tables, context_lens, block_size,
        int(max_context_len), alibi_slopes,
    )  # fmt: skip
    output.copy_(results[:, places])


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """`ops.merge_attn_states` with every lse turned around, [num_heads, num_tokens]."""
    expect_defaults(
        merge_attn_states, prefill_tokens_with_context=prefill_tokens_with_context, output_scale=output_scale
    )
    merged, lse = ops.merge_attn_states(
        prefix_output, prefix_lse.T.contiguous(), suffix_output, suffix_lse.T.contiguous()
    )
    output.copy_(merged)
    if output_lse is not None:
        output_lse.copy_(lse.T)


# ---- the cache -------------------------------------------------------------------------------------------------------


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """`ops.reshape_and_cache` in vLLM's order."""
    call(
        "reshape_and_cache", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype,
        *_scales(reshape_and_cache, k_scale, v_scale),
    )  # fmt: skip


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """`ops.reshape_and_cache_flash` in vLLM's order."""
    call(
        "reshape_and_cache_flash", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype,
        *_scales(reshape_and_cache_flash, k_scale, v_scale),
    )  # fmt: skip


def gather_cached_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """`ops.gather_cached_kv` into key and value."""
    call("gather_cached_kv", key, value, key_cache, value_cache, slot_mapping)


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: BlockMapping) -> None:
    """`ops.copy_blocks`; block_mapping may be {source: [target, ...]}."""
    ops.copy_blocks(key_caches, value_caches, _pairs(block_mapping))


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: BlockMapping) -> None:
    """`ops.swap_blocks`; block_mapping may be {block of src: block of dst}."""
    ops.swap_blocks(src, dst, _pairs(block_mapping))


def convert_fp8(output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """output = input / scale as fp8, rounded to nearest and saturating; or, of fp8 input, output = input * scale.

    fp8 tensors have a dtype of their own, or are uint8, of which kv_dtype says what they hold: "auto", "fp8" and
    "fp8_e4m3", or "fp8_e5m2".
    """
    fp8_of = dict.fromkeys(("auto", "fp8", "fp8_e4m3"), torch.float8_e4m3fn) | {"fp8_e5m2": torch.float8_e5m2}
    if kv_dtype not in fp8_of:
        raise ValueError(f"convert_fp8: kv_dtype: expected one of {', '.join(fp8_of)}, got {kv_dtype!r}")

    def as_fp8(tensor: Tensor) -> Tensor:
        return tensor.view(fp8_of[kv_dtype]) if tensor.dtype == torch.uint8 else tensor

    if input.dtype.itemsize == 1:
        output.copy_(as_fp8(input).float() * scale)
    elif output.dtype.itemsize == 1:
        output = as_fp8(output)
        largest = torch.finfo(output.dtype).max
        output.copy_((input.float() / scale).clamp(-largest, largest))
    else:
        raise TypeError(f"convert_fp8: output: expected fp8 or uint8 of {input.dtype} input, got {output.dtype}")


# ---- the rest of a layer ---------------------------------------------------------------------------------------------


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    ops.rms_norm(input, weight, epsilon, out=out)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    ops.fused_add_rms_norm(input, residual, weight, epsilon)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    ops.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)


def rotary_embedding_neox(positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor) -> None:
    ops.rotary_embedding_neox(positions, query, key, head_size, cos_sin_cache)


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    ops.silu_and_mul(input, out=out)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    ops.gelu_and_mul(input, out=out)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    ops.gelu_tanh_and_mul(input, out=out)


def gelu_new(out: Tensor, input: Tensor) -> None:
    ops.gelu_new(input, out=out)


def gelu_fast(out: Tensor, input: Tensor) -> None:
    ops.gelu_fast(input, out=out)


def gelu_quick(out: Tensor, input: Tensor) -> None:
    ops.gelu_quick(input, out=out)


# ---- what vLLM means in the terms of the ops -------------------------------------------------------------------------


def _refuse_block_sparse(function: Callable[..., Any], blocksparse_vert_stride: int) -> None:
    if blocksparse_vert_stride > 1:  # 1 is every block
        expect_defaults(function, blocksparse_vert_stride=blocksparse_vert_stride)


def _scales(function: Callable[..., Any], k_scale: Scale, v_scale: Scale) -> tuple[Tensor | None, Tensor | None]:
    return scale_tensor(function, "k_scale", k_scale), scale_tensor(function, "v_scale", v_scale)


def _pairs(block_mapping: BlockMapping) -> Tensor:
    """int64 [num_pairs, 2], (source, target)."""
    if isinstance(block_mapping, Tensor):
        return block_mapping
    pairs: list[tuple[int, int]] = []
    if isinstance(block_mapping, Mapping):
        for source, targets in block_mapping.items():
            pairs += [(source, target) for target in ([targets] if isinstance(targets, int) else targets)]
    else:
        pairs += block_mapping
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
