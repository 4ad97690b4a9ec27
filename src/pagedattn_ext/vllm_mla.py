"""vLLM's functions that read a cache of latents, on the ops of this package. `vllm_ops` has them, too, beside
`concat_and_cache_mla`, which writes the cache.

A cache is [num_blocks, block_size, entry_size], the latent of a token and its rotary part one after the other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops
from ._adapters import call_as, check_memory, is_recorded, refuse_bools, refuse_gradients, scale_tensor
from ._index_checks import check_indices, num_seqs_of
from .ops._call import check_rank, check_tensors, to_int

__all__ = ["cp_gather_cache", "gather_and_maybe_dequant_cache", "mla_decode_kvcache_cpu"]

FP8_OF = dict.fromkeys(("fp8", "fp8_e4m3"), torch.float8_e4m3fn) | {"fp8_e5m2": torch.float8_e5m2}


def mla_decode_kvcache_cpu(
    out: Tensor, query: Tensor, kv_cache: Tensor, scale: float, block_tables: Tensor, seq_lens: Tensor
) -> None:
    """`ops.mla_attention` of one row a sequence.

    Args:
        out: [num_seqs, num_heads, latent_size]; written.
        query: [num_seqs, num_heads, entry_size].
    """
    function = mla_decode_kvcache_cpu
    check_tensors(function.__qualname__, out=out, query=query, kv_cache=kv_cache)
    refuse_bools(function, scale=scale)
    for name, tensor in (("out", out), ("query", query), ("kv_cache", kv_cache)):
        check_rank(function.__qualname__, name, tensor, 3)
    latent_size = out.shape[2]
    if not 1 <= latent_size <= query.shape[2]:
        raise ValueError(f"{function.__qualname__}: out: expected heads of 1 to {query.shape[2]}, got {latent_size}")
    check_memory(function, "out", out, (*query.shape[:2], latent_size), query.dtype, query.device)
    names = {"q_nope": "query", "q_pe": "query", "kv_c_cache": "kv_cache", "k_pe_cache": "kv_cache"}
    result, _ = call_as(
        function, names, ops.mla_attention,
        query[..., :latent_size], query[..., latent_size:], kv_cache[..., :latent_size], kv_cache[..., latent_size:],
        block_tables, seq_lens, scale=scale,
    )  # fmt: skip
    out.copy_(result)


def cp_gather_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> None:
    """Cached tokens of each sequence, one after the other, into dst.

    Args:
        src_cache: [num_blocks, block_size, entry_size].
        dst: [at least cu_seq_lens[-1], entry_size], of the cache's dtype; written.
        block_table: int32 or int64 [batch_size, max_num_blocks_per_seq].
        cu_seq_lens: int32 or int64 [batch_size + 1], where each sequence begins in dst, and the last ends.
        seq_starts: int32 or int64 [batch_size], the position of each sequence's first token; None is 0.
    """
    function = cp_gather_cache
    check_tensors(function.__qualname__, src_cache=src_cache)
    num_seqs = to_int(function.__qualname__, "batch_size", batch_size)
    dtype = src_cache.dtype
    dst, is_token, rows = _gathered(function, src_cache, dst, dtype, block_table, cu_seq_lens, seq_starts, num_seqs)
    dst.copy_(torch.where(is_token, rows, dst))


def gather_and_maybe_dequant_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: Tensor | float | None,
    seq_starts: Tensor | None = None,
) -> None:
    """`cp_gather_cache` of a cache that may be fp8, whose numbers times scale are the tokens. dst has any float dtype.
    token_to_seq and num_tokens have no effect.

    kv_cache_dtype: "auto" says that the cache is not fp8; the others, which fp8 it is: of that dtype, or uint8.
    """
    function = gather_and_maybe_dequant_cache
    check_tensors(function.__qualname__, src_cache=src_cache)
    if kv_cache_dtype != "auto" and kv_cache_dtype not in FP8_OF:
        expected = f"one of auto, {', '.join(FP8_OF)}"
        raise ValueError(f"{function.__qualname__}: kv_cache_dtype: expected {expected}, got {kv_cache_dtype!r}")
    factor = scale_tensor(function, "scale", scale)
    refuse_gradients(function, scale=factor)
    if kv_cache_dtype == "auto":
        if src_cache.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            expected = "float32, float16 or bfloat16 with kv_cache_dtype 'auto'"
            raise TypeError(f"{function.__qualname__}: src_cache: expected {expected}, got {src_cache.dtype}")
    elif src_cache.dtype in (torch.uint8, FP8_OF[kv_cache_dtype]):
        src_cache = src_cache.view(FP8_OF[kv_cache_dtype])
    else:
        expected = f"uint8 or {FP8_OF[kv_cache_dtype]} with kv_cache_dtype {kv_cache_dtype!r}"
        raise TypeError(f"{function.__qualname__}: src_cache: expected {expected}, got {src_cache.dtype}")
    num_seqs = num_seqs_of(function, "cu_seq_lens", cu_seq_lens)
    dst, is_token, rows = _gathered(function, src_cache, dst, None, block_table, cu_seq_lens, seq_starts, num_seqs)
    if kv_cache_dtype != "auto":
        rows = rows.float() if factor is None else rows.float() * factor.to(rows.device)
    dst.copy_(torch.where(is_token, rows.to(dst.dtype), dst))


def _gathered(
    function: Callable[..., Any],
    src_cache: Tensor,
    dst: Tensor,
    dtype: torch.dtype | None,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None,
    num_seqs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first rows of dst, which of them are to be written [num_rows, 1], and what they get, in the cache's dtype.
    The others get anything. To leave the others out is to wait for a GPU, and a graph cannot.

    dtype: of dst; None is any float dtype.
    """
    name = function.__qualname__
    check_tensors(name, block_table=block_table, cu_seq_lens=cu_seq_lens)
    refuse_gradients(function, src_cache=src_cache)
    check_rank(name, "src_cache", src_cache, 3)
    check_indices(function, "cu_seq_lens", cu_seq_lens, num_seqs + 1)
    num_blocks, block_size, entry_size = src_cache.shape
    check_rank(name, "dst", dst, 2)
    check_memory(function, "dst", dst, (len(dst), entry_size), dtype, src_cache.device)
    if cu_seq_lens.is_cpu and num_seqs >= 0 and not is_recorded(dst.device):
        dst = dst[: int(cu_seq_lens[-1])]
    first = torch.zeros_like(cu_seq_lens[1:]) if seq_starts is None else seq_starts
    names = {"start_loc": "cu_seq_lens", "first_positions": "seq_starts", "block_tables": "block_table"}
    names["positions"] = "cu_seq_lens" if seq_starts is None else "seq_starts"
    sequences, positions = call_as(function, names, ops.batch_positions, cu_seq_lens, first, len(dst))
    slots = call_as(
        function, names, ops.compute_slot_mapping, positions, block_table, block_size, num_blocks,
        batch_indices=sequences,
    )  # fmt: skip
    is_token = (slots >= 0)[:, None]  # behind them is padding
    if num_blocks * block_size == 0:
        return dst, is_token, dst.to(src_cache.dtype)
    slots = slots.clamp(min=0)
    memory = src_cache.view(torch.uint8) if src_cache.dtype.itemsize == 1 else src_cache
    return dst, is_token, memory[slots // block_size, slots % block_size].view(src_cache.dtype)
