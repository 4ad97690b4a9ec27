"""BlockAllocator: reference counts, errors, and random use against a plain model."""

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
    with pytest.raises(ValueError, match="num_blocks: expected at least 1, got 0"):
        BlockAllocator(0)
    allocator = BlockAllocator(2)
    for call in (allocator.free, allocator.fork):
        with pytest.raises(ValueError, match="in use, got 0, which is free"):
            call(0)
    for block in (-1, 2):
        for method in ("free", "fork", "ref_count"):
            with pytest.raises(ValueError, match=f"expected 0 to 1, got {block}"):
                getattr(allocator, method)(block)


def test_integrity_check_can_fail() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate()
    allocator._free.append(block)
    with pytest.raises(AssertionError, match="free list"):
        allocator.check_integrity()


class AllocatorMachine(RuleBasedStateMachine):
    """`owned` holds a block once per owner, and so does the model."""

    owned = Bundle("owned")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(5)
        self.num_owners: Counter[int] = Counter()

    @rule(target=owned)
    def allocate(self) -> Any:
        if len(+self.num_owners) == 5:
            with pytest.raises(OutOfBlocksError):
                self.allocator.allocate()
            return multiple()
        block = self.allocator.allocate()
        assert self.num_owners[block] == 0
        self.num_owners[block] = 1
        return block

    @rule(target=owned, block=owned)
    def fork(self, block: int) -> int:
        self.allocator.fork(block)
        self.num_owners[block] += 1
        return block

    @rule(block=consumes(owned))
    def free(self, block: int) -> None:
        self.allocator.free(block)
        self.num_owners[block] -= 1

    @rule(block=st.integers(-2, 6))
    def misuse(self, block: int) -> None:
        if self.num_owners[block] == 0:
            for call in (self.allocator.free, self.allocator.fork):
                with pytest.raises(ValueError):
                    call(block)

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.num_free_blocks == 5 - len(+self.num_owners)
        assert [self.allocator.ref_count(block) for block in range(5)] == [self.num_owners[b] for b in range(5)]


TestAllocatorMachine = AllocatorMachine.TestCase
