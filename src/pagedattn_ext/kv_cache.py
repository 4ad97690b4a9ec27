"""Allocation of paged caches."""

from math import prod
from typing import Literal

import torch
from torch import Tensor

from ._C import INT8_SCALE_ROWS, MAX_BLOCK_SIZE
from ._C import MAX_HEAD_SIZE as MAX_HEAD_SIZE
from .huge_pages import empty_huge_pages

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CACHE_DTYPES = (*FLOAT_DTYPES, *FP8_DTYPES, torch.int8)
LAYOUTS = ("chunked", "nhd")


def allocate_kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    num_layers: int = 1,
    pin_memory: bool = False,
    layout: Literal["chunked", "nhd"] = "chunked",
) -> list[tuple[Tensor, Tensor]]:
    """The (key_cache, value_cache) pair of each layer, not initialised; the layout is described in `pagedattn_ext.ops`.

    On the CPU the memory is in huge pages where the system grants them. The system gives memory when it is first
    written.

    Args:
        num_blocks: blocks of each layer.
        num_kv_heads: KV heads.
        head_size: elements of a head, a multiple of 16 / element size up to 512.
        block_size: tokens of a block, a power of two from 1 to 256; in the layout "nhd" any number from 1 on. Attention
            over int8 takes blocks from 8 on.
        dtype: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8 (on the CPU, in the layout "chunked").
        device: where the caches lie.
        num_layers: pairs to allocate.
        pin_memory: in page-locked memory, for asynchronous copies to and from a CUDA device (CPU only; needs CUDA).
        layout: "chunked" is a 5-D key cache and a 4-D value cache. "nhd" is two caches of [num_blocks, block_size,
            num_kv_heads, head_size].

    Raises TypeError for a wrong type and ValueError for a wrong size, before anything is allocated. On the CPU it
    raises MemoryError if there is not enough memory.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"allocate_kv_cache: dtype: expected a torch.dtype, got {type(dtype).__name__}")
    if dtype not in CACHE_DTYPES:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in CACHE_DTYPES)
        raise TypeError(f"allocate_kv_cache: dtype: expected one of {expected}, got {dtype}")
    if layout not in LAYOUTS:
        raise ValueError(f"allocate_kv_cache: layout: expected one of {', '.join(LAYOUTS)}, got {layout}")
    device = _device(device)
    if dtype == torch.int8:
        if layout != "chunked":
            raise ValueError(f"allocate_kv_cache: layout: expected chunked for int8, got {layout}")
        if device.type != "cpu":
            raise ValueError(f"allocate_kv_cache: device: expected cpu for int8, got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"allocate_kv_cache: device: expected cpu, as torch finds no CUDA device, got {device}")
    x = 16 // dtype.itemsize
    name = "allocate_kv_cache"
    _check_size(name, "num_blocks", num_blocks, 0)
    _check_size(name, "num_kv_heads", num_kv_heads, 1)
    _check_size(name, "head_size", head_size, x, MAX_HEAD_SIZE)
    _check_size(name, "block_size", block_size, 1, None if layout == "nhd" else MAX_BLOCK_SIZE)
    _check_size(name, "num_layers", num_layers, 0)
    if head_size != padded_head_size(head_size, dtype):
        raise ValueError(f"allocate_kv_cache: head_size: expected a multiple of {x} for {dtype}, got {head_size}")
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    if layout == "nhd":
        key_shape = value_shape = (num_blocks, block_size, num_kv_heads, head_size)
    else:
        if block_size & (block_size - 1):
            raise ValueError(f"allocate_kv_cache: block_size: expected a power of two, got {block_size}")
        key_shape = (num_blocks, num_kv_heads, head_size // x, block_size, x)
        value_shape = (num_blocks, num_kv_heads, num_value_rows(head_size, dtype), block_size)

    if pin_memory:  # in one piece, because torch rounds each piece up to a power of two
        sizes = [prod(key_shape), prod(value_shape)]
        pool = torch.empty((num_layers, sum(sizes)), dtype=dtype, device=device, pin_memory=True)
        return [
            (keys.view(key_shape), values.view(value_shape)) for keys, values in (both.split(sizes) for both in pool)
        ]

    def allocate(shape: tuple[int, ...]) -> Tensor:
        if device.type == "cpu":
            return empty_huge_pages(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    return [(allocate(key_shape), allocate(value_shape)) for _ in range(num_layers)]


def padded_head_size(head_size: int, dtype: torch.dtype) -> int:
    """The next multiple of 16 bytes, in elements of `dtype`. Heads of another size fit into a cache, padded with zeros.

    The zeros change no dot product of keys, and come out of values as zeros.

    Raises TypeError for a wrong type and ValueError for a negative size.
    """
    _check_size("padded_head_size", "head_size", head_size, 0)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"padded_head_size: dtype: expected a torch.dtype, got {type(dtype).__name__}")
    x = 16 // dtype.itemsize
    return -(-head_size // x) * x


def num_value_rows(head_size: int, dtype: torch.dtype) -> int:
    """Rows of a KV head in a block of a chunked value cache: one for each element, and an int8 cache's scales."""
    return head_size + (INT8_SCALE_ROWS if dtype == torch.int8 else 0)


def _device(device: object) -> torch.device:
    if not isinstance(device, (str, int, torch.device)):
        raise TypeError(
            f"allocate_kv_cache: device: expected a torch.device, its name or its number, got {type(device).__name__}"
        )
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"allocate_kv_cache: device: expected cpu, cuda or cuda:N, got {device!r}") from None


def _check_size(function: str, name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{function}: {name}: expected an int, got {type(value).__name__}")
    if value < minimum or (maximum is not None and value > maximum):
        expected = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        raise ValueError(f"{function}: {name}: expected {expected}, got {value}")
