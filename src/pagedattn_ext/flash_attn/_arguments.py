"""What flash-attn's arguments and results are in the terms of the ops."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._adapters import refuse_bools, window_of
from ..ops._call import check_rank, check_tensors, to_int
from ._attend import FP8

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


def options_of(
    function: Callable[..., Any],
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    attention_chunk: int,
) -> dict[str, Any]:
    """Which tokens a row sees, and its logits, as keyword arguments of `ops.paged_attention`."""
    refuse_bools(function, softmax_scale=softmax_scale, softcap=softcap, attention_chunk=attention_chunk)
    if type(attention_chunk) is not int:
        attention_chunk = to_int(function.__name__, "attention_chunk", attention_chunk)
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"{function.__name__}: window_size: expected (left, right), got {window_size!r}") from None
    if type(left) is not int:
        left = None if left is None else to_int(function.__name__, "window_size", left)
    if type(right) is not int:
        right = None if right is None else to_int(function.__name__, "window_size", right)
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
        "attention_chunk": attention_chunk,
    }


def results_of(
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


def rows_of(tensor: Tensor) -> Tensor:
    """[..., num_heads, head_size] -> [num_rows, num_heads, head_size], each row contiguous."""
    rows = tensor.flatten(0, -3)
    return rows if rows.is_contiguous() or rows[:1].is_contiguous() else rows.contiguous()


def with_contiguous_heads(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def one_of(function: Callable[..., Any], **spellings: Tensor | None) -> Tensor | None:
    """The argument of several names that is given."""
    given = {name: tensor for name, tensor in spellings.items() if tensor is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise ValueError(f"{function.__name__}: {second}: expected None beside {first}, of which it is another name")
    return next(iter(given.values()), None)


def sinks_of(function: Callable[..., Any], q: Tensor, **spellings: Tensor | None) -> Tensor | None:
    """The sinks as the ops take them, fp32 [num_heads]."""
    sinks = one_of(function, **spellings)
    if sinks is None:
        return None
    if sinks.shape != (num_heads := q.shape[-2],):
        name = next(name for name, tensor in spellings.items() if tensor is not None)
        raise ValueError(f"{function.__name__}: {name}: expected shape [{num_heads}], got {list(sinks.shape)}")
    return sinks.float().contiguous()


def check_ranks(function: Callable[..., Any], **tensors: tuple[Tensor, int]) -> None:
    """The rank of queries, keys and values, and that the heads of queries are as wide as those of keys."""
    widths = []
    for name, (tensor, rank) in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dim() != rank:
            check_tensors(function.__name__, **{name: tensor})
            check_rank(function.__name__, name, tensor, rank)
        widths.append(tensor.shape[-1])
    if widths[0] != widths[1]:
        message = f"expected heads of {widths[1]} elements, as the keys have, got {widths[0]}"
        raise ValueError(f"{function.__name__}: q: {message}")


def check_new(function: Callable[..., Any], k_cache: Tensor, v_cache: Tensor, **tensors: tuple[Tensor, int]) -> None:
    """The rank of new keys and values, and that their heads are those of the caches."""
    for (name, (tensor, rank)), cache in zip(tensors.items(), (k_cache, v_cache), strict=True):
        check_rank(function.__name__, name, tensor, rank)
        if tensor.shape[-2:] != cache.shape[-2:]:
            expected, got = list(cache.shape[-2:]), list(tensor.shape[-2:])
            raise ValueError(f"{function.__name__}: {name}: expected heads {expected}, as in {name}_cache, got {got}")


def check_out(function: Callable[..., Any], out: Tensor | None, q: Tensor, v: Tensor) -> None:
    if out is None:
        return
    check_tensors(function.__name__, out=out)
    shape, dtype = (*q.shape[:-1], v.shape[-1]), torch.bfloat16 if q.dtype in FP8 else q.dtype
    if out.shape != shape or out.dtype != dtype or out.device != q.device:
        raise ValueError(
            f"{function.__name__}: out: expected shape {list(shape)}, {dtype} on {q.device}, got {list(out.shape)}, "
            f"{out.dtype} on {out.device}"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"{function.__name__}: out: expected memory for each element, got an expanded tensor")
