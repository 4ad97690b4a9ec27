"""The functions of flash-attn on the ops; `pagedattn_ext.flash_attn` says what they take."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from .._adapters import call_as, check_ranks, expect_defaults, kept, starts_of_equal
from .._index_checks import check_indices, num_seqs_of, values_are_checked
from ..ops._call import check_bool, check_tensors, to_int, to_int64
from ._arguments import (
    OF_BATCHES,
    OF_CACHES,
    OF_KEYS,
    OF_LENGTHS,
    OF_OFFSETS,
    OF_PAGE_TABLES,
    OF_SEQUENCES,
    OF_TOKENS,
    WindowSize,
    check_out,
    one_of,
    options_of,
    results_of,
    rows_of,
    sinks_of,
    with_contiguous_heads,
)
from ._attend import Extras, Keys, NewTokens, attend_pages, attend_ragged, copied_pages, write_back


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Any:
    """Attention of a batch whose sequences are equally long.

    Row i of seqlen_q stands at position p = seqlen_k - seqlen_q + i. It sees the tokens from p - left to p + right of
    window_size, and with `causal` none after p. A row that sees nothing gives zeros.

    Args:
        q: [batch, seqlen_q, num_heads, head_size].
        k: [batch, seqlen_k, num_kv_heads, head_size].
        v: [batch, seqlen_k, num_kv_heads, head_size_v].
        softmax_scale: default head_size ** -0.5.
        softcap: logits become softcap * tanh(logit / softcap), if it is not 0.
        alibi_slopes: fp32 [num_heads], [1, num_heads] or [batch, num_heads]; -slope * |t - p| is added to the logit of
            token t.
        attention_chunk: if it is not 0, a row at p sees only tokens t with t // attention_chunk == p //
            attention_chunk (the chunked attention of Llama 4).
        learnable_sink, s_aux: [num_heads], a logit more in the softmax's denominator; one of the two.
        q_descale, k_descale, v_descale: what fp8 queries, keys and values are multiplied with: one element, expanded or
            not, or [batch, num_kv_heads]. fp8 queries need fp8 keys.
        out: where the result goes, [batch, seqlen_q, num_heads, head_size_v]; allocated by default.

    Returns:
        out, of q's dtype, or bf16 if q is fp8. With return_lse (out, lse), lse fp32 [batch, num_heads, seqlen_q],
        natural. With return_attn_probs (out, lse, an empty tensor), as flash-attn without dropout.
    """
    function = flash_attn_func
    if dropout_p != 0 or qv is not None:
        expect_defaults(function, dropout_p=dropout_p, qv=qv)
    check_ranks(function, q=(q, 4), k=(k, 4), v=(v, 4))
    check_out(function, out, q, v)
    batch, seqlen_k = k.shape[:2]
    if batch != q.shape[0]:
        raise ValueError(f"flash_attn_func: k: expected {q.shape[0]} sequences, as q has, got {batch}")
    sinks, names = sinks_of(function, q, OF_KEYS, learnable_sink=learnable_sink, s_aux=s_aux)
    options = options_of(function, q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, attention_chunk)
    extras = Extras(q_descale, k_descale, v_descale)
    if seqlen_k == 0:  # a page has at least one token
        k, v = (pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (k, v))
    keys = with_contiguous_heads(k), with_contiguous_heads(v), *_sequences_as_pages(batch, seqlen_k, q.device)
    arguments = function, rows_of(q), keys, _starts(q, None), options, extras
    attended, lse = call_as(function, names, attend_pages, *arguments)
    return results_of(q, attended, lse, out, return_lse=return_lse, return_attn_probs=return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    scheduler_metadata: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    ver: int = 3,
    fa_version: int = 2,
) -> Any:
    """`flash_attn_func` for a ragged batch, over keys and values that lie one after the other or in pages.

    Args:
        q: [total_q, num_heads, head_size].
        k, v: [total_k, num_kv_heads, head_size or head_size_v]; with a block table [num_blocks, block_size,
            num_kv_heads, head_size or head_size_v].
        cu_seqlens_q: int32 [batch + 1], from 0 to total_q.
        cu_seqlens_k: int32 [batch + 1], from 0 to total_k. With a block table its differences are the lengths, unless
            seqused_k has them.
        block_table, page_table: int32 or int64 [batch, max_num_blocks_per_seq]; one of the two.
        seqused_q: int32 [batch], rows of each sequence; the rows behind them give zeros and an lse of -inf.
        seqused_k: int32 [batch], lengths of the sequences. The keys behind them are not used.
        out: where the result goes, [total_q, num_heads, head_size_v]; allocated by default.
        The other arguments are those of `flash_attn_func`.

    Returns:
        As `flash_attn_func`: out [total_q, num_heads, head_size_v], lse [num_heads, total_q]. return_softmax_lse is
        return_lse.
    """
    function = flash_attn_varlen_func
    if dropout_p != 0 or qv is not None:
        expect_defaults(function, dropout_p=dropout_p, qv=qv)
    if page_table is not None:
        _, block_table = one_of(function, block_table=block_table, page_table=page_table)
    rank = 3 if block_table is None else 4
    check_ranks(function, q=(q, 3), k=(k, rank), v=(v, rank))
    check_out(function, out, q, v)
    names = OF_OFFSETS if seqused_k is None else OF_LENGTHS
    if page_table is not None:
        names = names | {"block_tables": "page_table"}
    sinks, names = sinks_of(function, q, names, learnable_sink=learnable_sink, s_aux=s_aux, sinks=sinks)
    options = options_of(function, q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, attention_chunk)
    extras = Extras(q_descale, k_descale, v_descale, seqused_q)
    return_lse = return_lse or return_softmax_lse
    num_seqs = num_seqs_of(function, "cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_k is not None and (block_table is None or seqused_k is None):
        check_indices(function, "cu_seqlens_k", cu_seqlens_k, num_seqs + 1)
    if seqused_k is not None:
        check_indices(function, "seqused_k", seqused_k, num_seqs)
    if block_table is None:
        if cu_seqlens_k is None:
            raise ValueError(f"{function.__name__}: cu_seqlens_k: expected a tensor without a block table, got None")
        k, v = with_contiguous_heads(k), with_contiguous_heads(v)
        if seqused_k is None and k.itemsize > 1 and not extras.need_pages(q):
            ragged = rows_of(q), k, v, cu_seqlens_q, cu_seqlens_k, options
            attended, lse = call_as(function, names, attend_ragged, *ragged)
            return results_of(q, attended, lse, out, return_lse=return_lse, return_attn_probs=return_attn_probs)
        if seqused_k is None:
            seqused_k = cu_seqlens_k.diff()
        k, v = k[:, None], v[:, None]  # tokens are pages
        num_keys = k.shape[0]
        block_table = call_as(
            function,
            OF_TOKENS,
            ops.consecutive_block_tables,
            cu_seqlens_k[:-1],
            cu_seqlens_k[1:],
            seqused_k,
            num_keys
            if max_seqlen_k is None
            else min(to_int(function.__name__, "max_seqlen_k", max_seqlen_k), num_keys),
            num_keys,
        )
    elif seqused_k is None:
        if cu_seqlens_k is None:
            raise ValueError(f"{function.__name__}: cu_seqlens_k: expected a tensor without seqused_k, got None")
        seqused_k = cu_seqlens_k.diff()
    keys = (k, v, block_table, seqused_k)
    attended, lse = call_as(function, names, attend_pages, function, rows_of(q), keys, cu_seqlens_q, options, extras)
    return results_of(q, attended, lse, out, return_lse=return_lse, return_attn_probs=return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    ver: int = 3,
    fa_version: int = 2,
) -> Any:
    """Attention over a cache. With k and v it first appends them to the cache, in place.

    The rows of a sequence are its last ones, new tokens included: row i of n stands at position length - n + i, and
    sees what `flash_attn_func` says.

    Args:
        q: [batch, seqlen_q, num_heads, head_size]; with cu_seqlens_q [total_q, num_heads, head_size].
        k_cache, v_cache: [batch_cache, seqlen_cache, num_kv_heads, head_size or head_size_v]; with a block table
            [num_blocks, block_size, num_kv_heads, head_size or head_size_v]. fp8 caches hold the element / k_descale.
            Where head_size is not head_size_v or no multiple of 16 bytes, each call copies the pages of its batch.
        k, v: new tokens, [batch, seqlen_new, num_kv_heads, head_size]; with cu_seqlens_k_new [total_new, ...].
            If both have the dtype of fp8 caches, they are the caches' numbers, whatever the scales are.
        rotary_cos, rotary_sin: [max_position, rot_dim / 2]. New key j is rotated by position cache_seqlens + j, row i
            by cache_seqlens + i (by cache_seqlens alone if neither causal nor in a window nor in a chunk). k and q
            stay as they are.
        cache_seqlens: the lengths before k and v are appended, an int or int32 [batch]; default the whole cache.
        cache_batch_idx: [batch], the sequence of the cache that each sequence uses, or the row of the block table;
            default its own.
        cache_leftpad: int32 [batch], tokens to skip at the start of each sequence of the cache.
        block_table, page_table: int32 or int64 [batch, max_num_blocks_per_seq]; one of the two.
        rotary_interleaved: rotate elements 2i and 2i + 1, and not i of the two halves.
        cu_seqlens_q: int32 [batch + 1], for a ragged q.
        cu_seqlens_k_new: int32 [batch + 1], for ragged k and v.
        rotary_seqlens: int32 [batch], in place of cache_seqlens for the positions of the rotary embedding.
        The other arguments are those of `flash_attn_func`.

    Returns:
        out, like q. With return_softmax_lse or return_lse (out, lse), lse fp32 [batch, num_heads, seqlen_q], or with
        cu_seqlens_q [num_heads, total_q].
    """
    function = flash_attn_with_kvcache
    if qv is not None:
        expect_defaults(function, qv=qv)
    if page_table is not None:
        _, block_table = one_of(function, block_table=block_table, page_table=page_table)
    check_ranks(function, q=(q, 4 if cu_seqlens_q is None else 3), k_cache=(k_cache, 4), v_cache=(v_cache, 4))
    check_out(function, out, q, v_cache)
    num_seqs = q.shape[0] if cu_seqlens_q is None else num_seqs_of(function, "cu_seqlens_q", cu_seqlens_q)
    if block_table is not None:
        names = OF_CACHES if page_table is None else OF_PAGE_TABLES
        if cache_batch_idx is not None:
            block_table = _rows_of_table(function, names["block_tables"], block_table, cache_batch_idx, num_seqs)
        check_tensors(function.__name__, **{names["block_tables"]: block_table})
        if block_table.dim() != 2 or block_table.shape[0] != num_seqs:
            expected, got_shape = f"expected shape [{num_seqs}, *]", list(block_table.shape)
            raise ValueError(f"{function.__name__}: {names['block_tables']}: {expected}, got {got_shape}")
    else:  # each sequence of the cache is a page
        names = OF_BATCHES
        if cache_batch_idx is None:
            if num_seqs > k_cache.shape[0]:
                expected, got = f"expected {num_seqs} sequences or more", k_cache.shape[0]
                raise ValueError(f"{function.__name__}: k_cache: {expected}, got {got}")
            names = OF_SEQUENCES
            block_table, _ = _sequences_as_pages(num_seqs, k_cache.shape[1], q.device)
        else:
            check_indices(function, "cache_batch_idx", cache_batch_idx, num_seqs)
            block_table = cache_batch_idx.view(num_seqs, 1)
    if cache_seqlens is None:
        cache_seqlens = block_table.shape[1] * k_cache.shape[1]
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = to_int64(function.__name__, "cache_seqlens", cache_seqlens)
        cache_seqlens = torch.full((num_seqs,), cache_seqlens, device=q.device)
    check_indices(function, "cache_seqlens", cache_seqlens, num_seqs)
    sinks, names = sinks_of(function, q, names, learnable_sink=learnable_sink, s_aux=s_aux, sinks=sinks)
    options = options_of(function, q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, attention_chunk)

    new = None
    if k is None or v is None:
        for name, tensor in (("k", k), ("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            if tensor is not None:
                raise ValueError(f"flash_attn_with_kvcache: {name}: expected None without both k and v, got a tensor")
    else:
        rank = 4 if cu_seqlens_k_new is None else 3
        check_ranks(function, k=(k, rank), v=(v, rank))
        if cu_seqlens_k_new is not None:
            check_indices(function, "cu_seqlens_k_new", cu_seqlens_k_new, num_seqs + 1)
        elif k.shape[0] != num_seqs:
            raise ValueError(f"flash_attn_with_kvcache: k: expected {num_seqs} sequences, as q has, got {k.shape[0]}")
        new = NewTokens(rows_of(k), rows_of(v), _starts(k, cu_seqlens_k_new))
        if rotary_cos is not None or rotary_sin is not None:
            options |= _rotary_options(function, rotary_cos, rotary_sin, rotary_interleaved)
            if rotary_seqlens is not None:
                check_indices(function, "rotary_seqlens", rotary_seqlens, num_seqs)
                options["rotary_lens"] = rotary_seqlens

    extras = Extras(q_descale, k_descale, v_descale)
    batch = rows_of(q), (k_cache, v_cache, block_table, cache_seqlens), _starts(q, cu_seqlens_q)
    attend = attend_pages if cache_leftpad is None else partial(_attend_behind_padding, cache_leftpad)
    attended, lse = call_as(function, names, attend, function, *batch, options, extras, new)
    return results_of(q, attended, lse, out, return_lse=return_lse or return_softmax_lse)


# ---- where rows and tokens lie --------------------------------------------------------------------------------------


@kept
def _sequences_as_pages(batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Block tables [batch, 1] and lengths [batch] of sequences that are a page each."""
    tables = torch.arange(batch, dtype=torch.int32, device=device).view(batch, 1)
    return tables, torch.full((batch,), length, dtype=torch.int32, device=device)


def _rows_of_table(
    function: Callable[..., Any], name: str, block_table: Tensor, cache_batch_idx: Tensor, num_seqs: int
) -> Tensor:
    """The row of the block table that each sequence uses."""
    check_ranks(function, **{name: (block_table, 2)})
    check_indices(function, "cache_batch_idx", cache_batch_idx, num_seqs)
    last = len(block_table) - 1
    if values_are_checked(cache_batch_idx) and not all(0 <= row <= last for row in cache_batch_idx.tolist()):
        expected = f"expected rows of {name}, 0 to {last}"
        raise ValueError(f"{function.__name__}: cache_batch_idx: {expected}, got {cache_batch_idx.tolist()}")
    return block_table.index_select(0, cache_batch_idx)


def _starts(q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor | None:
    """The query_start_loc of the ops. Without cu_seqlens_q the queries are [batch, seqlen, ...]."""
    if cu_seqlens_q is not None:
        return cu_seqlens_q
    batch, seqlen = q.shape[:2]
    return None if seqlen == 1 else _starts_of_equal(batch, seqlen, q.device)


_starts_of_equal = kept(starts_of_equal)


def _attend_behind_padding(
    cache_leftpad: Tensor,
    function: Callable[..., Any],
    query: Tensor,
    keys: Keys,
    starts: Tensor | None,
    options: dict[str, Any],
    extras: Extras,
    new: NewTokens | None,
) -> tuple[Tensor, Tensor]:
    """`attend_pages` without the first cache_leftpad [batch] tokens of each sequence of a cache."""
    k_cache, v_cache, block_table, cache_seqlens = keys
    num_blocks, page_size = k_cache.shape[:2]
    num_seqs, num_slots = block_table.shape[0], block_table.shape[1] * page_size
    check_indices(function, "cache_leftpad", cache_leftpad, cache_seqlens.shape[0])
    seq_lens = cache_seqlens
    if new is not None:
        seq_lens = seq_lens + new.lens()
    # Tokens are pages. Pages that do not lie side by side are copied.
    caches = k_cache, v_cache
    are_copied = not (_lie_side_by_side(k_cache) and _lie_side_by_side(v_cache))
    if are_copied:
        caches = copied_pages(keys, new, partial(torch.clone, memory_format=torch.contiguous_format))
    k_tokens, v_tokens = (cache.flatten(0, 1)[:, None] for cache in caches)
    sequences = torch.arange(num_seqs, device=query.device)
    first = sequences * num_slots
    places = ops.consecutive_block_tables(  # of tokens, if all sequences had their pages side by side
        first, first + num_slots, seq_lens, num_slots, num_seqs * num_slots, left_padding=cache_leftpad
    )
    is_token = torch.arange(num_slots, device=query.device) < (seq_lens - cache_leftpad)[:, None]
    tables = ops.compute_slot_mapping(
        (places % max(num_slots, 1)).long().flatten(), block_table, page_size, num_blocks,
        batch_indices=torch.where(is_token, sequences[:, None], -1).flatten(),
    ).view(num_seqs, num_slots)  # fmt: skip
    keys = (k_tokens, v_tokens, tables, cache_seqlens - cache_leftpad)
    if "rotary_cos" in options:  # positions count the padding
        options = {"rotary_lens": cache_seqlens.contiguous(), **options}
    result = attend_pages(function, query, keys, starts, options, extras, new)
    if new is not None and are_copied:
        write_back(function, new, block_table, cache_seqlens, (k_cache, caches[0]), (v_cache, caches[1]))
    return result


def _lie_side_by_side(cache: Tensor) -> bool:
    """Whether the tokens of all pages are evenly spaced. With one page, or pages of one token, one of the two strides
    means nothing."""
    num_blocks, page_size = cache.shape[:2]
    return num_blocks <= 1 or page_size <= 1 or cache.stride(0) == page_size * cache.stride(1)


def _rotary_options(
    function: Callable[..., Any], rotary_cos: Tensor | None, rotary_sin: Tensor | None, interleaved: bool
) -> dict[str, Any]:
    """The two as keyword arguments of `append_and_attend`."""
    if rotary_cos is None or rotary_sin is None:
        missing, given = ("rotary_cos", "rotary_sin") if rotary_cos is None else ("rotary_sin", "rotary_cos")
        raise ValueError(f"{function.__name__}: {missing}: expected a tensor beside {given}, got None")
    check_tensors(function.__name__, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    check_bool(function.__name__, "rotary_interleaved", interleaved)
    return {
        "rotary_cos": rotary_cos.contiguous(), "rotary_sin": rotary_sin.contiguous(), "rotary_is_neox": not interleaved,
    }  # fmt: skip
