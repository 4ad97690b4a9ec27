"""Between the cache and the blocks of prefixes on disk: what the engine reads, puts into the cache, and writes."""

import logging
from typing import Any

from pagedattn_serve.execution.block_store import BlockStore
from pagedattn_serve.execution.cache_engine import CacheEngine
from pagedattn_serve.scheduling.prefix_cache import PrefixCache
from pagedattn_serve.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)


class StoredPrefixes:
    """`BlockStore` for one cache. Only `read` may be called by any thread.

    num_read, num_written: blocks, so far.
    """

    def __init__(self, store: BlockStore, prefixes: PrefixCache, cache_engine: CacheEngine) -> None:
        self._store = store
        self._prefixes = prefixes
        self._cache = cache_engine
        prefixes.kept.turn_on(store.keys)

    @property
    def num_read(self) -> int:
        return self._store.files.num_read

    @property
    def num_written(self) -> int:
        return self._store.files.num_written

    def read(self, sequence: Sequence) -> tuple[list[bytes], dict[bytes, Any]]:
        """The keys of the blocks from which a new sequence can go on, in order; and, of those that lie on disk alone,
        what they hold. For `insert`."""
        keys = self._prefixes.keys_with_stored(sequence)
        return list(keys), self._store.read([key for key, is_stored in keys.items() if is_stored])

    def insert(self, keys: list[bytes], blocks: dict[bytes, Any]) -> None:
        """Put blocks of a prompt that were read from disk into free blocks of the cache, where the prompt finds them if
        it is let in before others need the room. After an exception, a block may be found that was not written."""
        for key, block in self._prefixes.insert(keys, blocks).items():
            self._cache.write_block(block, blocks[key])

    def write_some(self) -> bool:
        """Hand blocks that belong on disk to the thread that writes there, not many at once, so that no step waits for
        them. Returns whether there were any.

        Without memory for their copies they are left out: the step before has outputs, which must not be lost for that.
        """
        if not self._store.has_room:
            return False
        taken = self._prefixes.take_wanted(self._store.num_at_once)
        try:
            for key, block in taken:
                self._store.put(key, self._cache.read_block(block))
        except Exception:
            logger.exception("blocks are not written to prefix_cache_dir")
        return bool(taken)

    def write_all(self, waits: bool) -> None:
        """Let all blocks be written that belong on disk. waits: until they are, but not for ever; else a thread writes
        on, and an interpreter that ends waits for the thread."""
        while (self._store.has_room or self._store.wait()) and self.write_some():
            pass
        if waits:
            self._store.wait()
