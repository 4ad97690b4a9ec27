"""The pool of physical blocks: a free list and a reference count per block, every operation O(1)."""


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than asked for."""


class BlockAllocator:
    """Hands out block ids, 0 to num_blocks - 1. A block may have several owners; it is free when the last lets go."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks: expected at least 1, got {num_blocks}")
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest in CPU caches

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner."""
        return len(self._free)

    def ref_count(self, block: int) -> int:
        """Number of owners of a block; 0 if it is free. ValueError if there is no such block."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block: expected 0 to {self.num_blocks - 1}, got {block}")
        return self._ref_counts[block]

    def allocate(self) -> int:
        """Take a free block, with one owner. Raises OutOfBlocksError if there is none."""
        if not self._free:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks are in use")
        block = self._free.pop()
        self._ref_counts[block] = 1
        return block

    def fork(self, block: int) -> None:
        """Add an owner to a block in use. Raises ValueError if it is free or unknown."""
        self._require_in_use(block)
        self._ref_counts[block] += 1

    def free(self, block: int) -> None:
        """Remove an owner from a block; the last one frees it. Raises ValueError if it is free already or unknown."""
        self._require_in_use(block)
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free list holds each block without an owner exactly once, and no other."""
        unowned = [block for block, count in enumerate(self._ref_counts) if count == 0]
        assert sorted(self._free) == unowned, f"free list {sorted(self._free)}, blocks without an owner {unowned}"
        assert min(self._ref_counts) >= 0, f"negative reference count in {self._ref_counts}"

    def _require_in_use(self, block: int) -> None:
        if self.ref_count(block) == 0:
            raise ValueError(f"block: expected one in use, got {block}, which is free")
