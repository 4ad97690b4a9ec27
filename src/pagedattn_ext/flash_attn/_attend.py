"""The attention ops with what flash-attn takes and the ops do not: heads of any width, scales by head, fp8 queries,
rows that are not used.

`attend_pages` and `attend_ragged` turn such arguments into ones that the ops take, one kind after the other. Their
errors are in the terms of the ops: `call_as` gives them those of the caller.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from .._adapters import (
    call_as,
    check_scales,
    converted_rows,
    is_one_scale,
    is_recorded,
    refuse_bools,
    refuse_expanded,
    scale_tensor,
    sequences_of_rows,
    to_fp32,
    write_to_slots,
)
from .._index_checks import values_are_checked
from ..kv_cache import FP8_DTYPES
from ..ops._call import call, check_float, check_rank, check_tensors, given

Function = Callable[..., Any]
Keys = tuple[Tensor, Tensor, Tensor, Tensor]  # key_cache, value_cache, block_tables, seq_lens


class NewTokens(NamedTuple):
    """Keys and values that are written to the cache first, as `append_and_attend` takes them. starts: [num_seqs + 1],
    where those of each sequence begin; None: each sequence has one."""

    key: Tensor
    value: Tensor
    starts: Tensor | None

    def lens(self) -> Tensor | int:
        """How many each sequence has."""
        return 1 if self.starts is None else self.starts.diff()


class Extras(NamedTuple):
    """Arguments of flash-attn that the ops do not take as they are."""

    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    seqused_q: Tensor | None = None

    def need_pages(self, query: Tensor) -> bool:
        """Whether attention without a cache needs one."""
        return self.seqused_q is not None or query.dtype in FP8_DTYPES


def attend_pages(
    function: Function,
    query: Tensor,
    keys: Keys,
    starts: Tensor | None,
    options: dict[str, Any],
    extras: Extras,
    new: NewTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.paged_attention` of query, `keys`, query_start_loc and the options of `options_of`. With new tokens
    `ops.append_and_attend`: seq_lens are the lengths without them.

    fp8 queries give bf16, as in FlashAttention-3. Rows that are not used give zeros and an lse of -inf.
    """
    key_cache, value_cache, block_tables, seq_lens = keys
    has_scales = extras.k_descale is not None or extras.v_descale is not None
    if extras.seqused_q is not None:
        return _of_used_rows(function, query, keys, starts, extras.seqused_q, options, extras._replace(seqused_q=None))
    if (
        query.dtype in FP8_DTYPES
        or (has_scales and _scales_differ(extras))
        or (new is not None and _are_in_fp8(new, key_cache))
    ):
        return _scaled(function, query.flatten(0, -3), keys, starts, options, extras, new)
    if not _are_of_op(key_cache, value_cache):
        _check_widths(query, key_cache)
        if new is not None:
            _check_new_widths(new, key_cache, value_cache)
        _check_batch(query.flatten(0, -3), keys, starts)
        width = _width_of_op(key_cache, value_cache)
        key_copy, value_copy = copied_pages(keys, new, partial(_widened, width=width))
        wide_new = None if new is None else NewTokens(_widened(new.key, width), _widened(new.value, width), new.starts)
        wide = key_copy, value_copy, block_tables, seq_lens
        out, lse = attend_pages(function, _widened(query, width), wide, starts, options, extras, wide_new)
        if new is not None:
            write_back(function, new, block_tables, seq_lens, (key_cache, key_copy), (value_cache, value_copy))
        return out[..., : value_cache.shape[-1]].contiguous(), lse
    options = {**options, **_scales(function, extras)} if has_scales else options.copy()
    if starts is not None:
        options["query_start_loc"] = starts
    if new is None:
        return call("paged_attention", query, *keys, **options)
    if new.starts is not None:
        options["key_start_loc"] = new.starts
    return call("append_and_attend", query, new.key, new.value, *keys, **options)


def attend_ragged(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`ops.varlen_attention` with the options of `options_of`."""
    if _are_of_op(key, value):
        return call("varlen_attention", query, key, value, starts, key_starts, **options)
    _check_widths(query, key)
    width = _width_of_op(key, value)
    wide_key, wide_value = _widened(key, width), _widened(value, width)
    out, lse = call("varlen_attention", _widened(query, width), wide_key, wide_value, starts, key_starts, **options)
    return out[..., : value.shape[-1]].contiguous(), lse


def _check_batch(query: Tensor, keys: Keys, starts: Tensor | None) -> None:
    """What the op would check, for what computes with the batch before the op sees it. Values are left to the op, so
    that torch.compile and a CPUGraph take what computes."""
    key_cache, _, block_tables, seq_lens = keys
    check_tensors("paged_attention", block_tables=block_tables)
    check_rank("paged_attention", "block_tables", block_tables, 2)
    if key_cache.shape[2] == 0:
        raise ValueError(f"paged_attention: key_cache: expected at least 1 KV head, got shape {list(key_cache.shape)}")
    num_seqs, num_rows = block_tables.shape[0], query.shape[0]
    if seq_lens.shape != (num_seqs,):
        raise ValueError(f"paged_attention: seq_lens: expected shape [{num_seqs}], got {list(seq_lens.shape)}")
    if starts is None:
        if num_rows != num_seqs:
            raise ValueError(f"paged_attention: query: expected a row for each of {num_seqs} sequences, got {num_rows}")
    elif starts.shape != (num_seqs + 1,):
        expected, got = f"shape [{num_seqs + 1}]", list(starts.shape)
        raise ValueError(f"paged_attention: query_start_loc: expected {expected}, got {got}")
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(
            f"paged_attention: query: expected a number of heads that is a multiple of the {key_cache.shape[2]} KV "
            f"heads, got {query.shape[1]}"
        )


# ---- heads of any width ----------------------------------------------------------------------------------------------


def _are_of_op(keys: Tensor, values: Tensor) -> bool:
    width = keys.shape[-1]
    return width == values.shape[-1] and width * keys.itemsize % 16 == 0


def _width_of_op(keys: Tensor, values: Tensor) -> int:
    """The head size that the ops need for such keys and values: one for both, a multiple of 16 bytes."""
    unit = 16 // keys.itemsize
    return -(-max(keys.shape[-1], values.shape[-1]) // unit) * unit


def _check_widths(query: Tensor, keys: Tensor) -> None:
    """What the op would check, and cannot see of widened heads."""
    if query.shape[-1] != keys.shape[-1]:
        expected = f"expected heads of {keys.shape[-1]} elements, as the keys have"
        raise ValueError(f"paged_attention: query: {expected}, got {query.shape[-1]}")


def _check_new_widths(new: NewTokens, key_cache: Tensor, value_cache: Tensor) -> None:
    for name, tensor, cache in (("key", new.key, key_cache), ("value", new.value, value_cache)):
        if tensor.shape[-1] != cache.shape[-1]:
            expected = f"expected heads of {cache.shape[-1]} elements, as in {name}_cache"
            raise ValueError(f"append_and_attend: {name}: {expected}, got {tensor.shape[-1]}")


def _widened(tensor: Tensor, width: int) -> Tensor:
    """A copy with zeros behind each head. They change no product of queries and keys, and the results are cut."""
    return pad(tensor, (0, width - tensor.shape[-1]))


# ---- copies of pages -------------------------------------------------------------------------------------------------


def copied_pages(keys: Keys, new: NewTokens | None, convert: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """convert(key_cache) and convert(value_cache), in memory of their own, which holds the pages of the batch, under
    the same numbers. The others may hold anything."""
    key_cache, value_cache, pages, seq_lens = keys
    if pages.is_cpu and not is_recorded(pages.device):  # how many are used is a value
        seq_lens = seq_lens + (0 if new is None else new.lens())
        pages = pages[torch.arange(pages.shape[1]) * key_cache.shape[1] < seq_lens[:, None]]
    return converted_rows(key_cache, pages, convert), converted_rows(value_cache, pages, convert)


def write_back(
    function: Function,
    new: NewTokens,
    block_tables: Tensor,
    cached_lens: Tensor,
    keys_and_copy: tuple[Tensor, Tensor],
    values_and_copy: tuple[Tensor, Tensor],
) -> None:
    """Writes to caches what the op has appended to `copied_pages` of them, and nothing else: other tokens may be those
    of other threads."""
    refuse_expanded(function, key_cache=keys_and_copy[0], value_cache=values_and_copy[0])
    num_blocks, page_size = keys_and_copy[0].shape[:2]
    sequences, positions = None, cached_lens.contiguous()
    if new.starts is not None:
        sequences, positions = ops.batch_positions(new.starts, positions, new.key.shape[:-2].numel())
    slots = ops.compute_slot_mapping(positions, block_tables, page_size, num_blocks, batch_indices=sequences)
    places = slots // page_size, slots % page_size
    for cache, copy in (keys_and_copy, values_and_copy):
        write_to_slots(cache, slots, copy[places][..., : cache.shape[-1]], slots >= 0, page_size)


# ---- scales ----------------------------------------------------------------------------------------------------------


def _scales(function: Function, extras: Extras) -> dict[str, Any]:
    """The scales of an fp8 cache that are given, as keyword arguments of the ops."""
    scales = {
        "k_scale": scale_tensor(function, "k_descale", extras.k_descale),
        "v_scale": scale_tensor(function, "v_descale", extras.v_descale),
    }
    return given(scales)


def _scales_differ(extras: Extras) -> bool:
    """Whether the scales of the cache differ by head or sequence."""
    return not (is_one_scale(extras.k_descale) and is_one_scale(extras.v_descale))


def _are_in_fp8(new: NewTokens, key_cache: Tensor) -> bool:
    """Whether new tokens are the numbers of an fp8 cache."""
    return new.key.dtype in FP8_DTYPES and new.key.dtype == new.value.dtype == key_cache.dtype


def _scaled(
    function: Function,
    query: Tensor,
    keys: Keys,
    starts: Tensor | None,
    options: dict[str, Any],
    extras: Extras,
    new: NewTokens | None,
) -> tuple[Tensor, Tensor]:
    """With queries and results in fp32 that carry the scales: a scale of keys is one of queries just as well, and a
    scale of values one of results. A cache that is not fp8 is not scaled.

    query: [num_rows, num_heads, head_size].
    """
    _check_batch(query, keys, starts)
    num_kv_heads = keys[0].shape[2]
    q_scale, k_scale, v_scale = (
        _by_row(function, name, getattr(extras, name), starts, query, num_kv_heads)
        for name in ("q_descale", "k_descale", "v_descale")
    )
    if keys[0].dtype in FP8_DTYPES and query.dtype not in FP8_DTYPES:
        check_float("paged_attention", query=query)
    if new is not None:
        new = _scaled_new(function, keys[0], extras, new)
    extras = extras._replace(k_descale=None, v_descale=None)
    if keys[0].dtype not in FP8_DTYPES:
        if query.dtype in FP8_DTYPES:
            expected = f"{keys[0].dtype}, the dtype of the keys"
            raise TypeError(f"paged_attention: query: expected {expected}, got {query.dtype}")
        return attend_pages(function, query, keys, starts, options, extras, new)
    rotary = {name: options[name] for name in ("rotary_cos", "rotary_sin") if name in options}
    check_float("append_and_attend", **rotary)
    options = options | {name: tensor.float() for name, tensor in rotary.items()}
    scaled = query.float() * k_scale
    if query.dtype in FP8_DTYPES:
        scaled = scaled * q_scale
    dtype = torch.bfloat16 if query.dtype in FP8_DTYPES else query.dtype
    out, lse = attend_pages(function, scaled, keys, starts, options, extras, new)
    return (out * v_scale).to(dtype), lse


def _scaled_new(function: Function, key_cache: Tensor, extras: Extras, new: NewTokens) -> NewTokens:
    """The new tokens divided by the scales of an fp8 cache. Those that are fp8 themselves are the cache's numbers."""
    key, value = new.key.flatten(0, -3), new.value.flatten(0, -3)
    if _are_in_fp8(new, key_cache):
        return NewTokens(key.float(), value.float(), new.starts)
    by_row = partial(call_as, function, {"start_loc": "key_start_loc"}, _by_row, function)
    k_scale = by_row("k_descale", extras.k_descale, new.starts, key, key.shape[1])
    v_scale = by_row("v_descale", extras.v_descale, new.starts, value, value.shape[1])
    if key_cache.dtype not in FP8_DTYPES:
        return new
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype in FP8_DTYPES:
            expected = f"no fp8, or {key_cache.dtype} of both, as the caches have"
            raise TypeError(f"append_and_attend: {name}: expected {expected}, got {tensor.dtype}")
    check_float("append_and_attend", key=key, value=value)
    return NewTokens(key.float() / k_scale, value.float() / v_scale, new.starts)


def _by_row(
    function: Function, name: str, scale: float | Tensor | None, starts: Tensor | None, rows: Tensor, num_kv_heads: int
) -> Tensor | float:
    """The scale of each row and head, fp32 [num_rows, num_heads, 1], or one for all."""
    if scale is None:
        return 1.0
    if not isinstance(scale, Tensor):
        check_scales(function, **{name: scale})
        return scale
    refuse_bools(function, **{name: scale})
    scale = to_fp32(function, name, scale)
    if is_one_scale(scale):
        return scale[(0,) * scale.dim()]
    num_rows, num_heads = rows.shape[:2]
    num_seqs = num_rows if starts is None else starts.shape[0] - 1
    if scale.shape != (num_seqs, num_kv_heads):
        raise ValueError(
            f"{function.__name__}: {name}: expected one element, or shape [{num_seqs}, {num_kv_heads}] (a scale for "
            f"each sequence and KV head), got shape {list(scale.shape)}"
        )
    of_rows = scale if starts is None else scale[sequences_of_rows(starts, num_rows)[0]]
    return of_rows.repeat_interleave(num_heads // num_kv_heads, 1)[..., None]


# ---- rows -----------------------------------------------------------------------------------------------------------


def _of_used_rows(
    function: Function,
    query: Tensor,
    keys: Keys,
    starts: Tensor | None,
    used: Tensor,
    options: dict[str, Any],
    extras: Extras,
) -> tuple[Tensor, Tensor]:
    """Of each sequence the first `used` rows, which are its last tokens."""
    _check_batch(query, keys, starts)
    num_rows = query.shape[0]
    if starts is None:
        starts = torch.arange(num_rows + 1, device=query.device)
    elif values_are_checked(starts) and starts[-1] != num_rows:  # nobody else sees the rows behind
        expected = f"the number of query rows, {num_rows}, last"
        raise ValueError(f"paged_attention: query_start_loc: expected {expected}, got {starts[-1]}")
    room = starts.diff()
    check_tensors(function.__name__, seqused_q=used)
    if used.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{function.__name__}: seqused_q: expected dtype int32 or int64, got {used.dtype}")
    if used.shape != room.shape or (values_are_checked(used) and not ((used >= 0) & (used <= room)).all()):
        raise ValueError(
            f"{function.__name__}: seqused_q: expected for each of the {len(room)} sequences 0 to its rows "
            f"{room.tolist()}, got {used.tolist()}"
        )
    sequence, place = sequences_of_rows(starts, num_rows)
    rows = (place < used[sequence]).nonzero()[:, 0]
    used_starts = pad(used.cumsum(0), (1, 0))
    used_out, used_lse = attend_pages(function, query[rows], keys, used_starts, options, extras)
    out = used_out.new_zeros(num_rows, *used_out.shape[1:])
    lse = used_lse.new_full((num_rows, used_lse.shape[1]), -torch.inf)
    out[rows], lse[rows] = used_out, used_lse
    return out, lse
