"""Which blocks of the cache are worth a place on disk: those that a prompt has found, and those of registered prefixes.

A block that only one prompt has had may never be asked for again, and most blocks are of that kind. The second prompt
that begins alike makes the beginning worth keeping. It is kept from then on, and not when it falls out of the cache: so
it outlives an end of the process that nobody saw coming.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable

STORED = -2  # in a table that is not a sequence's yet, in the place of a block that lies on disk


class KeptBlocks:
    """The keys of blocks that are to be stored.

    stored: the keys of blocks that lie on disk, or are about to. Another thread may change it.
    is_on: whether blocks are stored at all.
    """

    def __init__(self) -> None:
        self.stored: Container[bytes] = ()
        self.is_on = False
        # In the order in which they came: a block is worth nothing without others. (A dictionary looks for its first
        # key wherever keys were taken before.)
        self._wanted: OrderedDict[bytes, None] = OrderedDict()

    def turn_on(self, stored: Container[bytes]) -> None:
        """From now on, blocks are stored."""
        self.stored, self.is_on = stored, True

    def want(self, keys: Iterable[bytes]) -> None:
        """Let the blocks of these keys be stored, unless they are."""
        if self.is_on:
            self._wanted.update((key, None) for key in keys if key not in self.stored)

    def take(self, find: Callable[[bytes], int | None], at_most: int) -> list[tuple[bytes, int]]:
        """Keys of blocks to store now, and their blocks. What is not in the cache any more is forgotten.

        find: the block of a key. What it holds must be computed: call this between two steps.
        """
        taken: list[tuple[bytes, int]] = []
        while self._wanted and len(taken) < at_most:
            key, _ = self._wanted.popitem(last=False)
            block = find(key)
            if block is not None and key not in self.stored:
                taken.append((key, block))
        return taken

    def clear(self) -> None:
        """Forget all, because the cache does."""
        self._wanted.clear()
