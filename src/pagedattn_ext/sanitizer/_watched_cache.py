"""The memory of one layer that is watched: by blocks, by slots, and as bytes."""

from collections.abc import Hashable

import torch
from torch import Tensor

from .._C import INT8_SCALE_ROWS

POISON = 0xFF  # in each byte: NaN in every float dtype, fp8 included


class WatchedCache:
    """A pair in a layout of `pagedattn_ext.ops`, or a cache of latents, [num_blocks, block_size, size].

    number: its place among all that are watched. layer: its name in errors. tensors: those with elements.
    Raises TypeError or ValueError if a cache is no tensor or has other sizes.
    """

    def __init__(
        self,
        number: int,
        key_cache: Tensor,
        value_cache: Tensor | None,
        layer: Hashable,
        num_blocks: int,
        block_size: int,
    ) -> None:
        slot_dim = slot_dim_of(key_cache) if isinstance(key_cache, Tensor) else 1
        given = {"key_cache": key_cache} | ({} if value_cache is None else {"value_cache": value_cache})
        for name, cache in given.items():
            if not isinstance(cache, Tensor):
                raise TypeError(f"register: {name}: expected a torch.Tensor, got {type(cache).__name__}")
            if not cache.numel() and name == "value_cache":  # of latents
                continue
            if cache.dim() <= slot_dim or cache.shape[0] != num_blocks or cache.shape[slot_dim] != block_size:
                expected = f"expected {num_blocks} blocks of {block_size} slots"
                raise ValueError(f"register: {name}: {expected}, got a tensor of shape {list(cache.shape)}")
            if cache.stride(-1) != 1:
                raise ValueError(
                    f"register: {name}: expected a contiguous last dimension, got strides {cache.stride()}"
                )
        self.number, self.layer = number, layer
        self.tensors = tuple(cache for cache in given.values() if cache.numel())
        parts = self.tensors
        if key_cache.dtype == torch.int8 and slot_dim == 3:  # rows of the value cache hold the scales, as fp32
            keys, values = parts
            codes, scales = values[:, :, :-INT8_SCALE_ROWS], values[:, :, -INT8_SCALE_ROWS:]
            parts = (keys, codes, scales.reshape(*scales.shape[:2], 2, -1).view(torch.float32))
        self._by_slot = tuple(part.movedim(slot_dim, 1) for part in parts)
        self._block_size = block_size

    def has_slots_of(self, cache: Tensor) -> bool:
        """Whether the slots of a cache that begins here have the numbers that they have here. Its blocks are as large,
        or both are tokens side by side, such as when an adapter makes a page of each token."""
        if cache.dim() < 3:  # which the op refuses
            return False
        if cache.shape[slot_dim_of(cache)] == self._block_size:
            return True
        own = self.tensors[0]
        return cache.dim() == own.dim() < 5 and _token_stride(cache) == _token_stride(own) is not None

    def poison(self, blocks: list[int]) -> None:
        """Fill the blocks."""
        for tensor in self.tensors:
            _bytes_of(tensor).index_fill_(0, torch.tensor(blocks, device=tensor.device), POISON)

    def first_not_poisoned(self, blocks: list[int]) -> int | None:
        """The first of the blocks that holds anything else."""
        for tensor in self.tensors:
            is_whole = (_bytes_of(tensor)[blocks] == POISON).flatten(1).all(1).tolist()
            if not all(is_whole):
                return blocks[is_whole.index(False)]
        return None

    def fingerprints(self, blocks: list[int]) -> Tensor:
        """A number from 0 on of what each block holds, [len(blocks)], on the CPU."""
        total = torch.zeros(len(blocks), dtype=torch.int64)
        for tensor in self.tensors:
            held = _bytes_of(tensor)[blocks].flatten(1).long()
            places = torch.arange(held.shape[1], device=held.device)
            total = total * 31 + (held * (2 * places + 1)).sum(1).cpu()
        return total & (1 << 62) - 1

    def tokens(self, slots: list[int]) -> list[Tensor]:
        """Copies of what the slots hold, bytes [len(slots), ...] of each part."""
        if not slots:
            return []
        of_slots = torch.tensor(slots)
        blocks, offsets = of_slots // self._block_size, of_slots % self._block_size
        return [_bytes_of(part[blocks, offsets].contiguous()) for part in self._by_slot]


def slot_dim_of(cache: Tensor) -> int:
    """The dimension of the tokens of a block."""
    return 3 if cache.dim() == 5 else 1


def _token_stride(cache: Tensor) -> int | None:
    """From each token to the next one, if tokens lie side by side across blocks. [num_blocks, block_size, ...]."""
    if cache.shape[1] == 1:
        return cache.stride(0)
    return cache.stride(1) if cache.stride(0) == cache.shape[1] * cache.stride(1) else None


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory as bytes: the last dimension, which is contiguous, gets longer."""
    return tensor.view(torch.uint8)
