"""The functions of vLLM's attention on CPUs, on the ops of this package. `vllm_ops` has them, too.

Caches hold keys and values as they come, so that `cpu_attention_with_kv_cache` reads what `cpu_attn_reshape_and_cache`
has written, and not what vLLM's own function has. Caches are [num_blocks, num_kv_heads, block_size, head_size], with
any strides but the last, such as the halves along dimension 2 of one tensor.

Taken, and without effect: isa, scheduler_metadata, enable_kv_split.
"""

import torch
from torch import Tensor

from . import ops
from ._adapters import call_as, check_memory, check_ranks, packed_heads, refuse_bools, scale_tensor, to_fp32
from .ops._call import check_tensors, to_int

__all__ = ["cpu_attention_with_kv_cache", "cpu_attn_get_scheduler_metadata", "cpu_attn_reshape_and_cache"]


def cpu_attn_get_scheduler_metadata(
    num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seq_lens: Tensor,
    dtype: torch.dtype,
    query_start_loc: Tensor,
    causal: bool,
    sliding_window_size: int,
    isa: str,
    enable_kv_split: bool,
    dynamic_causal: Tensor | None = None,
    kv_cache_dtype: str = "auto",
) -> Tensor:
    """A tensor without elements, because the ops plan their work at each call."""
    return torch.empty(0, dtype=torch.int8)


def cpu_attn_reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """`ops.reshape_and_cache` into head-major caches.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size], rows behind those of slot_mapping are padding.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_size], with any strides but the last.
    """
    check_ranks(
        cpu_attn_reshape_and_cache, key=(key, 3), value=(value, 3), key_cache=(key_cache, 4),
        value_cache=(value_cache, 4), slot_mapping=(slot_mapping, 1),
    )  # fmt: skip
    num_tokens = len(slot_mapping)
    k_scale_ = scale_tensor(cpu_attn_reshape_and_cache, "k_scale", k_scale)
    v_scale_ = scale_tensor(cpu_attn_reshape_and_cache, "v_scale", v_scale)
    call_as(
        cpu_attn_reshape_and_cache, {}, ops.reshape_and_cache,
        packed_heads(key[:num_tokens]), packed_heads(value[:num_tokens]),
        key_cache.transpose(1, 2), value_cache.transpose(1, 2), slot_mapping,
        kv_cache_dtype=kv_cache_dtype, k_scale=k_scale_, v_scale=v_scale_,
    )  # fmt: skip


def cpu_attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: Tensor | None,
    sliding_window: int,
    block_table: Tensor,
    softcap: float,
    scheduler_metadata: Tensor | None,
    s_aux: Tensor | None,
    dynamic_causal: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """`ops.paged_attention` on head-major caches, as `cpu_attn_reshape_and_cache` takes them.

    Args:
        query, output: [num_tokens, num_heads, head_size]; output is written.
        sliding_window: the number of tokens that a row sees up to its own, itself among them. If the rows are not
            causal, a row sees as many from its own on. -1 for no window.
        s_aux: sinks, [num_heads].
        alibi_slopes: [num_heads], for causal rows alone: vLLM and the ops differ where a row sees later tokens.
        dynamic_causal: int32 or bool [num_seqs], which sequences are causal, in place of causal.
    """
    name = "cpu_attention_with_kv_cache"
    refuse_bools(cpu_attention_with_kv_cache, scale=scale)
    check_ranks(cpu_attention_with_kv_cache, key_cache=(key_cache, 4), value_cache=(value_cache, 4))
    check_tensors(name, query=query, output=output)
    check_memory(cpu_attention_with_kv_cache, "output", output, query.shape, query.dtype, query.device)
    if type(sliding_window) is not int:
        sliding_window = to_int(name, "sliding_window", sliding_window)
    if s_aux is not None:
        check_tensors(name, s_aux=s_aux)
        s_aux = to_fp32(cpu_attention_with_kv_cache, "s_aux", s_aux)
    if dynamic_causal is not None:
        check_tensors(name, dynamic_causal=dynamic_causal, seq_lens=seq_lens)
    if alibi_slopes is not None and (dynamic_causal is not None or not causal):
        raise ValueError(f"{name}: alibi_slopes: expected None for rows that are not causal, got a tensor")
    if dynamic_causal is not None and dynamic_causal.shape != seq_lens.shape:
        expected = f"shape {list(seq_lens.shape)}, as seq_lens"
        raise ValueError(f"{name}: dynamic_causal: expected {expected}, got {list(dynamic_causal.shape)}")
    k_scale_ = scale_tensor(cpu_attention_with_kv_cache, "k_scale", k_scale)
    v_scale_ = scale_tensor(cpu_attention_with_kv_cache, "v_scale", v_scale)

    def attend(causal: bool) -> Tensor:
        out, _ = call_as(
            cpu_attention_with_kv_cache, {"block_tables": "block_table", "sinks": "s_aux"}, ops.paged_attention,
            packed_heads(query), key_cache.transpose(1, 2), value_cache.transpose(1, 2), block_table, seq_lens,
            query_start_loc=query_start_loc, scale=scale, causal=causal, alibi_slopes=alibi_slopes,
            sliding_window=None if sliding_window < 0 else sliding_window,
            right_window=None if sliding_window < 0 or causal else sliding_window - 1,
            softcap=softcap, sinks=s_aux,
            kv_cache_dtype=kv_cache_dtype, k_scale=k_scale_, v_scale=v_scale_,
        )  # fmt: skip
        return out

    if dynamic_causal is None:
        output.copy_(attend(causal))
        return
    sequence, _ = call_as(
        cpu_attention_with_kv_cache, {"start_loc": "query_start_loc", "first_positions": "seq_lens"},
        ops.batch_positions, query_start_loc, seq_lens, len(query),
    )  # fmt: skip
    output.copy_(torch.where(dynamic_causal.bool()[sequence, None, None], attend(True), attend(False)))
