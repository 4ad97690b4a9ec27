"""This engine: its own scheduler and block manager, with a runner that only counts.

Where steps are sure to be alike, the scheduler decides the first of them alone. `_decode_on` then does to each sequence
what the scheduler would do in all of them, with the block manager's own methods. That the results are the same is
tested (`tests/serving/simulation/test_steps_alike.py`).
"""

import sys

from pagedattn_serve.config import CacheConfig, SchedulerConfig
from pagedattn_serve.scheduling.batch import ScheduledBatch
from pagedattn_serve.scheduling.prompt_pace import NUM_MEASURED
from pagedattn_serve.scheduling.scheduler import Scheduler
from pagedattn_serve.scheduling.sequence import Sequence, SequenceRules, SequenceStatus
from pagedattn_serve.scheduling.sequence_group import SequenceGroup
from pagedattn_serve.simulation.beams import SimulatedBeams
from pagedattn_serve.simulation.cost_model import StepWork
from pagedattn_serve.simulation.systems.system import Memory, StepResult
from pagedattn_serve.simulation.workload import SimulatedRequest


class PagedSystem:
    """Every token that is drawn is unique. Outputs end at their known length."""

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self._scheduler = Scheduler(scheduler_config, cache_config)
        self._block_size = cache_config.block_size
        self._requests: dict[str, tuple[SimulatedRequest, SequenceGroup]] = {}  # unfinished
        self._batch = ScheduledBatch()
        self._num_added = 0
        self._prefix_caching = cache_config.enable_prefix_caching
        # Who finds no room waits until somebody ends. The blocks that are filled meanwhile are no help: they hold new
        # tokens, which no prompt has. With priorities, who waits may make others give up their blocks.
        self._waits_for_an_end = scheduler_config.policy == "fcfs"
        self._num_searches = 0  # beam searches, unfinished
        self._num_alike = 0
        self._next_token = 1 << 40  # beyond the tokens of prompts

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_recomputes + self._scheduler.num_swaps

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self._scheduler.swapped)

    @property
    def num_looked_up_tokens(self) -> int:
        return self._scheduler.num_looked_up_tokens

    @property
    def num_found_tokens(self) -> int:
        return self._scheduler.num_found_tokens

    def add(self, request: SimulatedRequest) -> None:
        request_id = str(self._num_added)
        rules = SequenceRules(
            num_sequences=request.num_sequences,
            uses_beams=request.beams is not None,
            width_argument="n" if request.beams is None else "beam_width",
            max_tokens=request.num_output_tokens,
        )
        group = SequenceGroup(request_id, request.prompt_token_ids, rules, request.arrival, request.priority)
        self._scheduler.add(group)
        self._num_added += 1
        self._num_searches += request.beams is not None
        self._requests[request_id] = request, group

    def begin_step(self) -> StepWork | None:
        if not self._requests:
            return None
        self._batch = batch = self._scheduler.schedule()
        work = StepWork(
            num_copied_tokens=len(batch.blocks_to_copy) * self._block_size,
            num_swapped_tokens=(len(batch.blocks_to_swap_out) + len(batch.blocks_to_swap_in)) * self._block_size,
        )
        num_decodes = num_begun = num_keys = 0
        least_left = sys.maxsize  # output tokens that are still to come, of the decode that has the fewest
        for scheduled in batch.sequences:
            sequence = scheduled.sequence
            if scheduled.num_new_tokens == 1 == scheduled.num_samples:
                num_output = len(sequence.output_token_ids)
                num_decodes += 1
                num_begun += num_output > 0
                num_keys += sequence.num_computed_tokens
                num_left = (sequence.rules.max_tokens or 0) - num_output
                if num_left < least_left:
                    least_left = num_left
            else:
                work.add_prompt(sequence.num_computed_tokens, scheduled.num_new_tokens, scheduled.num_samples)
        work.add_decodes(num_decodes, num_keys + num_decodes)
        is_steady = num_begun == len(batch.sequences) and self._is_steady(batch)
        self._num_alike = least_left - 1 if is_steady else 0
        return work

    def _is_steady(self, batch: ScheduledBatch) -> bool:
        """If all of the batch are decodes after their first token: whether the next steps run the same sequences, as
        long as there are blocks and no output is done."""
        if not 0 < batch.num_decodes == len(batch.sequences) or batch.has_copies or batch.preempted or batch.outgrown:
            return False
        if self._num_searches or (self.num_waiting and not self._waits_for_an_end):
            return False
        # Else some were left out: no budget, or a long prompt that pauses.
        return sum(len(group.sequences) for group in self._scheduler.running) == batch.num_decodes

    def num_alike(self) -> int:
        """As far as there are free blocks, too."""
        count, num_free = self._num_alike, self._scheduler.block_manager.num_free_blocks
        while count and self._num_blocks_for(count) > num_free:
            count //= 2
        return count

    def _num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that all sequences of the batch need for so many tokens more; perhaps fewer, if there are enough."""
        sequences, size = self._batch.sequences, self._block_size
        most = len(sequences) * -(-num_tokens // size)
        if most <= self._scheduler.block_manager.num_free_blocks:
            return most
        num_computed = [scheduled.sequence.num_computed_tokens + 1 for scheduled in sequences]
        return sum(-(-(each + num_tokens) // size) - -(-each // size) for each in num_computed)

    def end_step(self, seconds: float, num_steps: int = 1, growth: float = 0.0) -> StepResult:
        batch = self._batch
        for copies in (batch.blocks_to_swap_out, batch.blocks_to_swap_in, batch.blocks_to_copy):
            copies.clear()
        if not self._num_alike:
            self._scheduler.mark_computed(batch, seconds)
            return self._add_tokens(batch)
        for number in range(max(0, num_steps - NUM_MEASURED), num_steps):  # nobody looks back at more of them
            self._scheduler.observe(batch, seconds + number * growth)
        self._decode_on(batch, num_steps)
        got_tokens = [self._requests[scheduled.sequence.request_id][0] for scheduled in batch.sequences]
        finished: list[SimulatedRequest] = []
        if num_steps > self._num_alike:
            for scheduled, request in zip(batch.sequences, got_tokens, strict=True):
                if len(scheduled.sequence.output_token_ids) == request.num_output_tokens:
                    group = self._requests[scheduled.sequence.request_id][1]
                    self._finish(request, group, scheduled.sequence)
                    if not group.sequences:
                        finished.append(request)
        return StepResult(got_tokens, finished)

    def _decode_on(self, batch: ScheduledBatch, num_tokens: int) -> None:
        """Compute so many tokens of each sequence, the first of which has its block, and draw the token after each."""
        manager, size = self._scheduler.block_manager, self._block_size
        next_token = self._next_token
        for scheduled in batch.sequences:
            sequence = scheduled.sequence
            begin = sequence.num_computed_tokens
            num_left = num_tokens
            while num_left >= (room := size - begin % size):  # they fill a block
                sequence.output_token_ids.extend(range(next_token, next_token + room))
                next_token += room
                sequence.num_computed_tokens = begin = begin + room
                if self._prefix_caching:  # no other block has these tokens: there is nothing to merge
                    manager.publish(sequence, begin // size - 1, begin // size)
                num_left -= room
                if not num_left:
                    break
                manager.append(sequence)
            if num_left:
                sequence.output_token_ids.extend(range(next_token, next_token + num_left))
                next_token += num_left
                sequence.num_computed_tokens = begin + num_left
        self._next_token = next_token

    def _add_tokens(self, batch: ScheduledBatch) -> StepResult:
        scheduler = self._scheduler
        got_tokens: list[SimulatedRequest] = []
        finished: list[SimulatedRequest] = []
        searched = ""  # the beams of a request follow each other, and take a step together
        for scheduled in batch.sequences:
            request_id = scheduled.sequence.request_id
            if not scheduled.num_samples or request_id == searched:
                continue
            request, group = self._requests[request_id]
            if scheduled.num_samples == 1 and request.beams is None:
                got_tokens.append(request)
                outputs = [scheduled.sequence]
            elif request.beams is not None:
                searched = request_id
                got_tokens.append(request)
                outputs = self._step_beams(request, request.beams, group)
            else:
                forks = range(1, scheduled.num_samples)
                outputs = [scheduled.sequence]
                outputs += [scheduler.fork(group, scheduled.sequence, index) for index in forks]
                got_tokens += [request] * len(outputs)
            for output in outputs:
                output.output_token_ids.append(self._next_token)
                self._next_token += 1
                if len(output.output_token_ids) == request.num_output_tokens:
                    self._finish(request, group, output)
            if not group.sequences:
                finished.append(request)
        for group in batch.outgrown:
            request, _ = self._requests[group.request_id]
            request.has_failed = True
            scheduler.abort(group.request_id)
            self._forget(request, group)
            finished.append(request)
        return StepResult(got_tokens, finished)

    def _finish(self, request: SimulatedRequest, group: SequenceGroup, output: Sequence) -> None:
        request.output_token_ids = output.output_token_ids
        self._scheduler.finish(group, output, SequenceStatus.FINISHED_LENGTH)
        if not group.sequences:
            self._forget(request, group)

    def _forget(self, request: SimulatedRequest, group: SequenceGroup) -> None:
        del self._requests[group.request_id]
        self._num_searches -= request.beams is not None

    def _step_beams(self, request: SimulatedRequest, beams: SimulatedBeams, group: SequenceGroup) -> list[Sequence]:
        """The beams that run on, without their new tokens. Before the last token, all do."""
        before = list(group.sequences)
        if len(before[0].output_token_ids) + 1 == request.num_output_tokens:
            return before
        running: list[Sequence] = []
        for parent in beams.step():
            sequence = before[parent]
            running.append(self._scheduler.fork(group, sequence, 0) if sequence in running else sequence)
        for sequence in before:
            if sequence not in running:
                self._scheduler.finish(group, sequence, SequenceStatus.FINISHED_STOPPED)
        group.sequences = running
        return list(running)

    def memory(self, num_steps: int = 0) -> Memory:
        manager, size = self._scheduler.block_manager, self._block_size
        never = num_new_blocks = 0
        for group in self._scheduler.running:
            request, _ = self._requests[group.request_id]
            num_request_tokens = request.num_tokens
            for sequence in group.sequences:
                num_blocks = len(manager.tables[sequence])
                if num_steps:
                    num_more = -(-(sequence.num_computed_tokens + 1 + num_steps) // size) - num_blocks
                    num_new_blocks += num_more
                    num_blocks += num_more
                if num_blocks * size > num_request_tokens:
                    never += num_blocks * size - num_request_tokens
        used = manager.num_used_slots() + num_steps * len(self._batch.sequences)
        taken = (manager.num_used_blocks + num_new_blocks) * size
        internal = min(never, taken - used)
        free = manager.num_blocks * size - taken
        saved = (manager.num_table_entries - manager.num_used_blocks) * size
        return Memory(used, taken - used - internal, internal, free, saved)
