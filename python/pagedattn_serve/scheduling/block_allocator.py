"""The pool of physical blocks: which are free, who owns the others, and what those hold that somebody may want again.

A block that is published under a key, for the tokens that it holds, stays findable when its last owner lets go, and is
taken for other tokens only when no free block is left, the one let go longest ago first (least recently used). Every
operation is O(1).
"""

from collections import OrderedDict
from collections.abc import Container, KeysView


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than asked for."""


class BlockAllocator:
    """Hands out block ids, 0 to num_blocks - 1. A block may have several owners; it is free when the last lets go.

    pinned: keys whose blocks are kept when nobody owns them.
    """

    def __init__(self, num_blocks: int, pinned: frozenset[bytes] = frozenset()) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks: expected at least 0, got {num_blocks}")
        self._ref_counts = [0] * num_blocks
        self._num_owned = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is the warmest in CPU caches
        self._block_of: dict[bytes, int] = {}  # published
        self._key_of: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # published and without an owner, oldest first
        self.pinned = pinned

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out: without an owner and not pinned."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody owns and that can be found by what they hold."""
        return self.num_blocks - len(self._free) - self._num_owned

    @property
    def num_owned_blocks(self) -> int:
        """Blocks with an owner."""
        return self._num_owned

    def ref_count(self, block: int) -> int:
        """Number of owners of a block. ValueError if there is no such block."""
        if not 0 <= block < len(self._ref_counts):
            raise ValueError(f"block: expected 0 to {self.num_blocks - 1}, got {block}")
        return self._ref_counts[block]

    def ref_counts(self) -> list[int]:
        """Number of owners of each block."""
        return self._ref_counts.copy()

    def states(self) -> list[str]:
        """Of each block: "used" by one owner, "shared" by several, "cached" if it can be found without, or "free"."""
        states = ["free" if count == 0 else "used" if count == 1 else "shared" for count in self._ref_counts]
        for block in self._key_of:
            if states[block] == "free":
                states[block] = "cached"
        return states

    def allocate(self) -> int:
        """Take a free block, with one owner. Raises OutOfBlocksError if there is none."""
        if self._free:
            block = self._free.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
        else:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks are in use")
        self._ref_counts[block] = 1
        self._num_owned += 1
        return block

    def allocate_many(self, number: int) -> list[int]:
        """Take so many free blocks. Raises OutOfBlocksError, with nothing changed, if there are fewer."""
        self.require(number)
        return [self.allocate() for _ in range(number)]

    def require(self, number: int) -> None:
        """Raise OutOfBlocksError if fewer blocks are free."""
        if number > self.num_free_blocks:
            raise OutOfBlocksError(f"{self.num_free_blocks} of {self.num_blocks} blocks are free, {number} are needed")

    def fork(self, block: int) -> None:
        """Add an owner to a block in use, or to a published one. Raises ValueError if it is free or unknown."""
        if self.ref_count(block) == 0:
            if block not in self._key_of:
                raise ValueError(f"block: expected one in use, got {block}, which is free")
            self._evictable.pop(block, None)  # a pinned one is not there
            self._num_owned += 1
        self._ref_counts[block] += 1

    def free(self, block: int) -> None:
        """Remove an owner from a block; the last one frees it. Raises ValueError if it is free already or unknown."""
        count = self.ref_count(block)
        if count == 0:
            raise ValueError(f"block: expected one in use, got {block}, which is free")
        self._ref_counts[block] = count - 1
        if count == 1:
            self._num_owned -= 1
            key = self._key_of.get(block)
            if key is None:
                self._free.append(block)
            elif key not in self.pinned:
                self._evictable[block] = None

    def publish(self, block: int, key: bytes) -> bool:
        """Let a block in use be found by `key`, which says what it holds. Returns False, with nothing changed, if the
        key has a block already."""
        if key in self._block_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def find(self, key: bytes) -> int | None:
        """The block published under `key`; None if there is none."""
        return self._block_of.get(key)

    def key_of(self, block: int) -> bytes:
        """The key that a block is published under."""
        return self._key_of[block]

    @property
    def published(self) -> KeysView[int]:
        """The blocks that can be found by what they hold, owned or not; as they are at any time."""
        return self._key_of.keys()

    def insert(self, keys: list[bytes], at_hand: Container[bytes]) -> dict[bytes, int]:
        """Publish free blocks, without an owner, under those of the keys that have no block. What the blocks hold comes
        from elsewhere: whoever calls this writes it before anything else happens. Ends at the first key that has no
        block and is not at hand, or when no block is free. Returns the new blocks.

        keys: of the blocks of a prompt, in order. The end is forgotten before what it builds on.
        """
        inserted: dict[bytes, int] = {}
        taken = []
        for key in keys:
            block = self._block_of.get(key)
            if block is not None:
                self.fork(block)
            elif key in at_hand and self.num_free_blocks:
                block = inserted[key] = self.allocate()
                self.publish(block, key)
            else:
                break
            taken.append(block)
        for block in reversed(taken):
            self.free(block)
        return inserted

    def pin(self, keys: list[bytes]) -> None:
        """From now on, keep what is or will be published under these keys, whether anybody owns it or not."""
        self.pinned = self.pinned.union(keys)
        for key in keys:
            block = self._block_of.get(key)
            if block is not None:
                self._evictable.pop(block, None)

    def num_pinned_with(self, keys: list[bytes]) -> int:
        """How many keys are pinned if these are, too."""
        return len(self.pinned.union(keys))

    def num_evictable(self, blocks: set[int]) -> int:
        """How many of these blocks are counted as free although they can be found."""
        return sum(block in self._evictable for block in blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block without an owner is either free or evictable or pinned."""
        assert min(self._ref_counts, default=0) >= 0, f"negative reference count in {self._ref_counts}"
        owned = self.num_blocks - self._ref_counts.count(0)
        assert self._num_owned == owned, f"{owned} blocks with an owner, counted {self._num_owned}"
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        unowned = [block for block, count in enumerate(self._ref_counts) if count == 0]
        pinned = [block for block, key in self._key_of.items() if key in self.pinned and not self._ref_counts[block]]
        assert sorted([*self._free, *self._evictable, *pinned]) == unowned, (
            f"free {sorted(self._free)}, evictable {sorted(self._evictable)}, pinned {pinned}, no owner {unowned}"
        )
        assert self._evictable.keys() <= self._key_of.keys(), "an evictable block that nobody can find"
        assert self._key_of.keys().isdisjoint(self._free), "a free block that can be found"
