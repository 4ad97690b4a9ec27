"""From the logical blocks of a sequence to the physical blocks of the cache.

As in PagedAttention (Kwon et al., SOSP 2023, sections 4.2 to 4.5), a sequence's block table names the physical block of
each run of `block_size` tokens. Blocks are taken as tokens come. Forked sequences share blocks, and a shared block is
copied when one of its sequences is about to write to it. A group can be swapped out to blocks of a pool in host memory.

Prefix caching: a full block is known by the hash of its tokens and of the block before it (the first block: and of the
sequence's salt). So a sequence that begins with the same tokens finds the block. A block is published when the tokens
that fill it are scheduled. That is early enough: a sequence that finds the block runs in the same step or later, and in
each layer all keys and values of a step are written before any are read. Where layers keep a state besides, blocks are
found up to the last one whose end has a checkpoint of the state (`StateSlots`).

Where every layer of a model has a window (or attends in chunks), a sequence gives a block back when all of the block's
tokens lie behind the widest window: no row to come sees them. A block is a block of all layers' caches, so a model with
a layer that sees all tokens gives none back.
"""

import math
from collections import Counter
from hashlib import blake2b
from struct import Struct

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.scheduling.block_allocator import BlockAllocator
from pagedattn_serve.scheduling.sequence import (
    ScheduledBatch,
    Sequence,
    TableArray,
)
from pagedattn_serve.scheduling.state_slots import StateSlots
from pagedattn_serve.scheduling.table_rows import RELEASED, TableRows, held


class BlockManager:
    """Block tables of the sequences that hold blocks, keyed by identity. A call that raises changes nothing.

    tables: to be read only.
    table_array: the block tables of the batch that was placed last, which the ops read. What changes in a table that
        has a row is written there at once.
    states: the slot of each sequence's state, if the model keeps states; to be read only.

    The sequences of a group, which may share blocks, are given together, as a list. If a method says that there is no
    room, nothing was changed.
    """

    def __init__(self, cache_config: CacheConfig, table_array: TableArray) -> None:
        self.block_size = cache_config.block_size
        self.window = cache_config.window
        self.prefix_caching = cache_config.enable_prefix_caching
        self._pack = Struct(f"{self.block_size}q").pack  # the tokens of a block as bytes
        self._watermark_blocks = math.ceil(cache_config.watermark * cache_config.num_blocks)
        self._allocator = BlockAllocator(cache_config.num_blocks)
        self.tables: dict[Sequence, list[int]] = {}
        self._host_allocator = BlockAllocator(cache_config.num_host_blocks)
        self._host_tables: dict[Sequence, list[int]] = {}
        self.states = StateSlots(cache_config.num_state_slots, cache_config.num_host_state_slots)
        self.table_array = table_array
        self._rows = TableRows(table_array)

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
    def num_host_blocks(self) -> int:
        """Blocks of the pool in host memory."""
        return self._host_allocator.num_blocks

    @property
    def num_used_host_blocks(self) -> int:
        """Blocks of the host's pool that swapped-out sequences hold."""
        return self._host_allocator.num_owned_blocks

    def block_table(self, sequence: Sequence) -> list[int]:
        """Physical block of each logical block, [num_blocks_of_sequence], RELEASED for those behind the window.
        ValueError if the sequence holds none.

        The manager's own list, to be read only.
        """
        table = self.tables.get(sequence)
        if table is None:
            raise ValueError(f"{sequence.request_id} holds no blocks")
        return table

    @property
    def num_table_entries(self) -> int:
        """Blocks that the sequences would hold if none were shared."""
        return sum(map(len, map(held, self.tables.values())))

    def num_used_slots(self) -> int:
        """Tokens whose keys and values are in blocks that sequences hold. Tokens of a shared block count once."""
        if self.window is None and self.num_table_entries == self.num_used_blocks:  # no block is shared
            return sum(sequence.num_computed_tokens for sequence in self.tables)
        num_tokens: dict[int, int] = {}
        for sequence, table in self.tables.items():
            num_full, rest = divmod(sequence.num_computed_tokens, self.block_size)
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
        return _owners(self._allocator, self.tables, groups)

    def host_block_owners(self, groups: list[list[Sequence]]) -> list[int]:
        """`block_owners` of the pool in host memory."""
        return _owners(self._host_allocator, self._host_tables, groups)

    # ---- taking blocks ----------------------------------------------------------------------------------------------

    def can_allocate(self, sequences: list[Sequence], *, keep_watermark: bool) -> bool:
        """Whether `allocate` would."""
        return self.states.have_room(sequences) and self._has_room(*self._plan(sequences), keep_watermark)

    def allocate(self, sequences: list[Sequence], *, keep_watermark: bool) -> bool:
        """Give the sequences blocks for all their tokens, and set how many of these tokens are computed already.

        A token counts as computed if its block was found by its tokens, or if the sequence shares the block with an
        earlier sequence of the list, which has to be computed first. The last token of each sequence is left to
        compute.

        Returns False if there is no room: too few blocks are free, or, with `keep_watermark`, the reserve would not
        stay free beside them. The reserve lets running sequences grow for a while before the newcomer has to be
        preempted for them. Raises ValueError if a sequence holds blocks already.
        """
        num_new, found = self._plan(sequences)
        if not (self.states.have_room(sequences) and self._has_room(num_new, found, keep_watermark)):
            return False
        for blocks in found:  # before any new block is taken, so that no found block is evicted for it
            for block in blocks:
                self._allocator.fork(block)
        block_of: dict[bytes, tuple[int, Sequence]] = {}  # and the first sequence that has the block
        for sequence, table in zip(sequences, found, strict=True):
            hashes = sequence.block_hashes[: (sequence.num_tokens - 1) // self.block_size]
            if self.states.num_slots and table:
                self.states.take_copy(sequence, hashes[len(table) - 1])
            else:
                self.states.take(sequence)
            owner = None
            for block_hash in hashes[len(table) :]:
                if block_hash not in block_of:
                    break
                block, owner = block_of[block_hash]
                self._allocator.fork(block)
                table.append(block)
            if owner is not None:
                self.states.wait_for(sequence, owner, len(table) * self.block_size)
            sequence.num_computed_tokens = len(table) * self.block_size
            table += [self._allocator.allocate() for _ in range(self._num_blocks_for(sequence) - len(table))]
            if len(sequences) > 1:
                for block_hash, block in zip(hashes, table, strict=False):
                    block_of.setdefault(block_hash, (block, sequence))
            self.tables[sequence] = table
        return True

    def append(self, sequence: Sequence) -> tuple[int, int] | None:
        """Make the last token (index num_tokens - 1) writable: its block exists and no other sequence shares it.

        To be called after each token added to the sequence, before the token is run; a second call does nothing. If
        the token's block was shared, returns the (src, dst) pair to copy before the token is written: copy-on-write.
        Raises ValueError if the sequence holds no blocks or lacks more than one, OutOfBlocksError if none is free.
        """
        pair = self._append_block(sequence)
        self.states.make_own(sequence)
        return pair

    def _append_block(self, sequence: Sequence) -> tuple[int, int] | None:
        table = self.block_table(sequence)
        num_tokens = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        num_missing = -(-num_tokens // self.block_size) - len(table)
        if num_missing > 1:
            raise ValueError(f"{sequence.request_id} lacks {num_missing} blocks, expected at most 1: append each token")
        if num_missing == 0 and self._allocator.ref_count(table[-1]) == 1:
            return None
        block = self._allocator.allocate()
        if num_missing == 1:
            table.append(block)
            self._rows.write(sequence, len(table) - 1, [block])
            return None
        shared = table[-1]
        table[-1] = block
        self._rows.write(sequence, len(table) - 1, [block])
        self._allocator.free(shared)
        return shared, block

    def append_drafts(self, sequence: Sequence, num_tokens: int) -> int:
        """After `append`, make positions behind the last token writable, as far as free blocks go. Returns how many of
        `num_tokens` have room. When the step is over, `trim` takes back what is not used."""
        table = self.block_table(sequence)
        num_missing = -(-(sequence.num_tokens + num_tokens) // self.block_size) - len(table)
        blocks = [self._allocator.allocate() for _ in range(min(num_missing, self._allocator.num_free_blocks))]
        self._rows.write(sequence, len(table), blocks)
        table += blocks
        return min(num_tokens, len(table) * self.block_size - sequence.num_tokens)

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks that its tokens do not reach."""
        table = self.block_table(sequence)
        while len(table) > self._num_blocks_for(sequence):
            self._allocator.free(table.pop())

    def num_blocks_to_append(self, sequences: list[Sequence]) -> int:
        """Blocks that `append` takes for all of the sequences together."""
        return self._num_to_append(sequences, [self.block_table(each) for each in sequences], self._allocator)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which holds the same tokens as `parent`, share all its blocks. Raises ValueError if the parent
        holds no blocks, the child holds some already, or they differ in length."""
        table = list(self.block_table(parent))
        self._require_unknown(child)
        if child.num_tokens != parent.num_tokens:
            raise ArgumentError("child", f"the parent's {parent.num_tokens} tokens", child.num_tokens)
        for block in held(table):
            self._allocator.fork(block)
        self.tables[child] = table
        self.states.fork(parent, child)

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks that lie behind the window of the next token to compute."""
        if self.window is None:
            return
        table = self.block_table(sequence)
        end = (sequence.num_computed_tokens + 1 - self.window) // self.block_size
        for i in range(end - 1, -1, -1):  # the end is forgotten before what it builds on
            if table[i] == RELEASED:
                break
            self._allocator.free(table[i])
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
        for block in reversed(held(self.block_table(sequence))):  # the end is forgotten before what it builds on
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

    # ---- the array of a batch ---------------------------------------------------------------------------------------

    def place(self, batch: ScheduledBatch) -> None:
        """Let row i of `table_array` be the block table of the i-th sequence. Plain decodes may change their order.

        Tell the batch the slots of the sequences' states, which slots are to be copied, and what checkpoints to make.
        """
        batch.table_writes = self._rows.place(batch.sequences, batch.num_plain, self.tables)
        if self.states.num_slots:
            batch.state_slots = [self.states.slot_of[scheduled.sequence] for scheduled in batch.sequences]
            batch.state_copies = self.states.take_copies()
            if self.prefix_caching:
                batch.state_checkpoints = self.states.plan_checkpoints(batch, self.block_size, self._hashes)

    # ---- swapping ---------------------------------------------------------------------------------------------------

    def swap_out(self, sequences: list[Sequence]) -> list[tuple[int, int]] | None:
        """Move the blocks of a group to the host's pool. Blocks that are shared on the device are shared there, too.

        Returns the (device block, host block) pairs to copy before the device blocks are written to. Returns None, with
        nothing changed, if the pool has too few free blocks. Raises ValueError if a sequence holds no blocks.
        """
        tables = [self.block_table(sequence) for sequence in sequences]
        blocks = dict.fromkeys(block for table in tables for block in held(table))
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
        num_computed = [sequence.num_computed_tokens // self.block_size for sequence in sequences]
        # What one is still to compute is not looked for, though a later one that shares it counts it as computed.
        to_compute = {block for table, num in zip(tables, num_computed, strict=True) for block in table[num:]}
        device_of: dict[int, int] = {}
        for sequence, table, num in zip(sequences, tables, num_computed, strict=True):
            found_of = dict(zip(table, self._find(sequence.block_hashes[:num]), strict=False))
            found_of.pop(RELEASED, None)
            device_of |= {block: found for block, found in found_of.items() if block not in to_compute}
        found = list(device_of.values())
        to_copy = list(dict.fromkeys(block for table in tables for block in held(table) if block not in device_of))
        num_new = len(to_copy) + self._num_to_append(sequences, tables, self._host_allocator)
        if not (self.states.have_room(sequences) and self._has_room(num_new, [found], keep_watermark)):
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

    def publish(self, sequence: Sequence, first: int, last: int) -> None:
        """Let the sequence's logical blocks [first, last) be found by their tokens, all of which are scheduled."""
        table, hashes = self.block_table(sequence), self._hashes(sequence, last)
        for i in range(first, last):
            self._allocator.publish(table[i], hashes[i])

    def merge(self, sequence: Sequence, first: int, last: int) -> None:
        """After `publish` and the step: where another sequence has published the same tokens, share its blocks."""
        table = self.block_table(sequence)
        for i in range(first, last):
            block_hash = sequence.block_hashes[i]
            published = self._allocator.find(block_hash)
            if published is None:  # the published block had no owner any more, and was taken for other tokens
                self._allocator.publish(table[i], block_hash)
            elif published != table[i]:
                self._allocator.fork(published)
                self._allocator.free(table[i])
                table[i] = published
                self._rows.write(sequence, i, [published])

    def pin_prefix(self, token_ids: list[int], max_num_blocks: int) -> int:
        """Keep the full blocks of these tokens, once a sequence has computed them: no other tokens take them.

        Returns how many tokens they hold. Raises ValueError if pins would take more than `max_num_blocks`.
        """
        sequence = Sequence("prefix", token_ids)
        hashes = self._hashes(sequence, len(token_ids) // self.block_size)
        num_pinned = self._allocator.num_pinned_with(hashes)
        if num_pinned > max_num_blocks:
            raise ArgumentError(
                "prefix",
                f"registered prefixes to take at most {max_num_blocks} blocks, which leaves the cache room for one "
                "sequence of max_model_len tokens",
                num_pinned,
            )
        self._allocator.pin(hashes)
        return len(hashes) * self.block_size

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block's reference count is the number of tables that hold it, `table_array`
        has the tables of the sequences that have rows, and the sequences with blocks are those with slots."""
        self._rows.check_integrity(self.tables)
        self.states.check_integrity(set(self.tables), set(self._host_tables))
        assert not self.tables.keys() & self._host_tables.keys(), "a sequence with blocks here and there"
        for allocator, tables in ((self._allocator, self.tables), (self._host_allocator, self._host_tables)):
            allocator.check_integrity()
            for sequence, table in tables.items():
                blocks = held(table)
                assert len(set(blocks)) == len(blocks), f"{sequence.request_id} holds a block twice: {table}"
                assert RELEASED not in blocks, f"{sequence.request_id} has given back a later block: {table}"
            num_holders = [0] * allocator.num_blocks
            for table in tables.values():
                for block in held(table):
                    num_holders[block] += 1
            counts = allocator.ref_counts()
            assert counts == num_holders, "; ".join(
                f"block {block}: reference count {count}, in {number} tables"
                for block, (count, number) in enumerate(zip(counts, num_holders, strict=True))
                if count != number
            )

    def _num_blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.num_tokens // self.block_size)

    def _num_to_append(self, sequences: list[Sequence], tables: list[list[int]], allocator: BlockAllocator) -> int:
        num_missing = 0
        sharers: Counter[int] = Counter()
        for sequence, table in zip(sequences, tables, strict=True):
            if self._num_blocks_for(sequence) > len(table):
                num_missing += 1
            else:
                sharers[table[-1]] += 1
        # The last sequence that comes to a block keeps it, unless the block is still shared.
        return num_missing + sum(min(count, allocator.ref_count(block) - 1) for block, count in sharers.items())

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The hashes of the sequence's first `num_blocks` blocks, which are full. There may be more of them."""
        hashes, size = sequence.block_hashes, self.block_size
        if len(hashes) < num_blocks:
            last = hashes[-1] if hashes else salt_hash(sequence.cache_salt)
            tokens = sequence.tokens(len(hashes) * size, num_blocks * size)
            for begin in range(0, len(tokens), size):
                last = blake2b(last + self._pack(*tokens[begin : begin + size]), digest_size=16).digest()
                hashes.append(last)
        return hashes

    def _hashes_before_last_token(self, sequence: Sequence, *, alone: bool) -> list[bytes]:
        """The hashes of full blocks that are worth looking for. The block of the last token is left out, because that
        token has to be computed. If the prompt's logits are asked for, there are none."""
        if (alone and not self.prefix_caching) or sequence.prompt_logits_from is not None:
            return []
        num_blocks = (sequence.num_tokens - 1) // self.block_size
        return self._hashes(sequence, num_blocks)[:num_blocks]

    def _plan(self, sequences: list[Sequence]) -> tuple[int, list[list[int]]]:
        """How many new blocks the sequences need, and the blocks that each finds by its tokens."""
        found: list[list[int]] = []
        shared: set[bytes] = set()  # hashes of blocks that earlier sequences bring
        num_new = 0
        for sequence in sequences:
            self._require_unknown(sequence)
            hashes = self._hashes_before_last_token(sequence, alone=len(sequences) == 1)
            # Several sequences with states would take away the checkpoints that the others of them have found.
            found.append([] if len(sequences) > 1 and self.states.num_slots else self._find(hashes))
            self.states.cut_to_checkpoint(found[-1], hashes)
            num_new += self._num_blocks_for(sequence) - len(found[-1])
            num_new -= sum(block_hash in shared for block_hash in hashes[len(found[-1]) :])
            shared.update(hashes)
        return num_new, found

    def _find(self, hashes: list[bytes]) -> list[int]:
        """The blocks of these hashes, up to the first hash that has no block."""
        blocks = []
        for block_hash in hashes:
            block = self._allocator.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _has_room(self, num_new: int, found: list[list[int]], keep_watermark: bool) -> bool:
        """Whether `num_new` blocks are free beside the found blocks, some of which count as free."""
        reserve = self._watermark_blocks if keep_watermark else 0
        num_revived = self._allocator.num_evictable({block for blocks in found for block in blocks})
        return num_new + num_revived + reserve <= self.num_free_blocks

    def _translate(
        self, sequences: list[Sequence], tables: list[list[int]], block_of: dict[int, int], allocator: BlockAllocator
    ) -> dict[Sequence, list[int]]:
        """The tables in blocks of another pool. A block has one owner so far, and as many as hold it afterwards."""
        owned: set[int] = set()
        for table in tables:
            for block in held(table):
                if block in owned:
                    allocator.fork(block_of[block])
                owned.add(block)
        translated = ([block_of.get(block, RELEASED) for block in table] for table in tables)
        return dict(zip(sequences, translated, strict=True))

    def _require_unknown(self, sequence: Sequence) -> None:
        if sequence in self.tables or sequence in self._host_tables:
            raise ValueError(f"{sequence.request_id} holds blocks already")


def salt_hash(salt: str) -> bytes:
    """What the hashes of a sequence's blocks begin with: nothing without a salt. With a salt, it differs from the hash
    of every block and from all tokens."""
    return blake2b(salt.encode(), digest_size=16, person=b"cache_salt").digest() if salt else b""


def _owners(allocator: BlockAllocator, tables: dict[Sequence, list[int]], groups: list[list[Sequence]]) -> list[int]:
    owners = [-1] * allocator.num_blocks
    num_left = allocator.num_owned_blocks
    # A sequence shares its beginning. So the first round goes from the end of each table to the first block that has an
    # owner, and looks at each block once. If blocks that were swapped in were computed by another sequence at the same
    # time, merging can leave blocks without an owner before that place. The second round finds them.
    for ends_at_shared in (True, False):
        for index, sequences in enumerate(groups):
            for sequence in sequences:
                for block in reversed(held(tables.get(sequence, []))):
                    if owners[block] < 0:
                        owners[block] = index
                        num_left -= 1
                    elif ends_at_shared:
                        break
        if num_left == 0:
            break
    return owners
