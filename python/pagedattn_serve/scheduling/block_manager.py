"""From the logical blocks of a sequence to the physical blocks of the cache.

As in PagedAttention (Kwon et al., SOSP 2023, sections 4.2 to 4.5), a sequence's block table names the physical block of
each run of `block_size` tokens. Blocks are taken as tokens come. Forked sequences share blocks, and a shared block is
copied when one of its sequences is about to write to it. A group can be swapped out to blocks of a pool in host memory.

A sequence whose beginning is in the cache shares the blocks there (`PrefixCache`).

Layers form groups by their windows (`models/cache_shape.py`), and a sequence has a block table for each group. A block
has room for one group, whichever that is, so all groups take their blocks from one pool. Where the layers of a group
have a window (or attend in chunks), a sequence gives a block back when all of its tokens lie behind the window: no row
to come sees them. A prompt takes such blocks as its chunks come to them.
"""

import math
from collections import Counter
from itertools import zip_longest

from pagedattn_serve.config import UNBOUNDED, CacheConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.scheduling.block_allocator import BlockAllocator
from pagedattn_serve.scheduling.block_owners import block_owners, check_owners
from pagedattn_serve.scheduling.held_blocks import num_behind
from pagedattn_serve.scheduling.prefix_cache import PrefixCache
from pagedattn_serve.scheduling.sequence import ScheduledBatch, Sequence, TableArray
from pagedattn_serve.scheduling.state_slots import StateSlots
from pagedattn_serve.scheduling.table_rows import RELEASED, TableRows, Tables, held


class BlockManager:
    """Block tables of the sequences that hold blocks, keyed by identity. A call that raises changes nothing.

    tables: to be read only.
    table_array: the block tables of the batch that was placed last, which the ops read. What changes in a table that
        has a row is written there at once.
    states: the slot of each sequence's state, if the model keeps states; to be read only.
    prefixes: finds blocks by the tokens that they hold.
    max_num_batched_tokens: the most tokens of a prompt that one step runs.

    The sequences of a group, which may share blocks, are given together, as a list. If a method says that there is no
    room, nothing was changed.
    """

    def __init__(
        self, cache_config: CacheConfig, table_array: TableArray, max_num_batched_tokens: int = UNBOUNDED
    ) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens
        self.block_size = cache_config.block_size
        self.windows = cache_config.windows  # of each group of layers
        self.gives_back = self.windows != (None,) * len(self.windows)
        self._watermark_blocks = math.ceil(cache_config.watermark * cache_config.num_blocks)
        self._allocator = BlockAllocator(cache_config.num_blocks)
        self.tables: dict[Sequence, Tables] = {}
        self._host_allocator = BlockAllocator(cache_config.num_host_blocks)
        self._host_tables: dict[Sequence, Tables] = {}
        self.states = StateSlots(cache_config.num_state_slots, cache_config.num_host_state_slots)
        self.prefixes = PrefixCache(cache_config, self._allocator, self.states)
        self.table_array = table_array
        self._rows = TableRows(table_array)

    @property
    def allocator(self) -> BlockAllocator:
        """Of the blocks in the cache; to be read only. `clear` puts another one there."""
        return self._allocator

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self._allocator.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken: no sequence holds them, and no prefix is pinned there."""
        return self._allocator.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that at least one sequence holds; a shared block counts once."""
        return self._allocator.num_owned_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no sequence holds, and whose tokens a prompt can still find."""
        return self._allocator.num_cached_blocks

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that are kept for registered prefixes, once these are computed."""
        return len(self._allocator.pinned)

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the pool in host memory."""
        return self._host_allocator.num_blocks

    @property
    def num_used_host_blocks(self) -> int:
        """Blocks of the host's pool that swapped-out sequences hold."""
        return self._host_allocator.num_owned_blocks

    def block_tables(self, sequence: Sequence) -> Tables:
        """For each group of layers the physical block of each logical block, [num_blocks_of_sequence], RELEASED for
        those behind the group's window. ValueError if the sequence holds none.

        The manager's own lists, to be read only.
        """
        tables = self.tables.get(sequence)
        if tables is None:
            raise ValueError(f"{sequence.request_id} holds no blocks")
        return tables

    def block_table(self, sequence: Sequence) -> list[int]:
        """`block_tables` of a model whose layers are one group."""
        [table] = self.block_tables(sequence)
        return table

    @property
    def num_table_entries(self) -> int:
        """Blocks that the sequences would hold if none were shared."""
        return sum(len(table) - table.count(RELEASED) for tables in self.tables.values() for table in tables)

    def num_used_slots(self) -> int:
        """Tokens whose keys and values are in blocks that sequences hold, once for each group of layers. Tokens of a
        shared block count once."""
        if not self.gives_back and self.num_table_entries == self.num_used_blocks:  # no block is shared
            return sum(sequence.num_computed_tokens for sequence in self.tables) * len(self.windows)
        num_tokens: dict[int, int] = {}
        for sequence, tables in self.tables.items():
            num_full, rest = divmod(sequence.num_computed_tokens, self.block_size)
            for table in tables:
                num_tokens.update(dict.fromkeys(table[:num_full], self.block_size))
                if rest:
                    num_tokens[table[num_full]] = max(rest, num_tokens.get(table[num_full], 0))
        num_tokens.pop(RELEASED, None)
        return sum(num_tokens.values())

    def block_states(self) -> list[str]:
        """What each block of the cache is: "used" by one sequence, "shared" by several, "cached" or "free"."""
        return self._allocator.states()

    def block_owners(self, groups: list[list[Sequence]]) -> list[int]:
        """For each block of the cache, the index of a group that holds it; -1 if no group does."""
        return block_owners(self._allocator, self.tables, groups)

    def host_block_owners(self, groups: list[list[Sequence]]) -> list[int]:
        """`block_owners` of the pool in host memory."""
        return block_owners(self._host_allocator, self._host_tables, groups)

    # ---- taking blocks ----------------------------------------------------------------------------------------------

    def can_allocate(self, sequences: list[Sequence], *, keep_watermark: bool) -> bool:
        """Whether `allocate` would."""
        num_new, found = self._plan(sequences)
        return self._has_room(sequences, num_new, found, keep_watermark)

    def allocate(self, sequences: list[Sequence], *, keep_watermark: bool) -> bool:
        """Give the sequences blocks for all their tokens, and set how many of these tokens are computed already. A
        sequence alone gets blocks for the next step, where its layers have windows: `extend` gives it more.

        A token counts as computed if its block was found by its tokens, or if the sequence shares the block with an
        earlier sequence of the list, which has to be computed first. The last token of each sequence is left to
        compute.

        Returns False if there is no room: too few blocks are free, or, with `keep_watermark`, the reserve would not
        stay free beside them. The reserve lets running sequences grow for a while before the newcomer has to be
        preempted for them. Raises ValueError if a sequence holds blocks already.
        """
        num_new, found = self._plan(sequences)
        if not self._has_room(sequences, num_new, found, keep_watermark):
            return False
        for tables in found:  # before any new block is taken, so that no found block is evicted for it
            for block in held(tables):
                self._allocator.fork(block)
            self.prefixes.kept.want(map(self._allocator.key_of, held(tables)))
        blocks_of: dict[bytes, tuple[list[int], Sequence]] = {}  # and the first sequence that has the blocks
        for sequence, tables in zip(sequences, found, strict=True):
            hashes = sequence.block_hashes[: (sequence.num_tokens - 1) // self.block_size]
            if self.states.num_slots and tables[0]:
                self.states.take_copy(sequence, hashes[len(tables[0]) - 1])
            else:
                self.states.take(sequence)
            owner = None
            for block_hash in hashes[len(tables[0]) :]:
                if block_hash not in blocks_of:
                    break
                blocks, owner = blocks_of[block_hash]
                for table, block in zip(tables, blocks, strict=True):
                    self._allocator.fork(block)
                    table.append(block)
            sequence.num_computed_tokens = len(tables[0]) * self.block_size
            if owner is not None:
                self.states.wait_for(sequence, owner, sequence.num_computed_tokens)
            for table, num_blocks in zip(tables, self._nums_of_blocks(sequence, len(sequences) == 1), strict=True):
                table += self._allocator.allocate_many(num_blocks - len(table))
            if len(sequences) > 1:
                for block_hash, *blocks in zip(hashes, *tables, strict=False):
                    blocks_of.setdefault(block_hash, (blocks, sequence))
            self.tables[sequence] = tables
        return True

    def extend(self, sequences: list[Sequence]) -> bool:
        """Give sequences in prefill the blocks for the tokens of the next step. Returns False, with nothing changed, if
        too few are free."""
        if not self.gives_back:
            return True
        if self.num_blocks_to_append(sequences) > self.num_free_blocks:
            return False
        for sequence in sequences:
            nums_of_blocks = self._nums_of_blocks(sequence, len(sequences) == 1)
            for group, table in enumerate(self.block_tables(sequence)):
                blocks = self._allocator.allocate_many(nums_of_blocks[group] - len(table))
                self._rows.write(sequence, group, len(table), blocks)
                table += blocks
        return True

    def append(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Make the last token (index num_tokens - 1) writable: its blocks exist and no other sequence shares them.

        To be called after each token added to the sequence, before the token is run; a second call does nothing. If
        the token's blocks were shared, returns the (src, dst) pairs to copy before the token is written: copy-on-write.
        Raises ValueError if the sequence holds no blocks or a table lacks more than one, OutOfBlocksError if too few
        are free.
        """
        tables, allocator = self.block_tables(sequence), self._allocator
        num_tokens = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        num_blocks = -(-num_tokens // self.block_size)
        num_missing = num_blocks - min(map(len, tables))
        if num_missing > 1:
            raise ValueError(f"{sequence.request_id} lacks {num_missing} blocks, expected at most 1: append each token")
        if allocator.num_free_blocks < len(tables):  # counted only if blocks are short
            allocator.require(sum(len(table) < num_blocks or allocator.ref_count(table[-1]) > 1 for table in tables))
        pairs = []
        for group, table in enumerate(tables):
            is_shared = len(table) == num_blocks
            if is_shared and allocator.ref_count(table[-1]) == 1:
                continue
            block = allocator.allocate()
            if is_shared:
                pairs.append((table[-1], block))
                allocator.free(table.pop())
            table.append(block)
            self._rows.write(sequence, group, num_blocks - 1, [block])
        self.states.make_own(sequence)
        return pairs

    def append_drafts(self, sequence: Sequence, num_tokens: int) -> int:
        """After `append`, make positions behind the last token writable, as far as free blocks go. Returns how many of
        `num_tokens` have room. When the step is over, `trim` takes back what is not used."""
        tables = self.block_tables(sequence)
        num_missing = -(-(sequence.num_tokens + num_tokens) // self.block_size) - len(tables[0])
        num_new = min(num_missing, self._allocator.num_free_blocks // len(tables))
        for group, table in enumerate(tables):
            blocks = self._allocator.allocate_many(num_new)
            self._rows.write(sequence, group, len(table), blocks)
            table += blocks
        return min(num_tokens, len(tables[0]) * self.block_size - sequence.num_tokens)

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks that its tokens do not reach."""
        for table in self.block_tables(sequence):
            while len(table) > self._num_blocks_for(sequence):
                self._allocator.free(table.pop())

    def num_blocks_to_append(self, sequences: list[Sequence]) -> int:
        """Blocks that `append` takes for all of the sequences together; or `extend`, if they are in prefill."""
        return self._num_to_append(sequences, [self.block_tables(each) for each in sequences], self._allocator)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which holds the same tokens as `parent`, share all its blocks. Raises ValueError if the parent
        holds no blocks, the child holds some already, or they differ in length."""
        tables = [list(table) for table in self.block_tables(parent)]
        self._require_unknown(child)
        if child.num_tokens != parent.num_tokens:
            raise ArgumentError("child", f"the parent's {parent.num_tokens} tokens", child.num_tokens)
        for block in held(tables):
            self._allocator.fork(block)
        self.tables[child] = tables
        self.states.fork(parent, child)

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks that lie behind the windows of the next token to compute."""
        for table, window in zip(self.block_tables(sequence), self.windows, strict=True):
            for i in range(num_behind(window, sequence.num_computed_tokens, self.block_size) - 1, -1, -1):
                if table[i] == RELEASED:
                    break
                self._allocator.free(table[i])  # from the end: it is forgotten before what it builds on
                table[i] = RELEASED  # the array keeps the block: nobody looks there

    def free(self, sequence: Sequence) -> None:
        """Take a sequence's blocks away, on the device or the host. Shared blocks stay with their other sequences.
        ValueError if it holds none."""
        self._free_blocks(sequence)
        self.states.free(sequence)

    def _free_blocks(self, sequence: Sequence) -> None:
        if sequence in self._host_tables:
            for block in held(self._host_tables.pop(sequence)):
                self._host_allocator.free(block)
            return
        # The end is forgotten before what it builds on, in all groups of layers alike.
        for blocks in reversed(list(zip_longest(*self.block_tables(sequence), fillvalue=RELEASED))):
            for block in blocks:
                if block != RELEASED:
                    self._allocator.free(block)
        del self.tables[sequence]
        self._rows.take_back(sequence)

    def clear(self) -> None:
        """Take the blocks of all sequences away, whatever state the tables are in, and forget what the blocks hold.

        Pinned prefixes stay pinned: their blocks are kept when they are computed again.
        """
        self.tables = {}
        self._allocator = BlockAllocator(self.num_blocks, self._allocator.pinned)
        self._host_tables = {}
        self._host_allocator = BlockAllocator(self._host_allocator.num_blocks)
        self.states.clear()
        self._rows.clear()
        self.prefixes.clear(self._allocator)

    # ---- the array of a batch ---------------------------------------------------------------------------------------

    def place(self, batch: ScheduledBatch) -> None:
        """Let row i of `table_array` have the tables of the i-th sequence. Plain decodes may change their order.

        Tell the batch the slots of the sequences' states, which slots are to be copied, and what checkpoints to make.
        """
        batch.table_writes = self._rows.place(batch.sequences, batch.num_plain, self.tables)
        if self.states.num_slots:
            batch.state_slots = [self.states.slot_of[scheduled.sequence] for scheduled in batch.sequences]
            batch.state_copies = self.states.take_copies()
            if self.prefixes.is_on:
                batch.state_checkpoints = self.states.plan_checkpoints(batch, self.block_size, self.prefixes.hashes)

    # ---- swapping ---------------------------------------------------------------------------------------------------

    def swap_out(self, sequences: list[Sequence]) -> list[tuple[int, int]] | None:
        """Move the blocks of a group to the host's pool. Blocks that are shared on the device are shared there, too.

        Returns the (device block, host block) pairs to copy before the device blocks are written to. Returns None, with
        nothing changed, if the pool has too few free blocks. Raises ValueError if a sequence holds no blocks.
        """
        tables = [self.block_tables(sequence) for sequence in sequences]
        blocks = dict.fromkeys(block for of_sequence in tables for block in held(of_sequence))
        if len(blocks) > self._host_allocator.num_free_blocks or not self.states.host_has_room(sequences):
            return None
        host_of = {block: self._host_allocator.allocate() for block in blocks}
        host_tables = self._translate(sequences, tables, host_of, self._host_allocator)
        self.states.swap_out(sequences)
        for sequence in sequences:
            self._free_blocks(sequence)
        self._host_tables |= host_tables
        return list(host_of.items())

    def swap_in(self, sequences: list[Sequence], *, keep_watermark: bool) -> list[tuple[int, int]] | None:
        """Move the blocks of a swapped-out group back, with room to append the last token of each sequence.

        Blocks that are still found by their tokens, or are found again, are not copied.

        Returns the (host block, device block) pairs to copy before the device blocks are read. Returns None, with
        nothing changed, if there is no room, as in `allocate`. Raises ValueError if a sequence is not swapped out.
        """
        for sequence in sequences:
            if sequence not in self._host_tables:
                raise ValueError(f"{sequence.request_id} is not swapped out")
        tables = [self._host_tables[sequence] for sequence in sequences]
        device_of = self.prefixes.find_again(sequences, tables)
        found = list(device_of.values())
        blocks = dict.fromkeys(block for of_sequence in tables for block in held(of_sequence))
        to_copy = [block for block in blocks if block not in device_of]
        num_new = len(to_copy) + self._num_to_append(sequences, tables, self._host_allocator)
        if not self._has_room(sequences, num_new, [[found]], keep_watermark):
            return None
        for block in found:
            self._allocator.fork(block)
        device_of.update((block, self._allocator.allocate()) for block in to_copy)
        device_tables = self._translate(sequences, tables, device_of, self._allocator)
        self.states.swap_in(sequences)
        for sequence in sequences:
            self._free_blocks(sequence)
        self.tables |= device_tables
        return [(block, device_of[block]) for block in to_copy]

    # ---- finding blocks by what they hold ---------------------------------------------------------------------------

    def publish(self, sequence: Sequence, first: int, last: int) -> bool:
        """Let the sequence's logical blocks [first, last) be found by their tokens, all of which are scheduled. Returns
        False if other blocks with some of these tokens are found: call `merge` after the step."""
        return self.prefixes.publish(sequence, self.block_tables(sequence), first, last)

    def merge(self, sequence: Sequence, first: int, last: int) -> None:
        """After `publish` and the step: where another sequence has published the same tokens, share its blocks."""
        for group, table in enumerate(self.block_tables(sequence)):
            for i in range(first, last):
                key = sequence.block_hashes[i] + self.prefixes.marks[group]
                published = self._allocator.find(key)
                if published is None:  # the published block had no owner any more, and was taken for other tokens
                    self._allocator.publish(table[i], key)
                elif published != table[i]:
                    self._allocator.fork(published)
                    self._allocator.free(table[i])
                    table[i] = published
                    self._rows.write(sequence, group, i, [published])

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block's reference count is the number of tables that hold it, `table_array`
        has the tables of the sequences that have rows, and the sequences with blocks are those with slots."""
        self._rows.check_integrity(self.tables)
        self.states.check_integrity(set(self.tables), set(self._host_tables))
        assert not self.tables.keys() & self._host_tables.keys(), "a sequence with blocks here and there"
        check_owners(self._allocator, self.tables)
        check_owners(self._host_allocator, self._host_tables)

    def _num_blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.num_tokens // self.block_size)

    def _nums_of_blocks(self, sequence: Sequence, is_alone: bool, num_computed: int | None = None) -> list[int]:
        """How many logical blocks each table of a sequence has in the next step: all, but for groups of layers with a
        window no more than the step can reach. What several sequences share is to be there for all of them.

        num_computed: if it differs from the sequence's.
        """
        num_blocks = self._num_blocks_for(sequence)
        if not self.gives_back or not is_alone:
            return [num_blocks] * len(self.windows)
        num_computed = sequence.num_computed_tokens if num_computed is None else num_computed
        num_reached = min(num_blocks, -(-(num_computed + self._max_num_batched_tokens) // self.block_size))
        return [num_blocks if window is None else num_reached for window in self.windows]

    def _num_to_append(self, sequences: list[Sequence], tables: list[Tables], allocator: BlockAllocator) -> int:
        num_missing = 0
        sharers: Counter[int] = Counter()
        for sequence, of_sequence in zip(sequences, tables, strict=True):
            for table, num_blocks in zip(of_sequence, self._nums_of_blocks(sequence, len(sequences) == 1), strict=True):
                if num_blocks > len(table):
                    num_missing += num_blocks - len(table)
                else:
                    sharers[table[-1]] += 1
        # The last sequence that comes to a block keeps it, unless the block is still shared.
        return num_missing + sum(min(count, allocator.ref_count(block) - 1) for block, count in sharers.items())

    def _plan(self, sequences: list[Sequence]) -> tuple[int, list[Tables]]:
        """How many new blocks the sequences need, and the blocks that each finds by its tokens."""
        found: list[Tables] = []
        shared: set[bytes] = set()  # hashes of blocks that earlier sequences bring
        num_new = 0
        for sequence in sequences:
            self._require_unknown(sequence)
            hashes = self.prefixes.hashes_before_last_token(sequence, alone=len(sequences) == 1)
            # Of several sequences, those with states would take away the checkpoints that the others of them have
            # found, and those with windows would not have all blocks that the others of them share.
            finds_none = len(sequences) > 1 and (self.states.num_slots > 0 or self.gives_back)
            found.append(self.prefixes.find([] if finds_none else hashes))
            num_found = len(found[-1][0])
            num_shared = sum(block_hash in shared for block_hash in hashes[num_found:]) if shared else 0
            nums_of_blocks = self._nums_of_blocks(sequence, len(sequences) == 1, num_found * self.block_size)
            num_new += sum(nums_of_blocks) - (num_found + num_shared) * len(self.windows)
            if len(sequences) > 1:
                shared.update(hashes)
        return num_new, found

    def _has_room(self, sequences: list[Sequence], num_new: int, found: list[Tables], keep_watermark: bool) -> bool:
        """Whether the sequences' states have room, and `num_new` blocks are free beside the found blocks, some of which
        count as free."""
        reserve = self._watermark_blocks if keep_watermark else 0
        num_revived = self._allocator.num_evictable({block for tables in found for block in held(tables)})
        return self.states.have_room(sequences) and num_new + num_revived + reserve <= self.num_free_blocks

    def _translate(
        self, sequences: list[Sequence], tables: list[Tables], block_of: dict[int, int], allocator: BlockAllocator
    ) -> dict[Sequence, Tables]:
        """The tables in blocks of another pool. A block has one owner so far, and as many as hold it afterwards."""
        owned: set[int] = set()
        for of_sequence in tables:
            for block in held(of_sequence):
                if block in owned:
                    allocator.fork(block_of[block])
                owned.add(block)
        return {
            sequence: [[block_of.get(block, RELEASED) for block in table] for table in of_sequence]
            for sequence, of_sequence in zip(sequences, tables, strict=True)
        }

    def _require_unknown(self, sequence: Sequence) -> None:
        if sequence in self.tables or sequence in self._host_tables:
            raise ValueError(f"{sequence.request_id} holds blocks already")
