"""Prefix caching: the blocks of the cache that hold the beginning of a sequence.

A full block is known by the hash of its tokens and of the block before it (the first block: and of the sequence's
salt). So a sequence that begins with the same tokens finds the block. A block is published when the tokens that fill it
are scheduled. That is early enough: a sequence that finds the block runs in the same step or later, and in each layer
all keys and values of a step are written before any are read. Where layers keep a state besides, blocks are found up to
the last one whose end has a checkpoint of the state (`StateSlots`). Of a group of layers with a window, a sequence
finds no more than the window shows from where it goes on.
"""

from collections.abc import Callable, Container

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.scheduling.block_allocator import BlockAllocator
from pagedattn_serve.scheduling.block_hashes import BlockHashes
from pagedattn_serve.scheduling.held_blocks import num_behind
from pagedattn_serve.scheduling.kept_blocks import STORED, KeptBlocks
from pagedattn_serve.scheduling.sequence import Sequence
from pagedattn_serve.scheduling.state_slots import StateSlots
from pagedattn_serve.scheduling.table_rows import RELEASED, Tables


class PrefixCache:
    """Finds blocks by what they hold.

    is_on: whether a sequence finds the blocks of sequences that came earlier.
    hashes: `BlockHashes.of` for the cache's blocks.
    marks: what makes a key of a block's hash, for each group of layers. The first group's key is the hash.
    kept: is told which blocks are worth a place on disk, and says which are there.
    """

    def __init__(self, cache_config: CacheConfig, allocator: BlockAllocator, states: StateSlots) -> None:
        self.is_on = cache_config.enable_prefix_caching
        self.hashes = BlockHashes(cache_config.block_size).of
        self.marks = [bytes([group] if group else []) for group in range(len(cache_config.windows))]
        self.kept = KeptBlocks()
        self._block_size = cache_config.block_size
        self._windows = cache_config.windows
        self._allocator = allocator
        self._states = states

    def clear(self, allocator: BlockAllocator) -> None:
        """Forget all blocks: from now on, the cache's are those of this allocator."""
        self._allocator = allocator
        self.kept.clear()

    def hashes_before_last_token(self, sequence: Sequence, *, alone: bool) -> list[bytes]:
        """The hashes of full blocks that are worth looking for. The block of the last token is left out, because that
        token has to be computed. If the prompt's logits are asked for, there are none."""
        if (alone and not self.is_on) or sequence.prompt_logits_from is not None:
            return []
        num_blocks = (sequence.num_tokens - 1) // self._block_size
        return self.hashes(sequence, num_blocks)[:num_blocks]

    def find(self, hashes: list[bytes], find_key: Callable[[bytes], int | None] | None = None) -> Tables:
        """The blocks of these hashes, up to the last from which a sequence can go on: each group of layers has all
        blocks that the next token sees, and there is a checkpoint of the state. find_key: the block of a key, if not
        the allocator's."""
        find_key = find_key or self._allocator.find
        tables: list[list[int | None]] = []
        end, previous = len(hashes), -1
        for mark, window in zip(self.marks, self._windows, strict=True):
            table: list[int | None] = []
            for block_hash in hashes[:end]:
                block = find_key(block_hash + mark)
                if block is None and window is None:  # nobody can go on behind this block
                    break
                table.append(block)
            tables.append(table)
            end = len(table)
        while end != previous:
            previous = end
            while end and not self._states.has_checkpoint(hashes[end - 1]):
                end -= 1
            for table, window in zip(tables, self._windows, strict=True):
                begin = self._first_needed(window, end)
                if None in table[begin:end]:
                    end = table.index(None, begin)
        found: Tables = []
        for table, window in zip(tables, self._windows, strict=True):
            begin = self._first_needed(window, end)
            found.append([RELEASED] * begin + [block for block in table[begin:end] if block is not None])
        return found

    def _first_needed(self, window: int | None, num_blocks: int) -> int:
        """The first block that a sequence needs to go on after so many; the last of them always, as a proof."""
        return max(0, min(num_behind(window, num_blocks * self._block_size, self._block_size), num_blocks - 1))

    def find_again(self, sequences: list[Sequence], tables: list[Tables]) -> dict[int, int]:
        """Of swapped-out sequences, the host's blocks whose tokens the cache has, and the blocks there."""
        num_computed = [sequence.num_computed_tokens // self._block_size for sequence in sequences]
        # What one is still to compute is not looked for, though a later one that shares it counts it as computed.
        to_compute: set[int] = set()
        for num, of_sequence in zip(num_computed, tables, strict=True):
            to_compute.update(*(table[num:] for table in of_sequence))
        device_of = {}
        for sequence, of_sequence, num in zip(sequences, tables, num_computed, strict=True):
            for mark, table in zip(self.marks, of_sequence, strict=True):
                for block, block_hash in zip(table[:num], sequence.block_hashes, strict=False):
                    if block != RELEASED and block not in to_compute:
                        found = self._allocator.find(block_hash + mark)
                        if found is not None:
                            device_of[block] = found
        return device_of

    def publish(self, sequence: Sequence, tables: Tables, first: int, last: int) -> bool:
        """`BlockManager.publish`. tables: of the sequence."""
        hashes, allocator, are_found = self.hashes(sequence, last), self._allocator, True
        for mark, table in zip(self.marks, tables, strict=True):
            for i in range(first, last):
                are_found &= allocator.publish(table[i], hashes[i] + mark)
            if pinned := allocator.pinned:
                self.kept.want(filter(pinned.__contains__, (block_hash + mark for block_hash in hashes[first:last])))
        return are_found

    def pin(self, token_ids: list[int], max_num_blocks: int, max_num_states: int = 0) -> int:
        """Keep the full blocks of these tokens, once a sequence has computed them: no other tokens take them. Of layers
        with a window, keep those that a prompt sees which begins with all of these blocks, or with all but one. If the
        model keeps states, keep the state at their end, too.

        Returns how many tokens they hold. Raises ValueError, with nothing kept, if pins would take more than
        `max_num_blocks`, or than `max_num_states` state slots.
        """
        sequence = Sequence("prefix", token_ids)
        hashes = self.hashes(sequence, len(token_ids) // self._block_size)
        num_tokens = (len(hashes) - 1) * self._block_size
        keys = [
            block_hash + mark
            for mark, window in zip(self.marks, self._windows, strict=True)
            for block_hash in hashes[num_behind(window, num_tokens, self._block_size) :]
        ]
        num_pinned = self._allocator.num_pinned_with(keys)
        if num_pinned > max_num_blocks:
            raise ArgumentError(
                "prefix",
                f"registered prefixes to take at most {max_num_blocks} blocks, which leaves the cache room for one "
                "sequence of max_model_len tokens",
                num_pinned,
            )
        if self._states.num_slots and hashes:
            self._states.pin(hashes[-1], max_num_states)
        self._allocator.pin(keys)
        self.kept.want(keys)
        return len(hashes) * self._block_size

    # ---- blocks on disk ---------------------------------------------------------------------------------------------

    def keys_with_stored(self, sequence: Sequence) -> dict[bytes, bool]:
        """The keys of the blocks from which a new sequence can go on, in order, and whether the block is on disk alone;
        nothing if none is. Any thread may call this: what it says may not be true any more, which harms nobody."""
        stored = self.kept.stored

        def find(key: bytes) -> int | None:
            block = self._allocator.find(key)
            return STORED if block is None and key in stored else block

        tables = self.find(self.hashes_before_last_token(sequence, alone=True), find)
        keys = {
            block_hash + mark: block == STORED
            for block_hash, *blocks in zip(sequence.block_hashes, *tables, strict=False)
            for mark, block in zip(self.marks, blocks, strict=True)
            if block != RELEASED
        }
        return keys if any(keys.values()) else {}

    def insert(self, keys: list[bytes], at_hand: Container[bytes]) -> dict[bytes, int]:
        """`BlockAllocator.insert`."""
        return self._allocator.insert(keys, at_hand)

    def take_wanted(self, at_most: int) -> list[tuple[bytes, int]]:
        """`KeptBlocks.take`: the keys and blocks to store now."""
        return self.kept.take(self._allocator.find, at_most)
