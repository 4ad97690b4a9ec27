"""From the logical blocks of a sequence to the physical blocks of the cache.

As in PagedAttention (Kwon et al., SOSP 2023, sections 4.2 to 4.4): a sequence's block table names the physical block of
each run of `block_size` tokens; blocks are taken as tokens come; forked sequences share blocks, and a shared block is
copied when one of them is about to write to it.
"""

import math
from collections import Counter

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.scheduling.block_allocator import BlockAllocator, OutOfBlocksError
from pagedattn_serve.scheduling.sequence import Sequence


class BlockManager:
    """Block tables of the sequences that hold blocks, keyed by identity. A call that raises changes nothing."""

    def __init__(self, cache_config: CacheConfig) -> None:
        self.block_size = cache_config.block_size
        self._watermark_blocks = math.ceil(cache_config.watermark * cache_config.num_blocks)
        self._allocator = BlockAllocator(cache_config.num_blocks)
        self._tables: dict[Sequence, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self._allocator.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._allocator.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one sequence holds; a shared block counts once."""
        return self.num_blocks - self.num_free_blocks

    def block_table(self, sequence: Sequence) -> list[int]:
        """Physical block of each logical block, [num_blocks_of_sequence]. ValueError if the sequence holds none.

        The manager's own list, which grows with the sequence: to be read only.
        """
        if sequence not in self._tables:
            raise ValueError(f"{sequence.request_id} holds no blocks")
        return self._tables[sequence]

    def can_allocate(self, sequence: Sequence, *, keep_watermark: bool) -> bool:
        """Whether blocks for all its tokens are free, and with `keep_watermark` the reserve stays free beside them.

        The reserve lets running sequences grow for a while before the newcomer has to be preempted for them.
        """
        reserve = self._watermark_blocks if keep_watermark else 0
        return self._num_blocks_for(sequence) + reserve <= self.num_free_blocks

    def allocate(self, sequence: Sequence) -> None:
        """Give a sequence blocks for all its tokens.

        Raises ValueError if it holds blocks already, OutOfBlocksError if too few are free.
        """
        self._require_unknown(sequence)
        num_needed = self._num_blocks_for(sequence)
        if num_needed > self.num_free_blocks:
            raise OutOfBlocksError(f"{sequence.request_id} needs {num_needed} blocks, {self.num_free_blocks} are free")
        self._tables[sequence] = [self._allocator.allocate() for _ in range(num_needed)]

    def append(self, sequence: Sequence) -> tuple[int, int] | None:
        """Make the last token (index num_tokens - 1) writable: its block exists and no other sequence shares it.

        To be called after each token added to the sequence, before it is run; a second call does nothing. Returns the
        (src, dst) pair to copy in the cache before that token is written, if its block was shared: copy-on-write.
        Raises ValueError if the sequence holds no blocks or lacks more than one, OutOfBlocksError if none is free.
        """
        table = self.block_table(sequence)
        num_missing = self._num_blocks_for(sequence) - len(table)
        if num_missing > 1:
            raise ValueError(f"{sequence.request_id} lacks {num_missing} blocks, expected at most 1: append each token")
        if num_missing == 0 and self._allocator.ref_count(table[-1]) == 1:
            return None
        block = self._allocator.allocate()
        if num_missing == 1:
            table.append(block)
            return None
        shared = table[-1]
        table[-1] = block
        self._allocator.free(shared)
        return shared, block

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which holds the same tokens as `parent`, share all its blocks.

        Raises ValueError if the parent holds no blocks, the child holds some already, or they differ in length.
        """
        table = list(self.block_table(parent))
        self._require_unknown(child)
        if child.num_tokens != parent.num_tokens:
            raise ValueError(f"child: expected the parent's {parent.num_tokens} tokens, got {child.num_tokens}")
        for block in table:
            self._allocator.fork(block)
        self._tables[child] = table

    def free(self, sequence: Sequence) -> None:
        """Take a sequence's blocks away; shared ones stay with the others. ValueError if it holds none."""
        for block in self.block_table(sequence):
            self._allocator.free(block)
        del self._tables[sequence]

    def clear(self) -> None:
        """Take the blocks of all sequences away, whatever state the tables are in."""
        self._tables = {}
        self._allocator = BlockAllocator(self.num_blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block's reference count is the number of tables that hold it."""
        self._allocator.check_integrity()
        for sequence, table in self._tables.items():
            assert len(set(table)) == len(table), f"{sequence.request_id} holds a block twice: {table}"
        holders = Counter(block for table in self._tables.values() for block in table)
        for block in range(self.num_blocks):
            count = self._allocator.ref_count(block)
            assert count == holders[block], f"block {block}: reference count {count}, in {holders[block]} tables"

    def _num_blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.num_tokens // self.block_size)

    def _require_unknown(self, sequence: Sequence) -> None:
        if sequence in self._tables:
            raise ValueError(f"{sequence.request_id} holds blocks already")
