"""From a sequence to the slot of its state, for a model whose layers keep more between tokens than keys and values.

The states of all such layers are one slot. A sequence takes a slot with its first block, and gives it back with its
last. Forked sequences share a slot until one of them is about to run: that sequence gets a slot of its own, to which
the state is copied first. A sequence that is swapped out takes its state along to a slot in host memory. If the
sequences of a group are computed again, what they share is computed by the first of them: it stops where another one
goes its own way, which waits for a copy of the state there.

As many slots as sequences may run at once are enough, so a slot is always free when a running sequence needs one. The
slots that are left keep checkpoints: the states of prompts at ends of blocks, found by the hash of the block. A prompt
leaves one every CHECKPOINT_TOKENS tokens, one at the end of the last full block before its last token, and one where a
registered prefix ends. A checkpoint has no owner; when a slot is needed, the checkpoint that was not used for longest
goes first. That of a registered prefix is pinned: it stays.
"""

from collections.abc import Callable

from pagedattn_serve.errors import ArgumentError
from pagedattn_serve.scheduling.block_allocator import BlockAllocator
from pagedattn_serve.scheduling.sequence import ScheduledBatch, Sequence, StateCheckpoint, StateCopies

CHECKPOINT_TOKENS = 512


class StateSlots:
    """The slots of the sequences that hold blocks. If there are no slots, because the model keeps no states, every
    method does nothing.

    slot_of: to be read only.
    """

    def __init__(self, num_slots: int, num_host_slots: int) -> None:
        self.num_slots = num_slots
        self._num_host_slots = num_host_slots
        self._allocator = BlockAllocator(num_slots)
        self.clear()

    def clear(self) -> None:
        """Take the slots of all sequences away, whatever state the tables are in, and forget all checkpoints. Pinned
        ones are kept when prompts leave them again."""
        self.slot_of: dict[Sequence, int] = {}
        self._allocator = BlockAllocator(self.num_slots, self._allocator.pinned)
        self._host_slot_of: dict[Sequence, int] = {}
        self._host_allocator = BlockAllocator(self._num_host_slots)
        self._copies = StateCopies()
        self._new_checkpoints: list[tuple[int, bytes]] = []  # slots that the step writes, and their keys
        self._waiting: dict[Sequence, tuple[Sequence, int]] = {}  # for the state of which sequence, after which token

    @property
    def num_used_slots(self) -> int:
        """Slots that at least one sequence holds; a shared slot counts once."""
        return self._allocator.num_owned_blocks

    def have_room(self, sequences: list[Sequence]) -> bool:
        """Whether there is a slot for each of the sequences."""
        return not self.num_slots or len(sequences) <= self._allocator.num_free_blocks

    def host_has_room(self, sequences: list[Sequence]) -> bool:
        """Whether the states of the sequences, which have slots, could be swapped out."""
        return len({self.slot_of[each] for each in self._with_slots(sequences)}) <= self._host_allocator.num_free_blocks

    def take(self, sequence: Sequence) -> None:
        """Give the sequence a slot. What the slot holds does not count."""
        if self.num_slots:
            self.slot_of[sequence] = self._allocator.allocate()

    def take_copy(self, sequence: Sequence, key: bytes) -> None:
        """Give the sequence a slot, to which the checkpoint of this key is copied. There must be one."""
        checkpoint = self._allocator.find(key)
        assert checkpoint is not None
        self._allocator.fork(checkpoint)
        self._allocator.free(checkpoint)  # it was used last now
        slot = self.slot_of[sequence] = self._allocator.allocate()
        if slot != checkpoint:  # else it was the last slot without an owner
            self._copies.to_copy.append((checkpoint, slot))

    def has_checkpoint(self, key: bytes) -> bool:
        """Whether a sequence can go on at the end of the block of this key, as far as states count."""
        return not self.num_slots or self._allocator.find(key) is not None

    def plan_checkpoints(
        self, batch: ScheduledBatch, block_size: int, keys_of: Callable[[Sequence, int], list[bytes]]
    ) -> list[StateCheckpoint]:
        """The checkpoints that the prompts of a batch leave, as far as slots are left.

        keys_of: the keys of so many first blocks of a sequence; there may be more of them.
        """
        checkpoints = []
        pinned = self._allocator.pinned
        period = max(1, CHECKPOINT_TOKENS // block_size)
        for i, scheduled in enumerate(batch.sequences[batch.num_plain :], batch.num_plain):
            sequence, begin = scheduled.sequence, scheduled.sequence.num_computed_tokens
            last = (sequence.num_tokens - 1) // block_size
            for num_blocks in range(begin // block_size + 1, (begin + scheduled.num_new_tokens) // block_size + 1):
                is_due = num_blocks == last or num_blocks % period == 0
                if not (is_due or pinned):
                    continue
                key = keys_of(sequence, num_blocks)[num_blocks - 1]
                if not (is_due or key in pinned):
                    continue
                if self._allocator.find(key) is None and self._allocator.num_free_blocks:
                    slot = self._allocator.allocate()
                    self._new_checkpoints.append((slot, key))
                    checkpoints.append(StateCheckpoint(i, num_blocks * block_size - begin, slot))
        return checkpoints

    def pin(self, key: bytes, max_num_pinned: int) -> None:
        """Keep the checkpoint of this key for good, once a prompt leaves it. Raises ValueError if more would be kept
        than `max_num_pinned`."""
        num_pinned = self._allocator.num_pinned_with([key])
        if num_pinned > max_num_pinned:
            raise ArgumentError(
                "prefix",
                f"at most {max_num_pinned} registered prefixes, whose states have slots beside those of max_num_seqs "
                "sequences",
                num_pinned,
            )
        self._allocator.pin([key])

    def publish_checkpoints(self) -> None:
        """After the step: let its checkpoints be found."""
        for slot, key in self._new_checkpoints:
            self._allocator.publish(slot, key)
            self._allocator.free(slot)
        self._new_checkpoints.clear()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share the parent's slot."""
        if self.num_slots:
            slot = self.slot_of[child] = self.slot_of[parent]
            self._allocator.fork(slot)

    def make_own(self, sequence: Sequence) -> None:
        """Before the sequence runs: if it shares its slot, give it another, to which the state is copied."""
        if self.num_slots and self._allocator.ref_count(shared := self.slot_of[sequence]) > 1:
            slot = self.slot_of[sequence] = self._allocator.allocate()
            self._allocator.free(shared)
            self._copies.to_copy.append((shared, slot))

    def wait_for(self, sequence: Sequence, other: Sequence, num_tokens: int) -> None:
        """Let the sequence, which has a slot, begin with the state of another one after `num_tokens` tokens."""
        if self.num_slots:
            self._waiting[sequence] = other, num_tokens

    def hand_on(self, sequences: list[Sequence]) -> None:
        """Before sequences of a group run: those that wait for a state which is there get a copy."""
        for sequence in sequences if self._waiting else ():
            other, num_tokens = self._waiting.get(sequence, (sequence, -1))
            if other.num_computed_tokens == num_tokens:
                self._copies.to_copy.append((self.slot_of[other], self.slot_of[sequence]))
                del self._waiting[sequence]

    def limits(self, sequences: list[Sequence]) -> list[int]:
        """How many tokens of each sequence may run: none while it waits, and not beyond where others wait for it."""
        limits = [sequence.num_uncomputed_tokens for sequence in sequences]
        for i, sequence in enumerate(sequences if self._waiting else ()):
            if sequence in self._waiting:
                limits[i] = 0
            else:
                stops = [num_tokens for other, num_tokens in self._waiting.values() if other is sequence]
                limits[i] = min([limits[i], *(stop - sequence.num_computed_tokens for stop in stops)])
        return limits

    def free(self, sequence: Sequence) -> None:
        """Take the sequence's slot away, on the device or the host."""
        self._waiting.pop(sequence, None)
        if sequence in self._host_slot_of:
            self._host_allocator.free(self._host_slot_of.pop(sequence))
        elif self.num_slots:
            self._allocator.free(self.slot_of.pop(sequence))

    def swap_out(self, sequences: list[Sequence]) -> None:
        """Move the states to the host. Slots that are shared on the device are shared there, too."""
        moved = self._move(self._with_slots(sequences), self.slot_of, self._allocator, self._host_allocator)
        self._host_slot_of |= moved[0]
        self._copies.to_swap_out += moved[1]

    def swap_in(self, sequences: list[Sequence]) -> None:
        """Move the states back to the device."""
        moved = self._move(self._with_slots(sequences), self._host_slot_of, self._host_allocator, self._allocator)
        self.slot_of |= moved[0]
        self._copies.to_swap_in += moved[1]

    def take_copies(self) -> StateCopies:
        """The copies of slots that were asked for since the last call."""
        copies, self._copies = self._copies, StateCopies()
        return copies

    def check_integrity(self, sequences: set[Sequence], host_sequences: set[Sequence]) -> None:
        """Raise AssertionError unless these sequences have slots, which are used as often as counted."""
        expected = (sequences, host_sequences) if self.num_slots else (set(), set())
        for slot_of, allocator, holders in (
            (self.slot_of, self._allocator, expected[0]),
            (self._host_slot_of, self._host_allocator, expected[1]),
        ):
            allocator.check_integrity()
            assert slot_of.keys() == holders, "sequences with blocks and those with states differ"
            counts = [0] * allocator.num_blocks
            for slot in slot_of.values():
                counts[slot] += 1
            for slot, _ in self._new_checkpoints if allocator is self._allocator else ():
                counts[slot] += 1
            assert counts == allocator.ref_counts(), f"slots in use {counts}, counted {allocator.ref_counts()}"

    def _with_slots(self, sequences: list[Sequence]) -> list[Sequence]:
        return sequences if self.num_slots else []

    def _move(
        self, sequences: list[Sequence], slot_of: dict[Sequence, int], source: BlockAllocator, target: BlockAllocator
    ) -> tuple[dict[Sequence, int], list[tuple[int, int]]]:
        """The slots of the sequences in the other pool, and the pairs to copy."""
        moved: dict[int, int] = {}
        places: dict[Sequence, int] = {}
        for sequence in sequences:
            slot = slot_of.pop(sequence)
            if slot in moved:
                target.fork(moved[slot])
            else:
                moved[slot] = target.allocate()
            places[sequence] = moved[slot]
            source.free(slot)
        return places, list(moved.items())
