"""vLLM's functions on the ops of this package, for code that calls `vllm._custom_ops`, or the ops of the first vLLM.

    from pagedattn_ext import vllm_ops as ops

Names, order and meaning of the arguments are those of vLLM 0.33, or of the last vLLM that had the function: results
first, which are written and not returned. Caches have either layout of `pagedattn_ext.ops`. From the first vLLM are
`single_query_cached_kv_attention` with a head_mapping, `gather_cached_kv`, `rotary_embedding_neox`, and block mappings
that are dicts. k_scale and v_scale may be floats.

The functions of vLLM's attention on CPUs are those of `vllm_cpu_attention`, those that read latents of `vllm_mla`.

Taken, and without effect: tp_rank, blocksparse_local_blocks, blocksparse_block_size and blocksparse_head_sliding_step
of `paged_attention_v1` and `paged_attention_v2`; scale and skip_scale of `concat_and_cache_mla`. Refused, with a
ValueError that names the argument: blocksparse_vert_stride, interleaved_v, and output_scale of `merge_attn_states`. A
bool is no scale.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from . import ops
from ._adapters import (
    call_as,
    check_memory,
    check_ranks,
    check_scales,
    check_shape,
    expect_defaults,
    packed_heads,
    refuse_bools,
    refuse_expanded,
    refuse_gradients,
    scale_tensor,
)
from ._index_checks import check_indices
from .kv_cache import FP8_DTYPES
from .ops._call import call, check_rank, check_tensors, to_int
from .vllm_cpu_attention import (
    cpu_attention_with_kv_cache,
    cpu_attn_get_scheduler_metadata,
    cpu_attn_reshape_and_cache,
)
from .vllm_mla import FP8_OF, cp_gather_cache, gather_and_maybe_dequant_cache, mla_decode_kvcache_cpu

__all__ = [
    "concat_and_cache_mla",
    "convert_fp8",
    "copy_blocks",
    "cp_gather_cache",
    "cpu_attention_with_kv_cache",
    "cpu_attn_get_scheduler_metadata",
    "cpu_attn_reshape_and_cache",
    "fused_add_rms_norm",
    "gather_and_maybe_dequant_cache",
    "gather_cached_kv",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "merge_attn_states",
    "mla_decode_kvcache_cpu",
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
FP8_OR_BYTES = (*FP8_DTYPES, torch.uint8)
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
    refuse_bools(paged_attention_v1, scale=scale)
    refuse_expanded(paged_attention_v1, out=out)
    packed = packed_heads(out)
    call(
        "paged_attention_v1", packed, packed_heads(query), key_cache, value_cache, num_kv_heads, scale, block_tables,
        seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype,
        *_scales(paged_attention_v1, k_scale, v_scale),
    )  # fmt: skip
    _write_back(out, packed)


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
    refuse_bools(paged_attention_v2, scale=scale)
    refuse_expanded(paged_attention_v2, out=out)
    packed = packed_heads(out)
    call(
        "paged_attention_v2", packed, exp_sum, max_logits, tmp_out, packed_heads(query), key_cache, value_cache,
        num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype,
        *_scales(paged_attention_v2, k_scale, v_scale),
    )  # fmt: skip
    _write_back(out, packed)


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
    function = single_query_cached_kv_attention
    check_ranks(function, query=(query, 3), value_cache=(value_cache, 4))
    check_tensors(function.__name__, output=output, key_cache=key_cache, head_mapping=head_mapping)
    num_heads, num_kv_heads = query.shape[1], value_cache.shape[1 if key_cache.dim() == 5 else 2]
    kv_heads = head_mapping.flatten().long()
    if len(kv_heads) != num_heads or not 0 <= int(kv_heads.min()) <= int(kv_heads.max()) < num_kv_heads:
        raise ValueError(
            f"{function.__name__}: head_mapping: expected {num_heads} elements from 0 to "
            f"{num_kv_heads - 1}, got {head_mapping.tolist()}"
        )
    check_memory(function, "output", output, query.shape, query.dtype, query.device)
    check_shape(function, "alibi_slopes", alibi_slopes, (num_heads,))
    # The ops take equally many heads for each KV head, side by side: each head gets a place of its own.
    place_in_group = (kv_heads[:, None] == kv_heads).tril(-1).sum(1)
    group_size = int(place_in_group.max()) + 1
    places = kv_heads * group_size + place_in_group
    grouped = query.new_zeros(query.shape[0], num_kv_heads * group_size, query.shape[2])
    grouped[:, places] = query
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.new_zeros(grouped.shape[1]).index_copy(0, places, alibi_slopes)
    results = torch.empty_like(grouped)
    names = {"seq_lens": "context_lens", "max_seq_len": "max_context_len"}
    call_as(
        function, names, paged_attention_v1,
        results, grouped, key_cache, value_cache, num_kv_heads, scale, block_tables, context_lens, block_size,
        to_int(function.__name__, "max_context_len", max_context_len), alibi_slopes,
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
    """`ops.merge_attn_states` with every lse turned around, [num_heads, num_tokens].

    Args:
        output: like prefix_output; written.
        output_lse: like prefix_lse; written. It may be None.
        prefill_tokens_with_context: the number of tokens that have a prefix, and come first. To all other tokens the
            suffix is all there is. None means all tokens.
    """
    name = "merge_attn_states"
    expect_defaults(merge_attn_states, output_scale=output_scale)
    check_ranks(
        merge_attn_states, prefix_output=(prefix_output, 3), prefix_lse=(prefix_lse, 2),
        suffix_output=(suffix_output, 3), suffix_lse=(suffix_lse, 2),
    )  # fmt: skip
    check_tensors(name, output=output)
    device = prefix_output.device
    check_memory(merge_attn_states, "output", output, prefix_output.shape, prefix_output.dtype, device)
    num_tokens, num_heads = prefix_output.shape[:2]
    for argument, lse in {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse}.items():
        check_shape(merge_attn_states, argument, lse, (num_heads, num_tokens))
    check_memory(merge_attn_states, "output_lse", output_lse, prefix_lse.shape, prefix_lse.dtype, device)
    count = num_tokens  # of tokens to merge
    if prefill_tokens_with_context is not None:
        count = to_int(name, "prefill_tokens_with_context", prefill_tokens_with_context)
        if not 0 <= count <= num_tokens:
            expected = f"0 to {num_tokens}, the number of tokens"
            raise ValueError(f"{name}: prefill_tokens_with_context: expected {expected}, got {count}")
    packed, prefix, suffix = output.contiguous(), prefix_output.contiguous(), suffix_output.contiguous()
    prefix_lses, suffix_lses = prefix_lse.T.contiguous(), suffix_lse.T.contiguous()
    lses = None if output_lse is None else torch.empty_like(prefix_lses)
    merged_lses = None if lses is None else lses[:count]
    states = prefix[:count], prefix_lses[:count], suffix[:count], suffix_lses[:count]
    call("merge_attn_states", packed[:count], merged_lses, *states)
    packed[count:].copy_(suffix[count:])  # whatever the suffix's lse: it is not merged
    if lses is not None:
        lses[count:].copy_(suffix_lses[count:])
    _write_back(output, packed)
    if output_lse is not None and lses is not None:
        output_lse.copy_(lses.T)


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
    interleaved_v: bool = False,
) -> None:
    """`ops.reshape_and_cache` in vLLM's order."""
    expect_defaults(reshape_and_cache, interleaved_v=interleaved_v)
    call(
        "reshape_and_cache", packed_heads(key), packed_heads(value), key_cache, value_cache, slot_mapping,
        kv_cache_dtype, *_scales(reshape_and_cache, k_scale, v_scale),
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
        "reshape_and_cache_flash", packed_heads(key), packed_heads(value), key_cache, value_cache, slot_mapping,
        kv_cache_dtype, *_scales(reshape_and_cache_flash, k_scale, v_scale),
    )  # fmt: skip


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    scale: Scale = None,
    skip_scale: bool = False,
) -> None:
    """`ops.concat_and_cache_mla` in vLLM's order. The cache is not fp8: scale and skip_scale have no effect."""
    if kv_cache_dtype != "auto":
        raise ValueError(f"concat_and_cache_mla: kv_cache_dtype: expected 'auto', got {kv_cache_dtype!r}")
    refuse_bools(concat_and_cache_mla, scale=scale)
    call("concat_and_cache_mla", kv_c, k_pe, kv_cache, slot_mapping)


def gather_cached_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """`ops.gather_cached_kv` into key and value."""
    refuse_expanded(gather_cached_kv, key=key, value=value)
    packed = packed_heads(key), packed_heads(value)
    call("gather_cached_kv", *packed, key_cache, value_cache, slot_mapping)
    _write_back(key, packed[0])
    _write_back(value, packed[1])


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: BlockMapping) -> None:
    """`ops.copy_blocks`; block_mapping may be {source: [target, ...]}."""
    ops.copy_blocks(key_caches, value_caches, _pairs("copy_blocks", block_mapping))


def swap_blocks(
    src: Tensor,
    dst: Tensor,
    block_size_in_bytes: int | BlockMapping | None = None,
    block_mapping: BlockMapping | None = None,
) -> None:
    """`ops.swap_blocks`, as swap_blocks(src, dst, block_mapping), which is vLLM's first order, or as swap_blocks(src,
    dst, block_size_in_bytes, block_mapping), which is the newest.

    Args:
        src, dst: blocks along dimension 0; with block_size_in_bytes contiguous memory of any shape, in which block i
            begins at byte i * block_size_in_bytes.
        block_mapping: int64 [num_pairs, 2], (block of src, block of dst); also a dict or a list of pairs.
    """
    if block_mapping is None:
        block_size_in_bytes, block_mapping = None, block_size_in_bytes
    pairs = _pairs("swap_blocks", block_mapping)
    if block_size_in_bytes is not None:
        size = to_int("swap_blocks", "block_size_in_bytes", block_size_in_bytes)
        refuse_gradients(swap_blocks, src=src, dst=dst)  # which the views of their bytes do not tell
        check_tensors("swap_blocks", src=src, dst=dst)
        src, dst = (_in_blocks(name, tensor, size) for name, tensor in (("src", src), ("dst", dst)))
    ops.swap_blocks(src, dst, pairs)


def convert_fp8(output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """output = input / scale as fp8, rounded to nearest and saturating; or, of fp8 input, output = input * scale.

    fp8 tensors have a dtype of their own, or are uint8, of which kv_dtype says what they hold: "auto", "fp8" and
    "fp8_e4m3", or "fp8_e5m2". The shapes are equal, or both are contiguous with blocks of as many elements, as are
    caches whose parts of a head differ in size.
    """
    fp8_of = {"auto": torch.float8_e4m3fn} | FP8_OF
    if not isinstance(kv_dtype, str) or kv_dtype not in fp8_of:
        raise ValueError(f"convert_fp8: kv_dtype: expected one of {', '.join(fp8_of)}, got {kv_dtype!r}")
    check_scales(convert_fp8, scale=scale)
    check_tensors("convert_fp8", output=output, input=input)
    refuse_gradients(convert_fp8, input=input)
    if output.shape != input.shape:
        are_blocks = output.is_contiguous() and input.is_contiguous() and output.shape[:1] == input.shape[:1]
        if not are_blocks or output.numel() != input.numel():
            expected = f"shape {list(input.shape)}, as input, or contiguous blocks of as many elements"
            raise ValueError(f"convert_fp8: output: expected {expected}, got {list(output.shape)}")
        input = input.view(output.shape)
    check_memory(convert_fp8, "output", output, output.shape, output.dtype, input.device)  # dtypes are looked at below

    def as_fp8(tensor: Tensor) -> Tensor:
        return tensor.view(fp8_of[kv_dtype]) if tensor.dtype == torch.uint8 else tensor

    if input.dtype in FP8_OR_BYTES:
        if not output.is_floating_point():
            raise TypeError(f"convert_fp8: output: expected a float dtype for {input.dtype} input, got {output.dtype}")
        output.copy_(as_fp8(input).float() * scale)
    elif not input.is_floating_point():
        raise TypeError(f"convert_fp8: input: expected fp8, uint8 or another float dtype, got {input.dtype}")
    elif output.dtype in FP8_OR_BYTES:
        output = as_fp8(output)
        largest = torch.finfo(output.dtype).max
        output.copy_((input.float() / scale).clamp(-largest, largest))
    else:
        raise TypeError(f"convert_fp8: output: expected fp8 or uint8 of {input.dtype} input, got {output.dtype}")


# ---- the rest of a layer ---------------------------------------------------------------------------------------------


def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Without a weight, the weight is 1."""
    ops.rms_norm(input, _weight(input) if weight is None else weight, epsilon, out=out)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Without a weight, the weight is 1."""
    ops.fused_add_rms_norm(input, residual, _weight(input) if weight is None else weight, epsilon)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """`ops.rotary_embedding` of the rot_dim elements of each head from rope_dim_offset on; with inverse, back."""
    name = "rotary_embedding"
    if type(rope_dim_offset) is not int:
        rope_dim_offset = to_int(name, "rope_dim_offset", rope_dim_offset)
    if rope_dim_offset != 0 or inverse:
        check_tensors(name, positions=positions, query=query, cos_sin_cache=cos_sin_cache)
        check_rank(name, "cos_sin_cache", cos_sin_cache, 2)
        head_size = to_int(name, "head_size", head_size)
    if rope_dim_offset != 0:
        largest = head_size - cos_sin_cache.shape[1]
        if not 0 <= rope_dim_offset <= largest:
            raise ValueError(
                f"rotary_embedding: rope_dim_offset: expected 0 to {largest}, what head_size {head_size} leaves of the "
                f"{cos_sin_cache.shape[1]} elements to rotate, got {rope_dim_offset}"
            )
        query = _rest_of_heads("query", query, positions, head_size, rope_dim_offset)
        key = None if key is None else _rest_of_heads("key", key, positions, head_size, rope_dim_offset)
        head_size -= rope_dim_offset
    if inverse:
        positions, cos_sin_cache = _inverse(positions, cos_sin_cache)
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


def _write_back(out: Tensor, packed: Tensor) -> None:
    """What was written into `packed`, which is `out` or a copy of its layout."""
    if packed is not out:
        out.copy_(packed)


def _in_blocks(argument: str, memory: Tensor, block_size: int) -> Tensor:
    """The bytes of memory, [num_blocks, block_size]."""
    num_bytes = memory.numel() * memory.element_size()
    if not memory.is_contiguous() or block_size <= 0 or num_bytes % block_size:
        raise ValueError(
            f"swap_blocks: {argument}: expected contiguous memory of whole blocks of block_size_in_bytes {block_size}, "
            f"got {num_bytes} bytes with strides {list(memory.stride())}"
        )
    return memory.view(-1).view(torch.uint8).view(-1, block_size)


def _weight(input: Tensor) -> Tensor:
    return torch.ones(input.shape[-1], dtype=input.dtype, device=input.device)


def _rest_of_heads(argument: str, tensor: Tensor, positions: Tensor, head_size: int, first: int) -> Tensor:
    """The elements from `first` on of each head of tensor, [*positions.shape, num_heads, head_size - first], a view."""
    check_tensors("rotary_embedding", **{argument: tensor})
    if tensor.dim() == positions.dim() + 1:
        if tensor.shape[-1] % head_size:
            expected = f"a last dimension that is a multiple of head_size {head_size}"
            raise ValueError(f"rotary_embedding: {argument}: expected {expected}, got shape {list(tensor.shape)}")
        tensor = tensor.view(*tensor.shape[:-1], tensor.shape[-1] // head_size, head_size)
    return tensor[..., first:]


def _inverse(positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """(positions, cos_sin_cache) of the inverse rotation: a row of the cache for each position, its sines negated."""
    check_indices(rotary_embedding, "positions", positions.flatten())
    try:
        rows = cos_sin_cache.index_select(0, positions.flatten())
    except IndexError:
        smallest, largest = int(positions.min()), int(positions.max())
        expected = f"0 to {len(cos_sin_cache) - 1} (the rows of cos_sin_cache)"
        raise ValueError(f"rotary_embedding: positions: expected {expected}, got {smallest} to {largest}") from None
    rows[:, rows.shape[1] // 2 :].neg_()
    return torch.arange(len(rows), device=positions.device).view_as(positions), rows


def _pairs(op: str, block_mapping: BlockMapping | None) -> Tensor:
    """int64 [num_pairs, 2], (source, target)."""
    if isinstance(block_mapping, Tensor):
        return block_mapping
    pairs: list[Any] = []
    try:
        if isinstance(block_mapping, Mapping):
            for source, targets in block_mapping.items():
                pairs += [(source, target) for target in ([targets] if isinstance(targets, int) else targets)]
        else:
            pairs += block_mapping  # type: ignore[arg-type]
        # Torch would take bools, and cut off fractions.
        if set(map(type, chain.from_iterable(pairs))) - {int}:
            pairs = [[to_int(op, "block_mapping", number) for number in pair] for pair in pairs]
        mapping = torch.tensor(pairs, dtype=torch.int64)
        if pairs and mapping.shape != (len(pairs), 2):
            raise TypeError
        return mapping.view(-1, 2)
    except (TypeError, ValueError, RuntimeError):
        got = "none" if block_mapping is None else repr(block_mapping)
        raise TypeError(f"{op}: block_mapping: expected a tensor, a dict or a list of pairs, got {got}") from None
