"""Masks in bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._adapters import sequences_of_rows
from ..._index_checks import num_seqs_of
from ...ops._call import check_tensors

BIT_ORDERS = ("big", "little")


def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """The elements of x (bool or numbers [n], not 0 is 1), eight in a byte: uint8 [ceil(n / 8)], zeros behind the last.
    The first element is the highest bit of a byte ("big") or the lowest ("little"), as in `numpy.packbits`."""
    _check_bit_order(packbits, bitorder)
    check_tensors("packbits", x=x)
    bits = torch.nn.functional.pad(x.flatten().bool(), (0, -x.numel() % 8)).view(-1, 8)
    return (bits * _weights(bitorder, x.device)).sum(1, dtype=torch.uint8)


def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """`packbits` of each segment x[indptr[i] : indptr[i + 1]], which begins with a byte of its own.

    indptr: int [num_segments + 1], from 0 to at most the length of x, not decreasing.

    Returns:
        The bytes, uint8 [new_indptr[-1]], and new_indptr, int32 [num_segments + 1].
    """
    _check_bit_order(segment_packbits, bitorder)
    check_tensors("segment_packbits", x=x)
    num_seqs_of(segment_packbits, "indptr", indptr)
    x, indptr = x.flatten(), indptr.to(x.device).contiguous()
    if indptr[0] != 0 or (indptr.diff() < 0).any() or indptr[-1] > x.shape[0]:
        raise ValueError(
            f"segment_packbits: indptr: expected offsets that do not decrease, from 0 to at most {x.shape[0]} (the "
            f"length of x), got {indptr.tolist()}"
        )
    new_indptr = torch.nn.functional.pad(((indptr.diff() + 7) // 8).cumsum(0), (1, 0)).int()
    segment, place = sequences_of_rows(indptr, int(indptr[-1]))
    bits = x.new_zeros(8 * int(new_indptr[-1]))
    bits[8 * new_indptr[segment] + place] = x[: int(indptr[-1])]
    return packbits(bits, bitorder), new_indptr


def unpack_bits(packed: Tensor) -> Tensor:
    """The bits of uint8 [n], lowest first: bool [8 * n]."""
    return (packed[:, None] & _weights("little", packed.device) != 0).flatten()


def _check_bit_order(function: Callable[..., Any], bitorder: str) -> None:
    if bitorder not in BIT_ORDERS:
        raise ValueError(f"{function.__qualname__}: bitorder: expected 'big' or 'little', got {bitorder!r}")


def _weights(bitorder: str, device: torch.device) -> Tensor:
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=device)
    return weights.flip(0) if bitorder == "big" else weights
