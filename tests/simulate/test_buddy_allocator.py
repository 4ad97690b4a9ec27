"""The buddy allocator of the Orca baselines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn_simulate.systems.orca import BuddyAllocator


@given(
    num_slots=st.integers(1, 300),
    calls=st.lists(st.one_of(st.integers(1, 320), st.integers(-30, -1)), max_size=60),
)
def test_ranges_do_not_overlap_and_all_come_back(num_slots: int, calls: list[int]) -> None:
    """calls: a positive number allocates so many slots, a negative one frees one of the ranges. Would catch a buddy
    that is merged while it is taken, a split that loses a half, and buddies that stay apart."""
    allocator = BuddyAllocator(num_slots)
    taken: dict[int, int] = {}
    for call in calls:
        if call < 0:
            if taken:
                begin = sorted(taken)[call % len(taken)]
                allocator.free(begin)
                del taken[begin]
            continue
        size = 1 << (call - 1).bit_length()
        num_free = allocator.num_free_slots
        begin = allocator.allocate(call)
        if begin is None:
            assert allocator.num_free_slots == num_free
            for start in range(0, num_slots - size + 1, size):  # every range of this size has a slot that is taken
                assert any(start < b + s and b < start + size for b, s in taken.items())
            continue
        assert begin % size == 0 and begin + size <= num_slots
        assert all(begin + size <= b or b + s <= begin for b, s in taken.items())
        taken[begin] = size
        assert allocator.num_free_slots == num_slots - sum(taken.values())
    for begin in list(taken):
        allocator.free(begin)
    fresh = BuddyAllocator(num_slots)
    assert allocator._free == fresh._free and allocator.num_free_slots == num_slots


def test_the_smallest_range_that_fits_is_split() -> None:
    """12 slots are ranges of 8 and 4. Small requests leave the large range whole."""
    allocator = BuddyAllocator(12)
    assert allocator.allocate(3) == 8
    assert allocator.allocate(8) == 0
    assert allocator.allocate(1) is None
    allocator.free(8)
    assert [allocator.allocate(2), allocator.allocate(1), allocator.allocate(1)] == [8, 10, 11]


def test_a_range_is_freed_once() -> None:
    allocator = BuddyAllocator(4)
    allocator.allocate(2)
    allocator.free(0)
    with pytest.raises(KeyError):
        allocator.free(0)


def test_adjacent_ranges_that_are_no_buddies_stay_apart() -> None:
    """Would catch a range that is joined with the one behind it, which the property above finds only now and then."""
    allocator = BuddyAllocator(4)
    begins = sorted(begin for _ in range(4) if (begin := allocator.allocate(1)) is not None)
    assert begins == [0, 1, 2, 3]
    for begin in (2, 1):
        allocator.free(begin)
    assert allocator.allocate(2) is None
