"""BlockAllocator: reference counts, published and pinned blocks, errors, and random use against a plain model."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pagedattn_serve.scheduling.block_allocator import BlockAllocator, OutOfBlocksError


def test_every_block_once_then_out_of_blocks() -> None:
    allocator = BlockAllocator(3)
    assert {allocator.allocate() for _ in range(3)} == {0, 1, 2}
    assert (allocator.num_blocks, allocator.num_free_blocks) == (3, 0)
    with pytest.raises(OutOfBlocksError, match="all 3 blocks"):
        allocator.allocate()


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    allocator = BlockAllocator(1)
    block = allocator.allocate()
    allocator.fork(block)
    assert allocator.ref_count(block) == 2
    allocator.free(block)
    assert (allocator.ref_count(block), allocator.num_free_blocks) == (1, 0)
    allocator.free(block)
    assert (allocator.ref_count(block), allocator.num_free_blocks) == (0, 1)


def test_errors() -> None:
    with pytest.raises(ValueError, match="num_blocks: expected at least 0, got -1"):
        BlockAllocator(-1)
    with pytest.raises(OutOfBlocksError, match="all 0 blocks"):
        BlockAllocator(0).allocate()
    allocator = BlockAllocator(2)
    for call in (allocator.free, allocator.fork):
        with pytest.raises(ValueError, match="in use, got 0, which is free"):
            call(0)
    for block in (-1, 2):
        for method in ("free", "fork", "ref_count"):
            with pytest.raises(ValueError, match=f"expected 0 to 1, got {block}"):
                getattr(allocator, method)(block)


def test_several_blocks_or_none() -> None:
    allocator = BlockAllocator(3)
    with pytest.raises(OutOfBlocksError, match="3 of 3 blocks are free, 4 are needed"):
        allocator.allocate_many(4)
    assert allocator.num_free_blocks == 3
    assert sorted(allocator.allocate_many(3)) == [0, 1, 2]


def make_published(num_blocks: int, num_published: int) -> BlockAllocator:
    """Blocks 0, 1, ... published as b"0", b"1", ... and let go in this order."""
    allocator = BlockAllocator(num_blocks)
    blocks = [allocator.allocate() for _ in range(num_published)]
    for block in blocks:
        allocator.publish(block, str(block).encode())
    for block in blocks:
        allocator.free(block)
    return allocator


def test_a_published_block_stays_findable_until_no_free_one_is_left() -> None:
    allocator = make_published(3, num_published=2)
    assert (allocator.num_free_blocks, allocator.num_cached_blocks, allocator.num_owned_blocks) == (3, 2, 0)
    assert allocator.allocate() == 2  # the free one first
    assert (allocator.find(b"0"), allocator.find(b"1")) == (0, 1)
    assert allocator.allocate() == 0
    assert (allocator.find(b"0"), allocator.find(b"1")) == (None, 1)
    assert (allocator.num_free_blocks, allocator.num_cached_blocks, allocator.num_owned_blocks) == (1, 1, 2)


def test_the_block_let_go_longest_ago_is_evicted_first() -> None:
    allocator = make_published(4, num_published=4)
    for block in (0, 2):  # found and let go again: used last
        allocator.fork(block)
        allocator.free(block)
    assert [allocator.allocate() for _ in range(4)] == [1, 3, 0, 2]


def test_a_found_block_is_not_evicted() -> None:
    allocator = make_published(2, num_published=2)
    allocator.fork(0)
    assert (allocator.ref_count(0), allocator.num_free_blocks) == (1, 1)
    assert allocator.allocate() == 1
    with pytest.raises(OutOfBlocksError):
        allocator.allocate()


def test_the_first_block_published_under_a_key_keeps_it() -> None:
    allocator = BlockAllocator(2)
    first, second = allocator.allocate(), allocator.allocate()
    allocator.publish(first, b"key")
    allocator.publish(second, b"key")
    assert allocator.find(b"key") == first
    allocator.free(second)
    assert allocator.num_cached_blocks == 0  # it is free for good
    allocator.check_integrity()


def test_inserted_blocks_end_at_the_first_that_is_not_at_hand() -> None:
    allocator = make_published(4, num_published=1)
    inserted = allocator.insert([b"0", b"a", b"b", b"c"], {b"a", b"c"})
    assert list(inserted) == [b"a"] and allocator.find(b"a") == inserted[b"a"]
    assert (allocator.find(b"b"), allocator.find(b"c")) == (None, None)
    assert (allocator.num_cached_blocks, allocator.num_free_blocks) == (2, 4)
    allocator.check_integrity()


def test_a_pinned_block_is_kept_without_an_owner() -> None:
    allocator = make_published(3, num_published=1)
    allocator.pin([b"0", b"later"])
    assert (allocator.num_free_blocks, allocator.num_cached_blocks) == (2, 1)
    later = allocator.allocate()
    allocator.publish(later, b"later")
    allocator.free(later)
    assert (allocator.num_free_blocks, allocator.num_cached_blocks) == (1, 2)
    allocator.allocate()
    with pytest.raises(OutOfBlocksError):
        allocator.allocate()
    assert (allocator.find(b"0"), allocator.find(b"later")) == (0, later)
    allocator.fork(later)
    assert (allocator.ref_count(later), allocator.num_free_blocks) == (1, 0)
    allocator.check_integrity()


def test_pins_count_each_key_once() -> None:
    allocator = BlockAllocator(2, frozenset([b"a"]))
    assert allocator.num_pinned_with([b"a", b"b", b"b"]) == 2
    assert allocator.pinned == {b"a"}


def test_integrity_check_can_fail() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator._free.append(block)
    with pytest.raises(AssertionError, match=r"free \[0, 1\], evictable \[\], pinned \[\], no owner \[1\]"):
        allocator.check_integrity()
    allocator = make_published(2, num_published=1)
    del allocator._block_of[b"0"]
    with pytest.raises(AssertionError):
        allocator.check_integrity()


class AllocatorMachine(RuleBasedStateMachine):
    """`owned` holds a block once per owner, and so does the model, which keeps what is evictable in a plain list."""

    owned = Bundle("owned")
    keys = st.sampled_from([b"a", b"b", b"c", b"d"])

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(5)
        self.num_owners: Counter[int] = Counter()
        self.block_of: dict[bytes, int] = {}
        self.evictable: list[int] = []
        self.pinned: set[bytes] = set()

    @rule(target=owned)
    def allocate(self) -> Any:
        num_kept = sum(self.num_owners[block] == 0 for key, block in self.block_of.items() if key in self.pinned)
        if len(+self.num_owners) + num_kept == 5:
            with pytest.raises(OutOfBlocksError):
                self.allocator.allocate()
            return multiple()
        block = self.allocator.allocate()
        assert self.num_owners[block] == 0
        if block in self.block_of.values():
            assert len(+self.num_owners) + len(self.evictable) + num_kept == 5  # nothing is evicted before that
            assert block == self.evictable.pop(0)
            self.block_of = {key: other for key, other in self.block_of.items() if other != block}
        self.num_owners[block] = 1
        return block

    @rule(target=owned, block=owned)
    def fork(self, block: int) -> int:
        self.allocator.fork(block)
        self.num_owners[block] += 1
        return block

    @rule(target=owned, key=keys)
    def find(self, key: bytes) -> Any:
        block = self.allocator.find(key)
        assert block == self.block_of.get(key)
        if block is None:
            return multiple()
        if block in self.evictable:
            self.evictable.remove(block)
        return self.fork(block)

    @rule(block=owned, key=keys)
    def publish(self, block: int, key: bytes) -> None:
        if block in self.block_of.values():  # it holds one thing
            return
        self.allocator.publish(block, key)
        self.block_of.setdefault(key, block)

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        self.allocator.pin([key])
        self.pinned.add(key)
        self.evictable = [block for block in self.evictable if block != self.block_of.get(key)]

    @rule(block=consumes(owned))
    def free(self, block: int) -> None:
        self.allocator.free(block)
        self.num_owners[block] -= 1
        keys = {other: key for key, other in self.block_of.items()}
        if self.num_owners[block] == 0 and keys.get(block, b"") in {*self.block_of} - self.pinned:
            self.evictable.append(block)

    @rule(block=st.integers(-2, 6))
    def misuse(self, block: int) -> None:
        if self.num_owners[block] == 0:
            for call in (self.allocator.free, self.allocator.fork):
                if call == self.allocator.fork and block in self.block_of.values():
                    continue
                with pytest.raises(ValueError):
                    call(block)

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity()
        num_owned = len(+self.num_owners)
        kept = {block for key, block in self.block_of.items() if key in self.pinned and not self.num_owners[block]}
        assert self.allocator.num_owned_blocks == num_owned
        assert self.allocator.num_free_blocks == 5 - num_owned - len(kept)
        assert self.allocator.num_cached_blocks == len(kept) + len(self.evictable)
        assert self.allocator.num_evictable(set(range(5))) == len(self.evictable)
        assert [self.allocator.ref_count(block) for block in range(5)] == [self.num_owners[b] for b in range(5)]


TestAllocatorMachine = AllocatorMachine.TestCase
