"""Documented functions for the ops in `torch.ops.pagedattn_ext`.

They allocate outputs and fill in what follows from the arguments; the ops themselves, with the argument order that the
field uses (outputs first), are in `torch.ops.pagedattn_ext`. All work under `torch.compile(fullgraph=True)`.

Paged cache, for x = 16 / element size (4 for fp32, 8 for fp16 and bf16):
    key_cache    [num_blocks, num_kv_heads, head_size / x, block_size, x]
    value_cache  [num_blocks, num_kv_heads, head_size, block_size]
Token t of a sequence is in block `block_table[t // block_size]` at offset `t % block_size`; its slot is
`block * block_size + offset`. Blocks may be strided in dimension 0. dtypes are fp32, fp16 and bf16, one for a cache and
all that meets it; block_size is a power of two from 8 to 256, head_size a multiple of x up to 256.

An fp8 cache (x = 16) holds value / scale, rounded to nearest and saturating, and meets tensors of any of the three
dtypes. kv_cache_dtype is "auto" (the cache tensor's own dtype, torch.float8_e4m3fn and torch.float8_e5m2 included),
"fp8" or "fp8_e4m3", or "fp8_e5m2" (these for uint8 tensors too); k_scale and v_scale are fp32 tensors of one element,
by default 1, and must be 1 for a cache that is not fp8.

Arithmetic is fp32, rounded once on store. No op has a backward: where gradients are recorded, a tensor that requires
grad raises RuntimeError (the raw ops let it pass).

Devices: CPU, and CUDA where the build has CUDA kernels. An op runs where its tensors are, on the current stream, and
does not wait for the GPU. They must be on one device, but k_scale and v_scale may be on the CPU, and block_mapping
anywhere. What index tensors on a GPU hold is checked with PAGEDATTN_CHECK=1 in the environment, which does wait for it.

Errors: ValueError for a wrong shape, stride or value, TypeError for a wrong dtype or what is not a tensor, both before
any memory is touched. The message names the argument, what was expected and what came. The ops themselves raise
RuntimeError with the same text.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "copy_blocks",
    "fused_add_rms_norm",
    "gather_cached_kv",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "merge_attn_states",
    "mul_and_silu",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_neox",
    "silu_and_mul",
    "swap_blocks",
]

SEVERAL_DEVICES = "the tensors are on several devices"

_ops = torch.ops.pagedattn_ext


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a raw op and gives its errors the Python types that the module's docstring promises."""
    if torch.is_grad_enabled():
        _refuse_grad(op, args, kwargs)
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        message = str(error)
        if any(text in message for text in (": expected dtype", ": expected a tensor,", "Expected a value of type")):
            raise TypeError(message) from None
        if ": expected " in message:
            raise ValueError(message) from None
        if isinstance(error, NotImplementedError) or SEVERAL_DEVICES in message:
            _name_other_device(op, args, kwargs)  # the error does not say which argument it is
        raise


def _name_other_device(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ValueError if the tensors are on several devices."""
    names = [argument.name for argument in op.default._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    expected = next((tensor.device for tensor in tensors.values()), None)
    for name, tensor in tensors.items():
        if tensor.device != expected:
            message = f"{op.__name__}: {name}: expected a tensor on {expected}, got one on {tensor.device}"
            raise ValueError(message) from None


def _refuse_grad(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """An op writes behind autograd's back: a tensor that requires grad would silently lose its gradient."""
    for i, argument in enumerate((*args, *kwargs.values())):
        if _requires_grad(argument) or (isinstance(argument, list) and any(map(_requires_grad, argument))):
            name = op.default._schema.arguments[i].name if i < len(args) else list(kwargs)[i - len(args)]
            raise RuntimeError(
                f"{op.__name__}: {name}: requires grad, but the ops have no backward: call them under "
                "torch.no_grad() or torch.inference_mode()"
            )


def _requires_grad(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.requires_grad


def _check_tensors(op: str, **tensors: object) -> None:
    """For functions that look at an argument before the op does."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name}: expected a torch.Tensor, got {type(tensor).__name__}")


# ---- attention ------------------------------------------------------------------------------------------------------


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
        block_tables: int32 [num_seqs, max_num_blocks_per_seq].
        seq_lens: int32 [num_seqs], tokens in the cache, the new one included.
        scale: default head_size ** -0.5.
        max_seq_len: bound of seq_lens; default the slots of a row of block_tables.
        alibi_slopes: fp32 [num_heads].
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
    _call(_ops.paged_attention_v1, out, *arguments, kv_cache_dtype, k_scale, v_scale)
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
    """`paged_attention_v1` with its arguments and its result, bit for bit, and scratch from the caller.

    The raw op takes exp_sums, max_logits (fp32 [num_seqs, num_heads, max_num_partitions]) and tmp_out ([num_seqs,
    num_heads, max_num_partitions, head_size]) after out, for partitions of 512 tokens; this function allocates them.
    What they hold afterwards is unspecified. Both split long sequences.
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
    max_num_partitions = -(-arguments[-2] // 512)
    exp_sums = query.new_empty((*query.shape[:2], max_num_partitions), dtype=torch.float32)
    tmp_out = query.new_empty((*query.shape[:2], max_num_partitions, query.shape[-1]))
    _call(
        _ops.paged_attention_v2, out, exp_sums, torch.empty_like(exp_sums), tmp_out, *arguments,
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
    """`out` and what follows it in the raw decode ops, up to alibi_slopes; what was left out is filled in."""
    _check_tensors(op, query=query, value_cache=value_cache, block_tables=block_tables)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    num_kv_heads, block_size = (value_cache.shape[1], value_cache.shape[3]) if value_cache.dim() == 4 else (0, 0)
    if max_seq_len is None:
        max_seq_len = block_tables.shape[-1] * block_size
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, (
        query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len,
        alibi_slopes,
    )  # fmt: skip


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    query_start_loc: Tensor | None = None,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a ragged batch over cached tokens: prefill, chunked prefill and decode rows in one call.

    The rows query[query_start_loc[s] : query_start_loc[s + 1]] are the last tokens of sequence s, whose keys and values
    are already in the cache: row i of n stands at position p = seq_lens[s] - n + i and sees the tokens t with
    p - sliding_window < t <= p. Its logits are scale * query . key, then softcap * tanh(logit / softcap) if softcap is
    not 0, then + alibi_slopes[h] * (t - p). A row that sees nothing gives zeros and an lse of -inf. The result of a row
    depends on its own sequence alone, bit for bit, however the batch is put together or a prompt cut into chunks (on
    CUDA the latter may change the last bits).

    Args:
        query: [num_tokens, num_heads, head_size], any stride in dimension 0.
        key_cache, value_cache, block_tables, seq_lens: as in `paged_attention_v1`. Blocks that no row sees (before the
            sliding window) may have any id.
        query_start_loc: int32 [num_seqs + 1], from 0 to num_tokens; default one row a sequence.
        scale: default head_size ** -0.5.
        alibi_slopes: fp32 [num_heads].
        sliding_window: tokens that a row sees, its own included; default all.
        softcap: default 0, none.
        sinks: fp32 [num_heads], a logit more in the softmax's denominator, without a value (counted in lse).
        kv_cache_dtype, k_scale, v_scale: for fp8 caches, see the module.

    Returns:
        out [num_tokens, num_heads, head_size] and lse, fp32 [num_tokens, num_heads]: the natural log of the sum of
        the exponentials of a row's logits.
    """
    _check_tensors("paged_attention", query=query)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return _call(
        _ops.paged_attention, query, key_cache, value_cache, block_tables, seq_lens,
        query_start_loc=query_start_loc, scale=scale, alibi_slopes=alibi_slopes, sliding_window=sliding_window,
        softcap=softcap, sinks=sinks, kv_cache_dtype=kv_cache_dtype, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip


@torch.library.register_fake("pagedattn_ext::paged_attention")
def _(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    # A meta tensor among real ones brings torch here, too. The scales alone may be elsewhere.
    others = [*args, *(value for name, value in kwargs.items() if name not in ("k_scale", "v_scale"))]
    if any(isinstance(other, Tensor) and other.device != query.device for other in others):
        raise RuntimeError(f"paged_attention: {SEVERAL_DEVICES}")
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return out, query.new_empty(query.shape[:2], dtype=torch.float32)


def merge_attn_states(
    prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of tokens from the attention over each: two results of `paged_attention`, merged.

    lse = log(exp(prefix_lse) + exp(suffix_lse)); output = exp(prefix_lse - lse) * prefix_output +
    exp(suffix_lse - lse) * suffix_output. Where both lse are -inf, zeros and -inf.

    Args:
        prefix_output, suffix_output: [num_tokens, num_heads, head_size], contiguous.
        prefix_lse, suffix_lse: fp32 [num_tokens, num_heads], contiguous.

    Returns:
        (output, lse).
    """
    _check_tensors("merge_attn_states", prefix_output=prefix_output, prefix_lse=prefix_lse)
    output, output_lse = torch.empty_like(prefix_output), torch.empty_like(prefix_lse)
    _call(_ops.merge_attn_states, output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse)
    return output, output_lse


# ---- cache ----------------------------------------------------------------------------------------------------------


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes the keys and values of new tokens into their slots of the cache.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size], any stride in dimension 0.
        key_cache, value_cache: see the module; updated.
        slot_mapping: int64 [num_tokens], block * block_size + offset; a token with a negative slot is skipped.
        kv_cache_dtype, k_scale, v_scale: for fp8 caches, see the module.
    """
    _call(
        _ops.reshape_and_cache, key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )  # fmt: skip


def gather_cached_kv(key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values in these slots: the inverse of `reshape_and_cache`.

    Args:
        key_cache, value_cache: see the module; not fp8.
        slot_mapping: int64 [num_tokens]. The rows of negative slots are zeros (the raw op leaves them as they are).

    Returns:
        (key, value), [num_tokens, num_kv_heads, head_size] each.
    """
    _check_tensors("gather_cached_kv", value_cache=value_cache, slot_mapping=slot_mapping)
    key, value = value_cache.new_zeros((2, *slot_mapping.shape, *value_cache.shape[1:3])).unbind()
    _call(_ops.gather_cached_kv, key, value, key_cache, value_cache, slot_mapping)
    return key, value


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copies whole blocks within the caches of every layer (the copy of copy-on-write).

    Args:
        key_caches, value_caches: one cache a layer, [num_blocks, ...]; updated.
        block_mapping: int64 [num_pairs, 2], (source, target). A source may occur several times, a target once; no block
            may be both.
    """
    _call(_ops.copy_blocks, key_caches, value_caches, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copies blocks of one pool to blocks of another, which may be on another device.

    Between a GPU and pinned host memory the copy is asynchronous, on the current stream: keep both pools, and leave the
    host's alone, until the stream is done. Memory that is not pinned is copied run by run of adjacent blocks.

    Args:
        src: [num_src_blocks, ...].
        dst: [num_dst_blocks, ...], blocks shaped like those of src; updated.
        block_mapping: int64 [num_pairs, 2], (block of src, block of dst), every block of dst at most once.
    """
    _call(_ops.swap_blocks, src, dst, block_mapping)


# ---- layernorm ------------------------------------------------------------------------------------------------------


def rms_norm(input: Tensor, weight: Tensor, epsilon: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """out = input / sqrt(mean(input ** 2) + epsilon) * weight, over the last dimension (Zhang and Sennrich, 2019).

    Args:
        input: [..., hidden_size], evenly spaced rows.
        weight: [hidden_size].
        out: like input (it may be input); allocated by default.

    Returns:
        out.
    """
    _check_tensors("rms_norm", input=input)
    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    _call(_ops.rms_norm, out, input, weight, epsilon)
    return out


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """residual += input, then input = rms_norm(residual), both in place; the norm sees the unrounded sum.

    Args:
        input, residual: [..., hidden_size], evenly spaced rows; updated.
        weight: [hidden_size].

    Returns:
        (input, residual).
    """
    _call(_ops.fused_add_rms_norm, input, residual, weight, epsilon)
    return input, residual


# ---- pos_encoding ---------------------------------------------------------------------------------------------------


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embedding, in place (Su et al., "RoFormer", 2021).

    (x, y) -> (x cos - y sin, y cos + x sin) within a head's first rot_dim elements: with is_neox, x is element i of
    their first half and y element i of the second (GPT-NeoX, LLaMA); without, they are elements 2i and 2i + 1 (GPT-J).

    Args:
        positions: int64 [num_tokens].
        query: [num_tokens, num_heads, head_size] or [num_tokens, num_heads * head_size], any stride in dimension 0.
        key: likewise, with num_kv_heads; or None.
        cos_sin_cache: [max_position, rot_dim], rot_dim / 2 cosines, then as many sines; rot_dim <= head_size.

    Returns:
        (query, key).
    """
    _call(_ops.rotary_embedding, positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key


def rotary_embedding_neox(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """`rotary_embedding` with is_neox, and a key."""
    _call(_ops.rotary_embedding_neox, positions, query, key, head_size, cos_sin_cache)
    return query, key


# ---- activation -----------------------------------------------------------------------------------------------------


def silu_and_mul(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = silu(input[..., :d]) * input[..., d:] with silu(x) = x / (1 + exp(-x)) (the gate of SwiGLU, Shazeer 2020).

    Args:
        input: [..., 2 * d], evenly spaced rows.
        out: [..., d]; allocated by default.

    Returns:
        out.
    """
    return _activate_and_multiply(_ops.silu_and_mul, "silu_and_mul", input, out)


def mul_and_silu(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = input[..., :d] * silu(input[..., d:]); arguments as in `silu_and_mul`."""
    return _activate_and_multiply(_ops.mul_and_silu, "mul_and_silu", input, out)


def gelu_and_mul(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = gelu(input[..., :d]) * input[..., d:] with gelu(x) = x (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel,
    2016; the gate of GEGLU); arguments as in `silu_and_mul`."""
    return _activate_and_multiply(_ops.gelu_and_mul, "gelu_and_mul", input, out)


def gelu_tanh_and_mul(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = gelu_new(input[..., :d]) * input[..., d:]; arguments as in `silu_and_mul`."""
    return _activate_and_multiply(_ops.gelu_tanh_and_mul, "gelu_tanh_and_mul", input, out)


def gelu_new(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), GPT-2's gelu (Hendrycks and Gimpel, 2016).

    Args:
        input: [..., d], evenly spaced rows.
        out: like input (it may be input); allocated by default.

    Returns:
        out.
    """
    return _activate(_ops.gelu_new, "gelu_new", input, out)


def gelu_fast(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = 0.5 x (1 + tanh(0.7978845608 x (1 + 0.044715 x^2))); arguments as in `gelu_new`."""
    return _activate(_ops.gelu_fast, "gelu_fast", input, out)


def gelu_quick(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """out = x / (1 + exp(-1.702 x)) (Hendrycks and Gimpel, 2016); arguments as in `gelu_new`."""
    return _activate(_ops.gelu_quick, "gelu_quick", input, out)


def _activate(op: Callable[..., None], name: str, input: Tensor, out: Tensor | None) -> Tensor:
    _check_tensors(name, input=input)
    if out is None:
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
    _call(op, out, input)
    return out


def _activate_and_multiply(op: Callable[..., None], name: str, input: Tensor, out: Tensor | None) -> Tensor:
    _check_tensors(name, input=input)
    if out is None:
        *rows, width = input.shape or [0]
        out = input.new_empty((*rows, width // 2))
    _call(op, out, input)
    return out
