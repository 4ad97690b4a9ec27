"""flash-attn's functions on the ops of this package, on a CPU as on CUDA.

    from pagedattn_ext.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Names, order, defaults and meaning of the arguments are those of flash-attn 2.8. Behind them, as keywords, stand the
arguments that FlashAttention-3 and 4 and sgl_kernel have added or renamed: page_table is block_table, s_aux and
learnable_sink are sinks, return_lse asks for the lse beside the output.

More than theirs: fp32; pages of any size, whose table is int32 or int64, and -1 or anything else behind a sequence's
own pages; fp8 caches beside queries of 16 or 32 bits; caches of any strides whose last dimension is contiguous.

Taken, and without effect: max_seqlen_q, max_seqlen_k (a bound, where there is seqused_k and no block table),
deterministic (all results are), num_splits, pack_gqa, sm_margin, scheduler_metadata, ver.

Different: a row without keys has an lse of -inf, as in FlashAttention-3 (flash-attn 2 says +inf). With ALiBi the lse is
that of the bias -slope * |t - p|, where flash-attn 2 leaves a constant out of causal rows.

Refused, with a ValueError that names the argument: dropout_p, qv, attention_chunk, q_descale, seqused_q; scales that
differ by head; alibi_slopes that differ by sequence; values whose heads are not as wide as those of the keys;
cache_leftpad or cache_batch_idx with a block table. Tensors that require grad raise RuntimeError, because there is no
backward. Head sizes are those of the ops, multiples of 16 bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import ops
from ._adapters import call_as, expect_defaults, scale_tensor, window_of
from ._index_checks import check_indices, num_seqs_of
from .ops._call import check_rank, to_int

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

WindowSize = tuple[int | None, int | None]  # (left, right), inclusive; None or less than 0 is no window

# What flash-attn calls the arguments of the ops.
NAMES = {"query": "q", "key": "k", "value": "v", "scale": "softmax_scale", "k_scale": "k_descale"}
NAMES |= {"v_scale": "v_descale", "sliding_window": "window_size", "right_window": "window_size"}
NAMES |= {"query_start_loc": "cu_seqlens_q", "key_start_loc": "cu_seqlens_k", "block_tables": "block_table"}
OF_KEYS = NAMES | {"key_cache": "k", "value_cache": "v"}
OF_TOKENS = OF_KEYS | {"first_blocks": "cu_seqlens_k", "end_blocks": "cu_seqlens_k", "seq_lens": "seqused_k"}
OF_TOKENS |= {"max_num_blocks_per_seq": "max_seqlen_k"}
OF_CACHES = NAMES | {"key_cache": "k_cache", "value_cache": "v_cache", "seq_lens": "cache_seqlens"}
OF_CACHES |= dict.fromkeys(("positions", "first_positions"), "cache_seqlens")
OF_CACHES |= {"start_loc": "cu_seqlens_k_new", "num_tokens": "rows of k", "cos_sin_cache": "rotary_cos"}


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
) -> Any:
    """Attention of a batch whose sequences are equally long.

    Row i of seqlen_q stands at position p = seqlen_k - seqlen_q + i. It sees the tokens from p - left to p + right of
    window_size, and with `causal` none after p. A row that sees nothing gives zeros.

    Args:
        q: [batch, seqlen_q, num_heads, head_size].
        k, v: [batch, seqlen_k, num_kv_heads, head_size].
        softmax_scale: default head_size ** -0.5.
        softcap: logits become softcap * tanh(logit / softcap), if it is not 0.
        alibi_slopes: fp32 [num_heads]; -slope * |t - p| is added to the logit of token t.
        learnable_sink, s_aux: [num_heads], a logit more in the softmax's denominator; one of the two.
        k_descale, v_descale: what fp8 keys and values are multiplied with; one element, expanded or not.

    Returns:
        out, like q. With return_lse (out, lse), lse fp32 [batch, num_heads, seqlen_q], natural. With return_attn_probs
        (out, lse, an empty tensor), as flash-attn without dropout.
    """
    function = flash_attn_func
    expect_defaults(function, dropout_p=dropout_p, qv=qv, q_descale=q_descale, attention_chunk=attention_chunk)
    _refuse_gradients(function, q=q, k=k, v=v)
    _check_ranks(function, q=(q, 4), k=(k, 4), v=(v, 4))
    batch, seqlen_k = k.shape[:2]
    if seqlen_k == 0:  # a page has at least one token
        k, v = (pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (k, v))
    sinks = _one_of(function, learnable_sink=learnable_sink, s_aux=s_aux)
    out, lse = call_as(
        function,
        OF_KEYS,
        ops.paged_attention,
        _rows(q),
        _with_contiguous_heads(k),
        _with_contiguous_heads(v),
        torch.arange(batch, dtype=torch.int32, device=q.device)[:, None],  # each sequence is a page
        torch.full((batch,), seqlen_k, dtype=torch.int32, device=q.device),
        query_start_loc=_starts(q, None),
        **_options(function, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks),
        **_scales(function, k_descale, v_descale),
    )
    return _results(q, out, lse, return_lse=return_lse, return_attn_probs=return_attn_probs)


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
    ver: int = 3,
) -> Any:
    """`flash_attn_func` for a ragged batch, over keys and values that lie one after the other or in pages.

    Args:
        q: [total_q, num_heads, head_size].
        k, v: [total_k, num_kv_heads, head_size]; with a block table [num_blocks, block_size, num_kv_heads, head_size].
        cu_seqlens_q: int32 [batch + 1], from 0 to total_q.
        cu_seqlens_k: int32 [batch + 1], from 0 to total_k. With a block table its differences are the lengths, unless
            seqused_k has them.
        block_table, page_table: int32 or int64 [batch, max_num_blocks_per_seq]; one of the two.
        seqused_k: int32 [batch], lengths of the sequences. The keys behind them are not used.
        The other arguments are those of `flash_attn_func`.

    Returns:
        As `flash_attn_func`: out like q, lse [num_heads, total_q].
    """
    function = flash_attn_varlen_func
    expect_defaults(
        function, dropout_p=dropout_p, qv=qv, q_descale=q_descale, attention_chunk=attention_chunk, seqused_q=seqused_q
    )
    _refuse_gradients(function, q=q, k=k, v=v)
    block_table = _one_of(function, block_table=block_table, page_table=page_table)
    rank = 3 if block_table is None else 4
    _check_ranks(function, q=(q, 3), k=(k, rank), v=(v, rank))
    sinks = _one_of(function, learnable_sink=learnable_sink, s_aux=s_aux, sinks=sinks)
    options = _options(function, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    num_seqs = num_seqs_of(function, "cu_seqlens_q", cu_seqlens_q)
    names = OF_KEYS | {"seq_lens": "cu_seqlens_k" if seqused_k is None else "seqused_k"}
    if page_table is not None:
        names["block_tables"] = "page_table"
    if cu_seqlens_k is not None and (block_table is None or seqused_k is None):
        check_indices(function, "cu_seqlens_k", cu_seqlens_k, num_seqs + 1)
    if seqused_k is not None:
        check_indices(function, "seqused_k", seqused_k, num_seqs)
    if block_table is None:
        if cu_seqlens_k is None:
            raise ValueError(f"{function.__name__}: cu_seqlens_k: expected a tensor without a block table, got None")
        k, v = (_with_contiguous_heads(tensor) for tensor in (k, v))
        if seqused_k is None and k.itemsize > 1:
            starts = cu_seqlens_q, cu_seqlens_k
            out, lse = call_as(function, names, ops.varlen_attention, _rows(q), k, v, *starts, **options)
            return _results(q, out, lse, return_lse=return_lse, return_attn_probs=return_attn_probs)
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
    out, lse = call_as(
        function,
        names,
        ops.paged_attention,
        _rows(q),
        k,
        v,
        block_table,
        seqused_k,
        query_start_loc=cu_seqlens_q,
        **options,
        **_scales(function, k_descale, v_descale),
    )
    return _results(q, out, lse, return_lse=return_lse, return_attn_probs=return_attn_probs)


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
    ver: int = 3,
) -> Any:
    """Attention over a cache. With k and v it first appends them to the cache, in place.

    The rows of a sequence are its last ones, new tokens included: row i of n stands at position length - n + i, and
    sees what `flash_attn_func` says.

    Args:
        q: [batch, seqlen_q, num_heads, head_size]; with cu_seqlens_q [total_q, num_heads, head_size].
        k_cache, v_cache: [batch_cache, seqlen_cache, num_kv_heads, head_size]; with a block table
            [num_blocks, block_size, num_kv_heads, head_size]. fp8 caches hold the element / k_descale.
        k, v: new tokens, [batch, seqlen_new, num_kv_heads, head_size]; with cu_seqlens_k_new [total_new, ...].
        rotary_cos, rotary_sin: [max_position, rot_dim / 2]. New key j is rotated by position cache_seqlens + j, row i
            by cache_seqlens + i (by cache_seqlens alone if neither causal nor windowed). k and q stay as they are.
        cache_seqlens: the lengths before k and v are appended, an int or int32 [batch]; default the whole cache.
        cache_batch_idx: [batch], the sequence of a cache without block table that each sequence uses; default its own.
        cache_leftpad: int32 [batch], tokens to skip at the start of each sequence of a cache without block table.
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
    expect_defaults(function, qv=qv, q_descale=q_descale, attention_chunk=attention_chunk)
    _refuse_gradients(function, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    block_table = _one_of(function, block_table=block_table, page_table=page_table)
    _check_ranks(function, q=(q, 4 if cu_seqlens_q is None else 3), k_cache=(k_cache, 4), v_cache=(v_cache, 4))
    names = OF_CACHES
    query = _rows(q)
    num_seqs = q.shape[0] if cu_seqlens_q is None else num_seqs_of(function, "cu_seqlens_q", cu_seqlens_q)
    if block_table is not None:
        expect_defaults(function, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
        if page_table is not None:
            names = names | {"block_tables": "page_table"}
        if block_table.dim() != 2 or block_table.shape[0] != num_seqs:
            expected, got_shape = f"expected shape [{num_seqs}, *]", list(block_table.shape)
            raise ValueError(f"{function.__name__}: {names['block_tables']}: {expected}, got {got_shape}")
    else:  # each sequence of the cache is a page
        names = names | {"block_tables": "cache_batch_idx"}
        if cache_batch_idx is None:
            if num_seqs > k_cache.shape[0]:
                expected, got = f"expected {num_seqs} sequences or more", k_cache.shape[0]
                raise ValueError(f"{function.__name__}: k_cache: {expected}, got {got}")
            cache_batch_idx = torch.arange(num_seqs, dtype=torch.int32, device=q.device)
        check_indices(function, "cache_batch_idx", cache_batch_idx, num_seqs)
        block_table = cache_batch_idx[:, None]
    if cache_seqlens is None:
        cache_seqlens = block_table.shape[1] * k_cache.shape[1]
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((num_seqs,), cache_seqlens, device=q.device)
    check_indices(function, "cache_seqlens", cache_seqlens, num_seqs)
    sinks = _one_of(function, learnable_sink=learnable_sink, s_aux=s_aux, sinks=sinks)
    options = _options(function, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    scales = _scales(function, k_descale, v_descale)

    seq_lens, new = cache_seqlens, None
    if k is None or v is None:
        for name, tensor in (("k", k), ("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            if tensor is not None:
                raise ValueError(f"flash_attn_with_kvcache: {name}: expected None without both k and v, got a tensor")
    else:
        rank = 4 if cu_seqlens_k_new is None else 3
        _check_ranks(function, k=(k, rank), v=(v, rank))
        if cu_seqlens_k_new is not None:
            check_indices(function, "cu_seqlens_k_new", cu_seqlens_k_new, num_seqs + 1)
        elif k.shape[0] != num_seqs:
            raise ValueError(f"flash_attn_with_kvcache: k: expected {num_seqs} sequences, as q has, got {k.shape[0]}")
        key = _rows(k)
        batch_indices, positions = _positions(function, names, cache_seqlens, k, cu_seqlens_k_new)
        cache_size = k_cache.shape[1], k_cache.shape[0]
        place = {"batch_indices": batch_indices}
        slots = call_as(function, names, ops.compute_slot_mapping, positions, block_table, *cache_size, **place)
        if rotary_cos is not None or rotary_sin is not None:
            cos_sin = _cos_sin(function, rotary_cos, rotary_sin)
            first, of_rotary = cache_seqlens, names
            if rotary_seqlens is not None:
                check_indices(function, "rotary_seqlens", rotary_seqlens, num_seqs)
                first = rotary_seqlens
                of_rotary = names | dict.fromkeys(("positions", "first_positions"), "rotary_seqlens")
                _, positions = _positions(function, of_rotary, first, k, cu_seqlens_k_new)
            key = _rotated(function, of_rotary, key, positions, cos_sin, rotary_interleaved)
            of_rotary = of_rotary | {"start_loc": "cu_seqlens_q", "num_tokens": "rows of q"}
            sequence, positions = _positions(function, of_rotary, first, q, cu_seqlens_q)
            if not causal and all(side is None or side < 0 for side in window_size):
                positions = first if sequence is None else first[sequence]  # nothing orders the rows
            query = _rotated(function, of_rotary, query, positions, cos_sin, rotary_interleaved)
        new = key, _rows(v), k_cache, v_cache, slots
        seq_lens = cache_seqlens + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())

    caches = k_cache, v_cache
    if cache_leftpad is not None:
        check_indices(function, "cache_leftpad", cache_leftpad, num_seqs)
        block_table = _tables_behind_padding(function, names, block_table[:, 0], k_cache, seq_lens, cache_leftpad)
        seq_lens = seq_lens - cache_leftpad
        caches = _tokens_as_pages(*caches)
    tables = block_table, seq_lens
    options |= {"query_start_loc": _starts(q, cu_seqlens_q), **scales}
    if new is not None:
        call_as(function, names, ops.check_paged_attention, query, *caches, *tables, **options)
        call_as(function, names, ops.reshape_and_cache, *new, **scales)
        if cache_leftpad is not None:
            caches = _tokens_as_pages(k_cache, v_cache)  # which may be copies
    out, lse = call_as(function, names, ops.paged_attention, query, *caches, *tables, **options)
    return _results(q, out, lse, return_lse=return_lse or return_softmax_lse)


# ---- what flash-attn means in the terms of the ops -------------------------------------------------------------------


def _options(
    function: Callable[..., Any],
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> dict[str, Any]:
    """Which tokens a row sees, and its logits, as keyword arguments of `ops.paged_attention`."""
    left, right = window_size
    if alibi_slopes is not None and alibi_slopes.dim() != 1:
        expected = "expected [num_heads], the same slopes for each sequence"
        raise ValueError(f"{function.__name__}: alibi_slopes: {expected}, got shape {list(alibi_slopes.shape)}")
    return {
        "scale": softmax_scale,
        "causal": causal,
        "sliding_window": window_of(left),
        "right_window": None if causal or right is None or right < 0 else right,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": None if sinks is None else sinks.float(),
    }


def _scales(function: Callable[..., Any], k_descale: Tensor | None, v_descale: Tensor | None) -> dict[str, Any]:
    """The scales of an fp8 cache, as keyword arguments of the ops."""
    return {
        "k_scale": scale_tensor(function, "k_descale", k_descale),
        "v_scale": scale_tensor(function, "v_descale", v_descale),
    }


def _results(q: Tensor, out: Tensor, lse: Tensor, *, return_lse: bool, return_attn_probs: bool = False) -> Any:
    """What a function returns, of the op's [num_rows, num_heads, head_size] and [num_rows, num_heads]."""
    out = out.view(q.shape)
    if not (return_lse or return_attn_probs):
        return out
    lse = lse.view(q.shape[:-1]).transpose(-2, -1).contiguous()
    return (out, lse, q.new_empty(0)) if return_attn_probs else (out, lse)


def _rows(tensor: Tensor) -> Tensor:
    """[..., num_heads, head_size] -> [num_rows, num_heads, head_size], each row contiguous."""
    rows = tensor.flatten(0, -3)
    return rows if rows.is_contiguous() or rows[:1].is_contiguous() else rows.contiguous()


def _with_contiguous_heads(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _starts(q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor | None:
    """The query_start_loc of the ops. Without cu_seqlens_q the queries are [batch, seqlen, ...]."""
    if cu_seqlens_q is not None:
        return cu_seqlens_q
    batch, seqlen = q.shape[:2]
    return None if seqlen == 1 else torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen


def _positions(
    function: Callable[..., Any], names: dict[str, str], first: Tensor, rows: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """The sequence and the position of each row, in sequences whose first rows stand at `first` [batch]. Without
    cu_seqlens rows are [batch, seqlen, ...]. The sequences are None if row i is of sequence i."""
    if cu_seqlens is None and rows.shape[1] == 1:
        return None, first
    num_rows = rows.shape[0] if cu_seqlens is not None else rows.shape[0] * rows.shape[1]
    sequences, positions = call_as(function, names, ops.batch_positions, cu_seqlens, first, num_rows)
    return sequences, positions


def _tables_behind_padding(
    function: Callable[..., Any],
    names: dict[str, str],
    cache_batch_idx: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    cache_leftpad: Tensor,
) -> Tensor:
    """Block tables of the tokens behind the padding of each sequence, for caches whose tokens are pages."""
    num_sequences, num_slots = k_cache.shape[:2]
    first = cache_batch_idx * num_slots
    names = names | {"left_padding": "cache_leftpad"}
    names |= dict.fromkeys(("first_blocks", "end_blocks"), names["block_tables"])
    return call_as(
        function,
        names,
        ops.consecutive_block_tables,
        first,
        first + num_slots,
        seq_lens,
        num_slots,
        num_sequences * num_slots,
        left_padding=cache_leftpad,
    )


def _tokens_as_pages(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    return k_cache.flatten(0, 1)[:, None], v_cache.flatten(0, 1)[:, None]


def _cos_sin(function: Callable[..., Any], rotary_cos: Tensor | None, rotary_sin: Tensor | None) -> Tensor:
    """The two side by side, as `ops.rotary_embedding` has them."""
    if rotary_cos is None or rotary_sin is None:
        missing, given = ("rotary_cos", "rotary_sin") if rotary_cos is None else ("rotary_sin", "rotary_cos")
        raise ValueError(f"{function.__name__}: {missing}: expected a tensor beside {given}, got None")
    check_rank(function.__name__, "rotary_cos", rotary_cos, 2)
    if rotary_sin.shape != rotary_cos.shape:
        expected, got = list(rotary_cos.shape), list(rotary_sin.shape)
        raise ValueError(f"{function.__name__}: rotary_sin: expected shape {expected}, as rotary_cos has, got {got}")
    if rotary_sin.dtype != rotary_cos.dtype:
        raise TypeError(
            f"{function.__name__}: rotary_sin: expected {rotary_cos.dtype}, as rotary_cos has, got {rotary_sin.dtype}"
        )
    return torch.cat([rotary_cos, rotary_sin], dim=-1)


def _rotated(
    function: Callable[..., Any],
    names: dict[str, str],
    rows: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    interleaved: bool,
) -> Tensor:
    rotated = rows.clone()
    arguments = positions.long(), rotated, None, rows.shape[-1], cos_sin_cache, not interleaved
    call_as(function, names, ops.rotary_embedding, *arguments)
    return rotated


def _refuse_gradients(function: Callable[..., Any], **tensors: Tensor | None) -> None:
    """The ops refuse gradients, too, but under their own names of the arguments, and after a cache was written."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{function.__qualname__}: {name}: requires grad, but there is no backward: call it under "
                "torch.no_grad() or torch.inference_mode()"
            )


def _one_of(function: Callable[..., Any], **spellings: Tensor | None) -> Tensor | None:
    """The argument of several names that is given."""
    given = {name: tensor for name, tensor in spellings.items() if tensor is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise ValueError(f"{function.__name__}: {second}: expected None beside {first}, of which it is another name")
    return next(iter(given.values()), None)


def _check_ranks(function: Callable[..., Any], **tensors: tuple[Tensor, int]) -> None:
    """Of each tensor its rank; and that the heads of keys and values, the last two, are equally wide."""
    widths = []
    for name, (tensor, rank) in tensors.items():
        if tensor.dim() != rank:
            check_rank(function.__name__, name, tensor, rank)
        widths.append(tensor.shape[-1])
    if widths[-1] != widths[-2]:
        message = f"expected heads of {widths[-2]} elements, as the keys have, got {widths[-1]}"
        raise ValueError(f"{function.__name__}: {name}: {message}")
