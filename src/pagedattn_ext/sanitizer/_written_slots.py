"""Which slots of the caches are written."""

from collections.abc import Iterable

from ._access import Part


class WrittenSlots:
    """Of each block, in each cache: the slots that are written, and those of them that an op has written, a bit for
    each slot. Of what came otherwise, such as a copy of a block, nobody knows how many slots were written.

    Caches are numbers from 0 on.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._all = (1 << block_size) - 1
        self._written: list[list[int]] = [[] for _ in range(num_blocks)]  # by block and by cache
        self._by_ops: list[list[int]] = [[] for _ in range(num_blocks)]
        self._before: dict[int, list[int]] = {}  # what was written in a renewed block
        self._whole: set[int] = set()  # of the blocks that are whole, those that were asked for

    def add_cache(self) -> None:
        """One more cache, in which nothing is written."""
        for slots in (*self._written, *self._by_ops):
            slots.append(0)
        self._whole.clear()

    def missing(self, block: int, cache: int, slots: int) -> int:
        """Those of the slots that are not written."""
        return slots & ~self._written[block][cache]

    def is_whole(self, block: int) -> bool:
        """Whether all slots are written, in all caches."""
        written = self._written[block]
        if block not in self._whole and written.count(self._all) == len(written):
            self._whole.add(block)
        return block in self._whole

    def is_by_op(self, slot: int, cache: int) -> bool:
        """Whether an op has written a slot of the cache."""
        block, offset = divmod(slot, self._block_size)
        return bool(self._by_ops[block][cache] >> offset & 1)

    def has_any_by_ops(self, block: int, cache: int) -> bool:
        """Whether ops have written a slot, in one cache."""
        return self._by_ops[block][cache] != 0

    def is_whole_by_ops(self, block: int, cache: int) -> bool:
        """Whether ops have written all slots, in one cache."""
        return self._by_ops[block][cache] == self._all

    def write(self, parts: Iterable[Part], cache: int) -> None:
        """An op has written these."""
        for block, slots, _ in parts:
            self._written[block][cache] |= slots
            self._by_ops[block][cache] |= slots

    def fill(self, block: int) -> None:
        """All slots were written in all caches, by no op."""
        for cache in range(len(self._written[block])):
            self.fill_in(block, cache)

    def fill_in(self, block: int, cache: int) -> None:
        """All slots were written in one cache, by no op."""
        self._set(block, cache, self._all)

    def copy(self, source: int, target: int, cache: int) -> None:
        """A block was copied. The source may be a block that was renewed in this step: the copy has what it held."""
        before = self._before[source][cache] if source in self._before else 0
        self._set(target, cache, self._written[source][cache] | before)

    def keep_only(self, block: int, slots: int) -> None:
        """All other slots count as never written."""
        self._written[block] = [written & slots for written in self._written[block]]
        self._by_ops[block] = [written & slots for written in self._by_ops[block]]
        self._whole.discard(block)

    def renew(self, block: int) -> None:
        """No slot counts as written. But until the end of the step the block may be copied from."""
        self._before.setdefault(block, self._written[block])
        self.keep_only(block, 0)

    def end_step(self) -> None:
        self._before.clear()

    def _set(self, block: int, cache: int, slots: int) -> None:
        self._written[block][cache], self._by_ops[block][cache] = slots, 0
        self._whole.discard(block)
