"""PAGEDATTN_SANITIZE=1: bugs planted in the block manager, the runner and the copies, each found in the step that first
does harm; and what is right is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import Checkpoint

from pagedattn_ext.sanitizer import CacheError
from pagedattn_serve.calibration import calibrate_kv_scales
from pagedattn_serve.engine import LLMEngine
from pagedattn_serve.execution.cache_engine import CacheEngine
from pagedattn_serve.execution.model_runner import ModelRunner
from pagedattn_serve.sampling_params import SamplingParams
from pagedattn_serve.scheduling.block_allocator import BlockAllocator
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.sequence import TableArray

Harm = list[str]
Patch = Callable[[type, str, Callable[..., Any]], None]


def make_engine(checkpoint: Checkpoint, **options: Any) -> LLMEngine:
    options = dict(block_size=8, num_blocks=14, max_model_len=64, max_num_seqs=6, swap_space=0.001) | options
    engine = LLMEngine(checkpoint.path, seed=0, **options)
    for i, (prompt, n) in enumerate(((range(20), 2), (range(30), 1), (range(16), 2), (range(3, 14), 1))):
        params = SamplingParams(n=n, max_tokens=24, ignore_eos=True, temperature=1, seed=i)
        engine.add_request(f"request {i}", None, params, [*prompt])
    return engine


def finish(engine: LLMEngine) -> dict[str, list[list[int]]]:
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = [completion.token_ids for completion in output.outputs]
    return tokens


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-sliding"])
def test_tokens_are_the_same(
    name: str, get_checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With forks, copies on write, swaps and prefixes; freed blocks are full of NaN. Without the variable, nothing
    stands before the ops."""
    monkeypatch.delenv("PAGEDATTN_SANITIZE", raising=False)
    plain = make_engine(get_checkpoint(name))
    assert plain.executor is plain.model_runner
    expected = finish(plain)
    assert plain.stats().num_swaps
    monkeypatch.setenv("PAGEDATTN_SANITIZE", "1")
    assert finish(make_engine(get_checkpoint(name))) == expected
    monkeypatch.setenv("PAGEDATTN_SANITIZE", "yes")
    with pytest.raises(ValueError, match=r"^PAGEDATTN_SANITIZE: expected 0 or 1, got 'yes'$"):
        make_engine(get_checkpoint(name))


def test_a_calibration(get_checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs its prompts without a batch, in blocks that nobody holds."""
    checkpoint = get_checkpoint("llama-gqa")
    expected = calibrate_kv_scales(checkpoint.path, checkpoint.prompts[:2])
    monkeypatch.setenv("PAGEDATTN_SANITIZE", "1")
    assert calibrate_kv_scales(checkpoint.path, checkpoint.prompts[:2]) == expected


# ---- bugs: each replaces a method, and says when it has done harm --------------------------------------------------


def hands_out_a_block_in_use(patch: Patch, harm: Harm) -> None:
    def allocate(real: Any, self: BlockAllocator) -> int:
        block: int = real(self)
        used = [other for other, count in enumerate(self._ref_counts) if count and other != block]
        if len(used) < 5:
            return block
        harm.append(f"{used[0]} once more")
        self._ref_counts[block] = 0
        self._num_owned -= 1
        self._free.append(block)
        return used[0]

    patch(BlockAllocator, "allocate", allocate)


def frees_shared_blocks(patch: Patch, harm: Harm) -> None:
    def free(real: Any, self: BlockAllocator, block: int) -> None:
        if self._ref_counts[block] > 1:
            harm.append(f"{block} is freed")
            self._ref_counts[block] = 1
        real(self, block)

    patch(BlockAllocator, "free", free)


def does_not_count_sharers(patch: Patch, harm: Harm) -> None:
    def fork(real: Any, self: BlockAllocator, block: int) -> None:
        if self._ref_counts[block]:
            harm.append(f"{block} is not counted")
        else:
            real(self, block)

    patch(BlockAllocator, "fork", fork)


def writes_to_shared_blocks(patch: Patch, harm: Harm) -> None:
    def append(real: Any, self: BlockManager, sequence: Any) -> Any:
        table = self.tables[sequence][0]
        if len(table) * self.block_size < sequence.num_tokens or self._allocator.ref_count(table[-1]) == 1:
            return real(self, sequence)
        harm.append(f"{table[-1]} is not copied")
        return []

    patch(BlockManager, "append", append)


def loses_copies(patch: Patch, harm: Harm) -> None:
    def copy(real: Any, self: CacheEngine, blocks: Any) -> None:
        harm.append("a copy is lost")

    patch(CacheEngine, "copy", copy)


def copies_backwards(patch: Patch, harm: Harm) -> None:
    def copy(real: Any, self: CacheEngine, blocks: Any) -> None:
        harm.append("a copy goes back")
        real(self, [(target, source) for source, target in blocks])

    patch(CacheEngine, "copy", copy)


def does_not_update_rows(patch: Patch, harm: Harm) -> None:
    def append(real: Any, self: BlockManager, sequence: Any) -> Any:
        write, self._rows.write = self._rows.write, lambda *_: harm.append("a row is stale")  # type: ignore[method-assign]
        try:
            return real(self, sequence)
        finally:
            self._rows.write = write  # type: ignore[method-assign]

    patch(BlockManager, "append", append)


def mixes_rows_up(patch: Patch, harm: Harm) -> None:
    def write(real: Any, self: TableArray, group: int, row: int, column: int, blocks: list[int]) -> None:
        if row == 1:
            harm.append("row 0 has the table of row 1")
        real(self, group, 0, column, blocks)

    patch(TableArray, "write", write)


def does_not_append(patch: Patch, harm: Harm) -> None:
    def append(real: Any, self: BlockManager, sequence: Any) -> Any:
        if len(self.tables[sequence][0]) * self.block_size >= sequence.num_tokens:
            return real(self, sequence)
        harm.append(f"{sequence.request_id} lacks a block")
        return []

    patch(BlockManager, "append", append)


def counts_a_token_too_many(patch: Patch, harm: Harm) -> None:
    def allocate(real: Any, self: BlockManager, sequences: Any, **options: Any) -> Any:
        has_room = real(self, sequences, **options)
        if has_room:
            sequences[0].num_computed_tokens += 1
            harm.append("a token is left out")
        return has_room

    patch(BlockManager, "allocate", allocate)


def swaps_in_other_blocks(patch: Patch, harm: Harm) -> None:
    def swap_in(real: Any, self: CacheEngine, blocks: Any) -> None:
        harm.append("blocks come to other places")
        real(self, [(host, (device + 1) % 14) for host, device in blocks])

    patch(CacheEngine, "swap_in", swap_in)


def forgets_to_swap_in(patch: Patch, harm: Harm) -> None:
    def swap_in(real: Any, self: CacheEngine, blocks: Any) -> None:
        harm.append("blocks are not copied")

    patch(CacheEngine, "swap_in", swap_in)


def writes_one_slot_further(patch: Patch, harm: Harm) -> None:
    def prepare(real: Any, self: ModelRunner, batch: Any) -> Any:
        inputs = real(self, batch)
        inputs.slot_mappings += 1
        harm.append("slots")
        return inputs

    patch(ModelRunner, "prepare_inputs", prepare)


def reads_one_token_more(patch: Patch, harm: Harm) -> None:
    def prepare(real: Any, self: ModelRunner, batch: Any) -> Any:
        inputs = real(self, batch)
        inputs.seq_lens[0] += 1
        harm.append("lengths")
        return inputs

    patch(ModelRunner, "prepare_inputs", prepare)


def releases_too_early(patch: Patch, harm: Harm) -> None:
    """A block of the layers with a window that the next row still sees. The harm is done in the step of that row."""
    early = []

    def release(real: Any, self: BlockManager, sequence: Any) -> None:
        num_computed, before = sequence.num_computed_tokens, [list(table) for table in self.tables[sequence]]
        sequence.num_computed_tokens += self.block_size
        real(self, sequence)
        sequence.num_computed_tokens = num_computed
        if self.tables[sequence] != before:
            early.append(sequence)

    def prepare(real: Any, self: ModelRunner, batch: Any) -> Any:
        harm.extend("a block is released" for scheduled in batch.sequences if scheduled.sequence in early)
        return real(self, batch)

    patch(BlockManager, "release", release)
    patch(ModelRunner, "prepare_inputs", prepare)


BUGS = [
    hands_out_a_block_in_use,
    frees_shared_blocks,
    does_not_count_sharers,
    writes_to_shared_blocks,
    loses_copies,
    copies_backwards,
    does_not_update_rows,
    mixes_rows_up,
    does_not_append,
    counts_a_token_too_many,
    swaps_in_other_blocks,
    forgets_to_swap_in,
    writes_one_slot_further,
    reads_one_token_more,
]


@pytest.mark.parametrize("bug", [*BUGS, releases_too_early], ids=lambda bug: bug.__name__)
def test_bugs_are_found_at_once(
    bug: Callable[[Patch, Harm], None], get_checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDATTN_SANITIZE", "1")
    harm: Harm = []

    def patch(owner: type, name: str, method: Callable[..., Any]) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args, **options: method(real, self, *args, **options))

    bug(patch, harm)
    engine = make_engine(get_checkpoint("qwen2-sliding" if bug is releases_too_early else "llama-gqa"))
    with pytest.raises(CacheError) as caught:
        while engine.has_unfinished_requests():
            assert not harm, "a step has ended that did harm"
            engine.step()
    assert harm, f"nothing was wrong yet: {caught.value}"
