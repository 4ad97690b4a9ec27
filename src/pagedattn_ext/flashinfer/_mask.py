"""Masks that say which keys each row of a ragged batch sees."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._adapters import sequences_of_rows
from ..ops._call import check_tensors
from .quantization.packbits import unpack_bits


@dataclass(frozen=True)
class Mask:
    """Of each sequence, one after the other, a bit for each row and key."""

    bits: Tensor  # bool
    starts: Tensor  # int64 [batch]: the first bit of each sequence


def mask_of(
    function: Callable[..., Any],
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    query_starts: Tensor,
    key_starts: Tensor,
) -> Mask | None:
    """Of the arguments of `plan`: custom_mask has an element for each bit, packed_custom_mask is `segment_packbits` of
    its sequences with bitorder "little". The latter wins, as in FlashInfer.

    query_starts, key_starts: [batch + 1], the rows and the keys of each sequence.
    """
    if packed_custom_mask is not None:
        check_tensors(function.__qualname__, packed_custom_mask=packed_custom_mask)
        name, given = "packed_custom_mask", packed_custom_mask.flatten()
        if given.dtype != torch.uint8:
            raise TypeError(f"{function.__qualname__}: {name}: expected torch.uint8, got {given.dtype}")
    elif custom_mask is not None:
        check_tensors(function.__qualname__, custom_mask=custom_mask)
        name, given = "custom_mask", custom_mask.flatten().bool()
    else:
        return None
    counts = query_starts.diff().long() * key_starts.diff().long()
    if name == "packed_custom_mask":
        counts = (counts + 7) // 8
    if given.shape[0] != counts.sum():
        raise ValueError(
            f"{function.__qualname__}: {name}: expected {counts.sum()} elements (for the rows times the keys of each "
            f"sequence), got {given.shape[0]}"
        )
    starts = counts.cumsum(0) - counts
    given, starts = given.to(key_starts.device), starts.to(key_starts.device)
    return Mask(given, starts) if name == "custom_mask" else Mask(unpack_bits(given), 8 * starts)


def visible_keys(
    mask: Mask | None, query_starts: Tensor, key_starts: Tensor, sliding_window: int | None
) -> tuple[Tensor, Tensor]:
    """Of each row, the keys that it sees under the mask (None: all) and within the window: their places among all keys,
    int32 [num_rows, most that a row sees], and how many there are, int32 [num_rows]."""
    sequence, place = sequences_of_rows(query_starts, int(query_starts[-1]))
    lengths = key_starts.diff()
    num_keys = lengths[sequence][:, None]
    key = torch.arange(int(lengths.max()) if len(lengths) else 0, device=key_starts.device)
    seen = key < num_keys
    if mask is not None and mask.bits.numel() > 0:
        bit = (mask.starts[sequence] + place * num_keys[:, 0])[:, None] + key
        seen &= mask.bits[bit.where(seen, 0)]
    if sliding_window is not None:
        position = lengths[sequence] - query_starts.diff()[sequence] + place
        seen &= key > position[:, None] - sliding_window
    counts = seen.sum(1)
    visible = torch.zeros(len(seen), int(counts.max()) if len(counts) else 0, dtype=torch.int32, device=key.device)
    row, column = seen.nonzero(as_tuple=True)
    visible[row, (seen.cumsum(1) - 1)[row, column]] = (key_starts[sequence[row]] + column).int()
    return visible, counts.int()
