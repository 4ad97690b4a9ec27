"""`pagedattn_ext.sanitizer`: each way to break a block table is found in the step that does it, and what is right is
left alone. The block manager here has the shape of those of small engines: blocks with counts and hashes, a queue of
free ones, and a table for each sequence."""

import functools
import pickle
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from pagedattn_ext import CPUGraph, allocate_kv_cache, ops
from pagedattn_ext.flash_attn import flash_attn_with_kvcache
from pagedattn_ext.sanitizer import CacheError, CacheSanitizer, Row, watching

SIZE = 4  # tokens of a block
NUM_BLOCKS = 10


class Sequence:
    def __init__(self, name, token_ids):
        self.name, self.token_ids, self.table, self.num_cached = name, list(token_ids), [], 0


class Manager:
    """Gives sequences blocks, and finds full blocks by their tokens and those before. `hooks`: a sanitizer to tell."""

    def __init__(self, hooks=None):
        self.hooks = hooks
        self.counts = [0] * NUM_BLOCKS
        self.hash_of = {}
        self.free = deque(range(NUM_BLOCKS))
        self.block_of = {}

    def tell(self, event, *arguments, **options):
        if self.hooks:
            getattr(self.hooks, event)(*arguments, **options)

    def take(self, sequence):
        block = self.free.popleft()
        self.block_of.pop(self.hash_of.pop(block, None), None)
        self.counts[block] = 1
        self.tell("allocated", sequence.name, [block])
        sequence.table.append(block)

    def share(self, sequence, block):
        if not self.counts[block]:
            self.free.remove(block)
        self.counts[block] += 1
        self.tell("shared", sequence.name, [block])
        sequence.table.append(block)

    def keys(self, sequence):
        return [tuple(sequence.token_ids[:end]) for end in range(SIZE, len(sequence.token_ids) + 1, SIZE)]

    def allocate(self, sequence):
        for key in self.keys(sequence)[: (len(sequence.token_ids) - 1) // SIZE]:
            if key not in self.block_of:
                break
            self.share(sequence, self.block_of[key])
            sequence.num_cached += SIZE
        while len(sequence.table) * SIZE < len(sequence.token_ids):
            self.take(sequence)

    def append(self, sequence):
        if len(sequence.table) * SIZE < len(sequence.token_ids):
            self.take(sequence)

    def publish(self, sequence):
        for key, block in zip(self.keys(sequence), sequence.table, strict=False):
            if key not in self.block_of:
                self.block_of[key], self.hash_of[block] = block, key

    def deallocate(self, sequence):
        for block in reversed(sequence.table):
            self.counts[block] -= 1
            if self.counts[block] == 0:
                self.free.append(block)
            self.tell("freed", sequence.name, [block], kept=block in self.hash_of)
        sequence.table = []


class Engine:
    """Two layers of two heads. `step` runs what each sequence has not computed; `prepare` makes the index tensors."""

    def __init__(self, sanitizer, manager, told):
        self.sanitizer, self.manager, self.told = sanitizer, manager, told
        self.caches = allocate_kv_cache(NUM_BLOCKS, 2, 16, SIZE, num_layers=2)
        for layer, (keys, values) in enumerate(self.caches):
            sanitizer.register(keys, values, f"layer {layer}")
        self.running = []

    def add(self, name, token_ids):
        self.running.append(Sequence(name, token_ids))
        self.manager.allocate(self.running[-1])

    def finish(self, name):
        [sequence] = [each for each in self.running if each.name == name]
        self.running.remove(sequence)
        self.manager.deallocate(sequence)

    def prepare(self):
        width = max(len(each.table) for each in self.running)
        tables = torch.tensor([[*each.table, *[0] * (width - len(each.table))] for each in self.running])
        lens = torch.tensor([len(each.token_ids) for each in self.running])
        positions = [range(each.num_cached, len(each.token_ids)) for each in self.running]
        slots = [
            each.table[min(i // SIZE, len(each.table) - 1)] * SIZE + i % SIZE
            for each, new in zip(self.running, positions, strict=True)
            for i in new
        ]
        counts = torch.tensor([0, *map(len, positions)]).cumsum(0)
        return tables.int(), lens.int(), torch.tensor(slots), counts.int()

    def step(self):
        for sequence in self.running:
            if sequence.num_cached == len(sequence.token_ids):
                sequence.token_ids.append(len(sequence.token_ids))
                self.manager.append(sequence)
        if "tables" in self.told:
            drawn = {each.name: [each.table] for each in self.running}
            self.sanitizer.draw(drawn, kept=set(self.manager.hash_of))
        rows = [Row(each.name, each.num_cached, len(each.token_ids) - each.num_cached) for each in self.running]
        self.sanitizer.expect(rows)
        tables, lens, slots, start_loc = self.prepare()
        token_ids = torch.tensor([i for each in self.running for i in each.token_ids[each.num_cached :]])
        results = []
        for keys, values in self.caches:
            new = (token_ids[:, None, None] + 1.0).expand(-1, 2, 16).contiguous()
            ops.reshape_and_cache(new, new, keys, values, slots)
            results.append(ops.paged_attention(new, keys, values, tables, lens, query_start_loc=start_loc)[0])
        for sequence in self.running:
            self.manager.publish(sequence)
            sequence.num_cached = len(sequence.token_ids)
        self.sanitizer.poison()
        return results


def run(engine):
    """Sequences that share a prefix, grow, end, and come back; each step by itself, for whoever looks between."""
    engine.add("a", range(10))
    engine.add("b", range(3))
    for _ in range(3):
        yield engine.step()
    engine.add("c", [*range(8), 20])
    yield engine.step()
    engine.finish("a")
    engine.finish("b")
    engine.add("d", range(40, 64))
    yield engine.step()
    engine.finish("d")
    engine.add("e", [*range(8), 30, 31, 32])
    for _ in range(4):
        yield engine.step()


TOLD = [{"tables"}, {"hooks"}, {"tables", "hooks"}]
each_way = pytest.mark.parametrize("told", TOLD, ids="+".join)


def make_engine(told):
    sanitizer = CacheSanitizer(NUM_BLOCKS, SIZE)
    return Engine(sanitizer, Manager(sanitizer if "hooks" in told else None), told)


@each_way
def test_what_is_right_is_left_alone(told):
    """The results are those of an engine that nobody watches, although freed blocks were filled with NaN."""
    engine = make_engine(told)
    with watching(engine.sanitizer):
        results = list(run(engine))
    engine.sanitizer.verify()
    alone = make_engine({"tables"})
    alone.sanitizer = SimpleNamespace(draw=lambda *_, **__: None, expect=lambda _: None, poison=lambda: None)
    for of_step, expected in zip(results, run(alone), strict=True):
        assert all(map(torch.equal, of_step, expected))


def broken(*methods):
    """A bug: what takes the place of methods of the manager or the engine. It gets the real one first, and a list to
    which it adds when it has done harm."""

    def bug(engine, harm):
        for owner, name, method in methods:
            holder = engine.manager if owner is Manager else engine
            setattr(holder, name, functools.partial(method, holder, getattr(holder, name), harm))

    return bug


def hands_out_a_block_in_use(manager, real, harm, sequence):
    used = [block for block, count in enumerate(manager.counts) if count and block not in sequence.table]
    if used:
        harm.append(used)
        manager.free.appendleft(used[0])
    real(sequence)


def does_not_count_sharers(manager, real, harm, sequence, block):
    real(sequence, block)
    manager.counts[block] -= 1


def takes_what_others_read(manager, real, harm, sequence):
    if any(manager.free[0] in each.table for each in manager.engine.running):
        harm.append(sequence)
    real(sequence)


def frees_shared_blocks(manager, real, harm, sequence):
    shared = [block for block in sequence.table if manager.counts[block] > 1]
    real(sequence)
    for block in shared:
        manager.counts[block] = 0
        manager.free.appendleft(block)


def does_not_append(manager, real, harm, sequence):
    if len(sequence.table) * SIZE < len(sequence.token_ids):
        harm.append(sequence)


def appends_the_last_block_again(manager, real, harm, sequence):
    if len(sequence.table) * SIZE < len(sequence.token_ids):
        harm.append(sequence)
        sequence.table.append(sequence.table[-1])


def finds_a_block_too_many(manager, real, harm, sequence):
    real(sequence)
    if 0 < sequence.num_cached < len(sequence.token_ids) - 1:
        harm.append(sequence)
        sequence.num_cached += 1


def shares_the_end_of_another(manager, real, harm, sequence):
    others = [each for each in manager.engine.running if each is not sequence]
    if others and others[0].table:
        harm.append(sequence)
        while len(sequence.table) * SIZE < len(sequence.token_ids):
            manager.share(sequence, others[0].table[len(sequence.table)])
    real(sequence)


def goes_on_after_its_end(engine, real, harm, name):
    [sequence] = [each for each in engine.running if each.name == name]
    table = sequence.table
    real(name)
    sequence.table = []
    if name == "b":
        harm.append(name)
        engine.stale = table


def reads_a_stale_table(engine, real, harm):
    tables, lens, slots, start_loc = real()
    if hasattr(engine, "stale"):
        tables = tables.clone()
        tables[-1, : len(engine.stale)] = torch.tensor(engine.stale)[: tables.shape[1]]
    return tables, lens, slots, start_loc


def swaps_rows(engine, real, harm):
    tables, lens, slots, start_loc = real()
    if len(tables) > 1:
        harm.append(tables)
        tables = tables.flip(0)
    return tables, lens, slots, start_loc


def writes_one_slot_further(engine, real, harm):
    tables, lens, slots, start_loc = real()
    harm.append(slots)
    return tables, lens, slots + 1, start_loc


def reads_one_token_more(engine, real, harm):
    tables, lens, slots, start_loc = real()
    harm.append(lens)
    return tables, lens + 1, slots, start_loc


def keeps_the_tables_of_the_step_before(engine, real, harm):
    tables, lens, slots, start_loc = real()
    before = getattr(engine, "before", tables)
    engine.before = tables
    if before.shape == tables.shape and not torch.equal(before, tables):
        harm.append(tables)
        return before, lens, slots, start_loc
    return tables, lens, slots, start_loc


def leaves_a_layer_out(engine, real, harm):
    tables, lens, slots, start_loc = real()
    harm.append(slots)
    return tables, lens, torch.full_like(slots, -1), start_loc


BUGS = {
    "a block in use is handed out": broken((Manager, "take", hands_out_a_block_in_use)),
    "sharers are not counted": broken(
        (Manager, "share", does_not_count_sharers), (Manager, "take", takes_what_others_read)
    ),
    "shared blocks are freed": broken(
        (Manager, "deallocate", frees_shared_blocks), (Manager, "take", takes_what_others_read)
    ),
    "a block is not appended": broken((Manager, "append", does_not_append)),
    "the last block is appended again": broken((Manager, "append", appends_the_last_block_again)),
    "a token too many counts as found": broken((Manager, "allocate", finds_a_block_too_many)),
    "a block is shared that is not full": broken((Manager, "allocate", shares_the_end_of_another)),
    "a table is read after its end": broken(
        (Engine, "finish", goes_on_after_its_end), (Engine, "prepare", reads_a_stale_table)
    ),
    "rows are swapped": broken((Engine, "prepare", swaps_rows)),
    "slots are one further": broken((Engine, "prepare", writes_one_slot_further)),
    "lengths are one more": broken((Engine, "prepare", reads_one_token_more)),
    "tables are those of the step before": broken((Engine, "prepare", keeps_the_tables_of_the_step_before)),
    "tokens are not written": broken((Engine, "prepare", leaves_a_layer_out)),
}


@pytest.mark.parametrize("name", BUGS)
@each_way
def test_bugs_are_found_at_once(name, told):
    engine = make_engine(told)
    engine.manager.engine = engine
    harm = []
    BUGS[name](engine, harm)
    steps = run(engine)
    with watching(engine.sanitizer), pytest.raises(CacheError) as caught:
        while True:
            assert not harm, "a step has ended that did harm"
            next(steps)
    assert harm, f"nothing was wrong yet: {caught.value}"


# ---- one access at a time ------------------------------------------------------------------------------------------


def make_layer(layout="chunked", dtype=torch.float32, size=16):
    """A sanitizer and a layer of 4 blocks of 8 tokens; "a" has blocks 0 and 1, whose first 10 slots are written."""
    sanitizer = CacheSanitizer(4, 8)
    if layout == "latents":
        caches = [torch.zeros(4, 8, size)]
    else:
        caches = [*allocate_kv_cache(4, 2, size, 8, dtype, layout=layout)[0]]
    sanitizer.register(*caches)
    sanitizer.allocated("a", [0, 1])
    with watching(sanitizer):
        write(caches, range(10))
    return sanitizer, caches


def write(caches, slots, value=1.0, **options):
    slots = torch.tensor([*slots])
    new = torch.full((len(slots), 2, 16), value)
    if len(caches) == 1:
        ops.concat_and_cache_mla(new[:, 0, :12], new[:, 0, 12:], *caches, slots)
    else:
        options |= dict(kv_cache_dtype="fp8") if caches[0].dtype == torch.float8_e4m3fn else {}
        ops.reshape_and_cache(new, new, *caches, slots, **options)


def attend(caches, length, table=(0, 1), op="paged_attention", num_rows=1, **options):
    if num_rows > 1:
        options["query_start_loc"] = torch.tensor([0, num_rows]).int()
    query, tables, lens = torch.ones(num_rows, 2, 16), torch.tensor([table]).int(), torch.tensor([length]).int()
    if len(caches) == 1:
        latents, rope = caches[0].split([12, 4], dim=2)
        return ops.mla_attention(query[..., :12], query[..., 12:], latents, rope, tables, lens, scale=1.0)[0]
    options |= dict(kv_cache_dtype="fp8") if caches[0].dtype == torch.float8_e4m3fn else {}
    return getattr(ops, op)(query, *caches, tables, lens, **options)


LAYOUTS = [("chunked", torch.float32), ("nhd", torch.float32), ("latents", torch.float32)]
LAYOUTS += [("chunked", torch.float8_e4m3fn), ("chunked", torch.int8)]


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_layouts_and_dtypes(layout, dtype):
    """Would catch slots that are looked for in another dimension, and poison that a dtype cannot hold."""
    sanitizer, caches = make_layer(layout, dtype)
    with watching(sanitizer):
        attend(caches, 10)
        with pytest.raises(CacheError, match="never written"):
            attend(caches, 11)
        sanitizer.shared("b", [0])
        write(caches, [3])  # the same bits
        with pytest.raises(CacheError, match="overwritten that belongs to a and b") as caught:
            write(caches, [3], 2.0)
        assert (caught.value.block, caught.value.slot, caught.value.layer) == (0, 3, 0)
    sanitizer, caches = make_layer(layout, dtype)
    with watching(sanitizer):
        sanitizer.shared("b", [0])
        sanitizer.freed("a", [0, 1])
        with pytest.raises(CacheError, match="is free"):
            write(caches, [9])
    for cache in caches:
        assert (cache[1].contiguous().view(torch.uint8) == 255).all()
        assert not (cache[0].contiguous().view(torch.uint8) == 255).all(), "b has it"


@pytest.mark.parametrize("op", ["paged_attention", "paged_attention_v1", "paged_attention_v2"])
def test_an_error_says_who_and_where(op):
    sanitizer, caches = make_layer()
    sanitizer.expect([Row("a", 10, 1)])
    with watching(sanitizer), pytest.raises(CacheError) as caught:
        attend(caches, 11, op=op)
    error = caught.value
    assert (error.op, error.owner, error.block, error.slot, error.layer) == (op, "a", 1, 10, 0)
    assert str(error) == f"{op}: a slot is read that was never written (layer 0, block 1, slot 10, owner a)"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.op, copy.owner, copy.slot) == (str(error), op, "a", 10)
    assert "attend" in [entry.name for entry in caught.traceback], "the stack leads to the op's caller"


def test_rows_see_what_their_windows_show():
    """Blocks behind the window may be anybody's; the first block that the first row sees may not."""
    sanitizer, caches = make_layer()
    with watching(sanitizer):
        attend(caches, 10, (3, 1), sliding_window=2)
        attend(caches, 10, (3, 1), attention_chunk=8)
        attend(caches, 10, (3, 1), num_rows=2, sliding_window=1)
        for options in (dict(), dict(sliding_window=3), dict(num_rows=2, sliding_window=2), dict(attention_chunk=16)):
            with pytest.raises(CacheError, match=r"block is read that is free .*block 3"):
                attend(caches, 10, (3, 1), **options)


def test_other_ops():
    sanitizer, caches = make_layer()
    keys, values = caches
    new, lens, tables = torch.ones(2, 2, 16), torch.tensor([10]), torch.tensor([[0, 1]])
    append = functools.partial(ops.append_and_attend, query_start_loc=torch.tensor([0, 2]).int())
    with watching(sanitizer):
        append(new, new, new, keys, values, tables, lens)
        attend(caches, 12)
        with pytest.raises(CacheError, match=r"append_and_attend: a slot is read that was never written .*slot 12"):
            append(new, new, new, keys, values, tables, lens + 3)
        with pytest.raises(CacheError, match=r"append_and_attend: .* too many for a table of 2 blocks"):
            append(new, new, new, keys, values, tables, lens + 5)
        ops.gather_cached_kv(keys, values, torch.tensor([-1, 11]))
        with pytest.raises(CacheError, match=r"gather_cached_kv: .*never written .*slot 12"):
            ops.gather_cached_kv(keys, values, torch.tensor([12]))
        with pytest.raises(CacheError, match=r"copy_blocks: a block is written that is free .*block 2"):
            ops.copy_blocks([keys], [values], torch.tensor([[1, 2]]))
        sanitizer.allocated("b", [2, 3])
        ops.copy_blocks([keys], [values], torch.tensor([[1, 2]]))
        attend(caches, 4, (2,))
        with pytest.raises(CacheError, match=r"never written .*slot 20"):
            attend(caches, 5, (2,))
        elsewhere = allocate_kv_cache(4, 2, 16, 8)[0]
        for source, target in zip(elsewhere, caches, strict=True):
            ops.swap_blocks(source.zero_(), target, torch.tensor([[0, 3]]))
        attend(caches, 8, (3,))
        sanitizer.freed("b", [3])
        with pytest.raises(CacheError, match=r"copy_blocks: a block is written that is free .*block 3"):
            ops.copy_blocks([elsewhere[0], keys], [elsewhere[1], values], torch.tensor([[1, 3]]))
        ops.swap_blocks(keys, elsewhere[0], torch.tensor([[2, 0]]))
        with pytest.raises(CacheError, match=r"swap_blocks: a block is read that is free .*block 3"):
            ops.swap_blocks(keys, elsewhere[0], torch.tensor([[3, 0]]))
        with pytest.raises(CacheError, match=r"swap_blocks: expected blocks from 0 to 3 .*block 4"):
            ops.swap_blocks(keys, elsewhere[0], torch.tensor([[4, 0]]))


def test_pages_of_one_token():
    """As flash-attn's adapter reads a cache behind padding."""
    sanitizer, caches = make_layer("nhd")
    new, padding = torch.ones(1, 1, 2, 16), torch.tensor([2])

    def append(num_cached, table=(0, 1)):
        lens, table = torch.tensor([num_cached]), torch.tensor([table])
        flash_attn_with_kvcache(new, *caches, new, new, cache_seqlens=lens, cache_leftpad=padding, block_table=table)

    with watching(sanitizer):
        append(10)
        append(11)
        with pytest.raises(CacheError, match=r"append_and_attend: a slot is read that was never written .*slot 12"):
            append(13)
        with pytest.raises(CacheError, match=r"append_and_attend: a block is written that is free .*slot 16"):
            append(8, (0, 2))
        attend(caches, 12)


def test_other_strides_are_not_watched():
    """A block's end is not where the next one begins, so pages of one token have other numbers than the slots. Blocks
    have the same."""
    pairs = torch.zeros(4, 2, 8, 2, 16)
    sanitizer = CacheSanitizer(num_blocks=4, block_size=8)
    sanitizer.register(*pairs.unbind(1))
    tokens, table = pairs.view(-1, 1, 2, 16), torch.tensor([[0]])
    with watching(sanitizer):
        ops.paged_attention(torch.ones(1, 2, 16), tokens, tokens, table, table[0] + 1)
        with pytest.raises(CacheError, match="swap_blocks: a block is written that is free"):
            ops.swap_blocks(pairs.clone(), pairs, torch.tensor([[0, 0]]))
        with pytest.raises(CacheError, match="paged_attention: a block is read that is free"):
            ops.paged_attention(torch.ones(1, 2, 16), *pairs.unbind(1), table, table[0] + 1)


def test_what_is_not_watched_is_found_later():
    """A write to a free block when it is taken, one to a full shared block when it gets another owner; both by
    `verify`."""
    sanitizer, caches = make_layer()
    sanitizer.shared("b", [0])
    caches[1][0, 0, 0, 0] += 1
    with pytest.raises(CacheError, match="belonged to a and b") as caught:
        sanitizer.verify()
    assert caught.value.op == "verify"
    with pytest.raises(CacheError, match="not watched"):
        sanitizer.shared("c", [0])
    sanitizer.freed("a", [1])
    caches[0][1, 1] = 0
    with pytest.raises(CacheError, match="written while it was free"):
        sanitizer.verify()
    with pytest.raises(CacheError, match="written while it was free"):
        sanitizer.allocated("b", [1])


def test_what_is_told_must_fit():
    sanitizer, _ = make_layer()
    for tell, problem in (
        (lambda: sanitizer.allocated("b", [1]), "allocated: a block was handed out that a holds .*block 1, owner b"),
        (lambda: sanitizer.shared("b", [2]), "shared: a block was shared that is free"),
        (lambda: sanitizer.freed("b", [1]), "freed: a block was freed that its owner does not hold"),
        (lambda: sanitizer.freed("a", [4]), "freed: expected blocks from 0 to 3 .*block 4"),
        (lambda: sanitizer.renewed([2, 9]), "renewed: expected blocks from 0 to 3 .*block 9"),
        (lambda: sanitizer.renewed([-1]), "renewed: expected blocks from 0 to 3 .*block -1"),
        (lambda: sanitizer.loaded([2, 9]), "loaded: expected blocks from 0 to 3 .*block 9"),
        (lambda: sanitizer.loaded([-1]), "loaded: expected blocks from 0 to 3 .*block -1"),
        (lambda: sanitizer.draw({"b": [[1, 1]]}), "tables: a block is twice"),
        (lambda: sanitizer.draw({"b": [[3, 2]], "c": [[2]]}), "tables: .*at different places"),
        (lambda: sanitizer.draw({"b": [[3]], "c": [[3]]}, [1, 1, 0, 1]), "tables: a block is counted 1 times"),
        (lambda: sanitizer.draw({"b": [[3]]}, [1, 1, 0, 0]), "tables: a block is free that is in the tables of b"),
    ):
        with pytest.raises(CacheError, match=problem):
            tell()
    sanitizer.draw({"b": [[3]], "c": [[2]]}, [1, 1, 1, 1])
    with pytest.raises(CacheError, match=r"tables: 9 tokens do not fit in 1 blocks .*owner c"):
        sanitizer.expect([Row("b", 3, 1), Row("c", 8, 1)])


def test_forked_sequences_share_until_one_copies():
    sanitizer, caches = make_layer()
    sanitizer.forked("a", "b")
    with watching(sanitizer):
        write(caches, [10])  # of one of them; nobody has read the slot yet
        with pytest.raises(CacheError, match=r"a token was overwritten that belongs to a and b .*slot 10"):
            write(caches, [10], 2.0)
        with pytest.raises(CacheError, match="two tokens go to one slot, in the block of a and b"):
            write(caches, [11, 11])


@pytest.mark.parametrize("is_whole", [False, True])
def test_copies_onto_what_others_read(is_whole):
    """A copy-on-write that takes a block which two have. Before both have written, it may be a copy for both."""
    sanitizer, caches = make_layer()
    keys, values = caches
    elsewhere = allocate_kv_cache(4, 2, 16, 8)[0][0]
    with watching(sanitizer):
        sanitizer.allocated("b", [2])
        sanitizer.forked("b", "c")
        ops.copy_blocks([keys], [values], torch.tensor([[0, 2]]))
        write(caches, range(16, 24) if is_whole else [16])
        with pytest.raises(CacheError, match=r"copy_blocks: a block was overwritten that belongs to b and c .*block 2"):
            ops.copy_blocks([keys], [values], torch.tensor([[0, 2]]))
        with pytest.raises(CacheError, match=r"swap_blocks: a block was overwritten that belongs to b and c .*block 2"):
            ops.swap_blocks(elsewhere, keys, torch.tensor([[0, 2]]))


def test_a_swap_between_caches_of_two_allocators():
    """Each looks at its own: the one that is read at what it freed, the other at what is written."""
    (sanitizer, caches), (other, others) = make_layer(), make_layer()
    with watching(sanitizer), watching(other):
        ops.swap_blocks(caches[0], others[0], torch.tensor([[0, 1]]))
        sanitizer.freed("a", [0])
        with pytest.raises(CacheError, match=r"swap_blocks: a block is read that is free .*block 0"):
            ops.swap_blocks(caches[0], others[0], torch.tensor([[0, 1]]))
        with pytest.raises(CacheError, match=r"swap_blocks: a block is written that is free .*block 3"):
            ops.swap_blocks(caches[0], others[0], torch.tensor([[1, 3]]))


def test_a_cache_that_is_registered_late():
    """When blocks of the other caches are shared already."""
    sanitizer, caches = make_layer()
    sanitizer.shared("b", [0])
    sanitizer.register(*allocate_kv_cache(4, 2, 16, 8)[0])
    sanitizer.verify()
    sanitizer.shared("c", [0])
    caches[1][0, 0, 0, 0] += 1
    with pytest.raises(CacheError, match=r"belonged to a and b and c .*layer 0"):
        sanitizer.verify()


def test_what_may_be_overwritten():
    """Refused drafts in a block that is found by another before it is filled, and what came from elsewhere."""
    sanitizer, caches = make_layer()
    sanitizer.draw({"a": [[0, 1]]})
    sanitizer.truncated("a", 9)
    sanitizer.loaded([0])
    sanitizer.draw({"a": [[0, 1]], "b": [[0, 1]]})
    with watching(sanitizer):
        attend(caches, 9)
        with pytest.raises(CacheError, match=r"never written .*slot 9"):
            attend(caches, 10)
        write(caches, [0, 9], 2.0)
        with pytest.raises(CacheError, match=r"overwritten that belongs to a and b .*slot 0"):
            write(caches, [0], 3.0)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "num_blocks: expected an int from 1 on, got 0", lambda: CacheSanitizer(0, 8)),
        (ValueError, "block_size: expected an int from 1 on, got '8'", lambda: CacheSanitizer(4, "8")),
        (TypeError, "key_cache: expected a torch.Tensor, got int", lambda: CacheSanitizer(4, 8).register(1)),
        (
            ValueError,
            r"value_cache: expected 4 blocks of 8 slots, got a tensor of shape \[3, 8, 16\]",
            lambda: CacheSanitizer(4, 8).register(torch.zeros(4, 8, 16), torch.zeros(3, 8, 16)),
        ),
        (
            ValueError,
            "key_cache: expected a contiguous last dimension",
            lambda: CacheSanitizer(4, 8).register(torch.zeros(4, 16, 8).mT),
        ),
    ],
)
def test_bad_arguments(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_replays_are_checked():
    """By what the index tensors hold at each replay, as long as the sanitizer watches; what a replay writes counts."""
    sanitizer, caches = make_layer()
    slots, table, length = torch.tensor([10]), torch.tensor([[0, 1]]), torch.tensor([11])
    key, query = torch.ones(1, 2, 16), torch.ones(1, 2, 16)
    graph = CPUGraph()

    def replay(slot, num_tokens):
        slots.fill_(slot)
        length.fill_(num_tokens)
        graph.replay()

    with watching(sanitizer):
        with graph.capture():
            ops.reshape_and_cache(key, key, *caches, slots)
            out, _ = ops.paged_attention(query, *caches, table, length)
        replay(10, 11)
        torch.testing.assert_close(out, key)
        with pytest.raises(CacheError, match="paged_attention: a slot is read that was never written") as error:
            replay(11, 14)
        assert (error.value.block, error.value.slot, error.value.owner) == (1, 12, "a")
        with pytest.raises(CacheError, match="reshape_and_cache: a block is written that is free"):
            replay(24, 12)
        replay(12, 13)
    replay(24, 14)  # nobody watches


def test_nothing_stands_before_the_ops_when_nobody_watches():
    name, key = "pagedattn_ext::reshape_and_cache", "BackendSelect"
    sanitizer, caches = make_layer()
    other, _ = make_layer()
    with watching(sanitizer):
        with watching(other):
            pass
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    write(caches, [31])


def test_kernels_of_others():
    sanitizer, (keys, values) = make_layer("nhd")
    slots = torch.tensor([10])
    with sanitizer.writing(keys, slots, "store"):
        keys.view(-1, 2, 16)[slots] = 1.0
        values.view(-1, 2, 16)[slots] = 1.0
    sanitizer.check_read(keys, torch.tensor([[0, 1]]), torch.tensor([11]))
    with pytest.raises(CacheError, match="flash: a slot is read that was never written"):
        sanitizer.check_read(keys, torch.tensor([[0, 1]]), torch.tensor([12]), op="flash")
    with (
        pytest.raises(CacheError, match="store: a block is written that is free"),
        sanitizer.writing(keys, torch.tensor([16]), "store"),
    ):
        raise AssertionError("the kernel has run")
