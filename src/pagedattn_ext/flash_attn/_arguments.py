"""What flash-attn's arguments and results are in the terms of the ops."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._adapters import check_memory, to_fp32, window_of
from ..kv_cache import FP8_DTYPES
from ..ops._call import check_bool, check_tensors, given, refuse_bools, to_int

WindowSize = Sequence[int | None]  # (left, right), inclusive; None or less than 0 is no window

# What flash-attn calls the arguments of the ops.
NAMES = {"query": "q", "key": "k", "value": "v", "scale": "softmax_scale", "k_scale": "k_descale"}
NAMES |= {"v_scale": "v_descale", "sliding_window": "window_size", "right_window": "window_size"}
NAMES |= dict.fromkeys(("query_start_loc", "start_loc"), "cu_seqlens_q")
NAMES |= {"key_start_loc": "cu_seqlens_k", "block_tables": "block_table"}
OF_KEYS = NAMES | {"key_cache": "k", "value_cache": "v"}
OF_OFFSETS = OF_KEYS | {"seq_lens": "cu_seqlens_k"}
OF_LENGTHS = OF_KEYS | {"seq_lens": "seqused_k"}
OF_TOKENS = OF_KEYS | {"first_blocks": "cu_seqlens_k", "end_blocks": "cu_seqlens_k", "seq_lens": "seqused_k"}
OF_TOKENS |= {"max_num_blocks_per_seq": "max_seqlen_k"}
OF_CACHES = NAMES | {"key_cache": "k_cache", "value_cache": "v_cache", "seq_lens": "cache_seqlens"}
OF_CACHES |= {"cached_lens": "cache_seqlens", "key_start_loc": "cu_seqlens_k_new"}
OF_CACHES |= {"num_new_tokens": "rows of k", "num_tokens": "rows", "left_padding": "cache_leftpad"}
OF_CACHES |= {"rotary_lens": "rotary_seqlens"}
OF_PAGE_TABLES = OF_CACHES | {"block_tables": "page_table"}
OF_SEQUENCES = OF_CACHES | dict.fromkeys(("block_tables", "first_blocks", "end_blocks"), "k_cache")
OF_BATCHES = OF_CACHES | dict.fromkeys(("block_tables", "first_blocks", "end_blocks"), "cache_batch_idx")


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
    if type(softcap) is not float or type(attention_chunk) is not int or softmax_scale is not None:
        refuse_bools(name, softmax_scale=softmax_scale, softcap=softcap, attention_chunk=attention_chunk)
        attention_chunk = to_int(name, "attention_chunk", attention_chunk)
    if type(causal) is not bool:
        check_bool(name, "causal", causal)
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"{name}: window_size: expected (left, right), got {window_size!r}") from None
    if type(left) is not int:
        left = None if left is None else to_int(name, "window_size", left)
    if type(right) is not int:
        right = None if right is None else to_int(name, "window_size", right)
    options: dict[str, Any] = {"scale": max(q.shape[-1], 1) ** -0.5 if softmax_scale is None else softmax_scale}
    options |= given({"sliding_window": window_of(left)})
    if not causal:
        options["causal"] = False
        if right is not None and right >= 0:
            options["right_window"] = right
    if softcap != 0:
        options["softcap"] = softcap
    if sinks is not None:
        options["sinks"] = sinks
    if alibi_slopes is not None:
        check_tensors(name, alibi_slopes=alibi_slopes)
        options["alibi_slopes"] = alibi_slopes[0] if alibi_slopes.shape[:-1] == (1,) else alibi_slopes.contiguous()
    if attention_chunk != 0:
        options["attention_chunk"] = attention_chunk
    return options


def results_of(
    q: Tensor, attended: Tensor, lse: Tensor, out: Tensor | None, *, return_lse: bool, return_attn_probs: bool = False
) -> Any:
    """What a function returns, of the op's results for `rows_of` q."""
    if attended.dim() != q.dim():  # [num_rows, ...], of sequences of one length
        attended = attended.view(*q.shape[:-1], attended.shape[-1])
    if out is not None:
        attended = out.copy_(attended)
    if not (return_lse or return_attn_probs):
        return attended
    lse = lse.view(*q.shape[:-1]).transpose(-2, -1).contiguous()
    return (attended, lse, q.new_empty(0)) if return_attn_probs else (attended, lse)


def rows_of(tensor: Tensor) -> Tensor:
    """[..., num_heads, head_size] as it is if it is contiguous, otherwise [num_rows, num_heads, head_size], each row
    contiguous."""
    if tensor.is_contiguous():
        return tensor
    rows = tensor.flatten(0, -3)
    return rows if rows[:1].is_contiguous() else rows.contiguous()


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


def sinks_of(
    function: Callable[..., Any], q: Tensor, names: dict[str, str], **spellings: Tensor | None
) -> tuple[Tensor | None, dict[str, str]]:
    """The sinks as the ops take them, fp32 [num_heads], and the names with what the caller calls them."""
    name, sinks = one_of(function, **spellings)
    if sinks is None:
        return None, names
    check_tensors(function.__name__, **{name: sinks})
    if sinks.shape != (num_heads := q.shape[-2],):
        raise ValueError(f"{function.__name__}: {name}: expected shape [{num_heads}], got {list(sinks.shape)}")
    return to_fp32(function, name, sinks).contiguous(), names | {"sinks": name}


def check_out(function: Callable[..., Any], out: Tensor | None, q: Tensor, v: Tensor) -> None:
    if out is None:
        return
    dtype = torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype
    check_memory(function, "out", out, (*q.shape[:-1], v.shape[-1]), dtype, q.device)
