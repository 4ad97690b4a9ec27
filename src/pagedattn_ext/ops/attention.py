"""Attention over the paged cache, and the merge of two of its results."""

import math
from typing import Any

import torch
from torch import Tensor

from ._call import (
    MAYBE_ON_CPU,
    NAMESPACE,
    call,
    check_bool,
    check_one_device,
    check_rank,
    check_tensors,
    given,
    to_int,
)


def paged_attention_v1(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one new token per sequence over its cached tokens (decode).

    out[s, h] = softmax(scale * query[s, h] . keys + alibi_slopes[h] * (t - (seq_lens[s] - 1))) values, over the tokens
    t < seq_lens[s], with the keys and values of KV head h // (num_heads // num_kv_heads). A sequence of length 0 gives
    zeros. Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
    SOSP 2023.

    Args:
        query: [num_seqs, num_heads, head_size], any stride in dimension 0.
        key_cache, value_cache: see the module; slots past a sequence's end may hold anything, NaN included.
        block_tables: int32 or int64 [num_seqs, max_num_blocks_per_seq].
        seq_lens: int32 or int64 [num_seqs], tokens in the cache, the new one included.
        scale: default head_size ** -0.5.
        max_seq_len: bound of seq_lens; default the slots of a row of block_tables.
        alibi_slopes: fp32 [num_heads], or [num_seqs, num_heads].
        kv_cache_dtype, k_scale, v_scale: for fp8 caches, see the module.
        out: like query; allocated by default.

    Returns:
        out, [num_seqs, num_heads, head_size].
    """
    out, arguments = _decode_arguments(
        "paged_attention_v1",
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        scale,
        max_seq_len,
        alibi_slopes,
        out,
    )
    call("paged_attention_v1", out, *arguments, kv_cache_dtype, k_scale, v_scale)
    return out


def paged_attention_v2(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    alibi_slopes: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_attention_v1` with its arguments and its result, bit for bit, for callers of vLLM's v2.

    After out, the raw op takes the scratch of such callers: exp_sums, max_logits (fp32 [num_seqs, num_heads,
    max_num_partitions]) and tmp_out ([num_seqs, num_heads, max_num_partitions, head_size]), for partitions of 512
    tokens. The op checks the scratch, and neither reads nor writes it. Both ops split long sequences, and allocate what
    they need. This function makes scratch of the right shapes.
    """
    out, arguments = _decode_arguments(
        "paged_attention_v2",
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        scale,
        max_seq_len,
        alibi_slopes,
        out,
    )
    max_num_partitions = max(0, -(-arguments[-2] // 512))
    exp_sums = query.new_empty((*query.shape[:2], max_num_partitions), dtype=torch.float32)
    tmp_out = query.new_empty((*query.shape[:2], max_num_partitions, query.shape[-1]))
    call(
        "paged_attention_v2", out, exp_sums, torch.empty_like(exp_sums), tmp_out, *arguments,
        kv_cache_dtype, k_scale, v_scale,
    )  # fmt: skip
    return out


def _decode_arguments(
    op: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float | None,
    max_seq_len: int | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, tuple[Any, ...]]:
    """`out`, and the arguments that follow it in the raw decode ops, up to alibi_slopes. Defaults are filled in."""
    check_tensors(op, query=query, key_cache=key_cache, value_cache=value_cache, block_tables=block_tables)
    check_rank(op, "query", query, 3)
    check_rank(op, "block_tables", block_tables, 2)
    if scale is None:
        scale = _default_scale(query)
    num_kv_heads, block_size = _kv_heads_and_block_size(key_cache, value_cache)
    max_seq_len = _bound_of_lengths(op, max_seq_len, block_tables.shape[1] * block_size)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, (
        query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len,
        alibi_slopes,
    )  # fmt: skip


def _kv_heads_and_block_size(key_cache: Tensor, value_cache: Tensor) -> tuple[int, int]:
    """Zeros where the value cache has a wrong rank, which the op refuses."""
    if value_cache.dim() != 4:
        return 0, 0
    # key_cache: [num_blocks, block_size, num_kv_heads, head_size] has 4 dimensions
    num_kv_heads, block_size = (2, 1) if key_cache.dim() == 4 else (1, 3)
    return value_cache.shape[num_kv_heads], value_cache.shape[block_size]


def _bound_of_lengths(op: str, max_seq_len: int | None, num_slots: int) -> int:
    """max_seq_len, but at most the slots of a row of block_tables."""
    return num_slots if max_seq_len is None else min(to_int(op, "max_seq_len", max_seq_len), num_slots)


def _default_scale(query: Tensor) -> float:
    return max((query.shape or (0,))[-1], 1) ** -0.5  # the op refuses heads without elements


def _starts_of_equal(op: str, query: Tensor, block_tables: Tensor) -> Tensor | None:
    """The query_start_loc of [num_seqs, rows_per_seq, num_heads, head_size]. None: one row a sequence."""
    if not isinstance(query, Tensor) or query.dim() != 4 or query.shape[1] == 1:
        return None
    check_tensors(op, block_tables=block_tables)
    if query.shape[0] != block_tables.shape[0]:
        expected, got = f"the rows of {block_tables.shape[0]} sequences", list(query.shape)
        raise ValueError(f"{op}: query: expected {expected}, as block_tables has, got shape {got}")
    return torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device) * query.shape[1]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    scale: float | None = None,
    max_seq_len: int | None = None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = True,
    right_window: int | None = None,
    attention_chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of a ragged batch over cached tokens: prefill, chunked prefill and decode rows in one call.

    The rows query[query_start_loc[s] : query_start_loc[s + 1]] are the last tokens of sequence s. Their keys and values
    are already in the cache. Row i of n stands at position p = seq_lens[s] - n + i and sees the tokens t with
    p - sliding_window < t <= p; if causal is false, up to p + right_window; and with attention_chunk only those with
    t // attention_chunk == p // attention_chunk. Its logits are scale * query . key, then
    softcap * tanh(logit / softcap) if softcap is not 0, then - alibi_slopes[h] * |t - p|. A row that sees nothing gives
    zeros and an lse of -inf. A sequence gets the same bits in any batch and, if causal, however its prompt is cut into
    chunks (on CUDA, cutting a prompt in another way may change the last bits).

    Args:
        query: [num_tokens, num_heads, head_size], any stride in dimension 0; or [num_seqs, rows_per_seq, num_heads,
            head_size]. With query_start_loc the first two of four dimensions count as one.
        key_cache, value_cache, block_tables, seq_lens: as in `paged_attention_v1`. Blocks that no row sees (before the
            sliding window or the chunk) may have any id.
        query_start_loc: int32 or int64 [num_seqs + 1], from 0 to num_tokens; default rows_per_seq rows a sequence, or
            one.
        scale: default head_size ** -0.5.
        max_seq_len: bound of seq_lens, as in `paged_attention_v1`. It does not change a result. Where tables are wider
            than sequences are long, CUDA kernels choose their way by it.
        alibi_slopes: fp32 [num_heads], or [num_seqs, num_heads].
        sliding_window: tokens that a row sees up to its own, which counts; default all.
        softcap: default 0, none.
        sinks: fp32 [num_heads], a logit more in the softmax's denominator, without a value (counted in lse).
        kv_cache_dtype, k_scale, v_scale: for fp8 caches, see the module.
        causal: whether a row sees no token after its own.
        right_window: tokens that a row sees after its own if causal is false; default all. If causal is true, 0 or
            None.
        attention_chunk: a row sees tokens of its own chunk of so many alone, as in Llama 4; default 0, no chunks.

    Returns:
        out, like query, and lse, fp32 without query's last dimension: the natural log of the sum of the exponentials
        of a row's logits.
    """
    op = "paged_attention"
    check_bool(op, "causal", causal)
    if scale is None:
        check_tensors(op, query=query)
        scale = _default_scale(query)
    if max_seq_len is not None:
        check_tensors(op, key_cache=key_cache, value_cache=value_cache, block_tables=block_tables)
        check_rank(op, "value_cache", value_cache, 4)
        check_rank(op, "block_tables", block_tables, 2)
        num_slots = block_tables.shape[1] * _kv_heads_and_block_size(key_cache, value_cache)[1]
        max_seq_len = _bound_of_lengths(op, max_seq_len, num_slots)
    if query_start_loc is None:
        query_start_loc = _starts_of_equal(op, query, block_tables)
    optional = {
        "query_start_loc": query_start_loc, "max_seq_len": max_seq_len, "alibi_slopes": alibi_slopes,
        "sliding_window": sliding_window, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale,
        "right_window": right_window,
    }  # fmt: skip
    return call(
        op, query, key_cache, value_cache, block_tables, seq_lens,
        scale=scale, softcap=softcap, kv_cache_dtype=kv_cache_dtype, causal=causal, attention_chunk=attention_chunk,
        **given(optional),
    )  # fmt: skip


def append_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cached_lens: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    key_start_loc: Tensor | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    causal: bool = True,
    right_window: int | None = None,
    attention_chunk: int = 0,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_is_neox: bool = True,
    rotary_lens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A step of a layer: keys and values of new tokens are written to the end of their sequences in the cache, and
    `paged_attention` is computed over the cache with them. All is checked before anything is written.

    With rotary_cos and rotary_sin, copies of the queries and of the new keys are rotated first, as `rotary_embedding`
    does. New key j of a sequence stands at position cached_lens + j, and row i at cached_lens + i, or at cached_lens if
    the rows are neither causal nor in a window nor in a chunk.

    Args:
        query: [num_tokens, num_heads, head_size], or [num_seqs, rows_per_seq, num_heads, head_size].
        key, value: [num_new_tokens, num_kv_heads, head_size], or [num_seqs, tokens_per_seq, num_kv_heads, head_size].
        key_cache, value_cache: see the module; updated.
        block_tables: with room for the new tokens. No two sequences have a block in common that new tokens go to.
        cached_lens: int32 or int64 [num_seqs], tokens in the cache before.
        key_start_loc: int32 or int64 [num_seqs + 1], where the new tokens of each sequence begin, from 0 to
            num_new_tokens; default equally many tokens for each sequence.
        rotary_cos, rotary_sin: [max_position, rot_dim / 2] each, fp32 or of query's dtype.
        rotary_is_neox: is_neox of `rotary_embedding`.
        rotary_lens: int32 or int64 [num_seqs], in place of cached_lens for the positions.
        The other arguments are those of `paged_attention`; k_scale and v_scale are also those of `reshape_and_cache`.

    Returns:
        out, like query, and lse, fp32, without the last dimension.
    """
    op = "append_and_attend"
    check_bool(op, "causal", causal)
    check_bool(op, "rotary_is_neox", rotary_is_neox)
    if scale is None:
        check_tensors(op, query=query)
        scale = _default_scale(query)
    if query_start_loc is None:
        query_start_loc = _starts_of_equal(op, query, block_tables)
    optional = {
        "query_start_loc": query_start_loc, "key_start_loc": key_start_loc, "alibi_slopes": alibi_slopes,
        "sliding_window": sliding_window, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale,
        "right_window": right_window, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_lens": rotary_lens,
    }  # fmt: skip
    return call(
        op, query, key, value, key_cache, value_cache, block_tables, cached_lens,
        scale=scale, softcap=softcap, kv_cache_dtype=kv_cache_dtype, causal=causal, attention_chunk=attention_chunk,
        rotary_is_neox=rotary_is_neox, **given(optional),
    )  # fmt: skip


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float | None = None,
    max_seq_len: int | None = None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal: bool = True,
    right_window: int | None = None,
    attention_chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` of a ragged batch whose keys and values lie one after the other, without a cache.

    Sequence s has the keys and values of rows key_start_loc[s] to key_start_loc[s + 1], and its query rows are the
    last of its tokens. Nothing is copied.

    Args:
        query: [num_tokens, num_heads, head_size], any stride in dimension 0.
        key, value: [num_keys, num_kv_heads, head_size], any strides in dimensions 0 and 1.
        query_start_loc, key_start_loc: int32 or int64 [num_seqs + 1], from 0 to num_tokens and to num_keys.
        scale: default head_size ** -0.5.
        max_seq_len: at least every sequence's keys; default num_keys. It does not change a result.
        alibi_slopes, sliding_window, softcap, sinks, causal, right_window, attention_chunk: as in `paged_attention`.

    Returns:
        out [num_tokens, num_heads, head_size] and lse, fp32 [num_tokens, num_heads], as `paged_attention` does.
    """
    if scale is None:
        check_tensors("varlen_attention", query=query)
        check_rank("varlen_attention", "query", query, 3)
        scale = _default_scale(query)
    check_bool("varlen_attention", "causal", causal)
    optional = {
        "max_seq_len": max_seq_len, "alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "sinks": sinks,
        "right_window": right_window,
    }  # fmt: skip
    return call(
        "varlen_attention", query, key, value, query_start_loc, key_start_loc,
        scale=scale, softcap=softcap, causal=causal, attention_chunk=attention_chunk, **given(optional),
    )  # fmt: skip


def _register_fake(op: str) -> None:
    @torch.library.register_fake(f"{NAMESPACE}::{op}")
    def _(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        elsewhere = [name for name, value in kwargs.items() if name in MAYBE_ON_CPU and value is not None]
        on_one_device = [value for name, value in kwargs.items() if not (name in elsewhere and value.is_cpu)]
        check_one_device(op, query, *args, *on_one_device)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


_register_fake("paged_attention")
_register_fake("append_and_attend")
_register_fake("varlen_attention")


def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c_cache: Tensor,
    k_pe_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    scale: float,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Multi-head latent attention of a ragged batch with absorbed weights: one key and value a token, for all heads.

    The key of a token is its latent and its rotary part, the value is its latent: out[i, h] = softmax(scale *
    (q_nope[i, h] . latents + q_pe[i, h] . rotary parts)) latents, over the tokens that row i sees. Rows and tokens are
    those of `paged_attention`. A row that sees nothing gives zeros and an lse of -inf. A row gets the same bits in any
    batch (on CUDA too). Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.

    Args:
        q_nope: [num_tokens, num_heads, latent_size], the part of the queries without positions, times the weights that
            make keys of latents; latent_size up to 512.
        q_pe: [num_tokens, num_heads, rope_size], the rotated part; rope_size up to 512, or 0.
        kv_c_cache: [num_blocks, block_size, latent_size], any block_size.
        k_pe_cache: [num_blocks, block_size, rope_size]. The two caches may be slices of one, as
            `concat_and_cache_mla` writes it.
        block_tables, seq_lens, query_start_loc: as in `paged_attention`.
        scale: of the heads before their weights were absorbed, mostly (qk_nope_head_dim + qk_rope_head_dim) ** -0.5.
        causal: whether a row sees no token after its own.

    All tensors of numbers have one dtype, fp32, fp16 or bf16; the last dimension is contiguous, all others may have
    any stride.

    Returns:
        out [num_tokens, num_heads, latent_size] and lse, fp32 [num_tokens, num_heads].
    """
    check_bool("mla_attention", "causal", causal)
    return call(
        "mla_attention", q_nope, q_pe, kv_c_cache, k_pe_cache, block_tables, seq_lens,
        query_start_loc=query_start_loc, scale=scale, causal=causal,
    )  # fmt: skip


_register_fake("mla_attention")


def merge_attn_states(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    *,
    lse_base: float = math.e,
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of tokens, merged from two results of `paged_attention`, one for each set.

    lse = log(exp(prefix_lse) + exp(suffix_lse)); output = exp(prefix_lse - lse) * prefix_output +
    exp(suffix_lse - lse) * suffix_output. An lse of -inf or of +inf says that a part has no tokens; its output may then
    hold anything. Where both parts have none, the result is zeros and -inf.

    Args:
        prefix_output, suffix_output: [num_tokens, num_heads, head_size], contiguous.
        prefix_lse, suffix_lse: fp32 [num_tokens, num_heads], contiguous.
        lse_base: what stands in place of e in the formulas, above 1. FlashInfer's lse has base 2.

    Returns:
        (output, lse).
    """
    check_tensors("merge_attn_states", prefix_output=prefix_output, prefix_lse=prefix_lse)
    output, output_lse = torch.empty_like(prefix_output), torch.empty_like(prefix_lse)
    states = prefix_output, prefix_lse, suffix_output, suffix_lse
    call("merge_attn_states", output, output_lse, *states, lse_base=lse_base)
    return output, output_lse
