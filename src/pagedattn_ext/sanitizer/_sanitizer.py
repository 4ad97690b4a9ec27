"""Who owns each block, which slots are written, and whether an access fits that."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._access import Access, Told
from ._inference_mode import in_inference_mode
from ._watched_cache import WatchedCache

NO_BLOCK = -1  # in a drawn table: a block that was given back, such as one behind a window


class CacheError(RuntimeError):
    """An access that does not fit the block's owners, or what is written.

    owner, block, slot, layer: None where they are unknown or there are several. slot: within the cache, block *
    block_size + offset. op: what did it; "tables", "allocated" and so on, if what was told contradicts itself.
    """

    __module__ = str(__package__)  # where it is imported from

    def __init__(
        self,
        op: str,
        problem: str,
        *,
        owner: Hashable = None,
        block: int | None = None,
        slot: int | None = None,
        layer: Hashable = None,
    ) -> None:
        where = {"layer": layer, "block": block, "slot": slot, "owner": owner}
        told = ", ".join(f"{name} {value}" for name, value in where.items() if value is not None)
        super().__init__(f"{op}: {problem} ({told})" if told else f"{op}: {problem}")
        self.op, self.owner, self.block, self.slot, self.layer = op, owner, block, slot, layer
        self._remake = partial(CacheError, op, problem, owner=owner, block=block, slot=slot, layer=layer)

    def __reduce__(self) -> tuple[Callable[[], "CacheError"], tuple[()]]:
        return self._remake, ()  # for pickle: engines run in processes of their own


class Row(NamedTuple):
    """What a step is to do for a sequence: num_new tokens come behind the num_cached tokens in the cache."""

    owner: Hashable
    num_cached: int
    num_new: int


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
        self._num_owners = torch.zeros(num_blocks, dtype=torch.int64)
        self._blocks_of: dict[Hashable, set[int]] = {}
        self._tables: dict[Hashable, list[list[int]]] = {}  # drawn
        self._counts: list[int] = []  # that were checked last
        self._tells_renewals = False
        self._kept: Collection[int] = set()
        self._loose: set[int] = set()  # lost their last owner and are neither kept nor poisoned
        self._poisoned: set[int] = set()
        self._written = torch.zeros((0, num_blocks, block_size), dtype=torch.bool)  # of each cache
        self._seen = self._written.clone()  # those that an op has written; of others it may be unknown how many were
        self._before: dict[int, Tensor] = {}  # what was written in a renewed block, which may still be copied from
        self._prints: dict[int, Tensor] = {}  # of shared and kept blocks; -1 in caches where not all is written
        self._rows: list[Row] = []
        self._row_of_token = self._ends = torch.zeros(0, dtype=torch.int64)
        self._expected: list[tuple[Tensor, Tensor]] = []  # of each group of layers: tables, slots of new tokens
        self._accesses: list[Access] = []

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
        nothing = self._written.new_zeros((1, self.num_blocks, self.block_size))
        self._written, self._seen = torch.cat([self._written, nothing]), torch.cat([self._seen, nothing])

    def has(self, cache: Tensor) -> bool:
        """Whether this is a registered cache, or begins where one does."""
        return cache.data_ptr() in self._cache_at

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
        self._tells_renewals = True
        self._renew(blocks)

    @in_inference_mode
    def loaded(self, blocks: Iterable[int]) -> None:
        """Something that is not watched has written all of these blocks, in all caches, such as a copy from disk."""
        for block in blocks:
            self._written[:, block], self._seen[:, block] = True, False
            self._poisoned.discard(block)
            self._prints.pop(block, None)

    @in_inference_mode
    def truncated(self, owner: Hashable, num_tokens: int) -> None:
        """The owner keeps its first tokens; what it has written behind them, such as refused drafts, counts as
        never written. Looks at the tables that were drawn last, and leaves blocks alone that others have as well."""
        for table in self._tables.get(owner, ()):
            for i in range(num_tokens // self.block_size, len(table)):
                if table[i] != NO_BLOCK and self._owners[table[i]] == {owner}:
                    begin = max(0, num_tokens - i * self.block_size)
                    self._written[:, table[i], begin:] = self._seen[:, table[i], begin:] = False

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
        had_none = self._num_owners == 0
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
            self._renew(block for block in touched if had_none[block] and block not in self._kept)
        self._update_prints(touched, "tables")

    @in_inference_mode
    def expect(self, rows: Sequence[Row]) -> None:
        """What the next step is to do, in the order of the rows of its block tables and of its new tokens. Ops on as
        many rows or tokens are then held to these owners, to their lengths, and to the tables that were drawn.
        Without rows any owner may write to its blocks, and read what it has."""
        self._rows, self._accesses, self._expected = list(rows), [], []
        tables = [self._tables.get(row.owner) for row in rows]
        cached, new = (torch.tensor([row[i] for row in rows], dtype=torch.int64) for i in (1, 2))
        self._ends = cached + new
        self._row_of_token = torch.repeat_interleave(new)
        positions = torch.arange(len(self._row_of_token)) - (new.cumsum(0) - new - cached)[self._row_of_token]
        for group in zip(*(table for table in tables if table is not None), strict=True):
            if len(group) < len(rows):
                return  # of some rows, nothing was drawn
            for row, table in zip(rows, group, strict=True):
                if -(-(row.num_cached + row.num_new) // self.block_size) > len(table):
                    problem = f"{row.num_cached + row.num_new} tokens do not fit in {len(table)} blocks"
                    raise CacheError("tables", problem, owner=row.owner)
            width = max(map(len, group))
            padded = torch.tensor([[*table, *[NO_BLOCK] * (width - len(table))] for table in group])
            blocks = padded[self._row_of_token, positions // self.block_size]
            self._expected.append((padded, blocks * self.block_size + positions % self.block_size))

    @in_inference_mode
    def poison(self) -> None:
        """At the end of a step: fill the blocks that lost their last owner. Until then they may be copied from."""
        blocks = [block for block in self._loose if not self._owners[block] and block not in self._kept]
        self._loose.clear()
        self._before.clear()
        if blocks:
            for cache in self._caches:
                cache.poison(blocks)
            self._written[:, torch.tensor(blocks)] = self._seen[:, torch.tensor(blocks)] = False
            self._poisoned |= set(blocks)

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
        before = self._begin_write(key_cache, slots, op)
        yield
        self._end_write(key_cache, before, op)

    @in_inference_mode
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

        def seen() -> Iterator[Tensor]:
            nothing = torch.zeros_like(seq_lens)
            yield from (nothing if given is None else given for given in (first, num_new))

        self.check_rows(key_cache, block_tables, seq_lens, (first, num_new), seen, op)

    @in_inference_mode
    def check_rows(
        self,
        key_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        others: Told,
        seen: Callable[[], Iterable[Tensor]],
        op: str,
    ) -> None:
        """`check_read`. `seen` makes first and num_new of `others`, if no other layer has come with the same."""
        cache = self._cache_at[key_cache.data_ptr()]
        told = (block_tables, seq_lens, *others)
        access = self._find_access(told)
        if access is None:
            first, num_new = seen()
            index = block_tables, seq_lens, first.clamp(min=0), num_new
            tables, lens, first, num_new = (tensor.cpu().long() for tensor in index)
            access = self._check_tables(told, tables, lens, first, num_new, op, cache.layer)
        self._check_written(cache, access, op)

    @in_inference_mode
    def check_read_slots(self, key_cache: Tensor, slots: Tensor, op: str = "read") -> None:
        """Before a kernel that reads the token of each of these slots, [num_tokens]. Negative slots are left out."""
        cache = self._cache_at[key_cache.data_ptr()]
        slots = self._valid(slots.cpu().long(), op, cache.layer)
        self._check_owned(slots, op, cache.layer, "is read")
        self._check_written(cache, Access((), slots, slots.new_zeros(0), slots[:0]), op)

    @in_inference_mode
    def copied(self, key_cache: Tensor, pairs: Tensor, op: str = "copy") -> None:
        """Before blocks are copied within a registered layer. pairs: [num_pairs, 2], (source, target)."""
        cache = self._cache_at[key_cache.data_ptr()]
        for source, target in pairs.tolist():
            self._known((source, target), op)
            before = self._before.get(source)
            if not self._owners[source] and before is None and source in self._poisoned:
                raise CacheError(op, "a block is read that is free", block=source, layer=cache.layer)
            if not self._owners[target]:
                raise CacheError(op, "a block is written that is free", block=target, layer=cache.layer)
            written = self._written[cache.number, source]
            self._written[cache.number, target] = written if before is None else written | before[cache.number]
            self._seen[cache.number, target] = False

    @in_inference_mode
    def copied_in(self, cache: Tensor, blocks: Tensor, op: str = "copy") -> None:
        """Before blocks of a registered cache are written whole, with what lay elsewhere. It counts as written."""
        layer = self._cache_at[cache.data_ptr()]
        for block in self._known(blocks.tolist(), op):
            if not self._owners[block]:
                raise CacheError(op, "a block is written that is free", block=block, layer=layer.layer)
        self._written[layer.number, blocks.cpu().long()] = True
        self._seen[layer.number, blocks.cpu().long()] = False

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
        self._num_owners[block] = len(self._owners[block])
        self._loose.discard(block)
        self._accesses = []

    def _drop(self, owner: Hashable, block: int) -> None:
        self._owners[block].discard(owner)
        self._num_owners[block] = len(self._owners[block])
        self._blocks_of[owner].discard(block)
        if not self._blocks_of[owner]:
            del self._blocks_of[owner]
        if not self._owners[block]:
            self._loose.add(block)
        self._accesses = []

    def _check_counts(self, touched: set[int], counts: Sequence[int] | None) -> None:
        """That blocks with several owners are meant to have them."""
        if counts is not None:
            if not touched and counts == self._counts:  # most steps
                return
            self._counts = list(counts)
            wrong = (self._num_owners > torch.tensor(counts)).nonzero().flatten().tolist()
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
            self._before.setdefault(block, self._written[:, block].clone())
            self._written[:, block] = self._seen[:, block] = False
            self._poisoned.discard(block)
            self._prints.pop(block, None)

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
            is_full = self._seen[cache.number, blocks].all(1)
            prints[:, cache.number] = torch.where(is_full, cache.fingerprints(blocks), -1)
        return prints

    # ---- checks of accesses -----------------------------------------------------------------------------------------

    def _find_access(self, told: Told) -> Access | None:
        return next((access for access in self._accesses if access.was_told(told)), None)

    def _remember(self, access: Access) -> Access:
        self._accesses = [access.with_copies(), *self._accesses[:15]]
        return access

    def _valid(self, slots: Tensor, op: str, layer: Hashable) -> Tensor:
        slots = slots.flatten()
        slots = slots[slots >= 0]
        outside = slots[slots >= self.num_blocks * self.block_size]
        if len(outside):
            problem = f"expected slots from 0 to {self.num_blocks * self.block_size - 1}"
            raise CacheError(op, problem, slot=int(outside[0]), layer=layer)
        return slots

    def _check_owned(self, slots: Tensor, op: str, layer: Hashable, is_accessed: str) -> None:
        free = slots[self._num_owners[slots // self.block_size] == 0]
        if len(free):
            block = int(free[0]) // self.block_size
            state = "free, and kept for what it holds" if block in self._kept else "free"
            problem = f"a block {is_accessed} that is {state}"
            raise CacheError(op, problem, block=block, slot=int(free[0]), layer=layer)

    @in_inference_mode
    def _begin_write(self, key_cache: Tensor, slots: Tensor, op: str) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The slots; and those of them whose tokens others read as well, and what they hold."""
        cache = self._cache_at[key_cache.data_ptr()]
        slots = slots.cpu().long().flatten()
        access = self._find_access((slots,)) or self._check_slots(slots, op, cache.layer)
        shared = access.shared
        if len(shared):
            shared = shared[self._seen[cache.number].view(-1)[shared]]
        return access.slots, shared, cache.tokens(shared)

    @in_inference_mode
    def _end_write(self, key_cache: Tensor, begun: tuple[Tensor, Tensor, list[Tensor]], op: str) -> None:
        slots, shared, before = begun
        cache = self._cache_at[key_cache.data_ptr()]
        for old, new in zip(before, cache.tokens(shared), strict=True):
            is_same = (old == new).flatten(1).all(1).tolist()
            if not all(is_same):
                slot = int(shared[is_same.index(False)])
                block = slot // self.block_size
                problem = f"a token was overwritten that belongs to {self._names(block)}"
                raise CacheError(op, problem, block=block, slot=slot, layer=cache.layer)
        self._written[cache.number].view(-1)[slots] = True
        self._seen[cache.number].view(-1)[slots] = True

    def _check_slots(self, told: Tensor, op: str, layer: Hashable) -> Access:
        slots = self._valid(told, op, layer)
        if self._expected and len(told) == len(self._row_of_token):
            wrong = min((told != expected for _, expected in self._expected), key=lambda differs: int(differs.sum()))
            for token in wrong.nonzero().flatten().tolist()[:1]:
                slot = int(told[token])
                expected = " or ".join(str(int(of_group[token])) for _, of_group in self._expected)
                raise CacheError(
                    op,
                    f"token {token} of the step goes to a slot that is not its own, which is {expected}",
                    owner=self._rows[int(self._row_of_token[token])].owner,
                    block=slot // self.block_size if slot >= 0 else None,
                    slot=slot,
                    layer=layer,
                )
        in_order = slots.sort().values
        twice = in_order[1:][in_order[1:] == in_order[:-1]]
        if len(twice):
            block = int(twice[0]) // self.block_size
            problem = f"two tokens go to one slot, in the block of {self._names(block) or 'nobody'}"
            raise CacheError(op, problem, block=block, slot=int(twice[0]), layer=layer)
        self._check_owned(slots, op, layer, "is written")
        shared = slots[self._num_owners[slots // self.block_size] > 1]
        return self._remember(Access((told,), slots, slots.new_zeros(0), shared))

    def _check_tables(
        self,
        told: Told,
        tables: Tensor,
        lens: Tensor,
        first: Tensor,
        num_new: Tensor,
        op: str,
        layer: Hashable,
    ) -> Access:
        rows = self._rows if len(lens) == len(self._rows) else []
        if rows and not torch.equal(lens, self._ends):
            row = int((lens != self._ends).nonzero()[0])
            problem = f"row {row} has a length of {int(lens[row])}, expected {int(self._ends[row])}"
            raise CacheError(op, problem, owner=rows[row].owner, layer=layer)
        num_blocks = -(-lens // self.block_size)
        too_long = (num_blocks > tables.shape[1]).nonzero()
        if len(too_long):
            row = int(too_long[0])
            problem = f"row {row} has {int(lens[row])} tokens, too many for a table of {tables.shape[1]} blocks"
            raise CacheError(op, problem, owner=rows[row].owner if rows else None, layer=layer)
        width = int(num_blocks.max()) if len(lens) else 0
        tables, columns = tables[:, :width], torch.arange(width)
        is_read = (columns >= (first // self.block_size)[:, None]) & (columns < num_blocks[:, None])
        is_read &= (first < lens)[:, None]
        expected = [of_group[:, :width] for of_group, _ in self._expected] if rows else []
        wrong = min(
            (is_read & (tables != of_group) for of_group in expected),
            key=lambda differs: int(differs.sum()),
            default=is_read & ((tables < 0) | (tables >= self.num_blocks)),
        )
        for row, column in wrong.nonzero().tolist()[:1]:
            problem = f"row {row} has another block at place {column} than "
            problem += "its owner" if expected else "the cache can have"
            raise CacheError(
                op, problem, owner=rows[row].owner if rows else None, block=int(tables[row, column]), layer=layer
            )
        positions = torch.arange(width * self.block_size)
        sees = (positions >= first[:, None]) & (positions < lens[:, None])
        slots = (tables[:, :, None] * self.block_size + torch.arange(self.block_size)).flatten(1)
        self._check_owned(slots[sees], op, layer, "is read")
        if not expected:
            for row, (of_row, read) in enumerate(zip(tables.tolist(), is_read.tolist(), strict=True)):
                self._check_common_owner(
                    row, [block for block, is_ in zip(of_row, read, strict=True) if is_], op, layer
                )
        is_old = sees & (positions < (lens - num_new)[:, None])
        return self._remember(Access(told, slots[is_old], is_old.nonzero()[:, 0], slots[:0, 0]))

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
        is_written = self._written[cache.number].view(-1)[access.slots]
        if not is_written.all():
            i = int((~is_written).nonzero()[0])
            slot = int(access.slots[i])
            owner = self._only_owner(slot // self.block_size)
            if len(access.rows) and self._expected:
                owner = self._rows[int(access.rows[i])].owner
            problem = "a slot is read that was never written"
            raise CacheError(op, problem, owner=owner, block=slot // self.block_size, slot=slot, layer=cache.layer)
