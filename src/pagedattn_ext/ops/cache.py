"""Writing to the paged cache, reading back, copying whole blocks."""

import torch
from torch import Tensor

from ._call import call, check_tensors


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
        slot_mapping: int64 or int32 [num_tokens], block * block_size + offset; a token with a negative slot is skipped.
        kv_cache_dtype, k_scale, v_scale: for fp8 caches, see the module.
    """
    call("reshape_and_cache", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`reshape_and_cache` for caches of [num_blocks, block_size, num_kv_heads, head_size] alone, as vLLM calls it.

    key and value may have more tokens than slot_mapping, as padded batches do: the tokens at the end are left out.
    """
    call("reshape_and_cache_flash", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def gather_cached_kv(key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values in these slots: the inverse of `reshape_and_cache`.

    Args:
        key_cache, value_cache: see the module; not fp8.
        slot_mapping: int64 or int32 [num_tokens]. The rows of negative slots are zeros (the raw op leaves them as they
            are).

    Returns:
        (key, value), [num_tokens, num_kv_heads, head_size] each.
    """
    check_tensors("gather_cached_kv", key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    heads = value_cache.shape[2:4] if key_cache.dim() == 4 else value_cache.shape[1:3]
    key = value_cache.new_zeros((*slot_mapping.shape, *heads))
    value = torch.zeros_like(key)  # not halves of one tensor: torch.compile may lose where the second half begins
    call("gather_cached_kv", key, value, key_cache, value_cache, slot_mapping)
    return key, value


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copies whole blocks within the caches of every layer (the copy of copy-on-write).

    Args:
        key_caches, value_caches: one cache a layer, [num_blocks, ...], the last dimension contiguous, any other
            strides; updated.
        block_mapping: int64 [num_pairs, 2], (source, target). A source may occur several times, a target once; no block
            may be both.
    """
    call("copy_blocks", key_caches, value_caches, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copies blocks of one pool to blocks of another, which may be on another device.

    Between a GPU and pinned host memory the copy is asynchronous, on the current stream: keep both pools, and leave the
    host's alone, until the stream is done. Memory that is not pinned is copied run by run of adjacent blocks.

    Args:
        src: [num_src_blocks, ...], the last dimension contiguous, any other strides.
        dst: [num_dst_blocks, ...], blocks shaped like those of src, of strides of their own; updated.
        block_mapping: int64 [num_pairs, 2], (block of src, block of dst), every block of dst at most once.
    """
    call("swap_blocks", src, dst, block_mapping)
