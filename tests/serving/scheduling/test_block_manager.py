"""BlockManager: allocation, growth, copy-on-write, swapping, prefixes; and that each table leads to its own tokens."""

import itertools
from contextlib import suppress
from typing import Any

import pytest
from fake_cache import FakeCache
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.scheduling.block_allocator import OutOfBlocksError
from pagedattn_serve.scheduling.block_manager import RELEASED, BlockManager
from pagedattn_serve.scheduling.held_blocks import max_held_blocks, max_num_tokens
from pagedattn_serve.scheduling.sequence import Sequence, TableArray


def make_manager(
    num_blocks: int,
    watermark: float = 0.0,
    num_host_blocks: int = 0,
    enable_prefix_caching: bool = True,
    window: int | None = None,
) -> BlockManager:
    cache_config = CacheConfig(
        num_blocks=num_blocks,
        block_size=8,
        watermark=watermark,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=enable_prefix_caching,
        windows=(window,),
    )
    return BlockManager(cache_config, TableArray(SchedulerConfig(max_model_len=64), cache_config))


def make_sequence(num_tokens: int, first: int = 0) -> Sequence:
    return Sequence("a", list(range(first, first + num_tokens)))


def allocate(manager: BlockManager, *sequences: Sequence) -> list[list[int]]:
    """The tables that they get."""
    assert manager.allocate(list(sequences), keep_watermark=False)
    return [manager.block_table(sequence) for sequence in sequences]


def compute(manager: BlockManager, sequence: Sequence) -> None:
    """What the scheduler says of a sequence all of whose tokens but the last run in one step."""
    first, end = sequence.num_computed_tokens // 8, sequence.num_tokens - 1
    manager.publish(sequence, first, end // 8)
    sequence.num_computed_tokens = end
    manager.merge(sequence, first, end // 8)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_allocate_covers_all_tokens(num_tokens: int, num_blocks: int) -> None:
    manager = make_manager(4)
    sequence = make_sequence(num_tokens)
    [table] = allocate(manager, sequence)
    assert len(table) == num_blocks
    assert (manager.num_blocks, manager.num_used_blocks, manager.num_free_blocks) == (4, num_blocks, 4 - num_blocks)
    manager.free(sequence)
    assert manager.num_free_blocks == 4


@pytest.mark.parametrize(
    ("window", "num_computed", "num_released"),
    [(None, 39, 0), (40, 39, 0), (1, 7, 0), (1, 8, 1), (8, 14, 0), (8, 15, 1), (9, 15, 0), (9, 16, 1), (9, 39, 3)],
)
def test_blocks_behind_the_window_are_given_back(window: int | None, num_computed: int, num_released: int) -> None:
    """Those that the next token does not see. Also of a sequence that is forked, swapped out and in, and freed; and a
    prompt still finds them."""
    manager = make_manager(6, num_host_blocks=6, window=window)
    sequence = make_sequence(40)
    [table] = allocate(manager, sequence)
    blocks = list(table)
    manager.publish(sequence, 0, num_computed // 8)
    sequence.num_computed_tokens = num_computed
    for _ in range(2):
        manager.release(sequence)
        assert table == [RELEASED] * num_released + blocks[num_released:]
        assert manager.num_free_blocks == 1 + num_released
    assert manager.num_used_slots() == num_computed - 8 * num_released
    child = sequence.fork(1)
    manager.fork(sequence, child)
    assert manager.num_table_entries == 2 * (5 - num_released)
    pairs = manager.swap_out([sequence, child])
    assert pairs is not None and [block for block, _ in pairs] == blocks[num_released:]
    manager.check_integrity()
    assert manager.swap_in([sequence, child], keep_watermark=False) is not None
    assert manager.block_table(sequence) == manager.block_table(child)
    assert manager.block_table(child).count(RELEASED) == num_released
    manager.check_integrity()
    for each in sequence, child:
        manager.free(each)
    manager.check_integrity()
    assert manager.num_used_blocks == manager.num_used_host_blocks == 0
    again = make_sequence(40)
    allocate(manager, again)
    assert again.num_computed_tokens == num_computed // 8 * 8


def test_a_long_sequence_holds_its_window() -> None:
    """Of Mistral 7B's first version, whose layers all see 4096 tokens: 256 of the 2048 blocks of 32k tokens."""
    cache_config = CacheConfig(num_blocks=2048, windows=(4096,))
    manager = BlockManager(cache_config, TableArray(SchedulerConfig(max_model_len=2**15), cache_config))
    sequence = make_sequence(2**15)
    allocate(manager, sequence)
    sequence.num_computed_tokens = 2**15 - 1
    manager.release(sequence)
    assert manager.num_used_blocks == 256
    assert manager.num_free_blocks == 2048 - 256


def test_groups_of_layers_hold_their_windows() -> None:
    """Of Gemma 3 1B: 6 groups of layers see 512 tokens, and one sees all. A prompt of 32k tokens comes in chunks, then
    output; at no time are there more blocks than a sequence may need."""
    cache_config = CacheConfig(num_blocks=2048 + 6 * 193, watermark=0.0, windows=(512,) * 6 + (None,))
    assert max_held_blocks(2**15, cache_config, 2560) == cache_config.num_blocks
    assert max_num_tokens(cache_config, 2560) == 2**15
    manager = BlockManager(cache_config, TableArray(SchedulerConfig(max_model_len=2**15), cache_config), 2560)
    sequence = make_sequence(2**15 - 40)
    assert manager.allocate([sequence], keep_watermark=False)
    while sequence.num_uncomputed_tokens > 2560:
        num_computed = sequence.num_computed_tokens = sequence.num_computed_tokens + 2559  # never at a block's end
        manager.release(sequence)
        assert manager.extend([sequence])
        *windowed, whole = ([block for block in table if block != RELEASED] for table in manager.block_tables(sequence))
        first, end = (num_computed - 511) // 16, min(-(-(num_computed + 2560) // 16), 2046)
        assert [len(table) for table in windowed] == [end - first] * 6 and len(whole) == 2046
    sequence.num_computed_tokens = sequence.num_tokens - 1
    for token in range(40):
        manager.release(sequence)
        sequence.output_token_ids.append(token)
        manager.append(sequence)
        sequence.num_computed_tokens += 1
    manager.release(sequence)
    assert manager.num_used_blocks == manager.num_table_entries == 2048 + 6 * 32
    manager.check_integrity()


def test_a_prompt_finds_what_the_windows_of_a_prefix_show() -> None:
    """And not a prefix of which a window shows a block that was taken for other tokens."""
    cache_config = CacheConfig(num_blocks=14, block_size=8, watermark=0.0, windows=(9, None))
    manager = BlockManager(cache_config, TableArray(SchedulerConfig(max_model_len=64), cache_config))
    first = make_sequence(41)
    assert manager.allocate([first], keep_watermark=False)
    compute(manager, first)
    windowed, whole = map(list, manager.block_tables(first))
    manager.release(first)
    manager.free(first)
    again = make_sequence(34)
    assert manager.allocate([again], keep_watermark=False) and again.num_computed_tokens == 32
    assert [table[:4] for table in manager.block_tables(again)] == [[RELEASED] * 3 + windowed[3:4], whole[:4]]
    manager.free(again)
    other = make_sequence(
        24, first=100
    )  # takes the four free blocks, and two that were given back: the third and second
    assert manager.allocate([other], keep_watermark=False)
    assert manager.prefixes.find(first.block_hashes[:4])[1] == whole[:4]
    assert manager.prefixes.find(first.block_hashes[:3]) == [windowed[:1], whole[:1]]
    manager.check_integrity()


def test_watermark_is_rounded_up_and_kept_on_demand() -> None:
    manager = make_manager(4, watermark=0.01)
    assert manager.can_allocate([make_sequence(24)], keep_watermark=True)
    assert not manager.can_allocate([make_sequence(25)], keep_watermark=True)
    assert manager.can_allocate([make_sequence(32)], keep_watermark=False)
    assert not manager.can_allocate([make_sequence(33)], keep_watermark=False)
    assert not manager.allocate([make_sequence(25)], keep_watermark=True)
    assert make_manager(4).can_allocate([make_sequence(32)], keep_watermark=True)


def test_append_takes_a_block_per_block_size_tokens() -> None:
    manager = make_manager(2)
    sequence = make_sequence(7)
    allocate(manager, sequence)
    first = manager.block_table(sequence)
    sequence.output_token_ids.append(7)
    assert not manager.append(sequence) and manager.block_table(sequence) == first
    sequence.output_token_ids.append(8)
    assert not manager.append(sequence) and len(manager.block_table(sequence)) == 2
    assert not manager.append(sequence) and len(manager.block_table(sequence)) == 2  # a second call does nothing


def test_append_copies_a_shared_last_block_once() -> None:
    manager = make_manager(3)
    parent, child = make_sequence(12), make_sequence(12)
    allocate(manager, parent)
    manager.fork(parent, child)
    full, partial = manager.block_table(parent)
    assert manager.block_table(child) == [full, partial] and manager.num_used_blocks == 2
    child.output_token_ids.append(12)
    [(source, target)] = manager.append(child)
    assert source == partial
    assert manager.block_table(child) == [full, target] and manager.block_table(parent) == [full, partial]
    parent.output_token_ids.append(13)
    assert not manager.append(parent)  # its last block is its own again
    manager.check_integrity()


def test_a_full_shared_block_is_not_copied() -> None:
    manager = make_manager(2)
    parent, child = make_sequence(8), make_sequence(8)
    allocate(manager, parent)
    manager.fork(parent, child)
    child.output_token_ids.append(8)
    assert not manager.append(child)
    assert manager.block_table(child)[0] == manager.block_table(parent)[0]


def test_append_needs_a_block_only_at_times() -> None:
    manager = make_manager(1)
    parent, child = make_sequence(7), make_sequence(7)
    allocate(manager, parent)
    parent.output_token_ids.append(7)
    child.output_token_ids.append(7)
    assert not manager.append(parent)  # no block is free, none is needed
    manager.fork(parent, child)
    with pytest.raises(OutOfBlocksError):
        manager.append(child)  # the last block is shared
    manager.free(child)
    parent.output_token_ids.append(8)
    with pytest.raises(OutOfBlocksError):
        manager.append(parent)  # a new block is needed


def test_errors_change_nothing() -> None:
    manager = make_manager(2)
    parent, child, stranger = make_sequence(16), make_sequence(16), make_sequence(16)
    allocate(manager, parent)
    manager.fork(parent, child)
    tables = list(manager.block_table(parent)), list(manager.block_table(child))
    with pytest.raises(ValueError, match="holds blocks already"):
        manager.allocate([parent], keep_watermark=False)
    with pytest.raises(ValueError, match="holds blocks already"):
        manager.allocate([stranger, child], keep_watermark=False)
    with pytest.raises(ValueError, match="holds blocks already"):
        manager.fork(parent, child)
    with pytest.raises(ValueError, match="expected the parent's 16 tokens, got 15"):
        manager.fork(parent, make_sequence(15))
    for call in (manager.free, manager.append, manager.block_table):
        with pytest.raises(ValueError, match="holds no blocks"):
            call(stranger)
    with pytest.raises(ValueError, match="holds no blocks"):
        manager.fork(stranger, make_sequence(16))
    with pytest.raises(ValueError, match="holds no blocks"):
        manager.swap_out([parent, stranger])
    with pytest.raises(ValueError, match="is not swapped out"):
        manager.swap_in([parent], keep_watermark=False)
    assert not manager.allocate([stranger], keep_watermark=False)
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
    allocate(manager, sequence)
    manager._allocator.fork(manager.block_table(sequence)[0])
    with pytest.raises(AssertionError, match="reference count 2, in 1 tables"):
        manager.check_integrity()


# ---- several sequences that belong together -------------------------------------------------------------------------


def test_num_blocks_to_append_is_what_append_takes() -> None:
    manager = make_manager(8)
    sequences = [make_sequence(12)]
    allocate(manager, sequences[0])
    for _ in range(2):
        sequences.append(sequences[0].fork(0))
        manager.fork(sequences[0], sequences[-1])
    for num_blocks in (2, 0, 0, 0, 3):  # the third keeps the block that was shared; then a new one for each
        for i, sequence in enumerate(sequences):
            sequence.output_token_ids.append(i)
        num_used_blocks = manager.num_used_blocks
        assert manager.num_blocks_to_append(sequences) == num_blocks
        for sequence in sequences:
            manager.append(sequence)
        assert manager.num_used_blocks - num_used_blocks == num_blocks


def test_a_block_shared_with_one_outside_is_copied_for_all() -> None:
    manager = make_manager(8)
    outside, first, second = make_sequence(12), make_sequence(12), make_sequence(12)
    allocate(manager, outside)
    for sequence in (first, second):
        manager.fork(outside, sequence)
        sequence.output_token_ids.append(0)
    assert manager.num_blocks_to_append([first, second]) == 2
    assert all(manager.append(sequence) for sequence in (first, second))


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_sequences_allocated_together_share_what_they_have_in_common(enable_prefix_caching: bool) -> None:
    """As when a group is computed again. The first one's blocks are to be computed, and count for the others."""
    manager = make_manager(8, enable_prefix_caching=enable_prefix_caching)
    first, second, third = make_sequence(16), make_sequence(16), make_sequence(16)
    first.output_token_ids = [0] * 10  # 26 tokens: 3 full blocks and a rest
    second.output_token_ids = [0] * 8 + [1, 1]
    third.output_token_ids = [2] * 10
    one, two, three = allocate(manager, first, second, third)
    assert (two[:3], three[:2]) == (one[:3], one[:2])
    assert len({*one, *two, *three}) == manager.num_used_blocks == 7
    assert [each.num_computed_tokens for each in (first, second, third)] == [0, 24, 16]
    manager.check_integrity()


def test_a_full_last_block_is_not_shared_as_its_last_token_is_still_to_be_computed() -> None:
    manager = make_manager(4)
    first, second = make_sequence(16), make_sequence(16)
    one, two = allocate(manager, first, second)
    assert one[0] == two[0] and one[1] != two[1] and second.num_computed_tokens == 8


def test_sequences_allocated_together_need_the_blocks_that_they_do_not_share() -> None:
    sequences = [make_sequence(16), make_sequence(16)]
    for num_blocks, enough, is_on in ((3, True, True), (2, False, True), (3, True, False), (2, False, False)):
        manager = make_manager(num_blocks, enable_prefix_caching=is_on)
        assert manager.can_allocate(sequences, keep_watermark=False) == enough
        assert manager.allocate(sequences, keep_watermark=False) == enough
        manager.check_integrity()


# ---- swapping -------------------------------------------------------------------------------------------------------


def make_swappable(manager: BlockManager) -> list[Sequence]:
    """Two sequences of 13 tokens, of which the last is to be computed: they share a full and a partial block."""
    parent = make_sequence(12)
    allocate(manager, parent)
    parent.num_computed_tokens = 12
    child = parent.fork(1)
    manager.fork(parent, child)
    parent.output_token_ids.append(100)
    child.output_token_ids.append(101)
    return [parent, child]


def test_shared_blocks_are_swapped_once_and_stay_shared() -> None:
    manager = make_manager(6, num_host_blocks=2)
    group = make_swappable(manager)
    device = list(manager.block_table(group[0]))
    pairs = manager.swap_out(group)
    assert pairs is not None and [src for src, _ in pairs] == device and len({dst for _, dst in pairs}) == 2
    assert (manager.num_free_blocks, manager.num_used_host_blocks) == (6, 2)
    with pytest.raises(ValueError, match="holds no blocks"):
        manager.block_table(group[0])
    manager.check_integrity()
    back = manager.swap_in(group, keep_watermark=False)
    assert back is not None and [src for src, _ in back] == [dst for _, dst in pairs]
    assert manager.block_table(group[0]) == manager.block_table(group[1]) == [dst for _, dst in back]
    assert (manager.num_used_blocks, manager.num_used_host_blocks) == (2, 0)
    assert len(manager.append(group[0])) == 1 and not manager.append(group[1])
    manager.check_integrity()


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_swap_out_without_room_on_the_host_changes_nothing(num_host_blocks: int) -> None:
    manager = make_manager(6, num_host_blocks=num_host_blocks)
    group = make_swappable(manager)
    table = list(manager.block_table(group[0]))
    assert manager.swap_out(group) is None
    assert manager.block_table(group[0]) == manager.block_table(group[1]) == table
    assert manager.num_used_host_blocks == 0
    manager.check_integrity()


def test_swap_in_keeps_room_for_the_next_tokens() -> None:
    """The two blocks, and one for the copy that the first token to write needs."""
    manager = make_manager(3, num_host_blocks=2)
    group = make_swappable(manager)
    manager.swap_out(group)
    other = make_sequence(8, first=50)
    allocate(manager, other)
    assert manager.swap_in(group, keep_watermark=False) is None and manager.num_used_host_blocks == 2
    manager.check_integrity()
    manager.free(other)
    assert manager.swap_in(group, keep_watermark=False) is not None
    assert manager.append(group[0]) is not None and manager.num_free_blocks == 0


def test_swap_in_keeps_the_watermark_on_demand() -> None:
    manager = make_manager(4, watermark=0.25, num_host_blocks=2)
    group = make_swappable(manager)
    manager.swap_out(group)
    other = make_sequence(8, first=50)
    allocate(manager, other)
    assert manager.swap_in(group, keep_watermark=True) is None
    assert manager.swap_in(group, keep_watermark=False) is not None


def test_what_is_found_is_not_copied_back() -> None:
    manager = make_manager(6, num_host_blocks=6)
    sequence = make_sequence(20)
    allocate(manager, sequence)
    compute(manager, sequence)
    table = list(manager.block_table(sequence))
    pairs = manager.swap_out([sequence])
    assert pairs is not None and len(pairs) == 3
    back = manager.swap_in([sequence], keep_watermark=False)
    assert back is not None and [src for src, _ in back] == [pairs[2][1]]  # the block that is not full
    assert manager.block_table(sequence)[:2] == table[:2]
    manager.check_integrity()


def test_what_is_not_computed_yet_is_not_looked_for() -> None:
    """It is going to be written, and a block that is found must not be."""
    manager = make_manager(10, num_host_blocks=5)
    sequence, other = make_sequence(33), make_sequence(33)
    allocate(manager, sequence)
    sequence.num_computed_tokens = 10
    manager.swap_out([sequence])
    allocate(manager, other)
    compute(manager, other)
    manager.swap_in([sequence], keep_watermark=False)
    table, of_other = manager.block_table(sequence), manager.block_table(other)
    assert table[0] == of_other[0] and not set(table[1:]) & set(of_other)


def test_what_one_has_not_computed_yet_for_another_is_not_looked_for() -> None:
    """Amid the computing of several sequences again, a later one counts blocks that the first is going to write."""
    manager = make_manager(12, num_host_blocks=6)
    first, second, other = (make_sequence(20) for _ in range(3))
    second.output_token_ids = [0]
    allocate(manager, first, second)
    first.num_computed_tokens = 10
    assert second.num_computed_tokens == 16
    manager.swap_out([first, second])
    allocate(manager, other)
    compute(manager, other)
    manager.swap_in([first, second], keep_watermark=False)
    one, two, of_other = (manager.block_table(sequence) for sequence in (first, second, other))
    assert one[:2] == two[:2] and one[0] == of_other[0] and one[1] not in of_other
    manager.check_integrity()


def test_what_was_evicted_is_copied_back() -> None:
    manager = make_manager(3, num_host_blocks=3)
    sequence, other = make_sequence(20), make_sequence(16, first=50)
    allocate(manager, sequence)
    compute(manager, sequence)
    pairs = manager.swap_out([sequence])
    assert pairs is not None
    allocate(manager, other)  # takes the free block, and the end of what is cached: the second full block
    manager.free(other)
    back = manager.swap_in([sequence], keep_watermark=False)
    assert back is not None and [src for src, _ in back] == [pairs[1][1], pairs[2][1]]


def test_a_swapped_out_sequence_can_be_freed() -> None:
    manager = make_manager(6, num_host_blocks=2)
    group = make_swappable(manager)
    manager.swap_out(group)
    manager.free(group[0])
    assert manager.num_used_host_blocks == 2
    manager.free(group[1])
    assert manager.num_used_host_blocks == 0
    with pytest.raises(ValueError, match="holds no blocks"):
        manager.free(group[1])
    manager.check_integrity()


# ---- finding blocks by what they hold -------------------------------------------------------------------------------


def test_a_prompt_finds_the_blocks_of_its_beginning() -> None:
    manager = make_manager(6)
    first, second = make_sequence(20), make_sequence(18)
    allocate(manager, first)
    compute(manager, first)
    [table] = allocate(manager, second)
    assert table[:2] == manager.block_table(first)[:2] and second.num_computed_tokens == 16
    assert (manager.num_used_blocks, manager.num_table_entries) == (4, 6)
    for sequence in (first, second):
        manager.free(sequence)
    assert (manager.num_used_blocks, manager.num_free_blocks, manager.num_cached_blocks) == (0, 6, 2)


def test_equal_tokens_after_another_beginning_are_another_block() -> None:
    manager = make_manager(6)
    first, second = Sequence("a", [0] * 8 + [1] * 9), Sequence("b", [1] * 17)
    allocate(manager, first)
    compute(manager, first)
    allocate(manager, second)
    assert second.num_computed_tokens == 0


@given(num_tokens=st.integers(2, 40), first_salt=st.text(max_size=2), second_salt=st.text(max_size=2))
@example(num_tokens=20, first_salt="", second_salt="a")
@example(num_tokens=20, first_salt="a", second_salt="a")
def test_only_sequences_of_one_salt_share(num_tokens: int, first_salt: str, second_salt: str) -> None:
    manager = make_manager(10)
    first, second = make_sequence(num_tokens), make_sequence(num_tokens)
    first.cache_salt, second.cache_salt = first_salt, second_salt
    allocate(manager, first)
    compute(manager, first)
    assert manager.can_allocate([second], keep_watermark=False)
    allocate(manager, second)
    assert second.num_computed_tokens == ((num_tokens - 1) // 8 * 8 if first_salt == second_salt else 0)
    compute(manager, second)  # and merge
    shared = set(manager.block_table(first)) & set(manager.block_table(second))
    assert bool(shared) == (first_salt == second_salt and num_tokens > 8)
    assert first.fork(1).cache_salt == first_salt


def test_a_salt_cannot_be_the_hash_of_a_block() -> None:
    """Who could write the hash of another's block would find the one after it."""
    manager = make_manager(6)
    for first_token in itertools.count():
        victim = make_sequence(17, first_token)
        with suppress(UnicodeDecodeError):
            salt = manager.prefixes.hashes(victim, 1)[0].decode()
            break
    allocate(manager, victim)
    compute(manager, victim)
    thief = Sequence("thief", victim.tokens(8, 17), cache_salt=salt)
    allocate(manager, thief)
    assert thief.num_computed_tokens == 0


def test_a_pinned_prefix_is_of_no_salt() -> None:
    manager = make_manager(6)
    prefix = make_sequence(17)
    manager.prefixes.pin(prefix.prompt_token_ids, max_num_blocks=3)
    for salt, num_pinned in (("a", 0), ("", 2)):
        sequence = Sequence("0", prefix.prompt_token_ids, cache_salt=salt)
        allocate(manager, sequence)
        compute(manager, sequence)
        manager.free(sequence)
        assert manager.num_blocks - manager.num_free_blocks == num_pinned


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = make_manager(6, enable_prefix_caching=False)
    first, second = make_sequence(20), make_sequence(20)
    allocate(manager, first)
    first.num_computed_tokens = 19
    allocate(manager, second)
    assert second.num_computed_tokens == 0 and manager.num_cached_blocks == 0


@pytest.mark.parametrize("num_tokens", [16, 17, 24])
def test_a_hit_on_the_whole_prompt_leaves_its_last_token_to_compute(num_tokens: int) -> None:
    """At a multiple of the block size the last block is computed again, in another block."""
    manager = make_manager(8)
    first, second = make_sequence(25), make_sequence(num_tokens)
    allocate(manager, first)
    compute(manager, first)
    [table] = allocate(manager, second)
    num_found = (num_tokens - 1) // 8
    assert table[:num_found] == manager.block_table(first)[:num_found]
    assert table[num_found] not in manager.block_table(first)
    assert second.num_computed_tokens == num_found * 8 < num_tokens


def test_a_block_computed_twice_ends_as_one_and_nothing_is_freed_twice() -> None:
    manager = make_manager(6)
    first, second = make_sequence(17), make_sequence(17)
    one, two = map(list, allocate(manager, first) + allocate(manager, second))
    assert not set(one) & set(two)
    for sequence in (first, second):  # one step: both are scheduled before either is computed
        manager.publish(sequence, 0, 2)
    for sequence in (first, second):
        manager.merge(sequence, 0, 2)
        sequence.num_computed_tokens = 16
    assert manager.block_table(first) == one and manager.block_table(second) == [*one[:2], two[2]]
    assert manager.num_used_blocks == 4
    manager.check_integrity()
    manager.free(first)
    manager.check_integrity()
    assert manager.block_table(second)[:2] == one[:2] and manager.num_used_blocks == 3
    manager.free(second)
    manager.check_integrity()
    assert manager.num_free_blocks == 6


def test_publish_says_whether_there_is_something_to_merge() -> None:
    """Also if the last of several blocks is the only one with its tokens."""
    manager = make_manager(5)
    first, longer = make_sequence(9), make_sequence(17)
    allocate(manager, first)
    allocate(manager, longer)
    assert manager.publish(first, 0, 1)
    assert not manager.publish(longer, 0, 2)
    manager.merge(longer, 0, 2)
    assert manager.block_table(longer)[0] == manager.block_table(first)[0]


def test_a_block_that_was_evicted_between_publish_and_merge_is_published_then() -> None:
    """`publish` finds another block with the same tokens, which nobody owns: it may be gone when the step is over."""
    manager = make_manager(3)
    cached, same = make_sequence(9), make_sequence(8)
    allocate(manager, cached)
    compute(manager, cached)
    [of_cached, _] = manager.block_table(cached)
    manager.free(cached)
    allocate(manager, same)
    manager.publish(same, 0, 1)
    allocate(manager, make_sequence(16, first=50))  # takes all that is left
    manager.merge(same, 0, 1)
    assert manager.block_table(same) != [of_cached]
    assert manager._allocator.find(same.block_hashes[0]) == manager.block_table(same)[0]
    manager.check_integrity()


def test_the_end_of_a_sequence_is_forgotten_before_its_beginning() -> None:
    manager = make_manager(4)
    first = make_sequence(25)
    allocate(manager, first)
    compute(manager, first)
    manager.free(first)
    allocate(manager, make_sequence(16, first=50))  # the free block, and one of the three
    again = make_sequence(25)
    assert manager._plan([again])[1] == [manager.prefixes.find(first.block_hashes[:2])]
    assert manager.can_allocate([make_sequence(16)], keep_watermark=False)


def test_who_was_let_go_longest_ago_is_forgotten_first() -> None:
    manager = make_manager(6)
    sequences = [make_sequence(9, first=first) for first in (0, 100, 200)]
    for sequence in sequences:
        allocate(manager, sequence)
        compute(manager, sequence)
    for sequence in (sequences[1], sequences[0], sequences[2]):
        manager.free(sequence)
    allocate(manager, make_sequence(32, first=300))  # the three free blocks, and one more
    found = [manager.prefixes.find(sequence.block_hashes) != [[]] for sequence in sequences]
    assert found == [True, False, True]


def test_found_blocks_are_not_evicted_for_the_rest_of_the_prompt() -> None:
    manager = make_manager(3)
    first = make_sequence(17)
    allocate(manager, first)
    compute(manager, first)
    manager.free(first)
    longer = make_sequence(25)
    assert not manager.can_allocate([longer], keep_watermark=False)  # 2 found, and 2 more of 1 that is free
    assert not manager.allocate([longer], keep_watermark=False)
    assert manager.num_cached_blocks == 2
    assert manager.allocate([make_sequence(24)], keep_watermark=False)


def test_num_used_slots_counts_shared_blocks_once() -> None:
    manager = make_manager(6)
    first, second = make_sequence(13), make_sequence(11)
    allocate(manager, first)
    compute(manager, first)
    allocate(manager, second)
    second.num_computed_tokens = 10
    assert manager.num_used_slots() == 8 + 4 + 2


def grow(manager: BlockManager, sequence: Sequence, num_tokens: int) -> None:
    for token in range(num_tokens):
        sequence.output_token_ids.append(token)
        manager.append(sequence)
    compute(manager, sequence)


def test_every_block_that_is_held_has_an_owner() -> None:
    """Also those before a block that is shared, where a sequence shares what is not its beginning."""
    manager = make_manager(8, num_host_blocks=3)
    first, second, other = make_sequence(17), make_sequence(17), make_sequence(64, first=100)
    allocate(manager, first)
    compute(manager, first)
    manager.swap_out([first])
    allocate(manager, other)  # in all blocks: nothing is found any more
    manager.free(other)
    manager.swap_in([first], keep_watermark=False)
    allocate(manager, second)
    compute(manager, second)
    for sequence in (first, second):
        grow(manager, sequence, 8)
    tables = [manager.block_table(sequence) for sequence in (first, second)]
    assert tables[0][2] == tables[1][2] and not set(tables[0][:2]) & set(tables[1][:2])
    owners = manager.block_owners([[first], [], [second]])
    assert all(owners[block] == 0 for block in tables[0])
    assert all(owners[block] == 2 for block in set(tables[1]) - set(tables[0]))
    assert [manager.block_states()[block] for block in tables[1]] == ["used", "used", "shared", "used"]


def test_a_pinned_prefix_stays_when_nobody_uses_it_and_after_clear() -> None:
    manager = make_manager(4)
    assert manager.prefixes.pin(list(range(20)), max_num_blocks=2) == 16
    assert manager.num_free_blocks == 4  # nothing is computed yet
    for _ in range(2):
        sequence = make_sequence(20)
        allocate(manager, sequence)
        compute(manager, sequence)
        manager.free(sequence)
        assert (manager.num_free_blocks, manager.num_cached_blocks) == (2, 2)
        other = make_sequence(16, first=50)
        allocate(manager, other)
        manager.free(other)
        assert not manager.can_allocate([make_sequence(17, first=50)], keep_watermark=False)
        assert manager.can_allocate([make_sequence(20)], keep_watermark=False)
        manager.check_integrity()
        manager.clear()
        assert (manager.num_free_blocks, manager.num_cached_blocks) == (4, 0)


def test_too_many_pins_are_refused() -> None:
    manager = make_manager(4)
    manager.prefixes.pin(list(range(20)), max_num_blocks=3)
    with pytest.raises(ValueError, match=r"prefix: expected .* at most 3 blocks, .* got 4"):
        manager.prefixes.pin(list(range(100, 116)), max_num_blocks=3)
    assert manager.prefixes.pin(list(range(7)), max_num_blocks=3) == 0
    assert manager.prefixes.pin(list(range(27)), max_num_blocks=3) == 24  # two of the three are pinned already


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences come, grow, fork and go; a fake cache holds what each one wrote."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        config = CacheConfig(num_blocks=8, block_size=8, watermark=0.0)
        self.manager = BlockManager(config, TableArray(SchedulerConfig(max_model_len=64), config))
        self.cache = FakeCache(config)
        self.sequences: list[Sequence] = []
        self.new_token = itertools.count()

    @initialize(target=live, num_tokens=st.integers(1, 12))
    def first(self, num_tokens: int) -> Any:
        return self.allocate(num_tokens)

    @rule(target=live, num_tokens=st.integers(1, 30))
    def allocate(self, num_tokens: int) -> Any:
        prompt = [next(self.new_token) for _ in range(num_tokens)]
        sequence = Sequence("a", prompt)
        num_free_blocks = self.manager.num_free_blocks
        has_room = self.manager.can_allocate([sequence], keep_watermark=False)
        assert has_room == (-(-num_tokens // 8) <= num_free_blocks)
        assert self.manager.allocate([sequence], keep_watermark=False) == has_room
        if not has_room:
            assert num_free_blocks == self.manager.num_free_blocks
            return multiple()
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
            self.cache.copy(self.manager.append(sequence))
            position = sequence.num_tokens - 1
            self.cache.write(self.manager.block_table(sequence), position, sequence.output_token_ids[-1:])

    @rule(target=live, parent=live)
    def fork(self, parent: Sequence) -> Sequence:
        num_free_blocks = self.manager.num_free_blocks
        child = parent.fork(1)
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
