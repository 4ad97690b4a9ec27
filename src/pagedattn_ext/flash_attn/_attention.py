"""The functions of flash-attn on the ops; `pagedattn_ext.flash_attn` says what they take."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from .._adapters import call_as, expect_defaults, kept, refuse_gradients
from .._index_checks import check_indices, num_seqs_of
from ..ops._call import call, check_rank, to_int
from ._arguments import (
    OF_CACHES,
    OF_KEYS,
    OF_LENGTHS,
    OF_OFFSETS,
    OF_TOKENS,
    WindowSize,
    check_new,
    check_out,
    check_ranks,
    one_of,
    options_of,
    results_of,
    rows_of,
    sinks_of,
    with_contiguous_heads,
)
from ._attend import Extras, append, attend_pages, attend_prepared, attend_ragged, prepare


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
    expect_defaults(function, dropout_p=dropout_p, qv=qv)
    refuse_gradients(function, q=q, k=k, v=v, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, s_aux=s_aux)
    check_ranks(function, q=(q, 4), k=(k, 4), v=(v, 4))
    check_out(function, out, q, v)
    batch, seqlen_k = k.shape[:2]
    if batch != q.shape[0]:
        raise ValueError(f"flash_attn_func: k: expected {q.shape[0]} sequences, as q has, got {batch}")
    sinks = sinks_of(function, q, learnable_sink=learnable_sink, s_aux=s_aux)
    options = options_of(function, q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, attention_chunk)
    extras = Extras(q_descale, k_descale, v_descale)
    if seqlen_k == 0:  # a page has at least one token
        k, v = (pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (k, v))
    keys = with_contiguous_heads(k), with_contiguous_heads(v), *_sequences_as_pages(batch, seqlen_k, q.device)
    arguments = function, rows_of(q), keys, _starts(q, None), options, extras
    attended, lse = call_as(function, OF_KEYS, attend_pages, *arguments)
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
    expect_defaults(function, dropout_p=dropout_p, qv=qv)
    refuse_gradients(
        function, q=q, k=k, v=v, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, s_aux=s_aux, sinks=sinks
    )
    _, block_table = one_of(function, block_table=block_table, page_table=page_table)
    rank = 3 if block_table is None else 4
    check_ranks(function, q=(q, 3), k=(k, rank), v=(v, rank))
    check_out(function, out, q, v)
    sinks = sinks_of(function, q, learnable_sink=learnable_sink, s_aux=s_aux, sinks=sinks)
    options = options_of(function, q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, attention_chunk)
    extras = Extras(q_descale, k_descale, v_descale, seqused_q)
    return_lse = return_lse or return_softmax_lse
    num_seqs = num_seqs_of(function, "cu_seqlens_q", cu_seqlens_q)
    names = OF_OFFSETS if seqused_k is None else OF_LENGTHS
    if page_table is not None:
        names = names | {"block_tables": "page_table"}
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
            Where head_size is not head_size_v or no multiple of 16 bytes, the caches are copied at each call.
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
    expect_defaults(function, qv=qv)
    refuse_gradients(
        function, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, s_aux=s_aux, sinks=sinks,
    )  # fmt: skip
    _, block_table = one_of(function, block_table=block_table, page_table=page_table)
    check_ranks(function, q=(q, 4 if cu_seqlens_q is None else 3), k_cache=(k_cache, 4), v_cache=(v_cache, 4))
    check_out(function, out, q, v_cache)
    names = OF_CACHES
    query = rows_of(q)
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
            block_table, _ = _sequences_as_pages(num_seqs, k_cache.shape[1], q.device)
        else:
            check_indices(function, "cache_batch_idx", cache_batch_idx, num_seqs)
            block_table = cache_batch_idx.view(num_seqs, 1)
    if cache_seqlens is None:
        cache_seqlens = block_table.shape[1] * k_cache.shape[1]
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((num_seqs,), cache_seqlens, device=q.device)
    check_indices(function, "cache_seqlens", cache_seqlens, num_seqs)
    sinks = sinks_of(function, q, learnable_sink=learnable_sink, s_aux=s_aux, sinks=sinks)
    options = options_of(function, q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, attention_chunk)
    extras = Extras(q_descale, k_descale, v_descale)

    seq_lens, new = cache_seqlens, None
    if k is None or v is None:
        for name, tensor in (("k", k), ("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            if tensor is not None:
                raise ValueError(f"flash_attn_with_kvcache: {name}: expected None without both k and v, got a tensor")
    else:
        rank = 4 if cu_seqlens_k_new is None else 3
        check_new(function, k_cache, v_cache, k=(k, rank), v=(v, rank))
        if cu_seqlens_k_new is not None:
            check_indices(function, "cu_seqlens_k_new", cu_seqlens_k_new, num_seqs + 1)
        elif k.shape[0] != num_seqs:
            raise ValueError(f"flash_attn_with_kvcache: k: expected {num_seqs} sequences, as q has, got {k.shape[0]}")
        key = rows_of(k)
        batch_indices, positions = _positions(function, names, cache_seqlens, k, cu_seqlens_k_new)
        page_size, num_pages = k_cache.shape[1], k_cache.shape[0]
        place = {} if batch_indices is None else {"batch_indices": batch_indices}
        in_pages = positions, block_table, page_size, num_pages
        slots = call_as(function, names, call, "compute_slot_mapping", *in_pages, **place)
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
        new = key, rows_of(v), k_cache, v_cache, slots, _starts(k, cu_seqlens_k_new), extras
        if cu_seqlens_k_new is None:
            _, num_new = _sequences_as_pages(num_seqs, k.shape[1], q.device)
        else:
            num_new = cu_seqlens_k_new.diff()
        seq_lens = cache_seqlens + num_new

    if cache_leftpad is not None:
        check_indices(function, "cache_leftpad", cache_leftpad, num_seqs)
        block_table = _tables_behind_padding(function, names, block_table[:, 0], k_cache, seq_lens, cache_leftpad)
        seq_lens = seq_lens - cache_leftpad
    starts = _starts(q, cu_seqlens_q)

    def prepared() -> Any:
        caches = (k_cache, v_cache) if cache_leftpad is None else _tokens_as_pages(k_cache, v_cache)
        return prepare(function, query, (*caches, block_table, seq_lens), starts, options, extras)

    def attend() -> tuple[Tensor, Tensor]:
        arguments, steps = prepared()
        if new is not None:
            tensors, of_op = arguments
            call("check_paged_attention", *tensors, **of_op)
            append(function, *new)
            if tensors[1] is not k_cache:  # but what may be a copy from before
                arguments, steps = prepared()
        return attend_prepared(arguments, steps)

    attended, lse = call_as(function, names, attend)
    return results_of(q, attended, lse, out, return_lse=return_lse or return_softmax_lse)


# ---- where rows and tokens lie --------------------------------------------------------------------------------------


@kept
def _sequences_as_pages(batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Block tables [batch, 1] and lengths [batch] of sequences that are a page each."""
    tables = torch.arange(batch, dtype=torch.int32, device=device).view(batch, 1)
    return tables, torch.full((batch,), length, dtype=torch.int32, device=device)


def _starts(q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor | None:
    """The query_start_loc of the ops. Without cu_seqlens_q the queries are [batch, seqlen, ...]."""
    if cu_seqlens_q is not None:
        return cu_seqlens_q
    batch, seqlen = q.shape[:2]
    return None if seqlen == 1 else _starts_of_equal(batch, seqlen, q.device)


@kept
def _starts_of_equal(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """query_start_loc of sequences that have equally many rows."""
    if seqlen == 0:
        return torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return torch.arange(0, batch * seqlen + 1, seqlen, dtype=torch.int32, device=device)


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


def _cos_sin(
    function: Callable[..., Any], rotary_cos: Tensor | None, rotary_sin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The two as `ops.rotary_embedding` takes them."""
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
    return rotary_cos.contiguous(), rotary_sin.contiguous()


def _rotated(
    function: Callable[..., Any],
    names: dict[str, str],
    rows: Tensor,
    positions: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    interleaved: bool,
) -> Tensor:
    rotated = rows.clone()
    cos, sin = cos_sin
    arguments = positions.long(), rotated, None, rows.shape[-1], cos, not interleaved
    call_as(function, names, ops.rotary_embedding, *arguments, sin_cache=sin)
    return rotated
