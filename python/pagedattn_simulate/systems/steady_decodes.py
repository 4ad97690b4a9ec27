"""Decodes that go on, a token each in every step, and the scheduler that does not look at each of them in every step.

A sequence that decodes changes nothing but its own length until it needs its next block, or is done. So the steps in
which it needs a block are known when it joins, and its tokens are counted only then. The block manager is exact after
every step; the lengths of sequences are behind by less than a block. When blocks run out, or something else needs a
look at each sequence, all lengths are brought up to date, and the engine's scheduler decides by itself.
"""

import heapq
from dataclasses import dataclass

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.scheduling.block_manager import BlockManager
from pagedattn_serve.scheduling.scheduler import Scheduler, _LongPrompts
from pagedattn_serve.scheduling.sequence import ScheduledBatch, Sequence, SequenceGroup
from pagedattn_simulate.workload import SimulatedRequest


@dataclass(slots=True, eq=False)
class SteadyDecode:
    """A sequence. Steps are counted as in `SteadyDecodes`.

    start: its computed tokens are the step's number less this.
    token: that it draws in each step. No other sequence draws it, so blocks are never alike.
    joined: the step in which it became one.
    last_block_from: the step from which it has its last block.
    num_unused_slots: of the last block, when its output is done.
    """

    request: SimulatedRequest
    group: SequenceGroup
    sequence: Sequence
    token: int
    start: int
    joined: int
    last_block_from: int
    num_unused_slots: int


class SteadyDecodes:
    """num_steps: that were taken so far; the number of the step that runs."""

    def __init__(self, manager: BlockManager) -> None:
        self.num_steps = 0
        self.groups: set[SequenceGroup] = set()
        self._manager = manager
        self._size = manager.block_size
        self._next_token = 1 << 40  # beyond the tokens of prompts
        self._all: dict[Sequence, SteadyDecode] = {}
        # Those that begin a block in the steps with the numbers i, i + block size, i + 2 * block size, ...
        self._due: list[dict[Sequence, SteadyDecode]] = [{} for _ in range(self._size)]
        self._ends: list[tuple[int, tuple[int, int], int, SteadyDecode]] = []  # a heap, by the steps after which
        self._sum_of_starts = 0
        self._left: list[SimulatedRequest] = []

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_keys(self) -> int:
        """Tokens in the cache before the step, over all sequences."""
        return len(self._all) * self.num_steps - self._sum_of_starts

    @property
    def num_left_steps(self) -> int:
        """Until the first of them is done, with the step that runs."""
        return self._ends[0][0] - self.num_steps

    def new_token(self) -> int:
        """One that no sequence has so far."""
        self._next_token += 1
        return self._next_token

    def join(self, request: SimulatedRequest, group: SequenceGroup, sequence: Sequence) -> None:
        """A sequence that decodes in this step, with a block for it, and goes on."""
        size = self._size
        start = self.num_steps - sequence.num_computed_tokens
        num_blocks = -(-request.num_tokens // size)
        last_block_from = (num_blocks - 1) * size + start
        num_unused_slots = num_blocks * size - request.num_tokens
        decode = SteadyDecode(
            request, group, sequence, self.new_token(), start, self.num_steps, last_block_from, num_unused_slots
        )
        end = self.num_steps + request.num_output_tokens - len(sequence.output_token_ids)
        self._all[sequence] = decode
        self.groups.add(group)
        self._due[start % size][sequence] = decode
        heapq.heappush(self._ends, (end, group.order, decode.token, decode))
        self._sum_of_starts += start

    def num_blocks_for(self, first: int, num_steps: int) -> int:
        """Blocks that begin in so many steps from the first on, which is counted from the step that runs."""
        num_rounds, rest = divmod(num_steps, self._size)
        begin = self.num_steps + first
        num_due = sum([len(self._due[step % self._size]) for step in range(begin, begin + rest)])
        return num_rounds * len(self._all) + num_due

    def begin_blocks(self) -> None:
        """Take the blocks that begin in the step. There have to be as many."""
        append = self._manager.append
        for sequence, decode in self._due[self.num_steps % self._size].items():
            self._catch_up(decode)
            append(sequence)

    def go_on(self, num_steps: int) -> None:
        """Take so many steps, the first of which has its blocks."""
        self.num_steps += 1
        for _ in range(num_steps - 1):
            self.begin_blocks()
            self.num_steps += 1

    def take_done(self) -> list[SteadyDecode]:
        """Those whose outputs have all of their tokens. They leave, in the order of their groups."""
        done = []
        while self._ends and self._ends[0][0] <= self.num_steps:
            decode = heapq.heappop(self._ends)[-1]
            self._catch_up(decode)
            sequence = decode.sequence
            del self._all[sequence], self._due[decode.start % self._size][sequence]
            self.groups.discard(decode.group)  # all outputs of a request are as long
            self._sum_of_starts -= decode.start
            done.append(decode)
        return done

    def dissolve(self) -> list[Sequence]:
        """Bring all sequences up to date. They leave."""
        sequences = list(self._all)
        for decode in self._all.values():
            self._catch_up(decode)
            self._left.append(decode.request)
        self._all.clear()
        self.groups.clear()
        for due in self._due:
            due.clear()
        self._ends.clear()
        self._sum_of_starts = 0
        return sequences

    def take_left(self) -> list[SimulatedRequest]:
        """The requests of those that left unfinished since the last call. They had a token in the step before."""
        left, self._left = self._left, []
        return left

    def num_slots_behind(self) -> int:
        """Tokens in the cache that the sequences do not count yet."""
        return self.num_keys - sum([sequence.num_computed_tokens for sequence in self._all])

    def num_slots_never_used(self, step: int) -> int:
        """Of blocks that the sequences have in a step, counted from the step that runs."""
        number = self.num_steps + step
        return sum([each.num_unused_slots for each in self._all.values() if each.last_block_from <= number])

    def _catch_up(self, decode: SteadyDecode) -> None:
        sequence, size = decode.sequence, self._size
        begin, end = sequence.num_computed_tokens, self.num_steps - decode.start
        sequence.output_token_ids += [decode.token] * (end - begin)
        sequence.num_computed_tokens = end
        if self._manager.prefixes.is_on and begin // size < end // size:
            # No other block has these tokens: there is nothing to merge.
            self._manager.publish(sequence, begin // size, end // size)


class SteadyScheduler(Scheduler):
    """The engine's scheduler. Batches leave out the steady decodes, but count them in num_decodes."""

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        super().__init__(scheduler_config, cache_config)
        self.steady = SteadyDecodes(self.block_manager)

    def not_steady(self) -> list[SequenceGroup]:
        """The other groups that run."""
        steady = self.steady.groups
        return [group for group in self.running if group not in steady] if len(steady) < len(self.running) else []

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        if not self.steady:
            super().observe(batch, seconds)
        elif batch.num_decodes == len(batch.sequences) + len(self.steady):
            self._pace.observe_decodes(seconds)

    def _place(self, batch: ScheduledBatch) -> None:
        """Nobody reads block tables here. So the batch keeps its order, in which outputs end, as steady decodes do."""

    def _schedule_running(
        self, batch: ScheduledBatch, long: _LongPrompts, running: list[SequenceGroup], budget: int
    ) -> int:
        num_steady = len(self.steady)
        if not num_steady:
            return super()._schedule_running(batch, long, running, budget)
        others = self.not_steady()
        num_others = sum([len(group.sequences) for group in others])
        num_blocks = self.steady.num_blocks_for(0, 1) + num_others  # at most
        if num_steady + num_others > budget or num_blocks > self.block_manager.num_free_blocks:
            self.steady.dissolve()
            return super()._schedule_running(batch, long, running, budget)
        self.steady.begin_blocks()
        batch.num_decodes = num_steady
        return super()._schedule_running(batch, long, others, budget - num_steady)

    def _run_long_prompts(self, batch: ScheduledBatch, long: _LongPrompts) -> None:
        if long.groups:  # how many of their tokens run depends on the whole batch
            for sequence in self.steady.dissolve():
                self._add_to_batch(batch, sequence, 1)
        super()._run_long_prompts(batch, long)

    def _num_places(self) -> int:
        num_steady = len(self.steady)
        num_others = sum([group.max_num_sequences for group in self.not_steady()])
        return max(self.config.max_num_seqs - num_steady - num_others, 0)

    def _preempt_last(self, batch: ScheduledBatch) -> None:
        if self.steady:
            self.steady.dissolve()
        super()._preempt_last(batch)
