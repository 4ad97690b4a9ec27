"""FlashMLA's functions for dense decoding and for sparse prompts on the ops of this package, on a CPU as on CUDA.

    from pagedattn_ext.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

Names, order and meaning of the arguments are those of FlashMLA, and `out` is of vLLM's copy of it. More than theirs:
fp32 and fp16, any number of heads, any page size, any head sizes with a value of up to 512 numbers, and a rotary part
of as many.

Taken, and without effect: tile_scheduler_metadata and num_splits, also those of older versions; here is nothing to
plan. Refused, with a ValueError that names the argument: fp8 caches, and sparse attention in pages
(is_fp8_kvcache, SGLang's descale_q and descale_k, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache,
topk_length and extra_topk_length of `flash_mla_with_kvcache`).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops
from ._adapters import (
    call_as,
    check_memory,
    check_real,
    check_shape,
    expect_defaults,
    refuse_bools,
    refuse_gradients,
    starts_of_equal,
)
from ._index_checks import check_indices, check_range
from .ops._call import check_rank, check_tensors, to_int

__version__ = "1.0.0"  # of the FlashMLA whose functions these are

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

# What FlashMLA calls the arguments of the op.
NAMES = {"q_nope": "q", "q_pe": "q", "kv_c_cache": "k_cache", "k_pe_cache": "k_cache", "block_tables": "block_table"}
NAMES |= {"seq_lens": "cache_seqlens", "scale": "softmax_scale"}
NAMES_OF_SPARSE = {"q_nope": "q", "q_pe": "q", "kv_c_cache": "kv", "k_pe_cache": "kv", "scale": "sm_scale"}


class FlashMLASchedMeta:
    """Stands for a plan of the work, of which there is none."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """(tile_scheduler_metadata, num_splits) for `flash_mla_with_kvcache`, whatever the arguments."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Latent attention of the last tokens of each sequence over its cached latents.

    Args:
        q: [batch, seqlen_q, num_heads, head_size], absorbed queries.
        k_cache: [num_blocks, page_size, num_kv_heads, head_size] of the same dtype; values are the first head_dim_v
            numbers. Each head of it serves num_heads / num_kv_heads heads of q that follow each other.
        block_table: int32 or int64 [batch, max_num_blocks_per_seq].
        cache_seqlens: int32 or int64 [batch], cached tokens, those of q included.
        softmax_scale: default head_size ** -0.5.
        causal: whether a row sees no token after its own; the last row stands at the last token.
        out: where the result goes; allocated by default.

    Returns:
        out [batch, seqlen_q, num_heads, head_dim_v] and lse, fp32 [batch, num_heads, seqlen_q]. A row that sees nothing
        gives zeros and an lse of +inf, as in FlashMLA.

    Raises TypeError and ValueError for a wrong type, shape or value, lengths and blocks among them.
    """
    function = flash_mla_with_kvcache
    expect_defaults(
        function, is_fp8_kvcache=is_fp8_kvcache, indices=indices, attn_sink=attn_sink, extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache, topk_length=topk_length, extra_topk_length=extra_topk_length,
        descale_q=descale_q, descale_k=descale_k,
    )  # fmt: skip
    refuse_bools(function, softmax_scale=softmax_scale)
    check_tensors(function.__name__, q=q, k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens)
    assert cache_seqlens is not None
    check_rank(function.__name__, "q", q, 4)
    check_rank(function.__name__, "k_cache", k_cache, 4)
    refuse_gradients(function, q=q, k_cache=k_cache)
    batch, seqlen_q, num_heads, head_size = q.shape
    num_kv_heads = k_cache.shape[2]
    _check_heads(function, q, k_cache=k_cache)
    head_dim_v = _width_of_values(function, head_size, head_dim_v=head_dim_v)
    check_memory(function, "out", out, (batch, seqlen_q, num_heads, head_dim_v), q.dtype, q.device)
    check_indices(function, "cache_seqlens", cache_seqlens, batch)
    starts = None if seqlen_q == 1 else starts_of_equal(batch, seqlen_q, q.device)
    heads = zip(q.flatten(0, 1).chunk(num_kv_heads, 1), k_cache.unbind(2), strict=True)
    parts = [
        call_as(
            function, NAMES, ops.mla_attention,
            rows[..., :head_dim_v], rows[..., head_dim_v:], latents[..., :head_dim_v], latents[..., head_dim_v:],
            block_table, cache_seqlens,
            query_start_loc=starts, scale=head_size**-0.5 if softmax_scale is None else softmax_scale, causal=causal,
        )
        for rows, latents in heads
    ]  # fmt: skip
    attended, lse = _joined(parts)
    attended = attended.view(batch, seqlen_q, num_heads, head_dim_v)
    lse = lse.masked_fill(lse == -math.inf, math.inf).view(batch, seqlen_q, num_heads).transpose(1, 2)
    return attended if out is None else out.copy_(attended), lse


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Latent attention of each row over tokens of its own.

    Args:
        q: [num_rows, num_heads, head_size], absorbed queries.
        kv: [num_tokens, num_kv_heads, head_size] of the same dtype; values are the first d_v numbers. Each head of it
            serves num_heads / num_kv_heads heads of q that follow each other.
        indices: int32 or int64 [num_rows, num_kv_heads, topk], the tokens that each row sees. Less than 0, and from
            num_tokens on, is no token.
        attn_sink: [num_heads], a logit that takes a share of the weights and has no value; it is not in the lse.
        topk_length: int32 or int64 [num_rows], how many of the row's indices count; None is all.
        out: where the result goes; allocated by default.

    Returns:
        out [num_rows, num_heads, d_v], the greatest logits and the lse, both fp32 [num_rows, num_heads]. A row that
        sees nothing gives zeros, -inf and +inf, as in FlashMLA. The greatest logits cost as much as the attention.

    Raises TypeError and ValueError for a wrong type, shape or value.
    """
    function = flash_mla_sparse_fwd
    refuse_bools(function, sm_scale=sm_scale)
    check_tensors(function.__name__, q=q, kv=kv, indices=indices)
    check_rank(function.__name__, "q", q, 3)
    check_rank(function.__name__, "kv", kv, 3)
    refuse_gradients(function, q=q, kv=kv, attn_sink=attn_sink)
    num_rows, num_heads, head_size = q.shape
    num_tokens, num_kv_heads, _ = kv.shape
    _check_heads(function, q, kv=kv)
    check_rank(function.__name__, "indices", indices, 3)
    check_indices(function, "indices", indices.flatten())
    topk = indices.shape[2]
    check_shape(function, "indices", indices, (num_rows, num_kv_heads, topk))
    d_v = _width_of_values(function, head_size, d_v=d_v)
    check_memory(function, "out", out, (num_rows, num_heads, d_v), q.dtype, q.device)
    check_shape(function, "attn_sink", attn_sink, (num_heads,))
    check_real(function, attn_sink=attn_sink)
    is_seen = (indices >= 0) & (indices < num_tokens)
    if topk_length is not None:
        check_range(function, "topk_length", topk_length, num_rows, topk)
        is_seen &= torch.arange(topk, device=q.device) < topk_length[:, None, None]

    def attend(scale: float) -> tuple[Tensor, Tensor]:
        """Each row is a sequence, whose pages have one token."""
        parts = []
        for head, rows in enumerate(q.chunk(num_kv_heads, 1)):
            latents, seen = kv[:, head, None], is_seen[:, head]
            table = indices[:, head].gather(1, seen.logical_not().sort(stable=True).indices)
            parts.append(
                call_as(
                    function, NAMES_OF_SPARSE, ops.mla_attention,
                    rows[..., :d_v], rows[..., d_v:], latents[..., :d_v], latents[..., d_v:], table, seen.sum(1),
                    scale=scale,
                )
            )  # fmt: skip
        return _joined(parts)

    attended, lse = attend(sm_scale)
    # With logits so far apart, all weight is on the greatest one.
    max_logits = attend(sm_scale * 2.0**40)[1] * 2.0**-40
    if attn_sink is not None:
        shares = torch.sigmoid(lse - attn_sink).masked_fill(lse == -math.inf, 0)
        attended = (attended * shares[..., None]).to(q.dtype)
    return attended if out is None else out.copy_(attended), max_logits, lse.masked_fill(lse == -math.inf, math.inf)


def _check_heads(function: Callable[..., Any], q: Tensor, **latents: Tensor) -> None:
    """latents: [..., num_kv_heads, head_size], under the function's name."""
    [(name, tensor)] = latents.items()
    num_heads, head_size = q.shape[-2:]
    num_kv_heads = tensor.shape[-2]
    if tensor.shape[-1] != head_size or num_kv_heads == 0 or num_heads % num_kv_heads:
        expected = f"heads of {head_size} numbers, as q has, whose number divides the {num_heads} of q"
        raise ValueError(f"{function.__name__}: {name}: expected {expected}, got shape {list(tensor.shape)}")


def _width_of_values(function: Callable[..., Any], head_size: int, **width: int) -> int:
    [(name, given)] = width.items()
    number = to_int(function.__name__, name, given)
    if not 1 <= number <= head_size:
        raise ValueError(f"{function.__name__}: {name}: expected 1 to {head_size}, got {number}")
    return number


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(out, lse) of all heads, from those of the heads of each KV head."""
    if len(parts) == 1:
        return parts[0]
    out, lse = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return out, lse
