"""Rotary position embedding whose results are fp8, for rope.py. FlashInfer has these functions in `flashinfer.rope`.

A head has two parts: rope, which is rotated, and nope, which is not. Bad arguments raise ValueError or TypeError before
anything is written.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._adapters import (
    call_as,
    check_memory,
    check_real,
    check_scales,
    check_shape,
    converted_rows,
    refuse_gradients,
)
from .._index_checks import check_indices
from ..kv_cache import FP8_DTYPES
from ..ops._call import check_rank, check_tensors, given
from .page import as_fp16, check_layout, pages_of, pair_of, write_latents, write_slots

Function = Callable[..., Any]


def rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q_rope, k_rope, q_nope, k_nope) as fp8, the first two rotated, each times its scale and saturating.

    Args:
        q_rope, q_nope: [nnz, num_heads, any width]; None is no width.
        k_rope, k_nope: the same of keys, or [nnz, any width], as MLA's latent keys are.
        cos_sin_cache, pos_ids: as cos_sin_cache and positions of `apply_rope_with_cos_sin_cache`.
        quantize_dtype: float8_e4m3fn or float8_e5m2; by default that of the results that are given, or the first.
        q_rope_out, k_rope_out, q_nope_out, k_nope_out: written; allocated by default.
    """
    return _rope_quantize(
        rope_quantize_fp8, (q_rope, k_rope, q_nope, k_nope), cos_sin_cache, pos_ids, is_neox, quantize_dtype,
        quant_scale_q, quant_scale_kv, (q_rope_out, k_rope_out, q_nope_out, k_nope_out),
    )  # fmt: skip


def mla_rope_quantize_fp8(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor,
    k_nope: Tensor,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: Tensor | None = None,
    k_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    k_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rope_quantize_fp8`."""
    return _rope_quantize(
        mla_rope_quantize_fp8, (q_rope, k_rope, q_nope, k_nope), cos_sin_cache, pos_ids, is_neox, quantize_dtype,
        quant_scale_q, quant_scale_kv, (q_rope_out, k_rope_out, q_nope_out, k_nope_out),
    )  # fmt: skip


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: Tensor,
    k_rope: Tensor,
    q_nope: Tensor | None,
    k_nope: Tensor | None,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    is_neox: bool = True,
    quantize_dtype: torch.dtype | None = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope_quantize_fp8` of queries and keys, and of v, with keys and values appended to fp8 pages.

    Args:
        v: [nnz, num_kv_heads, head_dim]; None for MLA's latent keys.
        paged_kv_cache: (keys, values) as in `append_paged_kv_cache`; for MLA (k_nope, k_rope), [num_pages, page_size,
            width] each.
        kv_indices, kv_indptr, batch_indices, positions: as in `append_paged_kv_cache`.

    Returns:
        (q_rope, q_nope) as fp8.
    """
    function = rope_quantize_fp8_append_paged_kv_cache
    check_layout(function, kv_layout)
    parts = q_rope, k_rope, q_nope, k_nope
    _check_parts(function, parts)
    if (v is None) != (k_rope.dim() == 2):
        expected = "None for keys without heads" if v is not None else "values for keys with heads"
        raise ValueError(f"{function.__qualname__}: v: expected {expected}, got {'None' if v is None else 'a tensor'}")
    rope_width, nope_width = k_rope.shape[-1], 0 if k_nope is None else k_nope.shape[-1]
    if v is None:
        caches, widths = pair_of(function, "paged_kv_cache", paged_kv_cache), (nope_width, rope_width)
    else:
        caches, width = pages_of(function, "paged_kv_cache", paged_kv_cache, kv_layout), rope_width + nope_width
        widths = width, width
    dtype = caches[0].dtype if quantize_dtype is None else quantize_dtype
    for cache, width in zip(caches, widths, strict=True):
        expected_shape = [*caches[0].shape[:1], page_size, *k_rope.shape[1:-1], width]
        if [*cache.shape] != expected_shape or cache.dtype != dtype:
            raise ValueError(
                f"{function.__qualname__}: paged_kv_cache: expected shape {expected_shape} of {dtype}, got "
                f"{list(cache.shape)} of {cache.dtype}"
            )
    check_shape(function, "v", v, (*k_rope.shape[:2], widths[1]))
    refuse_gradients(function, v=v)
    check_real(function, v=v)
    check_indices(function, "positions", positions, len(q_rope))
    slots = call_as(
        function, SLOT_NAMES, ops.compute_slot_mapping, positions, kv_indices, page_size, caches[0].shape[0],
        batch_indices=batch_indices, block_start_loc=kv_indptr,
    )  # fmt: skip
    numbers, outs = _rotated_and_scaled(
        function, parts, cos_sin_cache, pos_ids, is_neox, dtype, quant_scale_q, quant_scale_kv,
        (q_rope_out, None, q_nope_out, None),
    )  # fmt: skip
    k_rope, k_nope = outs[1].copy_(numbers[1]), outs[3].copy_(numbers[3])
    if v is None:
        pairs = [
            (name, as_fp16(function, name, rows), "paged_kv_cache", as_fp16(function, "paged_kv_cache", cache))
            for name, rows, cache in (("k_nope", k_nope, caches[0]), ("k_rope", k_rope, caches[1]))
        ]
        write_latents(function, pairs, slots)
    else:
        value = _scaled(v, quant_scale_kv, dtype).to(dtype)
        write_slots(function, CACHE_NAMES, torch.cat([k_rope, k_nope], -1), value, *caches, slots)
    return outs[0].copy_(numbers[0]), outs[2].copy_(numbers[2])


SLOT_NAMES = {"block_tables": "kv_indices", "block_start_loc": "kv_indptr", "block_size": "page_size"}
CACHE_NAMES = dict.fromkeys(("key_cache", "value_cache"), "paged_kv_cache")
CACHE_NAMES |= {"key": "k_rope", "value": "v"}


Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # q_rope, k_rope, q_nope, k_nope
Optionals = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _rope_quantize(
    function: Function,
    parts: Parts,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool,
    dtype: torch.dtype | None,
    scale_q: float,
    scale_kv: float,
    outs: Optionals,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """outs: for each of the parts."""
    _check_parts(function, parts)
    numbers, memory = _rotated_and_scaled(
        function, parts, cos_sin_cache, pos_ids, is_neox, dtype, scale_q, scale_kv, outs
    )
    q_rope, k_rope, q_nope, k_nope = (out.copy_(each) for each, out in zip(numbers, memory, strict=True))
    return q_rope, k_rope, q_nope, k_nope


def _check_parts(function: Function, parts: Parts) -> None:
    q_rope, k_rope, q_nope, k_nope = parts
    check_tensors(function.__qualname__, q_rope=q_rope, k_rope=k_rope)
    refuse_gradients(function, q_rope=q_rope, k_rope=k_rope, q_nope=q_nope, k_nope=k_nope)
    check_real(function, q_rope=q_rope, k_rope=k_rope, q_nope=q_nope, k_nope=k_nope)
    check_rank(function.__qualname__, "q_rope", q_rope, 3)
    if k_rope.dim() not in (2, 3):
        expected, got = "2 or 3 dimensions", list(k_rope.shape)
        raise ValueError(f"{function.__qualname__}: k_rope: expected {expected}, got shape {got}")
    for name, nope, rope in (("q_nope", q_nope, q_rope), ("k_nope", k_nope, k_rope)):
        if nope is None:
            continue
        check_tensors(function.__qualname__, **{name: nope})
        if nope.dim() != rope.dim() or nope.shape[:-1] != rope.shape[:-1]:
            expected, got = ", ".join(map(str, rope.shape[:-1])), list(nope.shape)
            raise ValueError(f"{function.__qualname__}: {name}: expected shape [{expected}, *], got {got}")


def _rotated_and_scaled(
    function: Function,
    parts: Parts,
    cos_sin_cache: Tensor,
    pos_ids: Tensor,
    is_neox: bool,
    dtype: torch.dtype | None,
    scale_q: float,
    scale_kv: float,
    outs: Optionals,
) -> tuple[list[Tensor], list[Tensor]]:
    """For each of the parts, which `_check_parts` has seen, the numbers that fp8 is to hold, in fp32, and memory of
    fp8 for them, which is not written."""
    q_rope, k_rope, q_nope, k_nope = parts
    named_outs = dict(zip(("q_rope_out", "k_rope_out", "q_nope_out", "k_nope_out"), outs, strict=True))
    check_tensors(function.__qualname__, cos_sin_cache=cos_sin_cache, pos_ids=pos_ids, **given(named_outs))
    check_real(function, cos_sin_cache=cos_sin_cache)
    check_scales(function, quant_scale_q=scale_q, quant_scale_kv=scale_kv)
    check_indices(function, "pos_ids", pos_ids, len(q_rope))
    dtype = next((out.dtype for out in outs if out is not None), torch.float8_e4m3fn) if dtype is None else dtype
    if dtype not in FP8_DTYPES:
        expected = "torch.float8_e4m3fn or torch.float8_e5m2"
        raise TypeError(f"{function.__qualname__}: quantize_dtype: expected {expected}, got {dtype!r}")
    whole = (
        q_rope, k_rope,
        q_rope[..., :0] if q_nope is None else q_nope,
        k_rope[..., :0] if k_nope is None else k_nope,
    )  # fmt: skip
    memory = []
    for part, (name, out) in zip(whole, named_outs.items(), strict=True):
        check_memory(function, name, out, part.shape, dtype, part.device)
        own = torch.empty_like(part, dtype=dtype, memory_format=torch.contiguous_format) if out is None else out
        memory.append(own)
    query, key = (part.float().contiguous() for part in whole[:2])
    query, key = (each.clone() if each is part else each for each, part in zip((query, key), whole[:2], strict=True))
    names = {"query": "q_rope", "key": "k_rope", "positions": "pos_ids"}
    heads = key[:, None] if key.dim() == 2 else key
    if cos_sin_cache.dtype != torch.float32:
        cos_sin_cache = converted_rows(cos_sin_cache, pos_ids, Tensor.float)
    call_as(function, names, ops.rotary_embedding, pos_ids.long(), query, heads, query.shape[2], cos_sin_cache, is_neox)
    rotated = query, key, *whole[2:]
    return [_scaled(part, scale, dtype) for part, scale in zip(rotated, (scale_q, scale_kv) * 2, strict=True)], memory


def _scaled(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """fp32, saturated for dtype."""
    largest = torch.finfo(dtype).max
    return (values.float() * scale).clamp(-largest, largest)
