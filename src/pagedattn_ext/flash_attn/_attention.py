"""The functions of flash-attn on the ops; `pagedattn_ext.flash_attn` says what they take."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from .._adapters import call_as, expect_defaults, refuse_bools, refuse_gradients, rows_of, window_of
from ..ops._call import check_rank, to_int
from ._attend import FP8, Extras, append, attend_pages, attend_ragged

WindowSize = tuple[int | None, int | None]  # (left, right), inclusive; None or less than 0 is no window

# The names of the ops' arguments in those of the functions.
DENSE_NAMES = {
    "query": "q", "key_cache": "k", "value_cache": "v", "seq_lens": "k", "block_tables": "k", "scale": "softmax_scale",
    "softcap": "softcap", "sliding_window": "window_size", "right_window": "window_size",
    "alibi_slopes": "alibi_slopes", "k_scale": "k_descale", "v_scale": "v_descale",
}  # fmt: skip
VARLEN_NAMES = DENSE_NAMES | {
    "key": "k", "value": "v", "query_start_loc": "cu_seqlens_q", "key_start_loc": "cu_seqlens_k",
    "seq_lens": "seqused_k", "block_tables": "block_table",
}  # fmt: skip
CACHE_NAMES = VARLEN_NAMES | {
    "key_cache": "k_cache", "value_cache": "v_cache", "seq_lens": "cache_seqlens", "slot_mapping": "cache_seqlens",
    "cos_sin_cache": "rotary_cos", "positions": "cache_seqlens",
}  # fmt: skip


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
    refuse_gradients(function, q=q, k=k, v=v)
    _check_ranks(function, q=(q, 4), k=(k, 4), v=(v, 4))
    _check_out(function, out, q, v)
    batch, seqlen_k = k.shape[:2]
    sinks = _sinks(function, q, learnable_sink=learnable_sink, s_aux=s_aux)
    options = _options(function, q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    extras = Extras(q_descale, k_descale, v_descale, _chunk(function, attention_chunk))
    if seqlen_k == 0:  # a page has at least one token
        k, v = (pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (k, v))
    keys = (
        _with_contiguous_heads(k),
        _with_contiguous_heads(v),
        torch.arange(batch, dtype=torch.int32, device=q.device)[:, None],  # each sequence is a page
        torch.full((batch,), seqlen_k, dtype=torch.int32, device=q.device),
    )
    attended, lse = call_as(
        function, DENSE_NAMES, attend_pages, function, _rows(q), keys, _starts(q, None), options, extras
    )
    return _results(q, attended, lse, out, return_lse=return_lse, return_attn_probs=return_attn_probs)


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
    refuse_gradients(function, q=q, k=k, v=v)
    block_table = _one_of(function, block_table=block_table, page_table=page_table)
    rank = 3 if block_table is None else 4
    _check_ranks(function, q=(q, 3), k=(k, rank), v=(v, rank))
    _check_out(function, out, q, v)
    sinks = _sinks(function, q, learnable_sink=learnable_sink, s_aux=s_aux, sinks=sinks)
    options = _options(function, q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    extras = Extras(q_descale, k_descale, v_descale, _chunk(function, attention_chunk), seqused_q)
    return_lse = return_lse or return_softmax_lse
    if block_table is None:
        if cu_seqlens_k is None:
            raise ValueError(f"{function.__name__}: cu_seqlens_k: expected a tensor without a block table, got None")
        k, v = (_with_contiguous_heads(tensor) for tensor in (k, v))
        if seqused_k is None and k.itemsize > 1 and not extras.need_pages(q):
            attended, lse = call_as(
                function, VARLEN_NAMES, attend_ragged, _rows(q), k, v, cu_seqlens_q, cu_seqlens_k, options
            )
            return _results(q, attended, lse, out, return_lse=return_lse, return_attn_probs=return_attn_probs)
        k, v = k[:, None], v[:, None]  # tokens are pages
        if seqused_k is None:
            seqused_k = cu_seqlens_k.diff()
        if max_seqlen_k is None:
            max_seqlen_k = int(seqused_k.max())
        block_table = _consecutive_pages(cu_seqlens_k[:-1], max_seqlen_k)
    elif seqused_k is None:
        if cu_seqlens_k is None:
            raise ValueError(f"{function.__name__}: cu_seqlens_k: expected a tensor without seqused_k, got None")
        seqused_k = cu_seqlens_k.diff()
    keys = (k, v, block_table, seqused_k)
    attended, lse = call_as(
        function, VARLEN_NAMES, attend_pages, function, _rows(q), keys, cu_seqlens_q, options, extras
    )
    return _results(q, attended, lse, out, return_lse=return_lse, return_attn_probs=return_attn_probs)


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
    refuse_gradients(function, q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    block_table = _one_of(function, block_table=block_table, page_table=page_table)
    _check_ranks(function, q=(q, 4 if cu_seqlens_q is None else 3), k_cache=(k_cache, 4), v_cache=(v_cache, 4))
    _check_out(function, out, q, v_cache)
    query = _rows(q)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if block_table is not None:
        expect_defaults(function, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    else:  # each sequence of the cache is a page
        if cache_batch_idx is None:
            cache_batch_idx = torch.arange(batch, dtype=torch.int32, device=q.device)
        block_table = cache_batch_idx[:, None]
    if cache_seqlens is None:
        cache_seqlens = block_table.shape[1] * k_cache.shape[1]
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((batch,), cache_seqlens, device=q.device)
    sinks = _sinks(function, q, learnable_sink=learnable_sink, s_aux=s_aux, sinks=sinks)
    options = _options(function, q, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    extras = Extras(q_descale, k_descale, v_descale, _chunk(function, attention_chunk))

    seq_lens = cache_seqlens
    if k is None or v is None:
        for name, tensor in (("k", k), ("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            if tensor is not None:
                raise ValueError(f"flash_attn_with_kvcache: {name}: expected None without both k and v, got a tensor")
    else:
        rank = 4 if cu_seqlens_k_new is None else 3
        _check_new(function, k_cache, v_cache, k=(k, rank), v=(v, rank))
        key = _rows(k)
        slots = _slots(block_table, _positions(cache_seqlens, k, cu_seqlens_k_new), cu_seqlens_k_new, k_cache.shape[1])
        if rotary_cos is not None and rotary_sin is not None:
            cos_sin = torch.cat([rotary_cos, rotary_sin], dim=-1)
            first = cache_seqlens if rotary_seqlens is None else rotary_seqlens
            key = _rotated(key, _positions(first, k, cu_seqlens_k_new), cos_sin, rotary_interleaved)
            successive = causal or any(side is not None and side >= 0 for side in window_size)
            query = _rotated(query, _positions(first, q, cu_seqlens_q, successive), cos_sin, rotary_interleaved)
        starts = _starts(k, cu_seqlens_k_new)
        call_as(function, CACHE_NAMES, append, function, key, _rows(v), k_cache, v_cache, slots, starts, extras)
        seq_lens = cache_seqlens + (k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff())

    if cache_leftpad is not None:  # tokens are pages
        block_table = _consecutive_pages(block_table[:, 0] * k_cache.shape[1] + cache_leftpad, k_cache.shape[1])
        k_cache, v_cache = (cache.flatten(0, 1)[:, None] for cache in (k_cache, v_cache))
        seq_lens = seq_lens - cache_leftpad
    keys = (k_cache, v_cache, block_table, seq_lens)
    attended, lse = call_as(
        function, CACHE_NAMES, attend_pages, function, query, keys, _starts(q, cu_seqlens_q), options, extras
    )
    return _results(q, attended, lse, out, return_lse=return_lse or return_softmax_lse)


# ---- what flash-attn means in the terms of the ops -------------------------------------------------------------------


def _options(
    function: Callable[..., Any],
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> dict[str, Any]:
    """Which tokens a row sees, and its logits, as keyword arguments of `ops.paged_attention`."""
    refuse_bools(function, softmax_scale=softmax_scale, softcap=softcap)
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"{function.__name__}: window_size: expected (left, right), got {window_size!r}") from None
    left, right = (None if side is None else to_int(function.__name__, "window_size", side) for side in (left, right))
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes[0] if alibi_slopes.shape[:-1] == (1,) else alibi_slopes.contiguous()
    return {
        "scale": max(q.shape[-1], 1) ** -0.5 if softmax_scale is None else softmax_scale,
        "causal": causal,
        "sliding_window": window_of(left),
        "right_window": None if causal or right is None or right < 0 else right,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }


def _results(
    q: Tensor, attended: Tensor, lse: Tensor, out: Tensor | None, *, return_lse: bool, return_attn_probs: bool = False
) -> Any:
    """What a function returns, of the op's [num_rows, num_heads, head_size] and [num_rows, num_heads]."""
    attended = attended.view(*q.shape[:-1], attended.shape[-1])
    if out is not None:
        attended = out.copy_(attended)
    if not (return_lse or return_attn_probs):
        return attended
    lse = lse.view(q.shape[:-1]).transpose(-2, -1).contiguous()
    return (attended, lse, q.new_empty(0)) if return_attn_probs else (attended, lse)


def _rows(tensor: Tensor) -> Tensor:
    """[..., num_heads, head_size] -> [num_rows, num_heads, head_size], each row contiguous."""
    rows = tensor.flatten(0, -3)
    return rows if rows[:1].is_contiguous() else rows.contiguous()


def _with_contiguous_heads(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _starts(q: Tensor, cu_seqlens_q: Tensor | None) -> Tensor | None:
    """The query_start_loc of the ops. Without cu_seqlens_q the queries are [batch, seqlen, ...]."""
    if cu_seqlens_q is not None:
        return cu_seqlens_q
    batch, seqlen = q.shape[:2]
    return None if seqlen == 1 else torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen


def _positions(first: Tensor, rows: Tensor, cu_seqlens: Tensor | None, successive: bool = True) -> Tensor:
    """The position of each row, in sequences whose first rows stand at `first` [batch]; the other rows behind these,
    or if not successive at the same positions. [total] with cu_seqlens, otherwise rows are [batch, seqlen, ...]."""
    if cu_seqlens is None:
        place = torch.arange(rows.shape[1], device=first.device)
        return first[:, None] + (place if successive else 0 * place)
    sequence, place = rows_of(cu_seqlens, rows.shape[0])
    return first[sequence] + (place if successive else 0)


def _consecutive_pages(first: Tensor, num_pages: int) -> Tensor:
    """Block tables of sequences whose pages lie one after the other, from `first` [num_seqs] on."""
    return first[:, None] + torch.arange(num_pages, dtype=first.dtype, device=first.device)


def _slots(block_table: Tensor, position: Tensor, cu_seqlens: Tensor | None, page_size: int) -> Tensor:
    """slot_mapping of the tokens at these positions [batch, seqlen], with cu_seqlens [total]."""
    if position.is_cpu and position.numel():
        first, last = map(int, position.aminmax())
        if first < 0 or last >= block_table.shape[1] * page_size:
            raise ValueError(
                "flash_attn_with_kvcache: cache_seqlens: expected 0 or more, and room for the new tokens, got new "
                f"tokens from {first} to {last} in caches for {block_table.shape[1] * page_size}"
            )
    pages = torch.div(position, page_size, rounding_mode="floor")
    if cu_seqlens is None:
        blocks = block_table.gather(1, pages)
    else:
        blocks = block_table[rows_of(cu_seqlens, position.shape[0])[0], pages]
    return torch.add(position % page_size, blocks.long(), alpha=page_size).flatten()


def _rotated(rows: Tensor, positions: Tensor, cos_sin_cache: Tensor, interleaved: bool) -> Tensor:
    rotated = rows.clone()
    positions = positions.long().flatten()
    ops.rotary_embedding(positions, rotated, None, rows.shape[-1], cos_sin_cache, not interleaved)
    return rotated


def _one_of(function: Callable[..., Any], **spellings: Tensor | None) -> Tensor | None:
    """The argument of several names that is given."""
    given = {name: tensor for name, tensor in spellings.items() if tensor is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise ValueError(f"{function.__name__}: {second}: expected None beside {first}, of which it is another name")
    return next(iter(given.values()), None)


def _sinks(function: Callable[..., Any], q: Tensor, **spellings: Tensor | None) -> Tensor | None:
    """The sinks as the ops take them, fp32 [num_heads]."""
    sinks = _one_of(function, **spellings)
    if sinks is None:
        return None
    if sinks.shape != (num_heads := q.shape[-2],):
        name = next(name for name, tensor in spellings.items() if tensor is not None)
        raise ValueError(f"{function.__name__}: {name}: expected shape [{num_heads}], got {list(sinks.shape)}")
    return sinks.float().contiguous()


def _chunk(function: Callable[..., Any], attention_chunk: int) -> int:
    chunk = to_int(function.__name__, "attention_chunk", attention_chunk)
    if chunk < 0:
        raise ValueError(f"{function.__name__}: attention_chunk: expected 0 or more tokens, got {chunk}")
    return chunk


def _check_ranks(function: Callable[..., Any], **tensors: tuple[Tensor, int]) -> None:
    """The rank of queries, keys and values, and that the heads of queries are as wide as those of keys."""
    for name, (tensor, rank) in tensors.items():
        check_rank(function.__name__, name, tensor, rank)
    (query, (q, _)), (_, (k, _)), _ = tensors.items()
    if q.shape[-1] != k.shape[-1]:
        message = f"expected heads of {k.shape[-1]} elements, as the keys have, got {q.shape[-1]}"
        raise ValueError(f"{function.__name__}: {query}: {message}")


def _check_new(function: Callable[..., Any], k_cache: Tensor, v_cache: Tensor, **tensors: tuple[Tensor, int]) -> None:
    """The rank of new keys and values, and that their heads are those of the caches."""
    for (name, (tensor, rank)), cache in zip(tensors.items(), (k_cache, v_cache), strict=True):
        check_rank(function.__name__, name, tensor, rank)
        if tensor.shape[-2:] != cache.shape[-2:]:
            expected, got = list(cache.shape[-2:]), list(tensor.shape[-2:])
            raise ValueError(f"{function.__name__}: {name}: expected heads {expected}, as in {name}_cache, got {got}")


def _check_out(function: Callable[..., Any], out: Tensor | None, q: Tensor, v: Tensor) -> None:
    if out is None:
        return
    shape, dtype = (*q.shape[:-1], v.shape[-1]), torch.bfloat16 if q.dtype in FP8 else q.dtype
    if out.shape != shape or out.dtype != dtype or out.device != q.device:
        raise ValueError(
            f"{function.__name__}: out: expected shape {list(shape)}, {dtype} on {q.device}, got {list(out.shape)}, "
            f"{out.dtype} on {out.device}"
        )
