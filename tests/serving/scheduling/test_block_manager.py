"""BlockManager: allocation, growth, copy-on-write, and that each table always leads to its own sequence's tokens."""

import itertools
from typing import Any

import pytest
from fake_cache import FakeCache
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pagedattn_serve.config import CacheConfig
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.block_allocator import OutOfBlocksError
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.sequence import Sequence


def make_manager(num_blocks: int, watermark: float = 0.0) -> BlockManager:
    return BlockManager(CacheConfig(num_blocks=num_blocks, block_size=8, watermark=watermark))


def make_sequence(num_tokens: int) -> Sequence:
    return Sequence("a", list(range(num_tokens)), SamplingParams(), 0.0)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_allocate_covers_all_tokens(num_tokens: int, num_blocks: int) -> None:
    manager = make_manager(4)
    sequence = make_sequence(num_tokens)
    manager.allocate(sequence)
    assert len(manager.block_table(sequence)) == num_blocks
    assert (manager.num_blocks, manager.num_used_blocks, manager.num_free_blocks) == (4, num_blocks, 4 - num_blocks)
    manager.free(sequence)
    assert manager.num_free_blocks == 4


def test_watermark_is_rounded_up_and_kept_on_demand() -> None:
    manager = make_manager(4, watermark=0.01)
    assert manager.can_allocate(make_sequence(24), keep_watermark=True)
    assert not manager.can_allocate(make_sequence(25), keep_watermark=True)
    assert manager.can_allocate(make_sequence(32), keep_watermark=False)
    assert not manager.can_allocate(make_sequence(33), keep_watermark=False)
    assert make_manager(4).can_allocate(make_sequence(32), keep_watermark=True)


def test_append_takes_a_block_per_block_size_tokens() -> None:
    manager = make_manager(2)
    sequence = make_sequence(7)
    manager.allocate(sequence)
    first = manager.block_table(sequence)
    sequence.output_token_ids.append(7)
    assert manager.append(sequence) is None and manager.block_table(sequence) == first
    sequence.output_token_ids.append(8)
    assert manager.append(sequence) is None and len(manager.block_table(sequence)) == 2
    assert manager.append(sequence) is None and len(manager.block_table(sequence)) == 2  # a second call does nothing


def test_append_copies_a_shared_last_block_once() -> None:
    manager = make_manager(3)
    parent, child = make_sequence(12), make_sequence(12)
    manager.allocate(parent)
    manager.fork(parent, child)
    full, partial = manager.block_table(parent)
    assert manager.block_table(child) == [full, partial] and manager.num_used_blocks == 2
    child.output_token_ids.append(12)
    pair = manager.append(child)
    assert pair is not None and pair[0] == partial
    assert manager.block_table(child) == [full, pair[1]] and manager.block_table(parent) == [full, partial]
    parent.output_token_ids.append(13)
    assert manager.append(parent) is None  # its last block is its own again
    manager.check_integrity()


def test_a_full_shared_block_is_not_copied() -> None:
    manager = make_manager(2)
    parent, child = make_sequence(8), make_sequence(8)
    manager.allocate(parent)
    manager.fork(parent, child)
    child.output_token_ids.append(8)
    assert manager.append(child) is None
    assert manager.block_table(child)[0] == manager.block_table(parent)[0]


def test_append_needs_a_block_only_at_times() -> None:
    manager = make_manager(1)
    parent, child = make_sequence(7), make_sequence(7)
    manager.allocate(parent)
    parent.output_token_ids.append(7)
    child.output_token_ids.append(7)
    assert manager.append(parent) is None  # no block is free, none is needed
    manager.fork(parent, child)
    with pytest.raises(OutOfBlocksError):
        manager.append(child)  # the last block is shared
    manager.free(child)
    parent.output_token_ids.append(8)
    with pytest.raises(OutOfBlocksError):
        manager.append(parent)  # a new block is needed


def test_a_block_table_is_one_object_as_long_as_it_is_held() -> None:
    """What readers of the tables may rely on: it grows in place, and another one comes after `free`."""
    manager = make_manager(3)
    sequence, child = make_sequence(8), make_sequence(8)
    manager.allocate(sequence)
    table = manager.block_table(sequence)
    manager.fork(sequence, child)
    sequence.output_token_ids.append(8)
    manager.append(sequence)
    assert manager.block_table(sequence) is table and len(table) == 2
    assert manager.block_table(child) is not table and len(manager.block_table(child)) == 1
    manager.free(sequence)
    manager.allocate(sequence)
    assert manager.block_table(sequence) is not table


def test_errors_change_nothing() -> None:
    manager = make_manager(2)
    parent, child, stranger = make_sequence(16), make_sequence(16), make_sequence(16)
    manager.allocate(parent)
    manager.fork(parent, child)
    tables = list(manager.block_table(parent)), list(manager.block_table(child))
    with pytest.raises(ValueError, match="holds blocks already"):
        manager.allocate(parent)
    with pytest.raises(ValueError, match="holds blocks already"):
        manager.fork(parent, child)
    with pytest.raises(ValueError, match="expected the parent's 16 tokens, got 15"):
        manager.fork(parent, make_sequence(15))
    for call in (manager.free, manager.append, manager.block_table):
        with pytest.raises(ValueError, match="holds no blocks"):
            call(stranger)
    with pytest.raises(ValueError, match="holds no blocks"):
        manager.fork(stranger, make_sequence(16))
    with pytest.raises(OutOfBlocksError, match="needs 2 blocks, 0 are free"):
        manager.allocate(stranger)
    with pytest.raises(OutOfBlocksError):
        manager.append(child)
    child.output_token_ids.extend(range(9))
    with pytest.raises(ValueError, match="lacks 2 blocks"):
        manager.append(child)
    assert tables == (manager.block_table(parent), manager.block_table(child))
    manager.check_integrity()


def test_integrity_check_can_fail() -> None:
    manager = make_manager(2)
    sequence = make_sequence(8)
    manager.allocate(sequence)
    manager._allocator.fork(manager.block_table(sequence)[0])
    with pytest.raises(AssertionError, match="reference count 2, in 1 tables"):
        manager.check_integrity()


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences come, grow, fork and go; a fake cache holds what each one wrote."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        config = CacheConfig(num_blocks=8, block_size=8, watermark=0.0)
        self.manager = BlockManager(config)
        self.cache = FakeCache(config)
        self.sequences: list[Sequence] = []
        self.new_token = itertools.count()

    @initialize(target=live, num_tokens=st.integers(1, 12))
    def first(self, num_tokens: int) -> Any:
        return self.allocate(num_tokens)

    @rule(target=live, num_tokens=st.integers(1, 30))
    def allocate(self, num_tokens: int) -> Any:
        prompt = [next(self.new_token) for _ in range(num_tokens)]
        sequence = Sequence("a", prompt, SamplingParams(), 0.0)
        if not self.manager.can_allocate(sequence, keep_watermark=False):
            num_free_blocks = self.manager.num_free_blocks
            with pytest.raises(OutOfBlocksError):
                self.manager.allocate(sequence)
            assert num_free_blocks == self.manager.num_free_blocks < -(-num_tokens // 8)
            return multiple()
        self.manager.allocate(sequence)
        self.cache.write(self.manager.block_table(sequence), 0, prompt)
        self.sequences.append(sequence)
        return sequence

    @rule(sequence=live, num_tokens=st.integers(1, 10))
    def append(self, sequence: Sequence, num_tokens: int) -> None:
        for _ in range(num_tokens):
            sequence.output_token_ids.append(next(self.new_token))
            before = list(self.manager.block_table(sequence))
            needs_block = sequence.num_tokens > 8 * len(before) or self.manager._allocator.ref_count(before[-1]) > 1
            if needs_block and self.manager.num_free_blocks == 0:
                with pytest.raises(OutOfBlocksError):
                    self.manager.append(sequence)
                assert self.manager.block_table(sequence) == before
                sequence.output_token_ids.pop()
                return
            pair = self.manager.append(sequence)
            self.cache.copy([pair] if pair else [])
            position = sequence.num_tokens - 1
            self.cache.write(self.manager.block_table(sequence), position, sequence.output_token_ids[-1:])

    @rule(target=live, parent=live)
    def fork(self, parent: Sequence) -> Sequence:
        num_free_blocks = self.manager.num_free_blocks
        child = Sequence("b", list(parent.prompt_token_ids), SamplingParams(), 0.0, list(parent.output_token_ids))
        self.manager.fork(parent, child)
        assert self.manager.num_free_blocks == num_free_blocks
        self.sequences.append(child)
        return child

    @rule(sequence=consumes(live))
    def free(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.manager.free(sequence)
        with pytest.raises(ValueError):
            self.manager.free(sequence)

    @invariant()
    def every_table_leads_to_its_own_tokens(self) -> None:
        self.manager.check_integrity()
        tables = [self.manager.block_table(sequence) for sequence in self.sequences]
        assert self.manager.num_used_blocks == len(set(itertools.chain(*tables)))
        for sequence, table in zip(self.sequences, tables, strict=True):
            assert self.cache.read(table, sequence.num_tokens) == sequence.tokens(0, sequence.num_tokens)


TestBlockManagerMachine = BlockManagerMachine.TestCase
