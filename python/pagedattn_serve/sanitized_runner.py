"""PAGEDATTN_SANITIZE=1: the cache of an engine under `pagedattn_ext.sanitizer`. Only then is this module imported."""

from functools import partial
from typing import Any
from weakref import proxy

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pagedattn_ext.sanitizer import CacheSanitizer, Row, watch
from pagedattn_serve.execution.cache_engine import CacheEngine
from pagedattn_serve.execution.model_runner import BatchRunner, ModelRunner, StepInputs
from pagedattn_serve.execution.sampler import SamplerOutput
from pagedattn_serve.models.causal_lm import ModelOutput
from pagedattn_serve.scheduling.block_allocator import BlockAllocator
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.sequence import ScheduledBatch, Sequence


class SanitizedRunner:
    """A `BatchRunner` that tells the sanitizer, before each batch, who holds which blocks and what is to be computed.

    Of several ranks, the cache of rank 0 is watched; the others get the same tables.
    """

    def __init__(self, runner: BatchRunner, model_runner: ModelRunner, manager: BlockManager) -> None:
        self._runner = runner
        self._manager = manager
        self._allocator: BlockAllocator | None = None  # whose blocks are watched as they are taken
        self._names: dict[Sequence, str] = {}
        self._drafted: list[tuple[Sequence, str, int]] = []  # in the last batch, and the tokens in the cache before
        self._rows: list[Row] = []  # of the batch
        self._num_run = 0  # of its tokens
        self.sanitizer = CacheSanitizer(manager.num_blocks, manager.block_size)
        layers_of: dict[int, list[int]] = {}  # groups of layers lie in the same memory
        caches = model_runner.cache_engine.kv_caches
        for layer, cache in enumerate(caches):
            layers_of.setdefault(cache.key_cache.data_ptr(), []).append(layer)
        for layers in layers_of.values():
            cache = caches[layers[0]]
            self.sanitizer.register(cache.key_cache, cache.value_cache, "/".join(map(str, layers)))
        self._see_loads(model_runner.cache_engine)
        # With proxies, here and below: objects that refer to each other keep an engine's caches until a collection.
        model_runner.run_model = partial(_run_model, proxy(model_runner), proxy(self))  # type: ignore[method-assign]

    @property
    def can_run_again(self) -> bool:
        return self._runner.can_run_again

    def execute(self, batch: ScheduledBatch) -> SamplerOutput:
        """As `BatchRunner.execute`. Raises CacheError, with nothing computed or in the midst of the step."""
        self._see_allocator()
        self._forget_drafts()
        allocator, tables = self._manager.allocator, self._manager.tables
        self._name(tables)
        names = self._names
        drawn = {names[sequence]: of_sequence for sequence, of_sequence in tables.items()}
        self.sanitizer.draw(drawn, allocator.ref_counts(), allocator.published)
        self._num_run = 0
        self._rows = [
            Row(
                names.get(scheduled.sequence, scheduled.sequence.request_id),
                scheduled.sequence.num_computed_tokens,
                scheduled.num_new_tokens + len(scheduled.draft_token_ids),
            )
            for scheduled in batch.sequences
        ]
        self._drafted = [
            (scheduled.sequence, names[scheduled.sequence], scheduled.sequence.num_computed_tokens)
            for scheduled in batch.sequences
            if scheduled.draft_token_ids
        ]
        watch(self.sanitizer)  # not before the first batch: a calibration has none, and takes blocks that nobody holds
        output = self._runner.execute(batch)
        self.sanitizer.poison()
        return output

    def check_health(self) -> None:
        self._runner.check_health()

    def find_hang(self) -> str | None:
        return self._runner.find_hang()

    def at_work(self) -> bool:
        return self._runner.at_work()

    def _expect(self, num_tokens: int) -> None:
        """The next tokens of the batch are to be run: all of them, or a piece, where stages are at work."""
        begin, end = self._num_run, self._num_run + num_tokens
        self._num_run, rows, first = end, [], 0
        for owner, num_cached, num_new in self._rows:
            num_before = max(begin - first, 0)
            num_in_piece = min(end - first, num_new) - num_before
            if num_in_piece > 0:
                rows.append(Row(owner, num_cached + num_before, num_in_piece))
            first += num_new
        self.sanitizer.expect(rows)

    def _forget_drafts(self) -> None:
        """What was written for drafts that were refused is overwritten by the next tokens."""
        for sequence, name, num_before in self._drafted:
            if sequence.num_computed_tokens > num_before:  # else it was preempted
                self.sanitizer.truncated(name, sequence.num_computed_tokens)

    def _name(self, tables: dict[Sequence, Any]) -> None:
        """A name for each sequence that holds blocks: the request's id, and a number where the id is taken."""
        self._names = {sequence: name for sequence, name in self._names.items() if sequence in tables}
        taken = set(self._names.values())
        for sequence in tables:
            if sequence not in self._names:
                name, number = sequence.request_id, 1
                while name in taken:
                    number += 1
                    name = f"{sequence.request_id}, sequence {number}"
                self._names[sequence] = name
                taken.add(name)

    def _see_allocator(self) -> None:
        """Learn of blocks as they are taken. A manager that was cleared has another allocator, and no block holds what
        it held."""
        allocator = self._manager.allocator
        if allocator is self._allocator:
            return
        self._allocator = allocator
        self.sanitizer.renewed(range(allocator.num_blocks))
        allocator.allocate = partial(_allocate, proxy(allocator), proxy(self.sanitizer))  # type: ignore[method-assign]

    def _see_loads(self, cache_engine: CacheEngine) -> None:
        """Learn of blocks that come from disk."""
        cache_engine.write_block = partial(_write_block, proxy(cache_engine), proxy(self))  # type: ignore[method-assign]

    def _loaded(self, block: int) -> None:
        self._see_allocator()
        self.sanitizer.loaded([block])


def _run_model(
    model_runner: ModelRunner, runner: SanitizedRunner, inputs: StepInputs, carried: Tensor | None = None
) -> ModelOutput:
    runner._expect(len(inputs.token_ids))
    return ModelRunner.run_model(model_runner, inputs, carried)


def _allocate(allocator: BlockAllocator, sanitizer: CacheSanitizer) -> int:
    block = BlockAllocator.allocate(allocator)
    sanitizer.renewed([block])
    return block


def _write_block(cache_engine: CacheEngine, runner: SanitizedRunner, block: int, data: npt.NDArray[np.uint8]) -> None:
    CacheEngine.write_block(cache_engine, block, data)
    runner._loaded(block)
