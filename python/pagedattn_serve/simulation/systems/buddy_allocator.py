"""The buddy system (Knowlton, 1965), by which Orca keeps adjacent slots for each request.

A range of 2^k slots begins at a multiple of 2^k. A range that is too large is split into two buddies; when both buddies
are free, they are one range again.
"""


class BuddyAllocator:
    """Ranges of adjacent slots. What is not a power of two at the end of the memory is ranges of its own.

    smallest: slots of the smallest range, a power of two.
    """

    def __init__(self, num_slots: int, smallest: int = 1) -> None:
        self.num_slots = num_slots
        self._smallest = smallest
        self.num_free_slots = num_slots
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]  # where ranges begin, by exponent
        self._taken: dict[int, int] = {}  # exponent, by where the range begins
        begin = 0
        for exponent in reversed(range(num_slots.bit_length())):
            if num_slots & (1 << exponent):
                self._free[exponent].add(begin)
                begin += 1 << exponent

    def size_of(self, num_slots: int) -> int:
        """Slots of the range that so many slots take."""
        return max(next_power_of_two(num_slots), self._smallest)

    def allocate(self, num_slots: int) -> int | None:
        """Where a range of at least so many slots begins. None, with nothing changed, if no free range is as large."""
        wanted = self.size_of(num_slots).bit_length() - 1
        exponent = next((each for each in range(wanted, len(self._free)) if self._free[each]), None)
        if exponent is None:
            return None
        begin = min(self._free[exponent])  # the first, so that the same calls give the same ranges
        self._free[exponent].remove(begin)
        while exponent > wanted:
            exponent -= 1
            self._free[exponent].add(begin + (1 << exponent))
        self._taken[begin] = wanted
        self.num_free_slots -= 1 << wanted
        return begin

    def free(self, begin: int) -> None:
        """Give back the range that begins there. KeyError if none does."""
        exponent = self._taken.pop(begin)
        self.num_free_slots += 1 << exponent
        while exponent + 1 < len(self._free) and (buddy := begin ^ (1 << exponent)) in self._free[exponent]:
            self._free[exponent].remove(buddy)
            begin = min(begin, buddy)
            exponent += 1
        self._free[exponent].add(begin)


def next_power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()
