"""Who owns each block, which slots are written, and whether an access fits that."""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._access import Access, Part, ReadRows, Told, parts_of, slots_between
from ._cache_error import CacheError
from ._inference_mode import in_inference_mode
from ._step import Row, Step
from ._watched_cache import WatchedCache
from ._written_slots import WrittenSlots

NO_BLOCK = -1  # in a drawn table: a block that was given back, such as one behind a window


class CacheSanitizer:
    """Of caches that one allocator gives blocks of: block b of each cache belongs to the same owners.

    Owners are any hashable values, such as request ids. They are told in one of two ways, or in both:

    - `allocated`, `shared`, `forked` and `freed`, where an allocator can be made to call them;
    - `draw`, once a step, with the block tables of all sequences that hold blocks.

    Raises CacheError from the call, or from the op, that is the first to do what does not fit. A write that changes
    what another owner reads is found when the op has run, anything else before. Values of index tensors are fetched
    from the device, so an op waits for it. Not thread-safe.
    """

    @in_inference_mode
    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"CacheSanitizer: {name}: expected an int from 1 on, got {value!r}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._caches: list[WatchedCache] = []
        self._cache_at: dict[int, WatchedCache] = {}  # by the address of a key or a value cache
        self._owners: list[set[Hashable]] = [set() for _ in range(num_blocks)]
        self._blocks_of: dict[Hashable, set[int]] = {}
        self._tables: dict[Hashable, list[list[int]]] = {}  # drawn
        self._tells_renewals = False
        self._kept: Collection[int] = set()
        self._loose: set[int] = set()  # lost their last owner and are neither kept nor poisoned
        self._poisoned: set[int] = set()
        self._written = WrittenSlots(num_blocks, block_size)
        self._prints: dict[int, Tensor] = {}  # of shared and kept blocks; -1 in caches where not all is written
        self._step = Step([], [], block_size)
        self._accesses: list[Access] = []  # the last ones, until owners change or something counts as written no more

    # ---- what there is ----------------------------------------------------------------------------------------------

    @in_inference_mode
    def register(self, key_cache: Tensor, value_cache: Tensor | None = None, layer: Hashable = None) -> None:
        """Watch the caches of a layer: a pair in a layout of `pagedattn_ext.ops`, or a cache of latents, [num_blocks,
        block_size, size]. The last dimension is contiguous. layer: its name in errors; default how many came before.

        Raises TypeError or ValueError, with nothing registered, if a cache is no tensor or has other sizes.
        """
        number = len(self._caches)
        layer = number if layer is None else layer
        cache = WatchedCache(number, key_cache, value_cache, layer, self.num_blocks, self.block_size)
        self._caches.append(cache)
        self._cache_at |= {tensor.data_ptr(): cache for tensor in cache.tensors}
        self._written.add_cache()
        self._prints = {block: torch.cat([of_block, torch.tensor([-1])]) for block, of_block in self._prints.items()}
        self._accesses = []

    def has(self, cache: Tensor) -> bool:
        """Whether this is a registered cache, or begins where one does."""
        return cache.data_ptr() in self._cache_at

    def has_slots_of(self, cache: Tensor) -> bool:
        """`has`, and its slots have the numbers that they have in the registered cache."""
        found = self._cache_at.get(cache.data_ptr())
        return found is not None and found.has_slots_of(cache)

    # ---- who owns what ----------------------------------------------------------------------------------------------

    @in_inference_mode
    def allocated(self, owner: Hashable, blocks: Iterable[int]) -> None:
        """The owner gets blocks that nobody has. What they hold is not to be read any more."""
        blocks = self._known(blocks, "allocated", owner)
        for block in blocks:
            if self._owners[block]:
                problem = f"a block was handed out that {self._names(block)} holds"
                raise CacheError("allocated", problem, owner=owner, block=block)
        self._tells_renewals = True
        self._renew(blocks)
        self._kept = {*self._kept}.difference(blocks)
        for block in blocks:
            self._add(owner, block)

    @in_inference_mode
    def shared(self, owner: Hashable, blocks: Iterable[int]) -> None:
        """The owner gets blocks that others have as well, or that were freed and kept; it reads what they hold."""
        blocks = self._known(blocks, "shared", owner)
        for block in blocks:
            if not self._owners[block] and block not in self._kept:
                raise CacheError("shared", "a block was shared that is free", owner=owner, block=block)
            self._add(owner, block)
        self._update_prints(blocks, "shared")

    def forked(self, parent: Hashable, child: Hashable) -> None:
        """The child shares all blocks of the parent."""
        self.shared(child, self._blocks_of.get(parent, ()))

    @in_inference_mode
    def freed(self, owner: Hashable, blocks: Iterable[int], kept: bool = False) -> None:
        """The owner gives blocks back. Those that nobody else has are poisoned, after all copies out of them; or, if
        kept, hold what they hold until somebody shares them or they are allocated."""
        blocks = self._known(blocks, "freed", owner)
        for block in blocks:
            if owner not in self._owners[block]:
                raise CacheError("freed", "a block was freed that its owner does not hold", owner=owner, block=block)
            self._drop(owner, block)
        if kept:
            self._kept = {*self._kept, *(block for block in blocks if not self._owners[block])}
        self._update_prints(blocks, "freed")
        self.poison()

    @in_inference_mode
    def renewed(self, blocks: Iterable[int]) -> None:
        """Blocks were taken for other tokens: what they hold counts as never written. An allocator that does not know
        owners calls this, beside `draw`; without such calls `draw` takes each block as renewed that nobody had and that
        was not kept."""
        blocks = self._known(blocks, "renewed")
        self._tells_renewals = True
        self._renew(blocks)

    @in_inference_mode
    def loaded(self, blocks: Iterable[int]) -> None:
        """Something that is not watched has written all of these blocks, in all caches, such as a copy from disk."""
        for block in self._known(blocks, "loaded"):
            self._written.fill(block)
            self._poisoned.discard(block)
            self._prints.pop(block, None)

    @in_inference_mode
    def truncated(self, owner: Hashable, num_tokens: int) -> None:
        """The owner keeps its first tokens; what it has written behind them, such as refused drafts, counts as
        never written. Looks at the tables that were drawn last, and leaves blocks alone that others have as well."""
        for table in self._tables.get(owner, ()):
            for i in range(num_tokens // self.block_size, len(table)):
                if table[i] != NO_BLOCK and self._owners[table[i]] == {owner}:
                    kept = slots_between(0, num_tokens - i * self.block_size, self.block_size)
                    self._written.keep_only(table[i], kept)
        self._accesses = []

    @in_inference_mode
    def draw(
        self,
        tables: Mapping[Any, Sequence[Sequence[int]]],
        counts: Sequence[int] | None = None,
        kept: Collection[int] | None = None,
    ) -> None:
        """What every owner holds from now on, in the place of what was told before.

        tables: of each owner a block table for each group of layers, one if all layers are alike; NO_BLOCK in place of
            blocks that were given back.
        counts: of each block, how many owners the allocator counts. Without it, several owners may have a block at the
            same place of their tables, where prefixes are shared; at different places they may not.
        kept: blocks whose tokens can be found again, whether anybody has them or not. To be given where there are
            prefixes to find: other blocks are poisoned when their last owner goes.
        """
        self._kept = set() if kept is None else kept
        had = set() if self._tells_renewals else set().union(*self._blocks_of.values())
        touched: set[int] = set()
        changed = {owner: new for owner, new in tables.items() if self._tables.get(owner) != new}
        for owner in (*(self._blocks_of.keys() - tables.keys()), *changed):
            new = {block for table in changed.get(owner, ()) for block in table if block != NO_BLOCK}
            self._known(new, "tables", owner)
            num_held = sum(block != NO_BLOCK for table in changed.get(owner, ()) for block in table)
            if num_held != len(new):
                held = [block for table in changed[owner] for block in table if block != NO_BLOCK]
                twice = next(block for block in held if held.count(block) > 1)
                raise CacheError("tables", "a block is twice in the tables of its owner", owner=owner, block=twice)
            old = self._blocks_of.get(owner, set())
            touched |= old ^ new
            for block in old - new:
                self._drop(owner, block)
            for block in new - old:
                self._add(owner, block)
            self._tables.pop(owner, None)
        self._tables |= {owner: [list(table) for table in new] for owner, new in changed.items()}
        self._check_counts(touched, counts)
        if not self._tells_renewals:
            self._renew(block for block in touched if block not in had and block not in self._kept)
        self._update_prints(touched, "tables")

    def expect(self, rows: Sequence[Row]) -> None:
        """What the next step is to do, in the order of the rows of its block tables and of its new tokens. Ops on as
        many rows or tokens are then held to these owners, to their lengths, and to the tables that were drawn.
        Without rows any owner may write to its blocks, and read what it has."""
        self._accesses, self._step = [], Step([], [], self.block_size)
        drawn = [self._tables.get(row.owner) for row in rows]
        groups = [] if None in drawn else zip(*(tables for tables in drawn if tables is not None), strict=True)
        self._step = Step(list(rows), list(groups), self.block_size)

    @in_inference_mode
    def poison(self) -> None:
        """At the end of a step: fill the blocks that lost their last owner. Until then they may be copied from."""
        blocks = [block for block in self._loose if not self._owners[block] and block not in self._kept]
        self._loose.clear()
        self._written.end_step()
        if blocks:
            for cache in self._caches:
                cache.poison(blocks)
            for block in blocks:
                self._written.keep_only(block, 0)
            self._poisoned |= set(blocks)
            self._accesses = []

    @in_inference_mode
    def verify(self, op: str = "verify") -> None:
        """Look at all blocks that are poisoned, or shared or kept and full: nobody may have written to them since."""
        self._verify_poison(sorted(self._poisoned), op)
        self._verify_prints(sorted(self._prints), op)

    # ---- accesses ---------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, key_cache: Tensor, slots: Tensor, op: str = "write") -> Iterator[None]:
        """Around a kernel that writes a token to each of the slots, [num_tokens], in a registered layer. Negative slots
        are left out."""
        end_write = self.begin_write(key_cache, slots, op)
        yield
        end_write()

    def begin_write(self, key_cache: Tensor, slots: Tensor, op: str) -> Callable[[], None]:
        """`writing`. What is returned is called once the kernel has run."""
        cache = self._cache_at[key_cache.data_ptr()]
        access = self._find_access((slots,)) or self._check_slots(slots, op, cache.layer)
        shared = [slot for slot in access.shared if self._written.is_by_op(slot, cache.number)]
        return partial(self._end_write, cache, access, shared, cache.tokens(shared), op)

    def check_read(
        self,
        key_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        *,
        first: Tensor | None = None,
        num_new: Tensor | None = None,
        op: str = "read",
    ) -> None:
        """Before a kernel that reads, of each row, the tokens [first, seq_lens) in a registered layer.

        block_tables: [num_rows, max_num_blocks_per_row]; the others: [num_rows]. first: default 0. num_new: of these
        tokens, how many at the end the same op writes; default 0.
        """

        def rows() -> ReadRows:
            nothing = [0] * len(seq_lens)
            others = (nothing if given is None else given.tolist() for given in (first, num_new))
            return ReadRows(seq_lens.tolist(), *others)

        self.check_rows(key_cache, (block_tables, seq_lens, first, num_new), block_tables, rows, op)

    def check_rows(
        self,
        key_cache: Tensor,
        told: Told,
        block_tables: Tensor,
        rows: Callable[[], ReadRows],
        op: str,
    ) -> None:
        """`check_read`. `rows` is called if no other layer has come with what is told, of the call."""
        cache = self._cache_at[key_cache.data_ptr()]
        access = self._find_access(told)
        if access is None:
            access = self._check_tables(told, block_tables, rows(), op, cache.layer)
        self._check_written(cache, access, op)

    def check_read_slots(self, key_cache: Tensor, slots: Tensor, op: str = "read") -> None:
        """Before a kernel that reads the token of each of these slots, [num_tokens]. Negative slots are left out."""
        cache = self._cache_at[key_cache.data_ptr()]
        valid = self._valid(slots.flatten().tolist(), op, cache.layer)
        self._check_owned(valid, op, cache.layer, "is read")
        self._check_written(cache, Access((), parts_of(valid, self.block_size), []), op)

    @in_inference_mode
    def copied(self, key_cache: Tensor, pairs: Tensor, op: str = "copy") -> None:
        """Before blocks are copied within a registered layer. pairs: [num_pairs, 2], (source, target)."""
        cache = self._cache_at[key_cache.data_ptr()]
        self._accesses = []
        for source, target in pairs.tolist():
            self._known((source, target), op)
            self._check_source(source, cache, op)
            self._check_target(target, cache, op)
            self._written.copy(source, target, cache.number)

    @in_inference_mode
    def copied_in(self, cache: Tensor, blocks: Tensor, op: str = "copy") -> None:
        """Before blocks of a registered cache are written whole, with what lay elsewhere. It counts as written."""
        watched = self._cache_at[cache.data_ptr()]
        for block in self._known(blocks.tolist(), op):
            self._check_target(block, watched, op)
            self._written.fill_in(block, watched.number)

    def copied_out(self, cache: Tensor, blocks: Tensor, op: str = "copy") -> None:
        """Before blocks of a registered cache are copied elsewhere."""
        watched = self._cache_at[cache.data_ptr()]
        for block in self._known(blocks.tolist(), op):
            self._check_source(block, watched, op)

    def _check_source(self, block: int, cache: WatchedCache, op: str) -> None:
        """That a block may be copied: until the end of a step even one that was freed."""
        if not self._owners[block] and block in self._poisoned:
            raise CacheError(op, "a block is read that is free", block=block, layer=cache.layer)

    def _check_target(self, block: int, cache: WatchedCache, op: str) -> None:
        """That a block may be written as a whole."""
        if not self._owners[block]:
            raise CacheError(op, "a block is written that is free", block=block, layer=cache.layer)
        if len(self._owners[block]) > 1 and self._written.has_any_by_ops(block, cache.number):
            raise CacheError(
                op, f"a block was overwritten that belongs to {self._names(block)}", block=block, layer=cache.layer
            )

    # ---- owners -----------------------------------------------------------------------------------------------------

    def _known(self, blocks: Iterable[int], op: str, owner: Hashable = None) -> list[int]:
        blocks = list(blocks)
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                problem = f"expected blocks from 0 to {self.num_blocks - 1}"
                raise CacheError(op, problem, owner=owner, block=block)
        return blocks

    def _names(self, block: int) -> str:
        return " and ".join(sorted(map(str, self._owners[block])))

    def _only_owner(self, block: int) -> Hashable:
        return next(iter(self._owners[block])) if len(self._owners[block]) == 1 else None

    def _add(self, owner: Hashable, block: int) -> None:
        self._owners[block].add(owner)
        self._blocks_of.setdefault(owner, set()).add(block)
        self._loose.discard(block)
        self._accesses = []

    def _drop(self, owner: Hashable, block: int) -> None:
        self._owners[block].discard(owner)
        self._blocks_of[owner].discard(block)
        if not self._blocks_of[owner]:
            del self._blocks_of[owner]
        if not self._owners[block]:
            self._loose.add(block)
        self._accesses = []

    def _check_counts(self, touched: set[int], counts: Sequence[int] | None) -> None:
        """That blocks with several owners are meant to have them."""
        if counts is not None:
            held = {block for blocks in self._blocks_of.values() for block in blocks}
            wrong = sorted(block for block in held if len(self._owners[block]) > counts[block])
            for block in wrong[:1]:
                state = f"is counted {counts[block]} times" if counts[block] else "is free"
                problem = f"a block {state} that is in the tables of {self._names(block)}"
                raise CacheError("tables", problem, owner=self._only_owner(block), block=block)
            return
        for block in sorted(block for block in touched if len(self._owners[block]) > 1):
            tables = [table for owner in self._owners[block] for table in self._tables.get(owner, ())]
            if len({table.index(block) for table in tables if block in table}) > 1:
                problem = f"a block is in the tables of {self._names(block)}, at different places"
                raise CacheError("tables", problem, block=block)

    def _renew(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self._verify_poison([block for block in blocks if block in self._poisoned], "renewed")
        for block in blocks:
            self._written.renew(block)
            self._poisoned.discard(block)
            self._prints.pop(block, None)
        self._accesses = []

    # ---- what nobody may write to -----------------------------------------------------------------------------------

    def _verify_poison(self, blocks: list[int], op: str) -> None:
        for cache in self._caches if blocks else ():
            block = cache.first_not_poisoned(blocks)
            if block is not None:
                problem = "a block was written while it was free, by what is not watched"
                raise CacheError(op, problem, block=block, layer=cache.layer)

    def _verify_prints(self, blocks: list[int], op: str) -> None:
        for block, now in zip(blocks, self._fingerprints(blocks), strict=True):
            before = self._prints[block]
            changed = ((before != now) & (before >= 0)).nonzero().flatten().tolist()
            if changed:
                owners = self._names(block) or "nobody, and was kept"
                problem = f"a block was changed, by what is not watched, while it belonged to {owners}"
                raise CacheError(op, problem, block=block, layer=self._caches[changed[0]].layer)

    def _update_prints(self, touched: Iterable[int], op: str) -> None:
        touched = sorted(touched)
        if not touched:
            return
        self._verify_prints([block for block in touched if block in self._prints], op)
        frozen = [b for b in touched if len(self._owners[b]) > 1 or (not self._owners[b] and b in self._kept)]
        for block in touched:
            self._prints.pop(block, None)
        self._prints |= dict(zip(frozen, self._fingerprints(frozen), strict=True))

    def _fingerprints(self, blocks: list[int]) -> Tensor:
        """A number of what each block holds in each cache, [len(blocks), num_caches]; -1 if not all is written."""
        prints = torch.full((len(blocks), len(self._caches)), -1)
        for cache in self._caches if blocks else ():
            is_full = torch.tensor([self._written.is_whole_by_ops(block, cache.number) for block in blocks])
            prints[:, cache.number] = torch.where(is_full, cache.fingerprints(blocks), -1)
        return prints

    # ---- checks of accesses -----------------------------------------------------------------------------------------

    def _find_access(self, told: Told) -> Access | None:
        return next((access for access in self._accesses if access.was_told(told)), None)

    def _remember(self, access: Access) -> Access:
        self._accesses = [access.with_copies(), *self._accesses[:15]]
        return access

    def _valid(self, slots: list[int], op: str, layer: Hashable) -> list[int]:
        end = self.num_blocks * self.block_size
        for slot in slots:
            if slot >= end:
                raise CacheError(op, f"expected slots from 0 to {end - 1}", slot=slot, layer=layer)
        return [slot for slot in slots if slot >= 0]

    def _check_owned(self, slots: list[int], op: str, layer: Hashable, is_accessed: str) -> None:
        for slot in slots:
            block = slot // self.block_size
            if not self._owners[block]:
                state = "free, and kept for what it holds" if block in self._kept else "free"
                raise CacheError(op, f"a block {is_accessed} that is {state}", block=block, slot=slot, layer=layer)

    def _end_write(self, cache: WatchedCache, access: Access, shared: list[int], before: list[Tensor], op: str) -> None:
        """shared: those of the slots whose tokens others read as well. before: what they held."""
        if shared:
            self._check_unchanged(cache, shared, before, op)
        self._written.write(access.parts, cache.number)

    def _check_unchanged(self, cache: WatchedCache, shared: list[int], before: list[Tensor], op: str) -> None:
        for old, new in zip(before, cache.tokens(shared), strict=True):
            is_same = (old == new).flatten(1).all(1).tolist()
            if not all(is_same):
                slot = shared[is_same.index(False)]
                block = slot // self.block_size
                problem = f"a token was overwritten that belongs to {self._names(block)}"
                raise CacheError(op, problem, block=block, slot=slot, layer=cache.layer)

    def _check_slots(self, told: Tensor, op: str, layer: Hashable) -> Access:
        of_tokens: list[int] = told.flatten().tolist()
        slots = self._valid(of_tokens, op, layer)
        if len(of_tokens) == self._step.num_tokens:
            self._step.check_slots(of_tokens, op, layer)
        if len(set(slots)) < len(slots):
            twice = min(slot for slot, count in Counter(slots).items() if count > 1)
            block = twice // self.block_size
            problem = f"two tokens go to one slot, in the block of {self._names(block) or 'nobody'}"
            raise CacheError(op, problem, block=block, slot=twice, layer=layer)
        self._check_owned(slots, op, layer, "is written")
        shared = [slot for slot in slots if len(self._owners[slot // self.block_size]) > 1]
        return self._remember(Access((told,), parts_of(slots, self.block_size), shared))

    def _check_tables(self, told: Told, block_tables: Tensor, rows: ReadRows, op: str, layer: Hashable) -> Access:
        lens, first, num_new = rows
        step = self._step if len(lens) == len(self._step.rows) else Step([], [], self.block_size)
        owners = [row.owner for row in step.rows] or [None] * len(lens)
        if step.rows:
            step.check_lens(lens, op, layer)
        for row, length in enumerate(lens):
            if -(-length // self.block_size) > block_tables.shape[1]:
                problem = f"row {row} has {length} tokens, too many for a table of {block_tables.shape[1]} blocks"
                raise CacheError(op, problem, owner=owners[row], layer=layer)
        tables: list[list[int]] = block_tables[:, : -(-max(lens, default=0) // self.block_size)].tolist()
        read = [
            range(max(begin, 0) // self.block_size, -(-end // self.block_size) if begin < end else 0)
            for begin, end in zip(first, lens, strict=True)
        ]
        if step.tables:
            step.check_tables(tables, read, op, layer)
        parts = []
        for row, (table, columns) in enumerate(zip(tables, read, strict=True)):
            for column in columns:
                block, start = table[column], column * self.block_size
                if not 0 <= block < self.num_blocks:
                    problem = f"row {row} has another block at place {column} than the cache can have"
                    raise CacheError(op, problem, owner=owners[row], block=block, layer=layer)
                if not self._owners[block]:
                    self._check_owned([block * self.block_size + max(first[row] - start, 0)], op, layer, "is read")
                if not self._written.is_whole(block):
                    end = lens[row] - num_new[row]
                    old = slots_between(first[row] - start, end - start, self.block_size)
                    parts.append(Part(block, old, owners[row] if step.tables else None))
            if not step.tables:
                self._check_common_owner(row, table[columns.start : columns.stop], op, layer)
        return self._remember(Access(told, parts, []))

    def _check_common_owner(self, row: int, blocks: list[int], op: str, layer: Hashable) -> None:
        """A table without a name is somebody's: all of its blocks are, and each of them once."""
        owners: set[Hashable] | None = None
        if len(set(blocks)) < len(blocks):
            twice = next(block for block in blocks if blocks.count(block) > 1)
            problem = f"row {row} has a block twice"
            raise CacheError(op, problem, owner=self._only_owner(twice), block=twice, layer=layer)
        for block in blocks:
            common = self._owners[block] if owners is None else owners & self._owners[block]
            if not common:
                others = " and ".join(sorted(map(str, owners or ())))
                problem = f"row {row} has a block of {self._names(block)} behind blocks of {others}"
                raise CacheError(op, problem, owner=self._only_owner(block), block=block, layer=layer)
            owners = common

    def _check_written(self, cache: WatchedCache, access: Access, op: str) -> None:
        for block, slots, owner in access.parts:
            missing = self._written.missing(block, cache.number, slots)
            if missing:
                slot = block * self.block_size + (missing & -missing).bit_length() - 1
                owner = self._only_owner(block) if owner is None else owner
                problem = "a slot is read that was never written"
                raise CacheError(op, problem, owner=owner, block=block, slot=slot, layer=cache.layer)
