"""An access to the cache that was checked, known again when another layer comes with the same one."""

from typing import NamedTuple

import torch
from torch import Tensor

Told = tuple[Tensor | int | None, ...]  # index tensors, and what else decides which slots an access goes to


class Access(NamedTuple):
    """Of another layer with the same one, only what it has written is looked at.

    told: of the call. slots: that it reads or writes, int64 [n]. rows: of each slot; empty if unknown. shared: those of
    the slots that several owners have.
    """

    told: Told
    slots: Tensor
    rows: Tensor
    shared: Tensor

    def with_copies(self) -> "Access":
        """The same with copies of the index tensors, because their memory may be written to."""
        return self._replace(told=tuple(each.clone() if isinstance(each, Tensor) else each for each in self.told))

    def was_told(self, told: Told) -> bool:
        return len(told) == len(self.told) and all(map(_are_equal, self.told, told))


def _are_equal(one: Tensor | int | None, other: Tensor | int | None) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other
