"""An access to the cache that was checked, known again when another layer comes with the same one."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

Told = tuple[Tensor | int | None, ...]  # index tensors, and what else decides which slots an access goes to


class ReadRows(NamedTuple):
    """Of each row: its tokens [first, lens) are read, of which num_new at the end are written by the same op."""

    lens: list[int]
    first: list[int]
    num_new: list[int]


class Part(NamedTuple):
    """slots: a bit for each slot of the block. owner: for whom the step reads them, if known."""

    block: int
    slots: int
    owner: Hashable = None


class Access(NamedTuple):
    """Of another layer with the same one, only what it has written is looked at.

    told: of the call. parts: what it writes; or what it reads and has not written, without blocks that are written
    whole in all caches. shared: those of the written slots that several owners have.
    """

    told: Told
    parts: list[Part]
    shared: list[int]

    def with_copies(self) -> "Access":
        """The same with copies of the index tensors, because their memory may be written to."""
        return self._replace(told=tuple(each.clone() if isinstance(each, Tensor) else each for each in self.told))

    def was_told(self, told: Told) -> bool:
        return len(told) == len(self.told) and all(map(_are_equal, self.told, told))


def parts_of(slots: Iterable[int], block_size: int) -> list[Part]:
    """Slots of the cache, by block."""
    in_block: dict[int, int] = {}
    for slot in slots:
        block, offset = divmod(slot, block_size)
        in_block[block] = in_block.get(block, 0) | 1 << offset
    return [Part(block, slots) for block, slots in in_block.items()]


def slots_between(begin: int, end: int, block_size: int) -> int:
    """A bit for each slot of a block from begin up to end, as far as the block has them."""
    begin, end = max(begin, 0), min(end, block_size)
    return (1 << end) - (1 << begin) if begin < end else 0


def _are_equal(one: Tensor | int | None, other: Tensor | int | None) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other
