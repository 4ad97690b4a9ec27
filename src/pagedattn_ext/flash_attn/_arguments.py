"""What flash-attn's arguments and results are in the terms of the ops."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops._call import check_bool, check_rank, check_tensors, refuse_bools, to_int
from ._attend import FP8

WindowSize = tuple[int | None, int | None]  # (left, right), inclusive; None or less than 0 is no window

# What flash-attn calls the arguments of the ops.
NAMES = {"query": "q", "key": "k", "value": "v", "scale": "softmax_scale", "k_scale": "k_descale"}
NAMES |= {"v_scale": "v_descale", "sliding_window": "window_size", "right_window": "window_size"}
NAMES |= {"query_start_loc": "cu_seqlens_q", "key_start_loc": "cu_seqlens_k", "block_tables": "block_table"}
OF_KEYS = NAMES | {"key_cache": "k", "value_cache": "v"}
OF_OFFSETS = OF_KEYS | {"seq_lens": "cu_seqlens_k"}
OF_LENGTHS = OF_KEYS | {"seq_lens": "seqused_k"}
OF_TOKENS = OF_KEYS | {"first_blocks": "cu_seqlens_k", "end_blocks": "cu_seqlens_k", "seq_lens": "seqused_k"}
OF_TOKENS |= {"max_num_blocks_per_seq": "max_seqlen_k"}
OF_CACHES = NAMES | {"key_cache": "k_cache", "value_cache": "v_cache", "seq_lens": "cache_seqlens"}
OF_CACHES |= dict.fromkeys(("positions", "first_positions"), "cache_seqlens")
OF_CACHES |= {"start_loc": "cu_seqlens_k_new", "num_tokens": "rows of k"}
OF_CACHES |= {"cos_sin_cache": "rotary_cos", "sin_cache": "rotary_sin"}


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
    """Which tokens a row sees, and its logits, as keyword arguments of the attention ops. Those that the ops have by
    default are left out."""
    name = function.__name__
    refuse_bools(name, softmax_scale=softmax_scale, softcap=softcap, attention_chunk=attention_chunk)
    check_bool(name, "causal", causal)
    if type(attention_chunk) is not int:
        attention_chunk = to_int(name, "attention_chunk", attention_chunk)
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"{function.__name__}: window_size: expected (left, right), got {window_size!r}") from None
    if type(left) is not int:
        left = None if left is None else to_int(function.__name__, "window_size", left)
    if type(right) is not int:
        right = None if right is None else to_int(function.__name__, "window_size", right)
    options: dict[str, Any] = {"scale": max(q.shape[-1], 1) ** -0.5 if softmax_scale is None else softmax_scale}
    if left is not None and left >= 0:
        options["sliding_window"] = left + 1  # it counts the row's own token
    if not causal:
        options["causal"] = False
        if right is not None and right >= 0:
            options["right_window"] = right
    if softcap != 0:
        options["softcap"] = softcap
    if sinks is not None:
        options["sinks"] = sinks
    if alibi_slopes is not None:
        options["alibi_slopes"] = alibi_slopes[0] if alibi_slopes.shape[:-1] == (1,) else alibi_slopes.contiguous()
    if attention_chunk != 0:
        options["attention_chunk"] = attention_chunk
    return options


def results_of(
    q: Tensor, attended: Tensor, lse: Tensor, out: Tensor | None, *, return_lse: bool, return_attn_probs: bool = False
) -> Any:
    """What a function returns, of the op's [num_rows, num_heads, head_size] and [num_rows, num_heads]."""
    if q.dim() == 4:  # sequences of one length
        width = attended.shape[-1]
        attended = attended.view_as(q) if width == q.shape[-1] else attended.view(*q.shape[:-1], width)
    if out is not None:
        attended = out.copy_(attended)
    if not (return_lse or return_attn_probs):
        return attended
    lse = lse.view(*q.shape[:-1]).transpose(-2, -1).contiguous()
    return (attended, lse, q.new_empty(0)) if return_attn_probs else (attended, lse)


def rows_of(tensor: Tensor) -> Tensor:
    """[..., num_heads, head_size] -> [num_rows, num_heads, head_size], each row contiguous."""
    rows = tensor if tensor.dim() == 3 else tensor.flatten(0, -3)
    return rows if rows.is_contiguous() or rows[:1].is_contiguous() else rows.contiguous()


def with_contiguous_heads(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def one_of(function: Callable[..., Any], **spellings: Tensor | None) -> tuple[str, Tensor | None]:
    """The argument of several names that is given, behind its name."""
    first, found = "", None
    for name, tensor in spellings.items():
        if tensor is None:
            continue
        if found is not None:
            raise ValueError(f"{function.__name__}: {name}: expected None beside {first}, of which it is another name")
        first, found = name, tensor
    return first, found


def sinks_of(function: Callable[..., Any], q: Tensor, **spellings: Tensor | None) -> Tensor | None:
    """The sinks as the ops take them, fp32 [num_heads]."""
    name, sinks = one_of(function, **spellings)
    if sinks is None:
        return None
    if sinks.shape != (num_heads := q.shape[-2],):
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
        if tensor.dim() != rank:
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
